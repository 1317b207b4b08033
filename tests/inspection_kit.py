"""What the tests of inspection share: a store in a folder, a clock to set, and ways to look at it and to damage it."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from duokv.kvstore.census import read_stat
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.explain import BlockView, explain, find_prefix
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.inspection import StoreView, inspect_store, operate_store
from duokv.kvstore.keys import Namespace, chain_keys
from duokv.kvstore.opening import open_store
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import ClassRule, Policy
from duokv.kvstore.store import KVStore
from duokv.kvstore.verification import VerifyReport, verify

NS = Namespace("model", "weights", "tokenizer", "format")
GEOMETRY = CacheGeometry.opaque("test", payload_bytes=3000)
SLOT = GEOMETRY.slot_bytes
POLICY = Policy(
    {"brief": ClassRule(10.0), "long": ClassRule(100.0), "still": ClassRule(50.0, "fixed"), "keep": ClassRule(None)},
    default="brief",
).numbered()


@dataclass
class Place:
    """A store in a folder, and a clock whose hands a test moves."""

    folder: Path
    now: float = 1_700_000_000.0
    config: StoreConfig = field(
        default_factory=lambda: StoreConfig(
            swa_bytes=0, maintenance_interval_s=0.0, segment_bytes=8 * SLOT, preallocate_bytes=SLOT, use_flush_s=0.0,
            seed_policy=POLICY, direct="off", fsync="none",
        )
    )  # fmt: skip

    @property
    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now, monotonic=lambda: self.now)

    def engine(self) -> KVStore:
        return open_store(str(self.folder), geometry=GEOMETRY, config=self.config, clock=self.clock)

    @contextmanager
    def inspect(self) -> Iterator[StoreView]:
        with inspect_store(str(self.folder), config=self.config, clock=self.clock) as view:
            yield view

    @contextmanager
    def operate(self) -> Iterator[StoreView]:
        with operate_store(str(self.folder), config=self.config, clock=self.clock) as view:
            yield view

    def store(self, *commits: tuple[Sequence[int], str], origin: Origin = Origin.EXACT) -> None:
        """One commit per (path, class)."""
        with self.engine() as store:
            for path, traffic in commits:
                data = [payload(path[: i + 1]) for i in range(len(path))]
                store.commit(NS, prompt(path), data, traffic=traffic, origin=origin)

    def tree(self) -> dict[str, str]:
        """Every file of the store with a digest of its bytes."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Fixtures have a second name, since a test's argument would redefine an import of the same name.
@pytest.fixture(name="place")
def place_fixture(tmp_path: Path) -> Place:
    return Place(tmp_path / "a store #1")


def prompt(path: Sequence[int], tail: int = 1) -> list[int]:
    """A prompt of one block per number, each filled with it, and `tail` tokens more. Equal paths share a prefix."""
    return [number for number in path for _ in range(128)] + [7] * tail


def payload(path: Sequence[int]) -> bytes:
    """The bytes of the last block of `path`."""
    return hashlib.shake_128(repr(tuple(path)).encode()).digest(GEOMETRY.payload_bytes)


def key_of(path: Sequence[int]) -> str:
    """The key of the last block of `path` in hex."""
    return chain_keys(NS, prompt(path))[-1].hex()


def segment_files(place: Place) -> list[Path]:
    return sorted(place.folder.glob("seg/*/*.seg"))


def block_of(place: Place, path: Sequence[int]) -> BlockView:
    """The last block of `path` as `explain` shows it."""
    with place.inspect() as view:
        found = explain(view, key_of(path))
    assert isinstance(found, BlockView)
    return found


def held(place: Place, *paths: Sequence[int]) -> list[int]:
    """How many leading blocks of each path a lookup finds, without using them."""
    with place.inspect() as view:
        return [find_prefix(view, NS, prompt(path)).hit_blocks for path in paths]


@contextmanager
def writer_alive(place: Place, name: str) -> Iterator[None]:
    """Hold the lock by which a writer of this name counts as running."""
    fd = os.open(place.folder / "locks" / f"writer-{name}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


def flip(place: Place, block: BlockView) -> None:
    """Change one payload bit of a block."""
    with (place.folder / block.file).open("r+b") as file:
        file.seek(block.file_offset + 10)
        byte = file.read(1)[0]
        file.seek(block.file_offset + 10)
        file.write(bytes([byte ^ 1]))


def block_count(place: Place) -> int:
    """How many blocks the index counts, alive or not."""
    with place.inspect() as view:
        return read_stat(view).blocks


def check(place: Place, limit: int | None = None) -> VerifyReport:
    """What `verify` finds."""
    with place.inspect() as view:
        return verify(view, limit=limit)
