"""Damaged bytes, on the device or on the way from it: a miss and an event, never wrong bytes."""

from __future__ import annotations

import dataclasses
import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    GEOMETRY,
    NS,
    SLOT,
    Hands,
    census,
    check_space,
    config,
    die,
    open_test_store,
    payloads,
    prompt,
    record,
)

from duokv.connectors.fs_faulty import Corrupt, Fail, Fault, FaultyBackend, Misdirect, Shorten
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.backend import ReadOp
from duokv.kvstore.damage import damage_noted
from duokv.kvstore.events import BlockQuarantined
from duokv.kvstore.geometry import TRAILER_BYTES, CacheGeometry
from duokv.kvstore.keys import chain_keys
from duokv.kvstore.opening import open_store
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore

LONG = (0,) * 6
SIDE = (0, 0, 1)
OTHER = (2, 2)
PATHS = (LONG, SIDE, OTHER)
TRAILER = SLOT - TRAILER_BYTES
SLOT_PLACES = {
    "payload, first": 0,
    "payload, last": GEOMETRY.payload_bytes - 1,
    "padding, first": GEOMETRY.payload_bytes,
    "padding, last": TRAILER - 1,
    "magic": TRAILER,
    "format": TRAILER + 4,
    "origin": TRAILER + 5,
    "class": TRAILER + 6,
    "payload length": TRAILER + 8,
    "stored at": TRAILER + 12,
    "chain position": TRAILER + 16,
    "geometry": TRAILER + 20,
    "key": TRAILER + 24 + 31,
    "parent": TRAILER + 56,
    "namespace": TRAILER + 88,
    "first token": TRAILER + 112,
    "last token": TRAILER + 112 + 511,
    "checksum": TRAILER + 624,
    "checksum, last": SLOT - 1,
}
FOOTER_TAIL = {
    "magic": -64, "format": -56, "geometry": -52, "body length": -48, "used": -44, "checksum": -40, "zeros": -1,
}  # fmt: skip


class World:
    """A closed store of three segments and a branch, whose files can be damaged."""

    def __init__(self, folder: Path, *, can_punch: bool = True) -> None:
        self.folder = folder
        self.hands = Hands()
        self.disk = MemoryBackend(can_punch=can_punch)
        self.written: dict[bytes, bytes] = {}
        store = open_test_store(self.disk, folder / "index", self.hands)
        for path, first in ((LONG, 0), (SIDE, 2), (OTHER, 0)):
            self.hands.now += 1.0
            self.commit(store, path, first)
        store.close()
        self.places = self._places()

    def commit(self, store: KVStore, path: tuple[int, ...], first: int = 0) -> int:
        blocks = payloads(path, first)
        self.written |= zip(chain_keys(NS, prompt(path))[first:], blocks, strict=True)
        return store.commit(NS, prompt(path), blocks, first_block=first, traffic="keep").new

    def _places(self) -> dict[bytes, tuple[str, int]]:
        store = open_test_store(self.disk, self.folder / "index", self.hands)
        found = census(store)
        names = {number: info.name(number) for number, info in found.segments.items()}
        by_prefix = {prefix: (names[held.segment], held.slot) for prefix, held in found.blocks.items()}
        store.close()
        return {key: by_prefix[key[:16]] for key in self.written}

    def open(self, *faults: Fault, rebuild: bool = False) -> KVStore:
        """A store on a copy of the disk and the index; the faults begin once it is open."""
        self.copy = self.disk.crash_clone(1.0, random.Random(0))
        self.hands.now += 1.0
        index = self.folder / f"index {self.hands.now}"
        if not rebuild:
            shutil.copytree(self.folder / "index", index)
        self.faulty = FaultyBackend(self.copy)
        store = open_test_store(self.faulty, index, self.hands)
        self.faulty.inject(*faults)
        return store

    def flip(self, name: str, offset: int, mask: int = 0x10) -> None:
        """Damage one byte on the device; once more mends it."""
        byte = bytearray(1)
        if offset < 0:
            offset += next(file.size for file in self.disk.list(name))
        assert self.disk.read_many([ReadOp(name, offset, (memoryview(byte),))], deadline_s=60) == [1]
        self.disk.resume(name).write(offset, [memoryview(bytes([byte[0] ^ mask]))])

    def load(self, store: KVStore, path: tuple[int, ...]) -> int:
        """How many blocks of a prompt are read back; all of them right."""
        self.hands.now += 1.0
        hit = store.lookup(NS, prompt(path), "keep")
        rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
        loaded = store.load(hit, rows)
        for key, row in zip(hit.keys[:loaded], rows, strict=False):
            assert row.tobytes() == self.written[key]
        return loaded

    def load_all(self, store: KVStore) -> list[int]:
        return [self.load(store, path) for path in PATHS]

    def finish(self, store: KVStore, *, meddled: bool = False) -> None:
        """Whatever was lost can be stored anew, and then all is there. meddled: sizes of files were changed."""
        for path in PATHS:
            self.commit(store, path)
        assert self.load_all(store) == [6, 3, 2]
        if meddled:
            census(store)
        else:
            check_space(store, self.copy)
        die(store)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(params=[False, True], ids=["as it was", "rebuilt"])
def rebuild(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("block", [0, 1, 2, 5])
@pytest.mark.parametrize("offset", SLOT_PLACES.values(), ids=SLOT_PLACES)
def test_a_damaged_byte_costs_its_block(world: World, offset: int, block: int) -> None:
    """Its own block and those behind it, whose extent is cut there; nothing else."""
    key = chain_keys(NS, prompt(LONG))[block]
    name, slot = world.places[key]
    world.flip(name, slot * SLOT + offset)
    store = world.open()
    events = record(store)
    assert world.load_all(store) == [block, block if block < 2 else 3, 2]
    quarantined = [event for event in events if isinstance(event, BlockQuarantined)]
    assert [(event.key, event.segment, event.slot) for event in quarantined] == [(key, name, slot)]
    assert store.stats().counts["blocks_quarantined"] == 1
    with store._index.read() as txn:
        assert [(damage.key, damage.slot) for damage in damage_noted(txn)] == [(key.hex(), slot)]
    assert len(store.lookup(NS, prompt(LONG), "keep").keys) == block
    world.finish(store)


@pytest.mark.parametrize("block", range(6))
@pytest.mark.parametrize("offset", SLOT_PLACES.values(), ids=SLOT_PLACES)
def test_a_rebuild_is_as_careful(world: World, offset: int, block: int) -> None:
    name, slot = world.places[chain_keys(NS, prompt(LONG))[block]]
    world.flip(name, slot * SLOT + offset)
    store = world.open(rebuild=True)
    assert world.load_all(store) == [block, block if block < 2 else 3, 2]
    world.finish(store)


@pytest.mark.parametrize("offset", FOOTER_TAIL.values(), ids=FOOTER_TAIL)
def test_a_damaged_footer_costs_nothing(world: World, offset: int, rebuild: bool) -> None:
    for name in {name for name, _ in world.places.values()}:
        world.flip(name, offset)
    store = world.open(rebuild=rebuild)
    assert world.load_all(store) == [6, 3, 2]
    world.finish(store)


def sweep(world: World, name: str, offsets: range, *, rebuild: bool) -> None:
    for offset in offsets:
        world.flip(name, offset, 0xFF)
        store = world.open(rebuild=rebuild)
        lost = 8 - len({key for key in world.written if key[:16] in census(store).blocks})
        assert lost <= 6
        world.load_all(store)
        world.finish(store)
        world.flip(name, offset, 0xFF)


def test_any_byte_of_a_segment(world: World, rebuild: bool) -> None:
    name = world.places[chain_keys(NS, prompt(LONG))[1]][0]
    (file,) = world.disk.list(name)
    sweep(world, name, range(7, file.size, 331), rebuild=rebuild)


@pytest.mark.torture
def test_every_few_bytes_of_a_segment(world: World, rebuild: bool) -> None:
    name = world.places[chain_keys(NS, prompt(LONG))[1]][0]
    (file,) = world.disk.list(name)
    sweep(world, name, range(0, file.size, 13), rebuild=rebuild)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(
    "fault",
    [
        Corrupt(bit=8 * 17),
        Corrupt(bit=8 * (SLOT + TRAILER + 30)),
        Shorten(nbytes=0),
        Shorten(nbytes=SLOT),
        Shorten(nbytes=SLOT + 1),
        Misdirect(offset=SLOT),
        Misdirect(offset=0),
        Misdirect(name="duokv.json", offset=0),
    ],
    ids=str,
)
def test_a_read_gone_wrong_is_a_miss(world: World, fault: Fault, nth: int) -> None:
    """The device is whole, so recommitting is all it takes; how much is lost depends on the read that was hit."""
    store = world.open(dataclasses.replace(fault, nth=nth))
    world.load_all(store)
    assert world.faulty.fired == 1
    assert store.stats().counts.get("blocks_quarantined", 0) <= 1
    world.finish(store)


@pytest.mark.parametrize("error", [errno.EIO, errno.ETIMEDOUT, errno.EACCES, errno.ENOMEM, errno.EINVAL])
def test_a_read_that_fails_costs_nothing_for_good(world: World, error: int) -> None:
    store = world.open(Fail(kind="read", errno=error))
    assert world.load(store, LONG) < 6
    assert "blocks_quarantined" not in store.stats().counts
    assert world.load_all(store) == [6, 3, 2]
    world.finish(store)


def test_a_file_that_is_gone_is_given_up(world: World) -> None:
    name = world.places[chain_keys(NS, prompt(LONG))[0]][0]
    store = world.open()
    world.copy.remove(name)
    world.load_all(store)
    assert name not in {info.name(number) for number, info in census(store).segments.items()}
    assert "blocks_quarantined" not in store.stats().counts
    world.finish(store)


@pytest.mark.parametrize("size", [0, 1, SLOT, SLOT + 1, 2 * SLOT - 1, 2 * SLOT, 3 * SLOT, 3 * SLOT + 4095])
def test_a_truncated_segment(world: World, size: int, rebuild: bool) -> None:
    name = world.places[chain_keys(NS, prompt(LONG))[1]][0]
    world.disk.resume(name).seal(size)
    store = world.open(rebuild=rebuild)
    world.load_all(store)
    world.finish(store, meddled=not rebuild)


def foreign_files(folder: Path) -> Iterator[tuple[str, MemoryBackend]]:
    """Stores whose segments may be misplaced into another one."""
    for label, geometry, path in (
        ("another geometry", CacheGeometry.opaque("other", payload_bytes=1001, swa_bytes=4096), LONG),
        ("another store", GEOMETRY, (5,) * 6),
    ):
        disk = MemoryBackend()
        store = open_store(
            "memory://x", geometry=geometry, backend=disk, clock=Hands().clock,
            config=config(index_path=str(folder / label)),
        )  # fmt: skip
        blocks = [bytes(geometry.payload_bytes)] * len(path)
        store.commit(NS, prompt(path), blocks, traffic="keep", origin=Origin.APPROX)
        store.close()
        yield label, disk


def test_segments_that_are_not_ours(world: World, tmp_path: Path, rebuild: bool) -> None:
    """Whole segments of other stores, under names that are ours or could be, and files that are no segments at all."""
    for label, disk in foreign_files(tmp_path):
        for file in disk.list("seg/"):
            data = disk.read_file(file.name)
            assert data is not None
            for block in (None, 1):
                broken = World(tmp_path / f"{label} {file.name[-8:]} {block}")
                stranger = f"seg/stranger/{99:08x}.seg"
                name = stranger if block is None else broken.places[chain_keys(NS, prompt(LONG))[block]][0]
                broken.disk.write_file(name, data)
                store = broken.open(rebuild=rebuild)
                broken.load_all(store)
                assert broken.load(store, (5,) * 6) == 0
                broken.finish(store, meddled=not rebuild)
    world.disk.write_file("seg/stranger/0000002a.seg", b"no segment at all")
    world.disk.write_file("seg/notes.txt", b"nor is this")
    store = world.open(rebuild=rebuild)
    assert world.load_all(store) == [6, 3, 2]
    die(store)
