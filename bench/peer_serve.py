"""Runs one peer of `duokv.bench.peers`, in its process or alone in an environment that lacks duokv; times it there.

python peer_serve.py DRIVER.py NAME     # one JSON object a line: what to do on stdin, what came of it on stdout

A driver is a file beside this one with `open_peer(name, given)`, which gives a `Peer`. It needs numpy and no more of
ours: types it may take from here under TYPE_CHECKING.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TextIO, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

Action = Literal["put", "cold", "warm", "lookup", "tokens"]
"""cold and warm: reads from the device and from memory. lookup: which are stored, of their keys; tokens: of tokens."""
Rows = npt.NDArray[np.uint8]
"""`[n, slot_bytes]` uint8, page-aligned and touched; a row begins with its block's payload."""
Handle = TypeVar("Handle")

KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Given:
    """What a peer is opened with.

    folder: its own, empty. memory: rows of which all that are put or read into are views. blocks: of a round; rounds:
    at most put. threads: to use where it lets one choose.
    """

    folder: Path
    memory: Rows
    payload_bytes: int
    blocks: int
    rounds: int
    threads: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row."""
        return int(self.memory.shape[1])

    def first_row(self, rows: Rows) -> int:
        """Where `rows` begins in `memory`."""
        return int(rows.ctypes.data - self.memory.ctypes.data) // self.slot_bytes


class About(TypedDict):
    """What a peer promises, in words for people. missing: actions it does not offer, each with the reason."""

    version: str
    durable: bool
    durability: str
    integrity: str
    note: str
    missing: dict[str, str]


class Peer(Protocol[Handle]):
    """A store as its users call it. Only `put`, `read`, `lookup` and `lookup_tokens` are timed; one thread calls."""

    @property
    def about(self) -> About:
        """What it promises."""

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Handle:
        """Put in the peer's own words what comes next: keys of 32 bytes, and rows to put or to read into."""

    def put(self, handle: Handle) -> None:
        """Store the rows; return when the peer calls them stored, and durable if it can."""

    def read(self, handle: Handle) -> Iterable[memoryview | Rows]:
        """Read; give the memory where each block's payload now begins."""

    def lookup(self, handle: Handle) -> int:
        """How many leading keys are stored."""

    def lookup_tokens(self, handle: Handle) -> int:
        """The same of the tokens themselves; only if "tokens" is not missing."""

    def close(self) -> None:
        """Let go of everything; files are removed by the caller."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it. found: blocks put, read or found; digest: sha256 of the payloads read, in hexadecimal."""

    seconds: float
    found: int
    digest: str = ""


def keys_of(turn: int, blocks: int) -> list[bytes]:
    """The keys of a round."""
    return [hashlib.sha256(f"{turn}/{block}".encode()).digest() for block in range(blocks)]


def stamp(rows: Rows, keys: Sequence[bytes]) -> None:
    """Begin every row with its key, so that no two blocks are alike."""
    rows[: len(keys), :KEY_BYTES] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), KEY_BYTES)


def digest(payloads: Iterable[memoryview | Rows], payload_bytes: int) -> str:
    """The sha256 of the payloads, one after another."""
    whole = hashlib.sha256()
    for payload in payloads:
        whole.update((payload.data if isinstance(payload, np.ndarray) else payload).cast("B")[:payload_bytes])
    return whole.hexdigest()


def touched_rows(blocks: int, slot_bytes: int) -> Rows:
    """New rows, page-aligned, zero, in memory that is there."""
    rows = np.frombuffer(mmap.mmap(-1, blocks * slot_bytes), np.uint8).reshape(blocks, slot_bytes)
    rows[:] = 0
    return rows


def forget(folder: Path) -> None:
    """Bring every file below `folder` to the device and take it out of the page cache, unless it is mapped."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


class Bench(Generic[Handle]):
    """Does what is asked with one peer, and times it. content: the payloads to put, `blocks` rows in a file."""

    def __init__(self, open_peer: Callable[[Given], Peer[Handle]], given: Given, content: Path) -> None:
        self._given = given
        self._source, self._out = given.memory[: given.blocks], given.memory[given.blocks :]
        self._source[:] = np.fromfile(content, np.uint8).reshape(self._source.shape)
        self._peer = open_peer(given)
        self.about = self._peer.about

    def do(self, action: Action, turn: int, blocks: int) -> Answer:
        """One timed part on the first `blocks` blocks of round `turn`; what the peer raises comes out."""
        keys = keys_of(turn, blocks)
        rows = self._source[:blocks] if action == "put" else self._out[:blocks]
        if action == "put":
            stamp(rows, keys)
        else:
            # What an earlier one left there must not pass for read.
            rows[:, :KEY_BYTES] = 0
        handle = self._peer.prepare(action, keys, rows)
        if action == "cold":
            forget(self._given.folder)
        answer = self._timed(action, handle, blocks)
        if action == "put":
            # What it left to the system must not be written while others are measured.
            os.sync()
        return answer

    def close(self) -> None:
        """Close the peer."""
        self._peer.close()

    def _timed(self, action: Action, handle: Handle, blocks: int) -> Answer:
        if action in ("cold", "warm"):
            started = time.perf_counter()
            kept = list(self._peer.read(handle))
            seconds = time.perf_counter() - started
            return Answer(seconds, len(kept), digest(kept, self._given.payload_bytes))
        found = blocks
        started = time.perf_counter()
        if action == "put":
            self._peer.put(handle)
        elif action == "lookup":
            found = self._peer.lookup(handle)
        else:
            found = self._peer.lookup_tokens(handle)
        return Answer(time.perf_counter() - started, found)


def serve(driver: Path, name: str, asked: TextIO, answers: TextIO) -> None:
    """Open the peer as the first line says, then do what the others say, until they end or say close."""

    def tell(said: object) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    bench: Bench[object] | None = None
    try:
        for line in asked:
            order = json.loads(line)
            try:
                if bench is None:
                    bench = _opened(driver, name, order)
                    tell({"about": bench.about})
                elif order["do"] == "close":
                    break
                else:
                    tell(asdict(bench.do(order["do"], order["turn"], order["blocks"])))
            # Whatever a foreign project raises is this peer's reason in the report.
            except Exception as error:  # noqa: BLE001
                tell({"error": f"{type(error).__name__}: {error}"})
                if bench is None:
                    return
    finally:
        if bench is not None:
            bench.close()


def _opened(driver: Path, name: str, order: dict[str, str | int]) -> Bench[object]:
    spec = importlib.util.spec_from_file_location(driver.stem, driver)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{driver} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[driver.stem] = module
    spec.loader.exec_module(module)
    blocks = int(order["blocks"])
    given = Given(
        folder=Path(str(order["folder"])),
        memory=touched_rows(2 * blocks, int(order["slot_bytes"])),
        payload_bytes=int(order["payload_bytes"]),
        blocks=blocks,
        rounds=int(order["rounds"]),
        threads=int(order["threads"]),
    )

    def opened(given: Given) -> Peer[object]:
        peer: Peer[object] = module.open_peer(name, given)
        return peer

    return Bench(opened, given, Path(str(order["content"])))


def main() -> None:
    """Serve stdin and stdout; what foreign projects print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Path(sys.argv[1]), sys.argv[2], sys.stdin, answers)
    answers.close()


if __name__ == "__main__":
    main()
    # Threads of foreign projects may outlive their `close`.
    sys.stderr.flush()
    os._exit(0)
