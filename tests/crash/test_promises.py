"""What a durable commit promised outlives compaction, rebuilds, interrupts and failed syncs."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import lmdb
import numpy as np
import pytest
from store_kit import GEOMETRY, NS, SLOT, Hands, config, die, open_test_store, payload, payloads, prompt, record

from duokv.connectors.fs_faulty import Fail, FaultyBackend
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.answers import Commit
from duokv.kvstore.backend import Backend
from duokv.kvstore.errors import StoreError
from duokv.kvstore.events import Degraded
from duokv.kvstore.index import Index
from duokv.kvstore.indexfile import BootMark
from duokv.kvstore.keys import chain_keys
from duokv.kvstore.origin import Origin
from duokv.kvstore.segment import SegmentWriter
from duokv.kvstore.store import KVStore

Path_ = tuple[int, ...]


class World:
    """A store, and what is left of it after power loss."""

    def __init__(self, folder: Path, *, can_punch: bool = True, **settings: object) -> None:
        self.folder = folder
        self.hands = Hands()
        self.disk = MemoryBackend(can_punch=can_punch)
        self.faulty = FaultyBackend(self.disk)
        self.settings = config(**settings)
        self.store = self.open(self.faulty)
        self.events = record(self.store)
        self.losses = 0

    def open(self, backend: Backend, boot: str = "boot") -> KVStore:
        return open_test_store(backend, self.folder / boot, self.hands, self.settings, boot_id=boot)

    def commit(self, path: Path_, origin: Origin = Origin.EXACT, first: int = 0) -> Commit:
        self.hands.now += 1.0
        blocks = payloads(path, first, int(origin))
        return self.store.commit(NS, prompt(path), blocks, first_block=first, traffic="keep", origin=origin)

    def after_power_loss(self, unsynced: float = 0.0) -> KVStore:
        """Another boot's store, without its index, over what was durable and this share of what was not."""
        self.losses += 1
        return self.open(self.disk.crash_clone(unsynced, random.Random(self.losses)), f"boot {self.losses}")


def read(store: KVStore, path: Path_) -> tuple[int, int]:
    """(blocks found, blocks read back); each as some commit wrote it."""
    hit = store.lookup(NS, prompt(path), "keep")
    rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
    loaded = store.load(hit, rows)
    for i in range(loaded):
        assert rows[i].tobytes() in {payload(path[: i + 1], int(origin)) for origin in Origin}
    return len(hit.keys), loaded


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, segment_bytes=5 * SLOT)
    yield world
    die(world.store)


def test_a_file_goes_once_the_copies_of_its_blocks_are_durable(tmp_path: Path) -> None:
    world = World(tmp_path, can_punch=False, segment_bytes=10 * SLOT, capacity=64 * 12 * SLOT)
    kept = [(1000 + i, 1, 2) for i in range(120)]
    for i, path in enumerate(kept):
        world.commit(path).wait_durable()
        world.store.pin(chain_keys(NS, prompt(path)), ttl_s=1e6)
        world.commit((5000 + i, 1, 2))
        world.commit((15000 + i, 1))
    world.store.flush()
    before = {file.name for file in world.disk.list("seg/")}
    for i in range(60):
        world.commit((9000 + i, 1, 2, 3))
        if before - {file.name for file in world.disk.list("seg/")}:
            break
    held = [path for path in kept if read(world.store, path) == (3, 3)]
    assert len(held) > 50
    after = world.after_power_loss()
    assert [path for path in held if read(after, path) != (3, 3)] == []
    die(after)
    die(world.store)


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("first", [Origin.EXACT, Origin.APPROX])
def test_what_follows_a_fork_outlives_a_rebuild(tmp_path: Path, first: Origin, shared: int) -> None:
    world = World(tmp_path, segment_bytes=50 * SLOT)
    trunk, branch = (0, 1, 2, 3), (*(0, 1, 2, 3)[:shared], 9, 8)
    world.commit(trunk, first).wait_durable()
    world.commit(branch).wait_durable()
    held = [read(world.store, path) for path in (trunk, branch)]
    after = world.after_power_loss()
    assert [read(after, path) for path in (trunk, branch)] == held == [(4, 4), (shared + 2, shared + 2)]
    die(after)
    die(world.store)


@pytest.mark.parametrize("cut", [None, 1])
def test_blocks_between_one_that_was_replaced_and_one_that_was_cut_outlive_a_rebuild(
    world: World, cut: int | None
) -> None:
    world.commit((1, 2, 3), Origin.APPROX).wait_durable()
    world.commit((1,)).wait_durable()
    world.commit((7, 8, 9)).wait_durable()
    if cut is not None:
        with world.store._index.read() as txn:
            place = next(place for place, life in txn.lives() if (life.chain_pos, life.n) == (1, 2))
        world.store.blocks.take_out(place, cut, "capacity")
    world.store.flush()
    held = read(world.store, (1, 2, 3))
    assert held[0] == (3 if cut is None else 2)
    for unsynced in (0.0, 1.0):
        after = world.after_power_loss(unsynced)
        found, loaded = read(after, (1, 2, 3))
        assert found == loaded >= held[0]
        die(after)


def test_a_rebuild_promises_no_block_that_was_replaced_and_cut(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.commit((1, 2, 3), Origin.APPROX).wait_durable()
    world.commit((1, 2)).wait_durable()
    world.store.flush()
    with world.store._index.read() as txn:
        place = next(place for place, life in txn.lives() if life.n == 2)
    world.store.blocks.take_out(place, 1, "operator")
    world.store.flush()
    after = world.after_power_loss(1.0)
    assert read(after, (1, 2, 3)) == (1, 1)
    die(after)
    die(world.store)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_read_that_fails_during_a_rebuild_destroys_nothing(world: World, lasting: bool, sealed: bool) -> None:
    world.commit((1, 2, 3, 4)).wait_durable()
    world.commit((5, 6, 7)).wait_durable()
    if sealed:
        world.store.close()
    for nth in range(1, 50):
        clone = world.disk.crash_clone(0.0, random.Random(1))
        faulty = FaultyBackend(clone, [Fail(kind="read", nth=nth, lasting=lasting)])
        with suppress(StoreError):
            die(world.open(faulty, f"failing {nth}"))
        faulty.heal()
        fired = faulty.fired
        for boot in (f"failing {nth}", f"again {nth}"):
            again = world.open(clone, boot)
            assert [read(again, path) for path in ((1, 2, 3, 4), (5, 6, 7))] == [(4, 4), (3, 3)], nth
            die(again)
        if not fired:
            break
    assert nth > 3


def test_a_device_that_answers_nothing_is_no_reason_to_clean_up(world: World) -> None:
    world.commit((1, 2, 3)).wait_durable()
    world.losses += 1
    clone = world.disk.crash_clone(0.0, random.Random(1))
    files = [file.name for file in clone.list("seg/")]
    with pytest.raises(StoreError, match="cannot be read while the index is built anew; open the store when"):
        world.open(FaultyBackend(clone, [Fail(kind="read", lasting=True)]), "dark")
    assert [file.name for file in clone.list("seg/")] == files
    again = world.open(clone, "light")
    assert read(again, (1, 2, 3)) == (3, 3)
    die(again)


def test_an_interrupt_as_a_commit_returns_gives_no_slot_out_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = lmdb.Transaction.__exit__
    left = [True]

    class Interrupted:
        """A write transaction after whose commit somebody presses Ctrl-C."""

        def __init__(self, txn: lmdb.Transaction) -> None:
            self._txn = txn

        def __getattr__(self, name: str) -> object:
            return getattr(self._txn, name)

        def __enter__(self) -> object:
            return self._txn.__enter__()

        def __exit__(self, *exits: object) -> None:
            plain(self._txn, *exits)
            if left and left.pop():
                raise KeyboardInterrupt

    world.commit((4,))
    write = Index.write

    def interrupted(self: Index) -> object:
        txn = write(self)
        if left:
            txn._txn = Interrupted(txn._txn)  # type: ignore[assignment]
        return txn

    monkeypatch.setattr(Index, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.commit((1, 2, 3))
    monkeypatch.setattr(Index, "write", write)
    world.commit((1, 2, 3)).wait_durable()
    world.commit((7, 8, 9)).wait_durable()
    assert [read(world.store, path) for path in ((1, 2, 3), (7, 8, 9))] == [(3, 3), (3, 3)]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_segment_whose_sealing_was_interrupted_is_synced_by_the_next_flush(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    plain = SegmentWriter.seal

    def seal(self: SegmentWriter, *, durable: bool) -> int:
        monkeypatch.setattr(SegmentWriter, "seal", plain)
        raise error

    monkeypatch.setattr(SegmentWriter, "seal", seal)
    world.commit((1, 2, 3, 4, 5))
    with pytest.raises(error):
        world.commit((6,))
    world.commit((1, 2, 3, 4, 5)).wait_durable()
    after = world.after_power_loss()
    assert read(after, (1, 2, 3, 4, 5)) == (5, 5)
    die(after)


def test_a_sync_after_one_that_failed_proves_nothing(world: World) -> None:
    world.commit((1, 2))
    (writer,) = world.store.blocks.space.writers()
    world.faulty.inject(Fail(kind="sync"))
    for _ in range(2):
        with pytest.raises(OSError) as failed:  # noqa: PT011  by its number
            writer.sync()
        assert failed.value.errno == errno.EIO


def test_a_full_index_keeps_no_block_from_the_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    done = world.commit((1, 2, 3))

    def full() -> None:
        raise lmdb.MapFullError("full")

    monkeypatch.setattr(world.store.blocks, "flush_uses", full)
    done.wait_durable()
    assert [event.what for event in world.events if isinstance(event, Degraded)] == ["index"]
    after = world.after_power_loss()
    assert read(after, (1, 2, 3)) == (3, 3)
    die(after)


def test_a_store_that_is_being_opened_elsewhere_is_not_marked_clean(tmp_path: Path) -> None:
    """Who holds the open lock may write as soon as the mark was read."""
    backend, hands = MemoryBackend(), Hands()
    mark = BootMark(tmp_path)
    for opening, clean in ((True, False), (False, True)):
        store = open_test_store(backend, tmp_path, hands, config(), boot_id="boot")
        lock = backend.lock("open") if opening else None
        store.close()
        if lock is not None:
            lock.release()
        assert (mark.doubt("another boot") is None) is clean
        assert mark.doubt("boot") is None
