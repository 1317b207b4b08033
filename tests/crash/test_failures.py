"""What fails beside the backend's data path: closing, the index, the clock, and many threads at once."""

from __future__ import annotations

import errno
import itertools
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import lmdb
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
    payload,
    payloads,
    prompt,
    record,
)

from duokv.connectors.fs_faulty import Corrupt, Fail, FaultyBackend, Kind
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.answers import Commit
from duokv.kvstore.errors import UsageError
from duokv.kvstore.events import Degraded
from duokv.kvstore.index import Index, IndexTxn, WriteTxn
from duokv.kvstore.keys import chain_keys
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore

TRUNK = (0,) * 7
BRANCH = (0, 0, 1, 1)
OTHER = (2,) * 5
Path_ = tuple[int, ...]


class World:
    """A store whose backend and index can be made to fail."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.hands = Hands()
        self.disk = MemoryBackend()
        self.faulty = FaultyBackend(self.disk)
        self.index = folder / "index"
        self.settings = config(**settings)
        self.store = self.open()

    def open(self, boot_id: str = "boot") -> KVStore:
        self.hands.now += 1.0
        return open_test_store(self.faulty, self.index, self.hands, self.settings, boot_id=boot_id)

    def commit(self, path: Path_, *, first: int = 0, traffic: str = "long", origin: Origin = Origin.EXACT) -> Commit:
        self.hands.now += 1.0
        blocks = payloads(path, first, int(origin))
        return self.store.commit(NS, prompt(path), blocks, first_block=first, traffic=traffic, origin=origin)

    def read(self, path: Path_, traffic: str = "long") -> int:
        """How many blocks are found and read back; each as some commit wrote it."""
        self.hands.now += 1.0
        hit = self.store.lookup(NS, prompt(path), traffic)
        rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
        loaded = self.store.load(hit, rows)
        for i in range(loaded):
            assert rows[i].tobytes() in {payload(path[: i + 1], origin) for origin in Origin}
        return loaded

    def check(self) -> None:
        check_space(self.store, self.disk)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, capacity_blocks=12)
    yield world
    die(world.store)


# Closing


@pytest.mark.parametrize("boot", ["boot", "another boot"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_a_close_that_fails_is_finished_by_the_next_open(tmp_path: Path, lasting: bool, boot: str) -> None:
    for nth in itertools.count(1):
        world = World(tmp_path / str(nth))
        world.commit(TRUNK[:4], origin=Origin.APPROX)
        world.commit(TRUNK)
        world.commit(BRANCH, first=2, traffic="brief")
        world.commit(OTHER)
        begun = len(world.faulty.log)
        world.faulty.inject(Fail(kind=None, nth=nth, lasting=lasting))
        world.store.close()
        failed = world.faulty.fired
        hit = [operation.kind for operation in world.faulty.log[begun:]][nth - 1 :]
        world.faulty.heal()
        world.store = world.open(boot)
        world.check()
        found = [world.read(path) for path in (TRUNK, BRANCH, OTHER)]
        # What cannot be made durable is given up.
        assert found == [7, 4, 5] or "sync" in (hit if lasting else hit[:1])
        world.check()
        die(world.store)
        if not failed:
            return


# The index


def fail_index(index: Index, nth: int) -> Callable[[], None]:
    """Let the nth transaction from now on fail as it commits, until the returned function is called."""
    begin, left = index.write, itertools.count(nth, -1)

    @contextmanager
    def write() -> Iterator[WriteTxn]:
        with begin() as txn:
            yield txn
            if next(left) == 1:
                raise lmdb.DiskError("injected fault")

    index.write = write  # type: ignore[method-assign, assignment]

    def heal() -> None:
        index.write = begin  # type: ignore[method-assign]

    return heal


@pytest.mark.parametrize("flush_s", [0.0, 1e6], ids=["uses at once", "uses late"])
def test_any_index_transaction_may_fail(tmp_path: Path, flush_s: float) -> None:
    """Requests never raise, memory never runs ahead of the index, and space stays accounted for."""
    for nth in itertools.count(1):
        world = World(tmp_path / str(nth), capacity_blocks=12, use_flush_s=flush_s)
        events = record(world.store)
        heal = fail_index(world.store._index, nth)
        world.commit(TRUNK[:5], origin=Origin.APPROX)
        world.read(TRUNK, "keep")
        world.commit(TRUNK)
        world.commit(BRANCH, first=2)
        world.commit(OTHER)
        world.read(OTHER)
        world.faulty.inject(Corrupt(bit=3))
        world.read(OTHER)
        world.commit((3, 3, 3))
        failed = any("injected fault" in str(event) for event in events)
        heal()
        world.faulty.heal()
        world.commit(OTHER)
        assert world.read(OTHER) == 5
        world.store.maintain()
        world.store.flush()
        world.check()
        before = [world.read(path) for path in (TRUNK, BRANCH, OTHER)]
        world.store.close()
        world.store = world.open()
        world.check()
        assert [world.read(path) for path in (TRUNK, BRANCH, OTHER)] == before
        die(world.store)
        if not failed:
            return


def test_a_full_index_drops_commits_and_serves_hits(tmp_path: Path) -> None:
    world = World(tmp_path, index_map_bytes=1 << 20)
    events = record(world.store)
    world.commit(TRUNK)
    world.commit(OTHER)
    for size in (2000, 1):
        with suppress(lmdb.MapFullError):
            for number in itertools.count():
                with world.store._index.write() as txn:
                    txn.put_meta(b"ballast %d %d" % (size, number), bytes(size))
    done = world.commit(BRANCH)
    assert (done.new, done.present, done.dropped) == (0, 2, 2)
    assert any("MDB_MAP_FULL" in str(event) for event in events)
    assert world.read(TRUNK) == 7
    world.check()
    world.faulty.inject(Corrupt(bit=3))
    assert world.read(OTHER) == 0
    world.commit(BRANCH)
    world.check()
    die(world.store)


def unreadable() -> AbstractContextManager[IndexTxn]:
    raise lmdb.ReadersFullError("injected fault")


def test_an_index_that_cannot_be_read_is_a_miss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.commit(TRUNK)
    events = record(world.store)

    with monkeypatch.context() as patch:
        patch.setattr(world.store._index, "read", unreadable)
        hit = world.store.lookup(NS, prompt(TRUNK), "long")
        assert (hit.tokens, hit.miss_reason) == (0, "index")
        assert world.commit(OTHER).dropped == 5
    assert any(isinstance(event, Degraded) for event in events)
    assert world.read(TRUNK) == 7
    assert world.commit(OTHER).new == 5
    world.check()


def test_an_index_that_fails_under_a_load_is_a_miss(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.commit(TRUNK)
    hit = world.store.lookup(NS, prompt(TRUNK), "long")

    with monkeypatch.context() as patch:
        patch.setattr(world.store._index, "read", unreadable)
        assert world.store.load(hit, np.zeros((7, GEOMETRY.payload_bytes), np.uint8)) == 0
    assert world.read(TRUNK) == 7


# Durability


@pytest.mark.parametrize("fsync", ["none", "segment", "always"])
def test_a_promise_is_not_given_for_what_was_given_up_meanwhile(tmp_path: Path, fsync: str) -> None:
    """A sync that failed is not made good by a later one that succeeds: the kernel may have dropped the pages."""
    world = World(tmp_path, fsync=fsync)
    commits = [world.commit((0,)), world.commit((1,))]
    for path in ((2,) * 4, (3,) * 4):
        world.faulty.inject(Fail(kind="sync"))
        commits.append(world.commit(path))
    for commit in commits:
        with suppress(OSError):
            commit.wait_durable()
            world.faulty.heal()
            left = open_test_store(world.disk.crash_clone(0.0, random.Random(0)), tmp_path / "left", world.hands)
            assert set(census(world.store).blocks) <= set(census(left).blocks)
            die(left)
            shutil.rmtree(tmp_path / "left")
            assert fsync == "always", "one of the syncs failed, so nobody was told that all is durable"
    world.faulty.heal()
    world.commit(TRUNK).wait_durable()
    assert world.read(TRUNK) == 7
    world.check()
    die(world.store)


@pytest.mark.parametrize("fsync", ["none", "segment", "always"])
def test_a_close_makes_all_durable(tmp_path: Path, fsync: str) -> None:
    world = World(tmp_path, fsync=fsync)
    world.commit(TRUNK)
    world.store.close()
    world.disk = world.disk.crash_clone(0.0, random.Random(0))
    world.store = open_test_store(world.disk, tmp_path / "left", world.hands)
    assert world.read(TRUNK) == 7
    die(world.store)


# Space


@pytest.mark.parametrize("kind", ["create", "reserve", "write"])
def test_commits_that_fail_leave_no_slots_behind(tmp_path: Path, kind: Kind) -> None:
    """What they took in segments before the one that failed is free again."""
    world = World(tmp_path)
    world.commit((0,))
    for _ in range(5):
        world.faulty.inject(Fail(kind=kind, nth=2, errno=errno.ENOSPC))
        assert world.commit(TRUNK).new == 0
        world.faulty.heal()
    assert world.commit(TRUNK).new == 6
    world.store.close()
    used = sum(file.size for file in world.disk.list("seg/") if file.size) // SLOT
    world.store = world.open()
    footers = len(census(world.store).segments)
    assert used == 7 + footers
    world.check()
    die(world.store)


# Uses and clocks


def test_exact_blocks_live_as_long_as_those_they_replace(tmp_path: Path) -> None:
    """Also by uses that were not yet in the index."""
    world = World(tmp_path, use_flush_s=1e6)
    world.commit(TRUNK, traffic="brief", origin=Origin.APPROX)
    world.read(TRUNK, "long")
    assert world.commit(TRUNK[:5], first=1, traffic="brief").new == 4
    world.hands.now += 50.0
    world.store.maintain()
    assert world.read(TRUNK) == 7
    world.check()
    die(world.store)


def test_a_full_store_goes_on_after_the_clock_was_set_back(world: World) -> None:
    for number in range(4):
        assert world.commit((number,) * 3).new == 3
    world.hands.now -= 86_400.0
    for number in range(4, 10):
        assert world.commit((number,) * 3).new == 3
        assert world.read((number,) * 3) == 3
    assert len(census(world.store).blocks) == 12
    world.check()


@pytest.mark.parametrize("milliseconds", [0.2, 0.499, 0.5, 0.501, 0.9])
def test_housekeeping_at_the_edge_of_a_life_ends(world: World, milliseconds: float) -> None:
    world.commit(TRUNK, traffic="brief")
    world.hands.now += 10.0 + milliseconds / 1000
    world.store.maintain()
    world.hands.now += 1.0
    world.store.maintain()
    assert world.read(TRUNK) == 0


@pytest.mark.parametrize("ttl_s", [-1.0, float("nan"), float("inf"), 1e13])
def test_a_pin_that_cannot_be_meant_is_refused(world: World, ttl_s: float) -> None:
    world.commit(TRUNK)
    with pytest.raises(UsageError, match="ttl"):
        world.store.pin(chain_keys(NS, prompt(TRUNK)), ttl_s=ttl_s)
    assert world.commit(OTHER).new == 5


def test_pinned_blocks_are_no_victims(world: World) -> None:
    world.commit(TRUNK)
    assert world.store.pin(chain_keys(NS, prompt(TRUNK[:5])), ttl_s=60.0) == 5
    for number in range(4, 9):
        world.commit((number,) * 7)
        assert world.read(TRUNK) == 5
    assert world.commit((9,) * 9).dropped == 2
    world.hands.now += 61.0
    assert world.commit((9,) * 9).new == 2
    world.check()


# Threads


def hammer(world: World, seconds_of_work: int) -> None:
    """Four threads look up, load and commit prompts that meet, in a store too small for them."""
    paths = [(a, b, c, 0, 0)[:n] for a in range(2) for b in range(2) for c in range(2) for n in range(1, 6)]
    wrong: list[Exception] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(seconds_of_work):
                path = rng.choice(paths)
                if rng.random() < 0.5:
                    world.commit(path, origin=rng.choice(list(Origin)))
                else:
                    world.read(path)
        except Exception as error:  # noqa: BLE001  shown by the main thread
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert "blocks_quarantined" not in world.store.stats().counts
    world.store.flush()
    world.check()


@pytest.mark.parametrize("capacity", [{"capacity_blocks": 8}, {"capacity": 14 * SLOT}], ids=["blocks", "bytes"])
def test_threads_at_once(tmp_path: Path, capacity: dict[str, int]) -> None:
    world = World(tmp_path, **capacity)
    hammer(world, 60)
    die(world.store)


@pytest.mark.torture
@pytest.mark.parametrize("capacity", [{"capacity_blocks": 8}, {"capacity": 14 * SLOT}], ids=["blocks", "bytes"])
def test_threads_for_long(tmp_path: Path, capacity: dict[str, int]) -> None:
    world = World(tmp_path, **capacity)
    hammer(world, 5_000)
    die(world.store)
