"""Figures of the store that do not depend on the machine, and a budget for them: counts, bytes, and times as multiples
of a plain way to do the same in the same process.

Times are the least of many tries, store and plain way in turns, which a busy machine hardly changes.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import lmdb
import msgspec
import numpy as np

from duokv.bench.clock import Time
from duokv.bench.filler import COMMIT_BLOCKS, NAMESPACE, PROMPT_TOKENS, TRAFFIC, commit_keys, fill, stored_prompts
from duokv.bench.scale_size import BRIEF, BRIEF_S, open_empty
from duokv.connectors.fs_faulty import FaultyBackend, Kind
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import KVStore, StoreConfig, open_store
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.keys import BLOCK_TOKENS, KEY_BYTES, TOKEN_BYTES

FIGURES: Mapping[str, str] = {
    "lookup_over_hashing": "lookup of 77,000 tokens, by hashing them",
    "list_lookup_over_hashing": "the same from a list, by hashing the array",
    "find_over_gets": "finding 601 hashed blocks in 18 extents, by reading their 36 records",
    "miss_over_get": "a miss of the first block, by reading one record",
    "renewal_over_gets": "renewing 601 blocks in 18 extents, by reading their 36 records",
    "commit_over_puts": "committing 34 blocks, by writing their two records",
    "expiry_over_deletes": "expiring 2,000 blocks, by deleting their records; in CPU time",
    "index_bytes_per_block": "bytes of the index file a block",
    "python_bytes_per_block": "bytes of Python objects a block, every extent used and put in order",
    "reads_per_load": "reads of a load of 601 blocks committed in 18 turns",
    "writes_per_commit": "writes of a commit of 601 blocks",
    "syncs_per_commit": "syncs of that commit, until it is durable",
    "operations_per_open": "operations on the backend of opening the store again",
}
_TRIES = 60
_CUT_BLOCKS = 2_000
_CUTS = 20
_EXTENT_BYTES = 20 + 16 * COMMIT_BLOCKS
_LIFE_BYTES = 56
_LOADED_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
_DEADLINE_S = 60.0


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most each of `FIGURES` may be, in an index of `blocks` blocks."""

    blocks: int
    most: dict[str, float]


def read_budget(path: Path) -> Budget:
    """Read a budget; UsageError unless it has exactly the figures there are."""
    try:
        budget = msgspec.json.decode(path.read_bytes(), type=Budget)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); name a budget as bench/budget.json is") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: not a budget ({error}); write it as bench/budget.json is") from error
    for name in budget.most:
        if name not in FIGURES:
            raise UsageError(f"{path}: {name!r} is not a figure; {nearest(name, FIGURES)}")
    if lacking := [name for name in FIGURES if name not in budget.most]:
        raise UsageError(f"{path}: no budget for {', '.join(lacking)}; add the most it may be")
    return budget


def check(figures: Mapping[str, float], budget: Budget) -> dict[str, str]:
    """What exceeds the budget: a line for each figure, by its name."""
    return {
        name: f"{name} is {found:.4g}, over the {budget.most[name]:g} allowed: {FIGURES[name]}"
        for name, found in figures.items()
        if found > budget.most[name]
    }


def measure_figures(blocks: int) -> dict[str, float]:
    """Measure all of `FIGURES` in an index of `blocks` blocks, in their order."""
    found = {**_times(blocks), **_bytes(blocks), **_counts()}
    return {name: round(found[name], 4) for name in FIGURES}


@dataclass(frozen=True, slots=True)
class _Plain:
    """An LMDB of two tables with a store's records and nothing around it."""

    env: lmdb.Environment
    extents: lmdb._Database
    lives: lmdb._Database
    keys: list[tuple[bytes, bytes]]

    @classmethod
    def filled(cls, folder: Path, blocks: int) -> _Plain:
        env = lmdb.open(str(folder), map_size=1 << 34, max_dbs=2, sync=False, readahead=False)
        plain = cls(env, env.open_db(b"extents"), env.open_db(b"lives"), [])
        rng = np.random.default_rng(5)
        for _ in range(-(-blocks // COMMIT_BLOCKS)):
            plain.put(rng.bytes(16))
        return plain

    def put(self, key: bytes) -> None:
        place = len(self.keys).to_bytes(8, "big")
        with self.env.begin(write=True) as txn:
            txn.put(key, bytes(_EXTENT_BYTES), db=self.extents)
            txn.put(place, bytes(_LIFE_BYTES), db=self.lives)
        self.keys.append((key, place))

    def get(self, records: int) -> None:
        with self.env.begin() as txn:
            for key, place in self.keys[:records]:
                txn.get(key, db=self.extents)
                txn.get(place, db=self.lives)

    def delete(self, records: int) -> None:
        with self.env.begin(write=True) as txn:
            for key, place in self.keys[-records:]:
                txn.delete(key, db=self.extents)
                txn.delete(place, db=self.lives)
        del self.keys[-records:]


def _times(blocks: int) -> dict[str, float]:
    now = Time()
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="duokv-check-")))
        store = undo.enter_context(open_empty(MemoryBackend(metadata_only=True), folder / "store", now.clock()))
        plain = _Plain.filled(folder, blocks)
        undo.callback(plain.env.close)
        fill(store, blocks, seed=0)
        rng = np.random.default_rng(1)
        turns = stored_prompts(store, seed=1)
        first = next(turns)
        whole = first.blocks
        extents = -(-whole // COMMIT_BLOCKS)
        absent = [rng.bytes(len(first.blob)) for _ in range(_TRIES)]
        chains = [rng.bytes(COMMIT_BLOCKS * KEY_BYTES) for _ in range(_TRIES)]
        keys = [rng.bytes(16) for _ in range(_TRIES)]

        def hashing() -> None:
            _hash(first.tokens.tobytes())

        def gets() -> None:
            plain.get(extents)

        return {
            "lookup_over_hashing": _ratio(lambda: store.lookup(NAMESPACE, next(turns).tokens, TRAFFIC), hashing),
            "list_lookup_over_hashing": _ratio(lambda: store.lookup(NAMESPACE, next(turns).numbers, TRAFFIC), hashing),
            "find_over_gets": _ratio(lambda: store.blocks.find(next(turns).blob, whole, TRAFFIC), gets),
            "miss_over_get": _ratio(lambda: store.blocks.find(absent.pop(), whole, TRAFFIC), lambda: plain.get(1)),
            "renewal_over_gets": _ratio(lambda: commit_keys(store, next(turns).blob, whole), gets),
            "commit_over_puts": _ratio(
                lambda: commit_keys(store, chains.pop(), COMMIT_BLOCKS), lambda: plain.put(keys.pop())
            ),
            "expiry_over_deletes": _expiry(store, now, plain),
        }


def _expiry(store: KVStore, now: Time, plain: _Plain) -> float:
    records = -(-_CUT_BLOCKS // COMMIT_BLOCKS)
    store.maintain()
    ours, theirs = [], []
    for turn in range(_CUTS):
        fill(store, _CUT_BLOCKS, seed=10 + turn, traffic=BRIEF)
        store.maintain()
        now.ahead_s += BRIEF_S + 1
        rng = np.random.default_rng(turn)
        for _ in range(records):
            plain.put(rng.bytes(16))
        # Long enough to be interrupted every time where other work wants the processor, so waiting does not count.
        ours.append(_seconds(store.maintain, time.thread_time))
        theirs.append(_seconds(lambda: plain.delete(records), time.thread_time))
    return min(ours) / min(theirs)


def _bytes(blocks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="duokv-check-") as folder:
        tracemalloc.start()
        try:
            with open_empty(MemoryBackend(metadata_only=True), Path(folder), Time().clock()) as store:
                fill(store, 1, seed=1)
                before, _ = tracemalloc.get_traced_memory()
                for _ in range(2):
                    fill(store, blocks, seed=0)
                store.maintain()
                after, _ = tracemalloc.get_traced_memory()
                stats = store.stats()
        finally:
            tracemalloc.stop()
    return {
        "index_bytes_per_block": stats.index_bytes / stats.blocks,
        "python_bytes_per_block": (after - before) / stats.blocks,
    }


def _counts() -> dict[str, float]:
    backend = FaultyBackend(MemoryBackend())

    def counted(kind: Kind | None) -> int:
        return sum(kind in (None, one.kind) for one in backend.log)

    with tempfile.TemporaryDirectory(prefix="duokv-check-") as folder:
        config = StoreConfig(swa_bytes=0, maintenance_interval_s=0, index_path=folder)

        def open_one() -> KVStore:
            return open_store("memory://check", geometry="deepseek-v4.1-flash", config=config, backend=backend)

        rng = np.random.default_rng(6)
        found: dict[str, float] = {}
        with open_one() as store, store.buffers(_LOADED_BLOCKS) as lent:
            tokens = rng.integers(0, 1 << 17, _LOADED_BLOCKS * BLOCK_TOKENS + 1, dtype=np.int32)
            backend.log.clear()
            store.commit(NAMESPACE, tokens, lent.rows, traffic=TRAFFIC).wait_durable()
            found |= {"writes_per_commit": counted("write"), "syncs_per_commit": counted("sync")}
            tokens = rng.integers(0, 1 << 17, _LOADED_BLOCKS * BLOCK_TOKENS + 1, dtype=np.int32)
            for at in range(0, _LOADED_BLOCKS, COMMIT_BLOCKS):
                part = lent.rows[at : at + COMMIT_BLOCKS]
                store.commit(NAMESPACE, tokens, part, first_block=at, traffic=TRAFFIC)
            hit = store.lookup(NAMESPACE, tokens, TRAFFIC)
            backend.log.clear()
            loaded = store.load(hit, lent.rows, deadline_s=_DEADLINE_S)
            if loaded != _LOADED_BLOCKS:
                raise AssertionError(f"{loaded} blocks loaded of {_LOADED_BLOCKS}")
            found["reads_per_load"] = counted("read")
        backend.log.clear()
        with open_one():
            found["operations_per_open"] = counted(None)
    return found


def _hash(ids: bytes) -> None:
    """Chain the blocks of a prompt as plainly as can be: the store's own way to hash is measured, not the measure."""
    key = bytes(KEY_BYTES)
    for at in range(0, len(ids) - TOKEN_BYTES + 1, TOKEN_BYTES):
        key = hashlib.sha256(key + ids[at : at + TOKEN_BYTES]).digest()


def _ratio(ours: Callable[[], object], plain: Callable[[], object]) -> float:
    pairs = [(_seconds(ours), _seconds(plain)) for _ in range(_TRIES)]
    return min(one for one, _ in pairs) / min(other for _, other in pairs)


def _seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    call()
    return clock() - started
