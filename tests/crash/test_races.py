"""Two processes of one host on one store: what a commit finds changed since it looked, in the middle of its writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
    die,
    open_test_store,
    payload,
    payloads,
    peer_of,
    prompt,
)

from duokv.connectors.fs_faulty import FaultyBackend, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.answers import Commit
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore

A = (0, 0, 0, 0)
LONG = (*A, 0, 0, 0)
SIDE = (0, 0, 1, 1)


class World:
    """Two stores, `ours` and `theirs`, with one index and one backend between them."""

    def __init__(self, folder: Path, *, can_punch: bool, **settings: object) -> None:
        self.hands = Hands()
        self.inner = MemoryBackend(can_punch=can_punch)
        self.faulty = FaultyBackend(self.inner)
        self.ours = open_test_store(self.faulty, folder / "index", self.hands, config(**settings))
        self.theirs = peer_of(self.ours, self.inner, self.hands)

    def commit(
        self, store: KVStore, path: tuple[int, ...], *, first: int = 0, origin: Origin = Origin.EXACT, serial: int = 0
    ) -> Commit:
        self.hands.now += 0.001
        blocks = payloads(path, first, serial)
        return store.commit(NS, prompt(path), blocks, first_block=first, origin=origin, traffic="keep")

    def during_our_write(self, action: Callable[[], object]) -> None:
        self.faulty.inject(Stall(kind="write", until=Meanwhile(action)))

    def check(self) -> None:
        """The index agrees with itself, the files with the index."""
        check_space(self.ours, self.inner, self.theirs)

    def read(self, path: tuple[int, ...]) -> list[bytes]:
        """What either process reads of a prompt."""
        seen = []
        for store in (self.ours, self.theirs):
            hit = store.lookup(NS, prompt(path), "keep")
            rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
            assert store.load(hit, rows) == len(hit.keys)
            seen.append([row.tobytes() for row in rows])
        assert seen[0] == seen[1]
        return seen[0]


@pytest.fixture(params=[True, False], ids=["punch", "no punch"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(tmp_path, can_punch=request.param)
    yield world
    die(world.ours)


@pytest.mark.parametrize("theirs", [A[:1], A[:2], A, LONG, SIDE], ids=str)
@pytest.mark.parametrize("ours", [A, LONG], ids=str)
def test_blocks_another_process_stored_meanwhile_are_stored_once(
    world: World, ours: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    world.during_our_write(lambda: world.commit(world.theirs, theirs, serial=2))
    done = world.commit(world.ours, ours, serial=1)
    shared = sum(a == b for a, b in zip(ours, theirs, strict=False)) if theirs != SIDE else 2
    assert (done.new, done.present, done.dropped) == (len(ours) - shared, shared, 0)
    assert world.read(ours) == [payload(ours[: i + 1], 2 if i < shared else 1) for i in range(len(ours))]
    assert world.read(theirs) == payloads(theirs, serial=2)
    world.check()


def test_blocks_between_others_stored_meanwhile(world: World) -> None:
    """Ours were [0, 7); theirs has the first two and, in another extent, the next two."""

    def meanwhile() -> None:
        world.commit(world.theirs, A[:2], serial=2)
        world.commit(world.theirs, A, first=2, serial=3)

    world.during_our_write(meanwhile)
    done = world.commit(world.ours, LONG, serial=1)
    assert (done.new, done.present, done.dropped) == (3, 4, 0)
    assert world.read(LONG) == [payload(LONG[: i + 1], (2, 2, 3, 3, 1, 1, 1)[i]) for i in range(7)]
    world.check()


@pytest.mark.parametrize("origin", list(Origin), ids=lambda o: o.name.lower())
def test_exact_over_approximate_by_two_at_once(world: World, origin: Origin) -> None:
    world.commit(world.ours, LONG, origin=Origin.APPROX)
    world.during_our_write(lambda: world.commit(world.theirs, LONG[:5], first=1, origin=origin, serial=2))
    done = world.commit(world.ours, A, first=2, serial=1)
    theirs_first = origin is Origin.EXACT
    assert (done.new, done.present) == ((0, 2) if theirs_first else (2, 0))
    serials = (0, 2, 2, 2, 2, 0, 0) if theirs_first else (0, 0, 1, 1, 0, 0, 0)
    assert world.read(LONG) == [payload(LONG[: i + 1], serials[i]) for i in range(7)]
    world.check()


def test_a_parent_taken_out_meanwhile_leaves_books_that_balance(world: World) -> None:
    world.commit(world.ours, A)
    place = next(iter(census(world.ours).segments)) << 32
    world.during_our_write(lambda: world.theirs.blocks.take_out(place, 1, "operator"))
    world.commit(world.ours, LONG, serial=1)
    assert world.read(LONG) == [payload(LONG[:1], 0)]
    world.check()
    world.commit(world.ours, LONG, serial=2)
    assert len(world.read(LONG)) == 7
    world.check()


def test_approximate_blocks_cut_meanwhile_are_not_replaced_twice(world: World) -> None:
    world.commit(world.ours, A[:3], origin=Origin.APPROX)
    place = next(iter(census(world.ours).segments)) << 32
    world.during_our_write(lambda: world.theirs.blocks.take_out(place, 1, "operator"))
    world.commit(world.ours, A[:3], first=2, serial=1)
    assert world.read(A)[:1] == [payload(A[:1], 0)]
    world.check()


def test_our_segment_declared_lost_meanwhile(world: World) -> None:
    world.commit(world.ours, A[:1])
    (number,) = census(world.ours).segments
    world.during_our_write(lambda: world.theirs.blocks.lose_segment(number))
    world.commit(world.ours, A[:3], serial=1)
    assert world.read(A) == []
    assert world.commit(world.ours, A, serial=2).new == 4
    assert world.read(A) == payloads(A, serial=2)
    world.check()


def test_a_process_evicts_what_another_one_stored(tmp_path: Path) -> None:
    """Also after it has already had to evict of its own: its queue learns of extents it did not store."""
    world = World(tmp_path, can_punch=True, capacity_blocks=6)
    world.commit(world.ours, (1, 1, 1))
    world.commit(world.ours, (2, 2, 2))
    world.commit(world.ours, (3, 3, 3))
    for number in (4, 5, 6):
        assert world.commit(world.theirs, (number,) * 3).new == 3
    for number in (7, 8, 9):
        assert world.commit(world.ours, (number,) * 3).new == 3
    assert len(census(world.ours).blocks) == 6
    world.check()
    die(world.ours)


def test_idle_housekeeping_does_not_hide_what_others_store(world: World) -> None:
    """Passes that find nothing to do write nothing; they must not make up for writes of another process."""
    for _ in range(3):
        world.ours.maintain()

    def meanwhile() -> None:
        world.ours.blocks.flush_uses()
        world.commit(world.theirs, A, serial=2)

    world.during_our_write(meanwhile)
    assert world.commit(world.ours, A, serial=1).present == 4
    world.check()


def test_capacity_holds_where_each_has_a_segment_open(tmp_path: Path) -> None:
    capacity = 40 * SLOT
    world = World(tmp_path, can_punch=True, capacity=capacity, segment_bytes=3 * SLOT)
    for number in range(30):
        world.commit(world.ours if number % 2 else world.theirs, (number,) * 3)
        assert sum(file.allocated for file in world.inner.list("seg/")) <= capacity
        world.check()
    die(world.ours)
