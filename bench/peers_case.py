"""Peers against the machine's limits: limit, peer, limit, peer, ... in one run, and what each read is what was put."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import lmdb
import numpy as np

from duokv.bench.io_limits import Crew, RawFile, copy, ratios_to_limit, write_durably
from duokv.bench.peer_serve import About, Action, Answer, Rows, digest, keys_of, stamp
from duokv.kvstore.buffers import aligned
from duokv.kvstore.errors import DuoKVError, StoreError

KEPT = 3
"""Rounds read in turn, so that no one else's cache answers for the device."""
_WARM_PASSES = 4
FAILURES = (DuoKVError, OSError, lmdb.Error)
"""What a peer may fail with."""
SERVE = Path(__file__).with_name("peer_serve.py")


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured of every peer: an action on so many blocks."""

    action: Action
    blocks: int

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.action} {self.blocks}"


@dataclass(frozen=True, slots=True)
class Size:
    """Of the whole run. blocks: of a round. rounds: at most put into a peer."""

    payload_bytes: int
    slot_bytes: int
    blocks: int
    rounds: int
    threads: int


class Worker(Protocol):
    """A peer that does what it is told, here or in another process."""

    @property
    def about(self) -> About:
        """What it promises."""

    def do(self, action: Action, turn: int, blocks: int) -> Answer:
        """One timed part; one of FAILURES if the peer fails."""

    def close(self) -> None:
        """Let go of it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One part of one peer: seconds of the peer's and of the limit's around them (one more); or why there are none."""

    peer_s: tuple[float, ...] = ()
    limit_s: tuple[float, ...] = ()
    reason: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Per pair the peer's rate as a share of the limit's, measured before and after."""
        return ratios_to_limit(self.peer_s, self.limit_s)

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return median(self.ratios)

    @property
    def seconds(self) -> float:
        """Of the peer, median."""
        return median(self.peer_s)


@dataclass(frozen=True, slots=True)
class Measured:
    """A peer and its figures; or why it was left out."""

    name: str
    about: About | None
    figures: Mapping[Part, Figure]
    skipped: str = ""


class Limits:
    """What the machine does at best with the same bytes, and the digests to be expected of reads. Close it."""

    def __init__(self, folder: Path, size: Size) -> None:
        self._folder = folder
        self._size = size
        self._crew = Crew(size.threads)
        self._source, self._out = (
            np.frombuffer(aligned(size.blocks * size.slot_bytes), np.uint8).reshape(size.blocks, size.slot_bytes)
            for _ in range(2)
        )
        self._source[:] = np.frombuffer(np.random.default_rng(0).bytes(self._source.nbytes), np.uint8).reshape(
            self._source.shape
        )
        self.content = folder / "content"
        self._source.tofile(self.content)
        flat = self._source.reshape(-1)
        self._raw = RawFile(folder / "limit", KEPT * flat.nbytes, flat)
        self._digests: dict[tuple[int, int], str] = {}
        self._turn = 0

    def seconds(self, part: Part) -> float:
        """Of the limit for `part`."""
        self._turn += 1
        source, out = (rows[: part.blocks].reshape(-1) for rows in (self._source, self._out))
        if part.action == "put":
            started, ended = write_durably(self._folder / "limit-put", source, 1, self._crew)
        elif part.action == "cold":
            base = self._turn % KEPT * self._source.nbytes
            started, ended = self._raw.read([(base, out)], self._crew)
        elif part.action == "warm":
            started, ended = copy([(source, out)], self._crew)
        else:
            return _dictionary_seconds(part.blocks)
        return ended - started

    def digest(self, turn: int, blocks: int) -> str:
        """Of the payloads of a round."""
        if (turn, blocks) not in self._digests:
            rows: Rows = self._source[:blocks]
            stamp(rows, keys_of(turn, blocks))
            self._digests[turn, blocks] = digest(rows, self._size.payload_bytes)
        return self._digests[turn, blocks]

    def close(self) -> None:
        """End its threads, remove its file."""
        self._crew.close()
        self._raw.close()


def measure(name: str, worker: Worker, limits: Limits, parts: Sequence[Part], pairs: int) -> Measured:
    """Every part of a peer. A part that fails, or reads other bytes than were put, has that as its reason."""
    figures: dict[Part, Figure] = {}
    missing = worker.about["missing"]
    blocks = max(part.blocks for part in parts)
    try:
        for turn in range(KEPT):
            worker.do("put", turn, blocks)
    except FAILURES as error:
        return Measured(name, worker.about, {part: Figure(reason=str(error)) for part in parts})
    puts = KEPT
    for part in parts:
        if reason := missing.get(part.action):
            figures[part] = Figure(reason=reason)
            continue
        turns = [puts + pair if part.action == "put" else pair % KEPT for pair in range(pairs)]
        puts += pairs if part.action == "put" else 0
        try:
            figures[part] = _measure(worker, limits, part, turns)
        except FAILURES as error:
            figures[part] = Figure(reason=str(error))
    return Measured(name, worker.about, figures)


def _measure(worker: Worker, limits: Limits, part: Part, turns: Sequence[int]) -> Figure:
    # The first ones warm up; a cache may want to see a block more than once before it keeps it.
    passes = {"warm": _WARM_PASSES, "lookup": 1, "tokens": 1}.get(part.action, 0)
    for turn in range(passes * KEPT):
        worker.do(part.action, turn % KEPT, part.blocks)
    limits.seconds(part)
    limit_s, peer_s = [limits.seconds(part)], []
    for turn in turns:
        answer = worker.do(part.action, turn, part.blocks)
        if answer.found != part.blocks:
            raise StoreError(f"FELL SHORT: {answer.found} blocks of {part.blocks}")
        if part.action in ("cold", "warm") and answer.digest != limits.digest(turn, part.blocks):
            raise StoreError("WRONG BYTES: what it read is not what was put")
        peer_s.append(answer.seconds)
        limit_s.append(limits.seconds(part))
    return Figure(tuple(peer_s), tuple(limit_s))


def _dictionary_seconds(blocks: int) -> float:
    held = {key: place for place, key in enumerate(keys_of(0, blocks))}
    asked = keys_of(0, blocks)
    started = time.perf_counter()
    found = sum(1 for key in asked if held.get(key) is not None)
    ended = time.perf_counter()
    if found != blocks:
        raise AssertionError(f"a dictionary found {found} of {blocks}")
    return ended - started


class ForeignPeer:
    """A peer driven by `peer_serve.py` under another interpreter. StoreError if that does not work. Close it.

    answer_s: seconds without an answer after which it is given up and ended.
    """

    def __init__(
        self, python: Path, driver: Path, name: str, *, folder: Path, content: Path, size: Size, answer_s: float
    ) -> None:
        self._answer_s = answer_s
        self._rest = b""
        # A session of its own: what it starts ends with it.
        with (folder.parent / f"{folder.name}.errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-P", str(SERVE), str(driver), name],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=folder, start_new_session=True,
            )  # fmt: skip
        self._about: About | None = None
        self._send(
            {
                "folder": str(folder),
                "content": str(content),
                "payload_bytes": size.payload_bytes,
                "slot_bytes": size.slot_bytes,
                "blocks": size.blocks,
                "rounds": size.rounds,
                "threads": size.threads,
            }
        )

    @property
    def about(self) -> About:
        """See `Worker.about`. Waits until it is open; StoreError if it cannot be."""
        if self._about is None:
            about: About = self._answer()["about"]  # type: ignore[assignment]
            self._about = about
        return self._about

    def do(self, action: Action, turn: int, blocks: int) -> Answer:
        """See `Worker.do`."""
        # Its first answer is about itself.
        _ = self.about
        self._send({"do": action, "turn": turn, "blocks": blocks})
        said = self._answer()
        return Answer(float(str(said["seconds"])), int(str(said["found"])), str(said["digest"]))

    def close(self) -> None:
        """Ask it to end, and see that it and what it started have."""
        try:
            with contextlib.suppress(StoreError, subprocess.TimeoutExpired):
                self._send({"do": "close"})
                self._process.wait(self._answer_s)
        finally:
            self._end()

    def _send(self, order: Mapping[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise StoreError(f"its process ended: {error}") from error

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        ends = time.monotonic() + self._answer_s
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, ends - time.monotonic()))[0]:
                self._end()
                raise StoreError(f"no answer in {self._answer_s:.0f} s")
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise StoreError(f"its process ended with {self._process.wait()}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            said = json.loads(line)
        except ValueError:
            raise StoreError(f"no JSON in its answer: {line[:80]!r}") from None
        if "error" in said:
            raise StoreError(" ".join(str(said["error"]).split())[:200])
        return dict(said)

    def _end(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
