"""Space, lives and the index's accounts when housekeeping meets failures, other processes and changes of policy."""

from __future__ import annotations

import errno
from pathlib import Path

import lmdb
import numpy as np
import pytest
from store_kit import (
    GEOMETRY,
    NS,
    SLOT,
    Hands,
    Meanwhile,
    census,
    check_space,
    config,
    open_test_store,
    payloads,
    peer_of,
    prompt,
    set_policy,
)

from duokv.connectors.fs_faulty import Fail, FaultyBackend, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import ClassRule, KVStore, Origin, Policy, lives
from duokv.kvstore.answers import Commit
from duokv.kvstore.index import IndexTxn, WriteTxn
from duokv.kvstore.inspection import operate_store
from duokv.kvstore.opening import open_store
from duokv.kvstore.operation import evict, plan_expired
from duokv.kvstore.reclaim import VictimQueue
from duokv.kvstore.verification import verify


def commit(
    store: KVStore, path: tuple[int, ...], *, first: int = 0, traffic: str = "keep", serial: int = 0,
    origin: Origin = Origin.EXACT,
) -> Commit:  # fmt: skip
    blocks = payloads(path, first, serial)
    return store.commit(NS, prompt(path), blocks, first_block=first, traffic=traffic, origin=origin)


def loaded(store: KVStore, path: tuple[int, ...]) -> list[bytes]:
    hit = store.lookup(NS, prompt(path), "keep")
    rows = np.zeros((max(1, len(hit.keys)), GEOMETRY.payload_bytes), np.uint8)
    count = store.load(hit, rows)
    assert count == len(hit.keys)
    return [row.tobytes() for row in rows[:count]]


@pytest.mark.parametrize("kind", ["reserve", "write"])
def test_slots_that_another_process_made_needless_are_never_used_again(tmp_path: Path, kind: str) -> None:
    hands, disk = Hands(), MemoryBackend()
    faulty = FaultyBackend(disk)
    settings = config(segment_bytes=16 * SLOT, cache_bytes=64 * SLOT)
    store = open_test_store(faulty, tmp_path / "index", hands, settings)
    peer = peer_of(store, disk, hands)
    path = (0,) * 6
    faulty.inject(Stall(kind="write", until=Meanwhile(lambda: commit(peer, path, serial=5))))
    assert commit(store, path, origin=Origin.APPROX, serial=1).present == 6
    check_space(store, disk, peer)
    hands.now += 1
    wrong = errno.ENOSPC if kind == "reserve" else errno.EIO
    faulty.inject(Fail(kind="reserve" if kind == "reserve" else "write", errno=wrong))
    assert commit(store, (4,) * 12, serial=2).new == 0
    check_space(store, disk, peer)
    assert commit(store, (5,) * 6, serial=3).new == 6
    check_space(store, disk, peer)
    assert loaded(store, path) == payloads(path, serial=5)
    assert loaded(store, (5,) * 6) == payloads((5,) * 6, serial=3)
    peer.blocks.space.close()
    store.close()


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_read_that_fails_while_survivors_are_copied_leaves_the_accounts_right(tmp_path: Path, nth: int) -> None:
    hands, disk = Hands(), MemoryBackend(can_punch=False)
    faulty = FaultyBackend(disk)
    settings = config(capacity=64 * 6 * SLOT, segment_bytes=6 * SLOT)
    store = open_test_store(faulty, tmp_path / "index", hands, settings)
    paths = ((4,) * 3, (1,) * 8, (2,) * 2, (3,))
    for path in paths:
        commit(store, path)
        hands.now += 1
    compactor = store.blocks._compactor
    assert compactor is not None
    with store._index.read() as txn:
        sealed = [(number, info) for number, info in txn.segments() if info.sealed]
    assert sealed
    faulty.inject(Fail(kind="read", errno=errno.EIO, nth=nth))
    for number, info in sealed:
        compactor._empty(number, info)
    check_space(store, disk)
    if not faulty.fired:
        return
    assert [loaded(store, path) for path in paths] == [payloads(path) for path in paths]
    store.close()


def test_a_commit_over_what_nothing_reaches_any_more_keeps_the_accounts(tmp_path: Path) -> None:
    """Under a fixed class a parent goes before its child."""
    hands, url = Hands(), f"file://{tmp_path / 'store'}"
    policy = Policy({"fixed": ClassRule(100.0, "fixed"), "keep": ClassRule(None)}, "keep").numbered()
    settings = config(seed_policy=policy, direct="off")
    path = (1, 1, 1, 2, 2, 2)
    with open_store(url, geometry=GEOMETRY, config=settings, clock=hands.clock) as store:
        commit(store, path[:3], traffic="fixed")
        hands.now += 60
        commit(store, path, first=3, traffic="fixed")
        hands.now += 60
    with operate_store(url, config=settings, clock=hands.clock) as view:
        with view.snapshot() as txn:
            plan = plan_expired(view, txn)
        evict(view, plan)
    with open_store(url, geometry=GEOMETRY, config=settings, clock=hands.clock) as store:
        commit(store, path, traffic="fixed", serial=2)
        census(store)
    with operate_store(url, config=settings, clock=hands.clock) as view:
        assert verify(view).clean


@pytest.mark.parametrize("pressed", [False, True])
def test_what_a_failed_pass_meant_to_delete_is_deleted_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pressed: bool
) -> None:
    hands = Hands()
    store = open_test_store(MemoryBackend(), tmp_path / "index", hands, config(capacity_blocks=12))
    for number in range(4):
        commit(store, (number,) * 3, traffic="brief")
        hands.now += 0.01

    def fail(*_: object) -> None:
        raise lmdb.MapFullError("full")

    with monkeypatch.context() as broken:
        broken.setattr(WriteTxn, "drop_extent", fail)
        if pressed:
            assert commit(store, (9,) * 3).new == 0
        else:
            hands.now += 30
            with pytest.raises(lmdb.MapFullError):
                store.maintain()
    hands.now += 100
    store.maintain()
    assert store.stats().blocks == 0
    store.close()


def test_a_use_is_not_lost_where_many_extents_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "_MOST_EXTENTS", 12)
    hands = Hands()
    store = open_test_store(MemoryBackend(), tmp_path / "index", hands, config(segment_bytes=64 * SLOT))
    path = tuple(range(10))
    for upto in range(1, 11):
        commit(store, path[:upto], first=upto - 1, traffic="brief")
    store.flush()
    for number in range(20, 28):
        commit(store, (number,))
    store.flush()
    hands.now += 6
    assert len(store.lookup(NS, prompt(path), "brief").keys) == 10
    hands.now += 6
    store.maintain()
    assert len(store.lookup(NS, prompt(path), "brief").keys) == 10
    store.close()


def test_a_longer_life_saves_what_a_long_pass_has_not_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands()
    store = open_test_store(MemoryBackend(), tmp_path / "index", hands, config(segment_bytes=4096 * SLOT))
    for number in range(600):
        commit(store, (number,), traffic="brief")
    hands.now += 20
    planned = VictimQueue.plan_expired
    left: list[int] = []

    def first_then_longer(self: VictimQueue, txn: IndexTxn, now_s: float, *, most: int | None = None) -> object:
        left.append(txn.totals()[1])
        return planned(self, txn, now_s, most=most)

    emitted = store.blocks.space.reclaimer.release

    def release(freed: object) -> None:
        if len(left) == 1:
            set_policy(store, Policy({"brief": ClassRule(None), "keep": ClassRule(None)}, "brief"))
        emitted(freed)  # type: ignore[arg-type]

    monkeypatch.setattr(VictimQueue, "plan_expired", first_then_longer)
    monkeypatch.setattr(store.blocks.space.reclaimer, "release", release)
    store.maintain()
    assert left[0] == 600
    assert 0 < store.stats().blocks < 600
    store.close()
