"""What the index costs at one size: wall and CPU time of each operation, bytes on disk and in memory.

Blocks have no bytes here, the index is real. Meant for a process of its own, since memory is what it grew by.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from duokv.bench.clock import Time
from duokv.bench.filler import COMMIT_BLOCKS, NAMESPACE, TRAFFIC, commit_keys, fill, stored_prompts
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import ClassRule, KVStore, Policy, StoreConfig, open_store
from duokv.kvstore.clock import Clock
from duokv.kvstore.geometry import PAGE_BYTES, TRAILER_BYTES, CacheGeometry
from duokv.kvstore.keys import BLOCK_TOKENS, KEY_BYTES
from duokv.kvstore.policy import DAY_S

CUT_BLOCKS = 10_000
REBUILT_BLOCKS = 100_000
OPERATIONS = ("commit", "lookup", "find", "miss", "renewal", "expiry", "reclaim", "queue", "open", "close", "rebuild")
"""See `Scale.costs`."""
BRIEF = "brief"
BRIEF_S = 60.0
_CUTS = 3
_SEED = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one call: `wall_s` the median, `cpu_s` the mean of this process's. blocks: what a call handles."""

    wall_s: float
    cpu_s: float
    blocks: int

    @property
    def cpu_us_per_block(self) -> float:
        """CPU time by block."""
        return 1e6 * self.cpu_s / self.blocks


@dataclass(frozen=True, slots=True)
class Scale:
    """Figures of an index of `blocks` blocks.

    costs: commit of 34 new blocks; lookup of 77,000 tokens; find, the same without hashing; miss of a first block;
    renewal of a 601-block prompt; expiry of 10,000 blocks at once; reclaim, a commit of 34 for which as many go; queue,
    the first expiry after opening, which orders all extents; open; close; rebuild, an open of at most 100,000 blocks of
    4 KiB in files whose index is gone.
    memory_bytes: what the process grew by, every extent used once and put in order. index_bytes: of the file.
    """

    blocks: int
    memory_bytes: int
    index_bytes: int
    costs: dict[str, Cost] = field(default_factory=dict)


def measure_size(blocks: int, repeats: int) -> Scale:
    """Fill an index with `blocks` blocks, then time."""
    backend = MemoryBackend(metadata_only=True)
    costs: dict[str, Cost] = {}
    now = Time()
    with tempfile.TemporaryDirectory(prefix="duokv-scale-") as folder:
        open_one = partial(open_empty, backend, Path(folder), now.clock())
        with open_one() as store:
            # What opening and a first commit take is not the blocks'.
            fill(store, 1, seed=1)
            before = anonymous_bytes()
            cpu = time.process_time()
            seconds = fill(store, blocks, seed=_SEED)
            costs["commit"] = Cost(median(seconds), (time.process_time() - cpu) / len(seconds), COMMIT_BLOCKS)
            # The same chains again: one use of every extent.
            fill(store, blocks, seed=_SEED)
            store.maintain()
            memory, index_bytes = anonymous_bytes() - before, store.stats().index_bytes
            stored = store.stats().blocks
            costs["close"] = _timed(store.close, 1, stored)
        with _opened(open_one, costs, stored) as store:
            costs["queue"] = _timed(store.maintain, 1, stored)
            costs |= _reads(store, repeats)
            costs["expiry"] = _expiry(store, now, min(CUT_BLOCKS, blocks))
            live = store.stats().blocks
        with open_one(capacity_blocks=live) as store:
            costs["reclaim"] = _reclaim(store, repeats)
    costs["rebuild"] = _rebuild(min(blocks, REBUILT_BLOCKS))
    return Scale(stored, memory, index_bytes, {name: costs[name] for name in OPERATIONS})


def open_empty(backend: MemoryBackend, folder: Path, clock: Clock, capacity_blocks: int | None = None) -> KVStore:
    """A store of blocks without bytes: they live 3 days, those of class `BRIEF` a minute."""
    policy = Policy({TRAFFIC: ClassRule(3 * DAY_S), BRIEF: ClassRule(BRIEF_S)}, TRAFFIC).numbered()
    config = StoreConfig(
        swa_bytes=0, maintenance_interval_s=0, index_path=str(folder), seed_policy=policy,
        capacity_blocks=capacity_blocks,
    )  # fmt: skip
    return open_store("memory://scale", geometry="deepseek-v4.1-flash", config=config, backend=backend, clock=clock)


def anonymous_bytes() -> int:
    """Memory of this process that no file backs; the index's pages are the page cache's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def _opened(open_one: Callable[[], KVStore], costs: dict[str, Cost], blocks: int) -> Iterator[KVStore]:
    stores: list[KVStore] = []
    costs["open"] = _timed(lambda: stores.append(open_one()), 1, blocks)
    with stores[0] as store:
        yield store


def _reads(store: KVStore, repeats: int) -> dict[str, Cost]:
    rng = np.random.default_rng(2)
    turns = stored_prompts(store, seed=2)
    first = next(turns)
    absent = [rng.bytes(len(first.blob)) for _ in range(repeats)]
    whole = first.blocks
    return {
        "lookup": _timed(lambda: store.lookup(NAMESPACE, next(turns).tokens, TRAFFIC), repeats, whole),
        "find": _timed(lambda: store.blocks.find(next(turns).blob, whole, TRAFFIC), repeats, whole),
        "miss": _timed(lambda: store.blocks.find(absent.pop(), whole, TRAFFIC), repeats, 1),
        "renewal": _timed(lambda: commit_keys(store, next(turns).blob, whole), repeats, whole),
    }


def _expiry(store: KVStore, now: Time, blocks: int) -> Cost:
    costs = []
    for turn in range(_CUTS):
        before = store.stats().blocks
        fill(store, blocks, seed=10 + turn, traffic=BRIEF)
        store.maintain()
        now.ahead_s += BRIEF_S + 1
        costs.append(_timed(store.maintain, 1, blocks))
        if store.stats().blocks != before:
            raise AssertionError(f"{store.stats().blocks - before} blocks are left that should have expired")
    return Cost(median(one.wall_s for one in costs), sum(one.cpu_s for one in costs) / len(costs), blocks)


def _reclaim(store: KVStore, repeats: int) -> Cost:
    rng = np.random.default_rng(3)
    blobs = [rng.bytes(COMMIT_BLOCKS * KEY_BYTES) for _ in range(repeats + 1)]
    before = store.stats().blocks
    # The first one puts all extents in order.
    commit_keys(store, blobs.pop(), COMMIT_BLOCKS)
    cost = _timed(lambda: commit_keys(store, blobs.pop(), COMMIT_BLOCKS), repeats, COMMIT_BLOCKS)
    if store.stats().blocks != before:
        raise AssertionError(f"{store.stats().blocks:,} blocks in a store of {before:,}")
    return cost


def _rebuild(blocks: int) -> Cost:
    geometry = CacheGeometry.opaque("scale", payload_bytes=PAGE_BYTES - TRAILER_BYTES)
    config = StoreConfig(swa_bytes=0, maintenance_interval_s=0, fsync="none")
    rng = np.random.default_rng(4)
    rows = np.zeros((COMMIT_BLOCKS, geometry.payload_bytes), np.uint8)
    with tempfile.TemporaryDirectory(prefix="duokv-scale-") as folder:

        def open_one() -> KVStore:
            return open_store(f"file://{folder}", geometry=geometry, config=config)

        with open_one() as store:
            for _ in range(-(-blocks // COMMIT_BLOCKS)):
                tokens = rng.integers(0, 1 << 17, COMMIT_BLOCKS * BLOCK_TOKENS, dtype=np.int32)
                store.commit(NAMESPACE, tokens, rows, traffic=TRAFFIC)
            stored = store.stats().blocks
        rebuilt: list[KVStore] = []
        shutil.rmtree(Path(folder) / "index")
        log = logging.getLogger("duokv")
        log.addFilter(_is_no_warning)
        try:
            cost = _timed(lambda: rebuilt.append(open_one()), 1, stored)
        finally:
            log.removeFilter(_is_no_warning)
        with rebuilt[0] as store:
            if store.stats().blocks != stored:
                raise AssertionError(f"{store.stats().blocks} blocks of {stored} after a rebuild")
        return cost


def _is_no_warning(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def _timed(call: Callable[[], object], repeats: int, blocks: int) -> Cost:
    seconds = []
    cpu = time.process_time()
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return Cost(median(seconds), (time.process_time() - cpu) / repeats, blocks)
