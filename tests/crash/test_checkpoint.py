"""Last uses outlive power loss as of the last checkpoint, which any one process writes now and then."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    GEOMETRY,
    NS,
    SLOT,
    Hands,
    Meanwhile,
    config,
    die,
    open_test_store,
    payloads,
    peer_of,
    prompt,
    record,
)

from duokv.connectors.fs_faulty import Fail, FaultyBackend, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.backend import Backend
from duokv.kvstore.checkpoint import LIVES_FILE, read_lives
from duokv.kvstore.events import Degraded
from duokv.kvstore.extent import stamp_s
from duokv.kvstore.opening import open_store
from duokv.kvstore.operation import rebuild_index
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore

PATH = (0, 1, 2)


def open_with(backend: Backend, folder: Path, hands: Hands, *, interval_s: float, boot: str = "boot") -> KVStore:
    settings = config(segment_bytes=8 * SLOT, checkpoint_interval_s=interval_s, use_flush_s=0.0)
    return open_test_store(backend, folder / boot, hands, settings, boot_id=boot)


def found(store: KVStore, path: tuple[int, ...] = PATH) -> int:
    return len(store.lookup(NS, prompt(path), "long").keys)


def last_use_s(backend: MemoryBackend) -> float:
    checkpoint = read_lives(backend)
    assert checkpoint is not None
    return max((stamp_s(life.last_use(0)) for life in checkpoint.lives.values()), default=0.0)


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.mark.parametrize("interval_s", [0.0, 30.0])
def test_power_loss_costs_the_uses_since_the_last_checkpoint(tmp_path: Path, hands: Hands, interval_s: float) -> None:
    disk = MemoryBackend()
    with open_with(disk, tmp_path, hands, interval_s=interval_s) as store:
        store.commit(NS, prompt(PATH), payloads(PATH), traffic="long").wait_durable()
    store = open_with(disk, tmp_path, hands, interval_s=interval_s)
    for _ in range(3):
        hands.now += 40.0
        assert found(store) == 3
        store.maintain()
    after = open_with(disk.crash_clone(0.0, random.Random(0)), tmp_path, hands, interval_s=interval_s, boot="next")
    assert found(after) == (3 if interval_s else 0)
    hands.now += 99.0 if interval_s else 0.0
    assert found(after) == (3 if interval_s else 0)
    die(after)
    die(store)


def test_one_process_writes_it_once_an_interval_and_only_what_changed(tmp_path: Path, hands: Hands) -> None:
    disk = MemoryBackend()
    faulty = FaultyBackend(disk)
    store = open_with(faulty, tmp_path, hands, interval_s=30.0)
    peer = peer_of(store, faulty, hands)
    started = hands.now
    written = []
    for second in range(300):
        hands.now = started + second
        if second < 70:
            store.commit(NS, prompt((second, 1)), payloads((second, 1)), traffic="keep")
        for each in (store, peer):
            before = len(faulty.log)
            each.maintain()
            written += [second for operation in faulty.log[before:] if operation.name == LIVES_FILE]
    assert written == [0, 30, 60, 90]
    assert last_use_s(disk) == started + 69.0
    peer.blocks.space.close()
    store.close()


def test_a_clock_that_goes_back_does_not_put_it_off(tmp_path: Path, hands: Hands) -> None:
    disk = MemoryBackend()
    store = open_with(disk, tmp_path, hands, interval_s=30.0)
    store.maintain()
    hands.now -= 1e6
    store.commit(NS, prompt(PATH), payloads(PATH), traffic="long")
    store.maintain()
    assert last_use_s(disk) == pytest.approx(hands.now, abs=10.0)
    store.close()


def test_one_that_cannot_be_written_is_said_and_written_an_interval_later(tmp_path: Path, hands: Hands) -> None:
    disk = MemoryBackend()
    faulty = FaultyBackend(disk)
    store = open_with(faulty, tmp_path, hands, interval_s=30.0)
    events = record(store)
    store.commit(NS, prompt(PATH), payloads(PATH), traffic="long")
    faulty.inject(Fail(kind="write_file", errno=errno.ENOSPC))
    store.maintain()
    assert [event.what for event in events if isinstance(event, Degraded)] == [LIVES_FILE]
    assert read_lives(disk) is None
    hands.now += 29.0
    store.maintain()
    assert read_lives(disk) is None
    hands.now += 1.0
    store.maintain()
    assert last_use_s(disk) == hands.now - 30.0
    store.close()


def after_power_loss(disk: MemoryBackend, folder: Path, hands: Hands, unsynced: float = 1.0) -> KVStore:
    hands.now += 1.0
    return open_with(disk.crash_clone(unsynced, random.Random(3)), folder, hands, interval_s=30.0, boot="next")


def loaded(store: KVStore, path: tuple[int, ...]) -> int:
    hit = store.lookup(NS, prompt(path), "keep")
    return store.load(hit, np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8))


LONG = (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tail_that_was_cut_since_costs_nothing_before_it(tmp_path: Path, hands: Hands, checkpointed: bool) -> None:
    disk = MemoryBackend()
    settings = config(segment_bytes=64 * SLOT, capacity_blocks=6, checkpoint_interval_s=30.0, use_flush_s=0.0)
    store = open_test_store(disk, tmp_path / "boot", hands, settings)
    store.commit(NS, prompt(LONG), payloads(LONG), traffic="keep").wait_durable()
    if checkpointed:
        store.maintain()
    hands.now += 1.0
    store.lookup(NS, prompt(LONG[:4]), "keep")
    hands.now += 1.0
    store.commit(NS, prompt((8, 9)), payloads((8, 9)), traffic="keep").wait_durable()
    assert loaded(store, LONG) == 4
    after = after_power_loss(disk, tmp_path, hands)
    assert loaded(after, LONG) == 4
    die(after)
    die(store)


def test_blocks_replaced_since_cost_nothing_beside_them(tmp_path: Path, hands: Hands) -> None:
    disk = MemoryBackend()
    store = open_with(disk, tmp_path, hands, interval_s=30.0)
    store.commit(NS, prompt(LONG), payloads(LONG), traffic="keep", origin=Origin.APPROX).wait_durable()
    store.maintain()
    exact = payloads(LONG[:4], 2, 1)
    store.commit(NS, prompt(LONG[:4]), exact, first_block=2, traffic="keep").wait_durable()
    assert loaded(store, LONG) == 6
    after = after_power_loss(disk, tmp_path, hands)
    assert loaded(after, LONG) == 6
    die(after)
    die(store)


@pytest.mark.parametrize(("lost", "left"), [((3,), 3), ((4, 5), 4), ((0,), 0)])
def test_slots_that_are_lost_cost_only_themselves(
    tmp_path: Path, hands: Hands, lost: tuple[int, ...], left: int
) -> None:
    disk = MemoryBackend()
    store = open_with(disk, tmp_path, hands, interval_s=30.0)
    store.commit(NS, prompt(LONG), payloads(LONG), traffic="keep").wait_durable()
    store.maintain()
    crashed = disk.crash_clone(1.0, random.Random(3))
    (name,) = [file.name for file in crashed.list("seg/")]
    data = crashed._files[name].data
    assert data is not None
    for slot in lost:
        data[slot * SLOT : (slot + 1) * SLOT] = bytes(SLOT)
    after = open_with(crashed, tmp_path, hands, interval_s=30.0, boot="next")
    assert loaded(after, LONG) == left
    assert after.stats().blocks == 6 - len(lost)
    after.commit(NS, prompt(LONG), payloads(LONG), traffic="keep")
    assert loaded(after, LONG) == 6
    die(after)
    die(store)


def test_uses_of_blocks_that_were_moved_since_are_kept(tmp_path: Path, hands: Hands) -> None:
    disk = MemoryBackend(can_punch=False)
    settings = config(segment_bytes=4 * SLOT, capacity=256 * SLOT, checkpoint_interval_s=30.0, use_flush_s=0.0)
    store = open_test_store(disk, tmp_path / "boot", hands, settings)
    store.commit(NS, prompt((1, 2)), payloads((1, 2)), traffic="brief")
    found(store, (1, 2))
    store.lookup(NS, prompt((1, 2)), "keep")
    for path in ((5, 6), (7,)):
        store.commit(NS, prompt(path), payloads(path), traffic="brief")
    store.flush()
    store.maintain()
    hands.now += 11.0
    store.maintain()
    assert store.blocks._compactor is not None
    with store.blocks._write_lock:
        store.blocks._compactor.run(100 * SLOT)
    store.flush()
    after = after_power_loss(disk, tmp_path, hands)
    hands.now += 15.0
    assert loaded(after, (1, 2)) == 2
    die(after)
    die(store)


def test_one_that_lands_over_a_newer_one_is_written_again(tmp_path: Path, hands: Hands) -> None:
    disk = MemoryBackend()
    faulty = FaultyBackend(disk)
    store = open_with(faulty, tmp_path, hands, interval_s=30.0)
    peer = peer_of(store, faulty, hands)
    store.commit(NS, prompt(PATH), payloads(PATH), traffic="long").wait_durable()

    def close_peer() -> None:
        for _ in range(8):
            hands.now += 50.0
            found(peer)
            peer.blocks.flush_uses()
        with peer._index.write() as txn:
            peer._checkpointer.close(txn)

    faulty.inject(Stall(kind="write_file", until=Meanwhile(close_peer)))
    store.maintain()
    newest = hands.now
    assert last_use_s(disk) < newest
    for _ in range(3):
        hands.now += 15.0
        store.maintain()
    assert last_use_s(disk) == newest
    store.close()


def test_a_rebuild_by_an_operator_takes_what_was_not_sealed_as_it_is(tmp_path: Path) -> None:
    store = open_store(
        f"file://{tmp_path}/one", geometry=GEOMETRY, config=config(segment_bytes=64 * SLOT, direct="off")
    )
    store.commit(NS, prompt(LONG[:2]), payloads(LONG[:2]), traffic="keep").wait_durable()
    store.commit(NS, prompt(LONG), payloads(LONG), traffic="keep")
    store.maintain()
    # Power loss: no index, and the file's new length was not durable.
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("index"))
    (segment,) = (tmp_path / "two" / "seg").rglob("*.seg")
    os.truncate(segment, 3 * SLOT)
    assert rebuild_index(f"file://{tmp_path}/two").blocks == 3
    die(store)


@pytest.mark.parametrize(("path", "kept"), [((0, 2, 2), 1), ((0, 1, 1), 3)], ids=["fork", "same"])
def test_uses_go_to_blocks_that_are_the_same_and_no_further(
    tmp_path: Path, hands: Hands, path: tuple[int, ...], kept: int
) -> None:
    disk = MemoryBackend()
    store = open_with(disk, tmp_path, hands, interval_s=30.0)
    store.commit(NS, prompt((0, 1, 1)), payloads((0, 1, 1)), traffic="keep", origin=Origin.APPROX)
    store.maintain()
    store.commit(NS, prompt(path), payloads(path, 0, 1), traffic="brief").wait_durable()
    after = after_power_loss(disk, tmp_path, hands)
    hands.now += 30.0
    assert len(after.lookup(NS, prompt(path), "keep").keys) == kept
    die(after)
    die(store)


def test_uses_of_several_extents_go_to_the_one_that_took_their_place(tmp_path: Path, hands: Hands) -> None:
    disk = MemoryBackend()
    store = open_with(disk, tmp_path, hands, interval_s=30.0)
    for first, last in ((0, 2), (2, 4)):
        head = LONG[:last]
        store.commit(NS, prompt(head), payloads(head, first), first_block=first, traffic="keep", origin=Origin.APPROX)
    store.maintain()
    store.commit(NS, prompt(LONG), payloads(LONG, 0, 1), traffic="brief").wait_durable()
    after = after_power_loss(disk, tmp_path, hands)
    hands.now += 30.0
    assert len(after.lookup(NS, prompt(LONG), "keep").keys) == 4
    die(after)
    die(store)
