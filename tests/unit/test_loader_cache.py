"""Loading with a block cache: from memory what is there, from the backend the rest, and never what is not there."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest
import xxhash
from store_kit import GEOMETRY, NS, SLOT, Hands, check_space, config, die, open_test_store, payloads, prompt, record

from duokv.connectors.fs_faulty import Corrupt, Fail, FaultyBackend, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.answers import PrefixHit
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.events import BlockQuarantined, BlocksLoaded
from duokv.kvstore.origin import Origin

PATH = (0,) * 8
SHORT = PATH[:3]


class World:
    """A store with a cache on a backend whose reads are counted."""

    def __init__(self, folder: Path, settings: StoreConfig) -> None:
        self.folder = folder
        self.settings = settings
        self.hands = Hands()
        self.backend = FaultyBackend(MemoryBackend())
        self.store = open_test_store(self.backend, folder, self.hands, settings)
        self.events = record(self.store)

    def reopen(self) -> None:
        """With an empty cache."""
        self.store.close()
        self.hands.now += 1.0
        self.store = open_test_store(self.backend, self.folder, self.hands, self.settings)
        self.events = record(self.store)

    def commit(
        self, path: tuple[int, ...] = PATH, *, serial: int = 0, first: int = 0, origin: Origin = Origin.EXACT
    ) -> int:
        self.hands.now += 1.0
        blocks = payloads(path, first, serial)
        return self.store.commit(NS, prompt(path), blocks, first_block=first, traffic="keep", origin=origin).new

    def look(self, path: tuple[int, ...] = PATH, require: Origin | None = None) -> PrefixHit:
        self.hands.now += 1.0
        return self.store.lookup(NS, prompt(path), "keep", require=require)

    def load(self, hit: PrefixHit | None = None, *, deadline_s: float | None = None) -> list[bytes]:
        """What a load gives, of a new lookup if none is named."""
        hit = hit or self.look()
        with self.store.buffers(len(hit.keys)) as lent:
            lent.rows[:] = 0xEE
            loaded = self.store.load(hit, lent.rows, deadline_s=deadline_s)
            return [row[: GEOMETRY.payload_bytes].tobytes() for row in lent.rows[:loaded]]

    @property
    def reads(self) -> int:
        return sum(operation.kind == "read" for operation in self.backend.log)

    def last(self) -> BlocksLoaded:
        return next(event for event in reversed(self.events) if isinstance(event, BlocksLoaded))

    def drive_out(self) -> None:
        """Fill the cache with something else, used."""
        for number in range(100, 120):
            self.commit((number,) * 4)
            self.load(self.look((number,) * 4))

    def take_out(self, keep: int) -> None:
        """Take the prompt's blocks from `keep` on out of the index, as reclaim would."""
        found = self.look()._found
        for (hop, _), span in zip(found.held, found.spans(), strict=True):
            self.store.blocks.take_out(int.from_bytes(hop.place, "big"), max(0, keep - span.block), "capacity")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, config(cache_bytes=16 * SLOT))
    yield world
    world.backend.heal()
    world.store.close()


# What it saves


def test_a_second_load_reads_nothing_and_hashes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.commit()
    world.reopen()
    hashed = 0
    plain = xxhash.xxh3_128_digest

    def counted(content: memoryview) -> bytes:
        nonlocal hashed
        hashed += 1
        return plain(content)

    monkeypatch.setattr(xxhash, "xxh3_128_digest", counted)
    before = world.reads
    assert world.load() == payloads(PATH)
    assert (world.reads > before, hashed) == (True, 8)
    assert world.last() == BlocksLoaded(8, 8, 8 * SLOT, None, 0, 0)
    before = world.reads
    assert world.load() == payloads(PATH)
    assert (world.reads, hashed) == (before, 8)
    assert world.last() == BlocksLoaded(8, 8, 0, None, 8, 8 * SLOT)
    stats = world.store.stats()
    assert (stats.counts["blocks_cached"], stats.counts["bytes_cached"]) == (8, 8 * SLOT)
    assert (stats.counts["bytes_read"], stats.counts["blocks_loaded"]) == (8 * SLOT, 16)
    assert (stats.cache.blocks, stats.cache.used_bytes, stats.cache.capacity_bytes) == (8, 8 * SLOT, 16 * SLOT)


def test_what_was_committed_is_warm(world: World) -> None:
    world.commit(SHORT)
    world.commit(first=3)
    assert world.load() == payloads(PATH)
    assert world.reads == 0


def test_a_commit_of_many_is_warm_as_a_whole(tmp_path: Path) -> None:
    """More than are written at once."""
    world = World(tmp_path, config(cache_bytes=128 * SLOT, segment_bytes=50 * SLOT))
    path = (4,) * 99
    assert world.commit(path) == 99
    assert world.load(world.look(path)) == payloads(path)
    assert world.reads == 0
    world.store.close()


@pytest.mark.parametrize("shape", [(8, GEOMETRY.payload_bytes), (8, 5000), (3, SLOT), (99, GEOMETRY.payload_bytes)])
def test_rows_of_any_layout_get_the_copies(world: World, shape: tuple[int, int]) -> None:
    world.commit()
    out = np.zeros(shape, np.uint8)
    loaded = world.store.load(world.look(), out)
    assert loaded == min(8, len(out))
    assert [row[: GEOMETRY.payload_bytes].tobytes() for row in out[:loaded]] == payloads(PATH)[:loaded]
    assert world.reads == 0


def test_a_part_of_a_hit_can_be_loaded(world: World) -> None:
    world.commit()
    with world.store.buffers(3) as lent:
        assert world.store.load(world.look(), lent.rows, first_block=4) == 3
        assert [row[: GEOMETRY.payload_bytes].tobytes() for row in lent.rows] == payloads(PATH)[4:7]
    assert world.reads == 0


def test_only_what_is_missing_is_read_and_the_lead_grows_in_order(world: World) -> None:
    world.commit()
    world.reopen()
    with world.store.buffers(3) as lent:
        for first in (1, 5):
            assert world.store.load(world.look(), lent.rows[:2], first_block=first) == 2
    with world.store.buffers(8) as lent:
        leads = []
        for lead in world.store.load_iter(world.look(), lent.rows):
            assert [row[: GEOMETRY.payload_bytes].tobytes() for row in lent.rows[:lead]] == payloads(PATH)[:lead]
            leads.append(lead)
    assert leads == sorted(set(leads))
    assert leads[-1] == 8
    assert world.last() == BlocksLoaded(8, 8, 4 * SLOT, None, 4, 4 * SLOT)


# What it must not do


def test_a_quarantined_block_is_never_seen_again(world: World) -> None:
    """Not by new lookups, and what is stored in its stead is what they get, whatever the old copies hold."""
    world.commit()
    world.drive_out()
    assert world.store.stats().cache.blocks == 16
    old = world.look()
    world.backend.inject(Corrupt(bit=8 * 17))
    assert world.load(old) == []
    assert world.load(old) == [], "the bytes that did not verify were not kept either"
    assert [event.slot for event in world.events if isinstance(event, BlockQuarantined)] == [0]
    assert world.look().tokens == 0
    assert world.commit(serial=1) == 3
    assert world.load()[:3] == payloads(SHORT, serial=1)


def test_a_copy_outlives_its_block_only_for_hits_from_before(world: World) -> None:
    world.commit()
    old = world.look()
    world.take_out(keep=3)
    world.store.cache._slab[:, : GEOMETRY.payload_bytes] ^= 0xFF
    assert world.look().tokens == 3 * 128
    world.commit(serial=1)
    # The new blocks lie elsewhere: copies of the old ones, right or not, are no copies of theirs.
    assert world.load()[3:] == payloads(PATH, 3, serial=1)
    world.store.cache._slab[:, : GEOMETRY.payload_bytes] ^= 0xFF
    reads = world.reads
    assert world.load(old) == payloads(PATH)
    assert world.reads == reads


def test_copies_before_and_after_blocks_that_moved_are_all_counted(world: World) -> None:
    world.commit()
    world.drive_out()
    world.load(world.look(SHORT))
    old = world.look()
    world.take_out(keep=3)
    world.commit(serial=1, first=3)
    assert world.load(old) == payloads(SHORT) + payloads(PATH, 3, serial=1)
    assert world.last() == BlocksLoaded(8, 8, 0, None, 8, 8 * SLOT)


def test_expired_blocks_are_not_served(world: World) -> None:
    world.store.commit(NS, prompt(SHORT), payloads(SHORT), traffic="brief")
    world.hands.now += 100.0
    assert world.store.lookup(NS, prompt(SHORT), "brief").tokens == 0
    world.store.maintain()
    assert world.look(SHORT).tokens == 0


@pytest.mark.parametrize("require", [None, Origin.EXACT])
def test_exact_blocks_take_the_place_of_approximate_copies(world: World, require: Origin | None) -> None:
    world.commit(origin=Origin.APPROX)
    approx = world.look()
    assert world.load(approx) == payloads(PATH)
    assert world.look(require=Origin.EXACT).tokens == 0
    assert world.commit(SHORT, serial=1) == 3
    exact = world.look(require=require)
    assert exact.exact_tokens == 3 * 128
    assert world.load(exact) == payloads(SHORT, serial=1) + (payloads(PATH, 3) if require is None else [])
    assert world.load(approx)[:3] in (payloads(SHORT), payloads(SHORT, serial=1))


def test_a_hit_on_exact_blocks_never_gets_approximate_copies(world: World) -> None:
    """Those that came in their place are in the cache, the exact ones are not."""
    world.commit()
    exact = world.look(require=Origin.EXACT)
    world.drive_out()
    world.take_out(keep=3)
    world.commit(serial=1, first=3, origin=Origin.APPROX)
    assert world.look().tokens == 8 * 128
    assert world.load(exact) == payloads(SHORT)
    assert world.load()[3:] == payloads(PATH, 3, serial=1)


def test_slots_that_are_written_twice_before_they_are_published(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that fails between data and index leaves its slots to the next one: here to exact blocks."""
    two = PATH[:2]
    world.commit((5,))
    blocks = world.store.blocks
    write_pieces = blocks._write_pieces

    def and_then_the_index_is_full(*given: object) -> bool:
        monkeypatch.setattr(blocks._index, "write", full)
        return write_pieces(*given)  # type: ignore[arg-type]

    def full() -> None:
        monkeypatch.undo()
        raise lmdb.MapFullError("full")

    monkeypatch.setattr(blocks, "_write_pieces", and_then_the_index_is_full)
    assert world.commit(two, serial=1, origin=Origin.APPROX) == 0
    assert world.commit(two, serial=2) == 2
    *_, first, again = (str(operation) for operation in world.backend.log if operation.kind == "write")
    assert first == again, "else this tests nothing"
    assert world.load(world.look(two, Origin.EXACT)) == payloads(two, serial=2)


@pytest.mark.parametrize("kind", ["write", "create", "reserve"])
def test_a_commit_that_fails_leaves_nothing_to_serve_and_loses_no_row(world: World, kind: str) -> None:
    for _ in range(5):
        world.backend.inject(Fail(kind=kind))  # type: ignore[arg-type]
        world.commit(serial=1)
        world.backend.heal()
        world.take_out(keep=0)
    world.commit(serial=2)
    assert world.load() == payloads(PATH, serial=2)
    world.drive_out()
    assert world.store.stats().cache.blocks == 16
    check_space(world.store, world.backend)


def test_an_index_that_names_another_block_is_found_out_all_the_same(world: World) -> None:
    """As with a damaged index: the place is held, but as another block."""
    world.commit()
    world.commit((9,))
    hit = world.look()
    stranger = world.look((9,))
    object.__setattr__(stranger, "_found", hit._found)
    assert world.load(stranger) == []
    assert [event.reason for event in world.events if isinstance(event, BlockQuarantined)] == ["another block"]


# Deadlines and a backend in trouble


def test_a_deadline_that_has_passed_is_a_miss_for_copies_too(world: World) -> None:
    world.commit()
    assert world.load(deadline_s=0.0) == []
    assert world.last() == BlocksLoaded(0, 8, 0, "deadline", 0, 0)
    assert world.load() == payloads(PATH)


def test_copies_do_not_wait_for_a_backend_that_hangs(world: World) -> None:
    world.commit((9,) * 5)
    world.commit()
    world.reopen()
    with world.store.buffers(3) as lent:
        assert world.store.load(world.look(), lent.rows) == 3
    gate = threading.Event()
    world.backend.inject(Stall(kind="read", until=gate, lasting=True))
    try:
        assert world.load(world.look((9,) * 5), deadline_s=0.05) == []
        for _ in range(3):
            assert world.load(deadline_s=0.05) == payloads(SHORT)
            assert world.last() == BlocksLoaded(3, 8, 0, "deadline", 3, 3 * SLOT)
        warm = world.look(SHORT)
        with world.store.buffers(3) as lent:
            assert world.store.load(warm, lent.rows, deadline_s=60.0) == 3
    finally:
        gate.set()


def test_a_load_that_is_given_up_holds_no_row(world: World) -> None:
    world.commit()
    with world.store.buffers(8) as lent:
        steps = world.store.load_iter(world.look(), lent.rows)
        assert isinstance(steps, Generator)
        assert next(steps) > 0
        steps.close()
    world.drive_out()
    assert (world.store.cache._policy._pins == 0).all()
    assert world.load() == payloads(PATH)


def test_rows_read_too_late_are_kept_for_the_next_load(world: World) -> None:
    world.commit()
    world.reopen()
    gate = threading.Event()
    world.backend.inject(Stall(kind="read", until=gate))
    assert world.load(deadline_s=0.05) == []
    gate.set()
    assert world.load() == payloads(PATH)
    world.backend.inject(Fail(kind="read", lasting=True))
    assert world.load() == payloads(PATH)


def test_without_a_cache_every_load_reads(tmp_path: Path) -> None:
    world = World(tmp_path, config())
    world.commit()
    for count in (1, 2):
        assert world.load() == payloads(PATH)
        assert world.last() == BlocksLoaded(8, 8, 8 * SLOT, None, 0, 0)
        assert world.reads >= count
    die(world.store)
