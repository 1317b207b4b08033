"""What a lookup costs: 77,000 tokens of which 601 blocks are stored, in an index of a million; and opening that store.

Blocks have no bytes here, the index is real. Hashing is measured apart, since it is most of a lookup.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from rich.progress import track

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import KVStore, Namespace, Origin, StoreConfig, chain_keys, open_store
from duokv.kvstore.keys import BLOCK_TOKENS, KEY_BYTES

PROMPT_TOKENS = 77_000
COMMIT_BLOCKS = 34
"""New blocks of a turn in the public coding-agent trace, on average."""
_NAMESPACE = Namespace(model="bench", weights="0", tokenizer="0", kv_format="0")
_TRAFFIC = "agent"


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
            commits = _fill(store, blocks, progress=progress)
        started = time.perf_counter()
        store = _open(backend, config)
        opened = time.perf_counter() - started
        with store:
            rng = np.random.default_rng(1)
            prompt = rng.integers(0, 1 << 17, PROMPT_TOKENS).astype(np.int32)
            blob = chain_keys(_NAMESPACE, prompt).blob
            whole = len(blob) // KEY_BYTES
            for upto in [*range(COMMIT_BLOCKS, whole, COMMIT_BLOCKS), whole]:
                _commit(store, blob, upto)
            numbers = prompt.tolist()
            hit = store.lookup(_NAMESPACE, prompt, _TRAFFIC)
            if hit.tokens != whole * BLOCK_TOKENS:
                raise AssertionError(f"{hit.tokens} tokens hit, {whole * BLOCK_TOKENS} are stored")
            return LookupCost(
                blocks=store.stats().blocks,
                open_s=opened,
                lookup_ms=1e3 * _timed(lambda: store.lookup(_NAMESPACE, prompt, _TRAFFIC), repeats),
                lookup_list_ms=1e3 * _timed(lambda: store.lookup(_NAMESPACE, numbers, _TRAFFIC), repeats),
                hashing_ms=1e3 * _timed(lambda: chain_keys(_NAMESPACE, prompt), repeats),
                miss_us=1e6 * _timed(lambda: store.blocks.find(rng.bytes(len(blob)), whole, _TRAFFIC), repeats),
                commit_us=1e6 * commits,
                renew_us=1e6 * _timed(lambda: _commit(store, blob, whole), repeats),
                index_bytes_per_block=store.stats().index_bytes / store.stats().blocks,
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m duokv.bench.lookup", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks in the index (default: a million)")
    parser.add_argument("--repeats", type=int, default=200, help="calls a median is taken of")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    chosen = parser.parse_args(argv)
    if chosen.blocks < 1 or chosen.repeats < 1:
        parser.error("--blocks and --repeats must be at least 1")
    cost = measure(chosen.blocks, repeats=chosen.repeats, progress=not chosen.json and sys.stderr.isatty())
    if chosen.json:
        sys.stdout.write(json.dumps(asdict(cost)) + "\n")
    else:
        for name, value in asdict(cost).items():
            sys.stdout.write(f"{name:22}{value:>14,.3f}\n")
    return 0


def _open(backend: MemoryBackend, config: StoreConfig) -> KVStore:
    return open_store("memory://bench", geometry="deepseek-v4.1-flash", config=config, backend=backend)


def _fill(store: KVStore, blocks: int, *, progress: bool) -> float:
    """Commit random chains; returns the median seconds of a commit."""
    rng = np.random.default_rng(0)
    seconds = []
    for _ in track(range(-(-blocks // COMMIT_BLOCKS)), "filling the index", disable=not progress):
        blob = rng.bytes(COMMIT_BLOCKS * KEY_BYTES)
        seconds.append(_timed(lambda blob=blob: _commit(store, blob, COMMIT_BLOCKS), 1))  # type: ignore[misc]
    return median(seconds)


def _commit(store: KVStore, blob: bytes, blocks: int) -> None:
    store.blocks.commit(blob, blocks, _TRAFFIC, first=0, payload=None, origin=Origin.EXACT)


def _timed(call: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


if __name__ == "__main__":
    raise SystemExit(main())
