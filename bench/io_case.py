"""One way to use a store against the machine's limit for it: limit, store, limit, store, ... in one run.

A case is measured in one process or in several at once. Each has a store of its own on the shared folder, a file for
the limit, and memory that is touched and reused; only what a caller would wait for is timed.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

import numpy as np

from duokv.bench.filler import NAMESPACE, TRAFFIC, fill_index
from duokv.bench.io_limits import (
    Crew,
    RawFile,
    Timed,
    copy,
    forget_pages,
    physical_bytes,
    ratios_to_limit,
    write_durably,
)  # fmt: skip
from duokv.kvstore import CacheGeometry, KVStore, PrefixHit, StoreConfig, open_store
from duokv.kvstore.errors import DuoKVError, StoreError
from duokv.kvstore.geometry import TRAILER_BYTES
from duokv.kvstore.keys import BLOCK_TOKENS

V41 = "deepseek-v4.1-flash"
V41_SLOT = 114_688

Action = Literal["load", "lookup+load", "stream", "commit"]
"""stream: until the first blocks of a load are there; its limit is one read of one block."""
From = Literal["device", "cache", "page cache"]
_KEPT = 3
"""Prompts read in turn, so that no one else's cache answers for the device."""
_LEAST_BLOCKS = 64
"""Blocks of a timed part at least: small batches are repeated."""
_DURABLE_COMMITS = 8
_DEADLINE_S = 60.0
_WITNESS = 16
"""Leading bytes of a row that are wiped before a load: enough to tell, few enough to leave the caches alone."""
_VOCABULARY = 1 << 17


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    blocks: of one call. threads: the store's reading threads, and those of the limit. source: where a load's bytes are:
    "device" is cold, "cache" the store's own, which is off otherwise. direct: past the page cache. index_blocks: others
    in the index.
    """

    action: Action
    slot_bytes: int = V41_SLOT
    blocks: int = 601
    threads: int = 8
    source: From = "device"
    direct: bool = True
    index_blocks: int = 0
    processes: int = 1

    @property
    def span(self) -> int:
        """Blocks of one prompt."""
        return self.blocks if self.action == "commit" else max(self.blocks, _LEAST_BLOCKS)

    @property
    def times(self) -> int:
        """Calls in one timed part."""
        most = {"stream": 1, "commit": _DURABLE_COMMITS}.get(self.action, _LEAST_BLOCKS)
        return max(1, min(most, _LEAST_BLOCKS // self.blocks))

    @property
    def nbytes(self) -> int:
        """Bytes of one timed part, of all processes."""
        blocks = 1 if self.action == "stream" else self.times * self.blocks
        return self.processes * blocks * self.slot_bytes

    @property
    def geometry(self) -> CacheGeometry:
        """V4.1 where the slot is its own, else one of no known inside."""
        if self.slot_bytes == V41_SLOT:
            return CacheGeometry.preset(V41)
        return CacheGeometry.opaque(f"slot-{self.slot_bytes}", payload_bytes=self.slot_bytes - TRAILER_BYTES)

    def disk_bytes(self, pairs: int) -> int:
        """What it takes on the device, about."""
        kept = (pairs + 2) * self.nbytes if self.action == "commit" else 2 * _KEPT * self.span * self.slot_bytes
        return self.processes * (kept + (16 << 20)) + 200 * self.index_blocks


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of the store's parts and of the limit's around them (one more).

    amplification: bytes that went to the device per byte of payload, of commits.
    """

    case: Case
    store_s: tuple[float, ...]
    limit_s: tuple[float, ...]
    amplification: float | None

    @property
    def ratios(self) -> tuple[float, ...]:
        """Per pair the store's rate as a share of the limit's, measured before and after."""
        return ratios_to_limit(self.store_s, self.limit_s)

    @property
    def ratio(self) -> float:
        """Median of the ratios."""
        return median(self.ratios)

    @property
    def store_rate(self) -> float:
        """Bytes per second, median."""
        return self.case.nbytes / median(self.store_s)

    @property
    def limit_rate(self) -> float:
        """Bytes per second, median."""
        return self.case.nbytes / median(self.limit_s)


def run_case(folder: Path, case: Case, pairs: int) -> Result:
    """Measure `case` in a folder below `folder`, which is removed afterwards. StoreError if the store falls short."""
    with tempfile.TemporaryDirectory(prefix="case-", dir=folder) as name:
        store = Path(name, "store")
        if case.index_blocks:
            fill_index(store / "index", case.geometry, case.index_blocks)
        _open(store, case).close()
        before = physical_bytes(store)
        with _runner(Path(name), case) as runner:
            # The first of each warms up.
            runner.limit()
            runner.store()
            limit_s, store_s = [runner.limit()], []
            for _ in range(pairs):
                store_s.append(runner.store())
                limit_s.append(runner.limit())
        written = None
        if case.action == "commit":
            blocks = (pairs + 1) * case.processes * case.times * case.blocks
            written = (physical_bytes(store) - before) / (blocks * case.geometry.payload_bytes)
        return Result(case, tuple(store_s), tuple(limit_s), written)


class Runner(Protocol):
    """Does one timed part; returns its seconds."""

    def limit(self) -> float:
        """The machine's."""

    def store(self) -> float:
        """The store's."""


class Subject:
    """One process's part of a case: `limit` and `store` do the same work without and with the store. Close it."""

    def __init__(self, folder: Path, case: Case, number: int) -> None:
        self._case = case
        self._folder = folder
        self._number = number
        self._rng = np.random.default_rng(number)
        self._turns = {"limit": 0, "store": 0}
        with ExitStack() as undo:
            self._store = undo.enter_context(_open(folder / "store", case))
            self._crew = Crew(case.threads)
            undo.callback(self._crew.close)
            self._source = undo.enter_context(self._store.buffers(case.span))
            for row in self._source.rows:
                row[:] = np.frombuffer(self._rng.bytes(case.slot_bytes), np.uint8)
            self._rows = undo.enter_context(self._store.buffers(case.span))
            self._rows.rows[:] = 0
            self._prompts: list[tuple[np.ndarray[tuple[int], np.dtype[np.int32]], PrefixHit]] = []
            self._raw: RawFile | None = None
            if case.action != "commit":
                self._prepare_loads(undo)
            self._undo = undo.pop_all()

    def limit(self) -> Timed:
        """Do the machine's part."""
        case, slot = self._case, self._case.slot_bytes
        turn = self._next("limit")
        if case.action == "commit":
            path = self._folder / f"limit-{self._number}-{turn}"
            content = self._source.rows[: case.blocks].reshape(-1)
            return write_durably(path, content, case.times, self._crew)
        parts = [(at, self._rows.rows[at : at + case.blocks].reshape(-1)) for at in self._starts()]
        if self._raw is None:
            return copy([(self._source.rows[at : at + case.blocks].reshape(-1), to) for at, to in parts], self._crew)
        base = turn % _KEPT * case.span
        if case.action == "stream":
            return self._raw.read([(base * slot, self._rows.rows[0])], self._crew)
        return self._raw.read([((base + at) * slot, to) for at, to in parts], self._crew)

    def store(self) -> Timed:
        """Do the store's part; StoreError if it does less than asked."""
        case = self._case
        turn = self._next("store")
        if case.action == "commit":
            return self._commit()
        if case.source == "device" and not case.direct:
            forget_pages(self._folder / "store")
        tokens, hit = self._prompts[turn % len(self._prompts)]
        rows = self._rows.rows
        # What the limit left there must not pass for loaded.
        rows[:, :_WITNESS] = 0
        loaded = []
        started = time.perf_counter()
        if case.action == "stream":
            steps = self._store.load_iter(hit, rows[: case.blocks], deadline_s=_DEADLINE_S)
            lead = next(steps, 0)
            ended = time.perf_counter()
            loaded.append(max(steps, default=lead))
        else:
            for at in self._starts():
                found = hit if case.action == "load" else self._store.lookup(NAMESPACE, tokens, TRAFFIC)
                out = rows[at : at + case.blocks]
                loaded.append(self._store.load(found, out, first_block=at, deadline_s=_DEADLINE_S))
            ended = time.perf_counter()
        if loaded != [case.blocks] * case.times:
            raise StoreError(f"{case}: loads gave {loaded} blocks of {case.blocks}; see the warnings before this line")
        return started, ended

    def check(self) -> None:
        """StoreError unless the rows last loaded are what was committed."""
        payload = self._case.geometry.payload_bytes
        used = self._case.times * self._case.blocks
        pairs = zip(self._rows.rows[:used], self._source.rows[:used], strict=True)
        if self._case.action != "commit" and not all(np.array_equal(a[:payload], b[:payload]) for a, b in pairs):
            raise StoreError(f"{self._case}: the store gave other bytes than it was given")

    def close(self) -> None:
        """Close the store, remove the limit's file."""
        self._undo.close()

    def _prepare_loads(self, undo: ExitStack) -> None:
        case = self._case
        for _ in range(_KEPT):
            tokens = self._tokens(case.span + 1)
            self._store.commit(NAMESPACE, tokens, self._source.rows, traffic=TRAFFIC)
            self._prompts.append((tokens, self._store.lookup(NAMESPACE, tokens, TRAFFIC)))
        self._store.flush()
        if case.source == "device":
            content = self._source.rows.reshape(-1)
            raw = RawFile(self._folder / f"limit-{self._number}", _KEPT * content.nbytes, content)
            undo.callback(raw.close)
            self._raw = raw
        else:
            # Often enough for any policy to take them in.
            for _ in range(4 * _KEPT):
                self.store()

    def _commit(self) -> Timed:
        case = self._case
        blocks = self._source.rows[: case.blocks]
        prompts = [self._tokens(case.blocks) for _ in range(case.times)]
        stored = []
        started = time.perf_counter()
        for tokens in prompts:
            commit = self._store.commit(NAMESPACE, tokens, blocks, traffic=TRAFFIC)
            commit.wait_durable()
            stored.append(commit.new)
        ended = time.perf_counter()
        if stored != [case.blocks] * case.times:
            raise StoreError(f"{case}: commits stored {stored} of {case.blocks}; see the warnings before this line")
        return started, ended

    def _starts(self) -> range:
        return range(0, self._case.times * self._case.blocks, self._case.blocks)

    def _tokens(self, blocks: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._rng.integers(0, _VOCABULARY, blocks * BLOCK_TOKENS, dtype=np.int32)

    def _next(self, side: str) -> int:
        turn = self._turns[side]
        self._turns[side] += 1
        return turn


class _Alone:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def limit(self) -> float:
        started, ended = self._subject.limit()
        return ended - started

    def store(self) -> float:
        started, ended = self._subject.store()
        self._subject.check()
        return ended - started


class _Together:
    """Processes that do their parts at the same time; the seconds are from the first start to the last end."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def limit(self) -> float:
        return self._ask("limit")

    def store(self) -> float:
        return self._ask("store")

    def _ask(self, side: str) -> float:
        for pipe in self._pipes:
            pipe.send(side)
        parts = [_answer(pipe) for pipe in self._pipes]
        return max(ended for _, ended in parts) - min(started for started, _ in parts)


@contextmanager
def _runner(folder: Path, case: Case) -> Iterator[Runner]:
    if case.processes == 1:
        subject = Subject(folder, case, 0)
        try:
            yield _Alone(subject)
        finally:
            subject.close()
        return
    # A fresh interpreter each: a store is not to be used across a fork.
    spawn = multiprocessing.get_context("spawn")
    pipes = []
    with ExitStack() as undo:
        for number in range(case.processes):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, folder, case, number))
            process.start()
            theirs.close()
            undo.callback(process.join)
            undo.callback(ours.close)
            pipes.append(ours)
        for pipe in pipes:
            _answer(pipe)
        yield _Together(pipes)


def serve(pipe: Connection, folder: Path, case: Case, number: int) -> None:
    """Be one process of a case: do the parts that `pipe` asks for until it is closed."""
    try:
        subject = Subject(folder, case, number)
    except (DuoKVError, OSError) as error:
        pipe.send(str(error))
        return
    sides: dict[str, Callable[[], Timed]] = {"limit": subject.limit, "store": partial(_checked, subject)}
    pipe.send((0.0, 0.0))
    try:
        while True:
            pipe.send(sides[pipe.recv()]())
    except EOFError:
        pass
    except (DuoKVError, OSError) as error:
        pipe.send(str(error))
    finally:
        subject.close()


def _checked(subject: Subject) -> Timed:
    part = subject.store()
    subject.check()
    return part


def _answer(pipe: Connection) -> Timed:
    try:
        said = pipe.recv()
    except EOFError:
        raise StoreError("a process of the benchmark ended early; see what it printed") from None
    if isinstance(said, str):
        raise StoreError(said)
    started, ended = said
    return float(started), float(ended)


def _open(folder: Path, case: Case) -> KVStore:
    prompt = case.span * case.slot_bytes
    config = StoreConfig(
        swa_bytes=0,
        read_threads=case.threads,
        direct="require" if case.direct else "off",
        buffer_bytes=max(256 << 20, 4 * prompt),
        cache_bytes=(_KEPT + 1) * prompt if case.source == "cache" else 0,
    )
    return open_store(folder.as_uri(), geometry=case.geometry, config=config)
