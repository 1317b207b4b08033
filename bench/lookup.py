"""What a lookup costs: 77,000 tokens of which 601 blocks are stored, in an index of a million; and opening that store.

Blocks have no bytes here, the index is real. Hashing is measured apart, since it is most of a lookup.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from duokv.bench.command_line import OneLineParser, number
from duokv.bench.filler import NAMESPACE, TRAFFIC, commit_keys, fill, stored_prompts
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import KVStore, StoreConfig, chain_keys, open_store
from duokv.kvstore.keys import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class LookupCost:
    """Medians. The list is the same prompt as Python ints; a miss is one whose first block is not there."""

    blocks: int
    open_s: float
    lookup_ms: float
    lookup_list_ms: float
    hashing_ms: float
    miss_us: float
    commit_us: float
    renew_us: float
    index_bytes_per_block: float


def measure(blocks: int, *, repeats: int, progress: bool) -> LookupCost:
    """Fill an index with `blocks` blocks in commits of 34, then time. Takes about 10 us a block."""
    backend = MemoryBackend(metadata_only=True)
    with tempfile.TemporaryDirectory(prefix="duokv-bench-") as folder:
        config = StoreConfig(swa_bytes=0, maintenance_interval_s=0, index_path=folder, fsync="none")
        with _open(backend, config) as store:
            commits = fill(store, blocks, seed=0, progress=progress)
        started = time.perf_counter()
        store = _open(backend, config)
        opened = time.perf_counter() - started
        with store:
            rng = np.random.default_rng(1)
            turns = stored_prompts(store, seed=1)
            first = next(turns)
            hit = store.lookup(NAMESPACE, first.tokens, TRAFFIC)
            if hit.tokens != first.blocks * BLOCK_TOKENS:
                raise AssertionError(f"{hit.tokens} tokens hit, {first.blocks * BLOCK_TOKENS} are stored")
            absent = [rng.bytes(len(first.blob)) for _ in range(repeats)]
            return LookupCost(
                blocks=store.stats().blocks,
                open_s=opened,
                lookup_ms=1e3 * _timed(lambda: store.lookup(NAMESPACE, next(turns).tokens, TRAFFIC), repeats),
                lookup_list_ms=1e3 * _timed(lambda: store.lookup(NAMESPACE, next(turns).numbers, TRAFFIC), repeats),
                hashing_ms=1e3 * _timed(lambda: chain_keys(NAMESPACE, first.tokens), repeats),
                miss_us=1e6 * _timed(lambda: store.blocks.find(absent.pop(), first.blocks, TRAFFIC), repeats),
                commit_us=1e6 * median(commits),
                renew_us=1e6 * _timed(lambda: commit_keys(store, next(turns).blob, first.blocks), repeats),
                index_bytes_per_block=store.stats().index_bytes / store.stats().blocks,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = OneLineParser(prog="python -m duokv.bench.lookup", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=number(1), default=1_000_000, help="blocks in the index (default: a million)")
    parser.add_argument("--repeats", type=number(1), default=200, help="calls a median is taken of")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    chosen = parser.parse_args(argv)
    cost = measure(chosen.blocks, repeats=chosen.repeats, progress=not chosen.json and sys.stderr.isatty())
    if chosen.json:
        sys.stdout.write(json.dumps(asdict(cost)) + "\n")
    else:
        for name, value in asdict(cost).items():
            sys.stdout.write(f"{name:22}{value:>14,.3f}\n")
    return 0


def _open(backend: MemoryBackend, config: StoreConfig) -> KVStore:
    return open_store("memory://bench", geometry="deepseek-v4.1-flash", config=config, backend=backend)


def _timed(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
