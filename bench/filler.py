"""Indexes of any size over no bytes: chains of random keys, committed in turns as agents do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.progress import track

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import KVStore, Namespace, Origin, StoreConfig, chain_keys, open_store
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import KEY_BYTES

COMMIT_BLOCKS = 34
"""New blocks of a turn in the public coding-agent trace, on average."""
PROMPT_TOKENS = 77_000
TRAFFIC = "agent"
_PROMPTS = 3
NAMESPACE = Namespace(model="bench", weights="0", tokenizer="0", kv_format="0")


def commit_keys(store: KVStore, blob: bytes, upto: int, traffic: str = TRAFFIC) -> None:
    """Commit the first `upto` blocks of a chain of keys, without their bytes."""
    store.blocks.commit(blob, upto, traffic, first=0, payload=None, origin=Origin.EXACT)


def commit_in_turns(store: KVStore, blob: bytes) -> None:
    """Commit a chain as a conversation does: an extent of 34 blocks a turn."""
    whole = len(blob) // KEY_BYTES
    for upto in [*range(COMMIT_BLOCKS, whole, COMMIT_BLOCKS), whole]:
        commit_keys(store, blob, upto)


@dataclass(frozen=True, slots=True)
class Prompt:
    """int32 [77,000] token ids, the same as Python ints, and the keys of their 601 blocks."""

    tokens: npt.NDArray[np.int32]
    numbers: list[int]
    blob: bytes
    blocks: int


def stored_prompts(store: KVStore, *, seed: int) -> Iterator[Prompt]:
    """Commit a few prompts in turns and give them out for ever, never one twice in a row: a store may remember."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(_PROMPTS):
        tokens = rng.integers(0, 1 << 17, PROMPT_TOKENS, dtype=np.int32)
        blob = chain_keys(NAMESPACE, tokens).blob
        commit_in_turns(store, blob)
        prompts.append(Prompt(tokens, tokens.tolist(), blob, len(blob) // KEY_BYTES))
    return itertools.cycle(prompts)


def fill(store: KVStore, blocks: int, *, seed: int, traffic: str = TRAFFIC, progress: bool = False) -> list[float]:
    """Commit `blocks` blocks or a few more, one chain of 34 each time; returns the seconds of each commit."""
    rng = np.random.default_rng(seed)
    seconds = []
    for _ in track(range(-(-blocks // COMMIT_BLOCKS)), "filling the index", disable=not progress):
        blob = rng.bytes(COMMIT_BLOCKS * KEY_BYTES)
        started = time.perf_counter()
        commit_keys(store, blob, COMMIT_BLOCKS, traffic)
        seconds.append(time.perf_counter() - started)
    return seconds


def fill_index(path: Path, geometry: CacheGeometry, blocks: int) -> None:
    """Put `blocks` blocks into the index at `path`, whose bytes are nowhere: a store there finds and cannot load them.

    That store must be opened on the same boot, or it tidies them away.
    """
    config = StoreConfig(swa_bytes=0, maintenance_interval_s=0, index_path=str(path))
    backend = MemoryBackend(metadata_only=True)
    with open_store("memory://filler", geometry=geometry, config=config, backend=backend) as store:
        fill(store, blocks, seed=0)
