"""Last uses outlive power loss as of the last checkpoint, which any one process writes now and then."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from store_kit import NS, SLOT, Hands, config, die, open_test_store, payloads, peer_of, prompt, record

from duokv.connectors.fs_faulty import Fail, FaultyBackend
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.backend import Backend
from duokv.kvstore.checkpoint import LIVES_FILE, read_lives
from duokv.kvstore.events import Degraded
from duokv.kvstore.extent import stamp_s
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
