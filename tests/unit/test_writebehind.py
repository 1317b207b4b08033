"""Commits that a thread writes: found and readable at once, copied, bounded, and honest about what came of them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from store_kit import GEOMETRY, NS, SLOT, Hands, config, open_test_store, payload, payloads, prompt, record, set_policy

from duokv.connectors.fs_faulty import Fail, FaultyBackend, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.answers import Commit
from duokv.kvstore.errors import StoreError
from duokv.kvstore.events import BlocksLoaded, BlocksStored, Degraded, Event, StoreFailed
from duokv.kvstore.keys import chain_keys
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import ClassRule, Policy
from duokv.kvstore.store import KVStore

PATH = (0, 1, 2, 3)


class World:
    """A store that writes behind, over a backend whose writes wait for `gate`."""

    def __init__(self, folder: Path, *, room: int = 8, full: str = "wait", held: bool = True) -> None:
        self.hands = Hands()
        self.faulty = FaultyBackend(MemoryBackend())
        self.gate = threading.Event()
        if held:
            self.faulty.inject(Stall(kind="write", until=self.gate))
        settings = config(
            segment_bytes=16 * SLOT, write_behind_bytes=room * SLOT, write_behind_full=full, read_deadline_s=60.0
        )
        self.store = open_test_store(self.faulty, folder / "index", self.hands, settings)
        self.events = record(self.store)

    def commit(
        self, path: tuple[int, ...], *, first: int = 0, origin: Origin = Origin.EXACT, serial: int = 0
    ) -> Commit:
        blocks = payloads(path, first, serial)
        return self.store.commit(NS, prompt(path), blocks, first_block=first, traffic="keep", origin=origin)

    def stored(self) -> tuple[int, int, int]:
        events = [event for event in self.events if isinstance(event, BlocksStored)]
        return sum(e.new for e in events), sum(e.present for e in events), sum(e.dropped for e in events)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.gate.set()
    world.store.close()


def found(store: KVStore, path: tuple[int, ...]) -> int:
    return len(store.lookup(NS, prompt(path), "keep").keys)


def read(store: KVStore, path: tuple[int, ...], deadline_s: float | None = None) -> list[bytes]:
    hit = store.lookup(NS, prompt(path), "keep")
    rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
    return [row.tobytes() for row in rows[: store.load(hit, rows, deadline_s=deadline_s)]]


def test_a_commit_returns_before_it_is_written_and_is_found(world: World) -> None:
    done = world.commit(PATH)
    assert (done.new, done.present, done.dropped) == (4, 0, 0)
    assert world.store.stats().blocks == 0
    assert found(world.store, PATH) == 4
    assert found(world.store, PATH[:2]) == 2
    assert found(world.store, (0, 1, 9)) == 2
    assert found(world.store, (9,)) == 0
    world.gate.set()
    done.wait_durable()
    assert world.store.stats().blocks == 4
    assert read(world.store, PATH) == payloads(PATH)


def test_a_load_waits_for_the_write_no_longer_than_its_deadline(world: World) -> None:
    world.commit(PATH)
    assert read(world.store, PATH, deadline_s=0.01) == []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, world.store, PATH)
        world.gate.set()
        assert reading.result() == payloads(PATH)


def test_what_is_stored_already_is_read_while_the_rest_is_written(tmp_path: Path) -> None:
    world = World(tmp_path, held=False)
    world.commit(PATH[:2]).wait_durable()
    world.faulty.inject(Stall(kind="write", until=world.gate))
    world.commit(PATH, first=2)
    hit = world.store.lookup(NS, prompt(PATH), "keep")
    rows = np.zeros((4, GEOMETRY.payload_bytes), np.uint8)
    leads = world.store.load_iter(hit, rows)
    assert next(leads) == 2
    assert [row.tobytes() for row in rows[:2]] == payloads(PATH[:2])
    world.gate.set()
    assert list(leads) == [4]
    assert [row.tobytes() for row in rows] == payloads(PATH)
    world.store.close()


def test_rows_are_the_callers_again_when_commit_returns(world: World) -> None:
    rows = np.stack([np.frombuffer(block, np.uint8) for block in payloads(PATH)])
    world.store.commit(NS, prompt(PATH), rows, traffic="keep")
    rows[:] = 0
    world.gate.set()
    assert read(world.store, PATH) == payloads(PATH)


def test_blocks_on_their_way_are_not_copied_again(world: World) -> None:
    world.commit(PATH[:3])
    again = world.commit(PATH, serial=1)
    assert (again.new, again.present, again.dropped) == (1, 3, 0)
    world.gate.set()
    world.store.flush()
    assert read(world.store, PATH) == [*payloads(PATH[:3]), payload(PATH, 1)]
    assert world.stored() == (4, 3, 0)


def test_exact_blocks_on_their_way_go_before_approximate_ones(world: World) -> None:
    world.commit(PATH, origin=Origin.APPROX, serial=1)
    better = world.commit(PATH[:2], serial=2)
    assert (better.new, better.present) == (2, 0)
    hit = world.store.lookup(NS, prompt(PATH), "keep")
    assert (hit.tokens, hit.exact_tokens) == (512, 256)
    only = world.store.lookup(NS, prompt(PATH), "keep", require=Origin.EXACT)
    assert (only.tokens, only.miss_reason) == (256, "approx")
    world.gate.set()
    assert read(world.store, PATH) == [*payloads(PATH[:2], serial=2), *payloads(PATH, 2, 1)]


def test_without_room_blocks_are_dropped_where_that_is_the_policy(tmp_path: Path) -> None:
    world = World(tmp_path, room=5, full="drop")
    world.commit(PATH)
    refused = world.commit((7, 8))
    assert (refused.new, refused.present, refused.dropped) == (0, 0, 2)
    assert world.commit((9,)).new == 1
    assert found(world.store, (7, 8)) == 0
    world.gate.set()
    world.store.flush()
    assert world.commit((7, 8)).new == 2
    world.store.close()
    assert world.stored() == (7, 0, 2)


def test_without_room_a_commit_waits_where_that_is_the_policy(tmp_path: Path) -> None:
    world = World(tmp_path, room=5)
    world.commit(PATH)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(world.commit, (7, 8))
        assert found(world.store, (7, 8)) == 0
        assert not second.done()
        world.gate.set()
        assert second.result().new == 2
    world.store.close()


def test_a_commit_larger_than_the_room_is_taken_alone(tmp_path: Path) -> None:
    world = World(tmp_path, room=1)
    assert world.commit(PATH).new == 4
    world.gate.set()
    assert read(world.store, PATH) == payloads(PATH)
    world.store.close()


def test_what_could_not_be_written_is_a_miss_and_said_when_waited_for(world: World) -> None:
    world.faulty.inject(Fail(kind="write", errno=errno.EIO, nth=1))
    parent, child = world.commit(PATH[:2]), world.commit(PATH, first=2)
    hit = world.store.lookup(NS, prompt(PATH), "keep")
    assert len(hit.keys) == 4
    world.gate.set()
    for commit in (parent, child):
        with pytest.raises(OSError, match="were not stored"):
            commit.wait_durable()
    rows = np.zeros((4, GEOMETRY.payload_bytes), np.uint8)
    assert world.store.load(hit, rows) == 0
    assert found(world.store, PATH) == 0
    assert any(isinstance(event, StoreFailed) for event in world.events)


def test_blocks_without_a_parent_are_dropped_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, held=False)
    lost = world.commit(PATH, first=2)
    assert (lost.new, lost.present, lost.dropped) == (0, 0, 2)
    world.store.close()
    assert world.stored() == (0, 0, 2)


def test_a_pin_holds_what_is_on_its_way(world: World) -> None:
    world.commit(PATH)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(world.store.pin, chain_keys(NS, prompt(PATH)), ttl_s=60.0)
        world.gate.set()
        assert held.result() == 4


def test_a_lookup_of_another_class_counts_once_they_are_stored(world: World) -> None:
    world.store.commit(NS, prompt(PATH), payloads(PATH), traffic="brief")
    world.store.lookup(NS, prompt(PATH), "long")
    world.gate.set()
    world.store.flush()
    world.hands.now += 50.0
    assert found(world.store, PATH) == 4


def test_close_writes_what_was_taken_over_and_takes_no_more(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.commit(PATH)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(world.store.close)
        world.gate.set()
        closing.result()
    with pytest.raises(StoreError, match="closed"):
        world.commit((7,))
    again = open_test_store(world.faulty.inner, tmp_path / "index", world.hands)
    assert read(again, PATH) == payloads(PATH)
    again.close()


def test_a_commit_that_breaks_does_not_end_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    behind = world.store._behind
    assert behind is not None
    write = behind._write
    broken = iter([True])

    def once(pending: object) -> object:
        if next(broken, False):
            raise ZeroDivisionError("a bug")
        return write(pending)  # type: ignore[arg-type]

    monkeypatch.setattr(behind, "_write", once)
    world.gate.set()
    lost = world.commit((7, 8))
    with pytest.raises(OSError, match="were not stored"):
        lost.wait_durable()
    world.commit(PATH).wait_durable()
    assert read(world.store, PATH) == payloads(PATH)
    assert not [event for event in world.events if isinstance(event, Degraded)]


def test_many_threads_commit_and_read_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, room=6, held=False)

    def work(tag: int) -> int:
        right = 0
        for turn in range(20):
            path = (tag, *range(turn % 5))
            world.commit(path)
            right += read(world.store, path) == payloads(path)
        return right

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [20] * 6
    world.store.close()


def test_who_was_told_that_blocks_are_on_their_way_hears_if_they_fail(world: World) -> None:
    world.faulty.inject(Fail(kind="write", errno=errno.EIO, nth=1))
    world.commit(PATH)
    again = world.commit(PATH)
    assert (again.new, again.present) == (0, 4)
    world.gate.set()
    with pytest.raises(OSError, match="were not stored"):
        again.wait_durable()


def test_a_class_that_is_removed_meanwhile_costs_its_use_only(world: World) -> None:
    done = world.commit(PATH)
    world.store.lookup(NS, prompt(PATH), "long")
    set_policy(world.store, Policy({"brief": ClassRule(10.0), "keep": ClassRule(None)}, "brief"))
    world.gate.set()
    done.wait_durable()
    assert read(world.store, PATH) == payloads(PATH)


def test_a_load_of_what_is_stored_does_not_wait(tmp_path: Path) -> None:
    world = World(tmp_path, held=False)
    world.commit(PATH[:2]).wait_durable()
    world.faulty.inject(Stall(kind="write", until=world.gate))
    world.commit(PATH, first=2)
    hit = world.store.lookup(NS, prompt(PATH), "keep")
    rows = np.zeros((2, GEOMETRY.payload_bytes), np.uint8)
    assert world.store.load(hit, rows) == 2
    world.gate.set()
    world.store.close()


def test_a_load_that_is_late_is_counted_as_a_miss(world: World) -> None:
    world.commit(PATH)
    read(world.store, PATH, deadline_s=0.01)
    loads = [event for event in world.events if isinstance(event, BlocksLoaded)]
    assert [(event.loaded, event.wanted, event.reason) for event in loads] == [(0, 4, "deadline")]


def test_rows_given_back_while_a_load_waits_stay_the_loads(tmp_path: Path) -> None:
    world = World(tmp_path, held=False)
    world.commit(PATH[:2]).wait_durable()
    world.faulty.inject(Stall(kind="write", until=world.gate))
    world.commit(PATH, first=2)
    hit = world.store.lookup(NS, prompt(PATH), "keep")
    lent = world.store.buffers(4)
    leads = world.store.load_iter(hit, lent.rows)
    assert next(leads) == 2
    lent.release()
    other = world.store.buffers(4)
    other.rows[:] = 0x55
    world.gate.set()
    assert list(leads) == [4]
    assert (other.rows == 0x55).all()
    other.release()
    world.store.close()


def test_a_thread_that_does_not_start_is_started_by_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, held=False, room=4)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            world.commit(PATH)
    assert found(world.store, PATH) == 0
    world.commit(PATH).wait_durable()
    assert read(world.store, PATH) == payloads(PATH)
    world.store.close()


def test_an_interrupt_while_a_commit_is_taken_over_gives_its_room_back(tmp_path: Path) -> None:
    world = World(tmp_path, held=False, room=4)
    world.commit((1,)).wait_durable()
    interrupted = iter([True])

    def interrupt(event: Event) -> None:
        if isinstance(event, BlocksStored) and event.present and next(interrupted, False):
            raise KeyboardInterrupt

    world.store.events.subscribe(interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.commit((1, 2, 3))
    # All the room there is: it would wait for ever if some of it were lost.
    assert world.commit((7, 8, 9, 10)).new == 4
    world.store.close()


def test_what_needs_no_room_is_never_refused(tmp_path: Path) -> None:
    world = World(tmp_path, room=4, full="drop", held=False)
    world.commit((1, 2)).wait_durable()
    world.faulty.inject(Stall(kind="write", until=world.gate))
    world.commit(PATH)
    renewed = world.commit((1, 2))
    assert (renewed.new, renewed.present, renewed.dropped) == (0, 2, 0)
    world.gate.set()
    world.store.close()


def test_a_commit_that_is_kept_keeps_no_rows(world: World) -> None:
    done = world.commit(PATH)
    hit = world.store.lookup(NS, prompt(PATH), "keep")
    world.gate.set()
    done.wait_durable()
    assert [pending.lent for pending in hit._pending] == [None]


def test_a_commit_without_room_hears_of_those_it_was_told_are_on_their_way(tmp_path: Path) -> None:
    world = World(tmp_path, room=4, full="drop")
    world.faulty.inject(Fail(kind="write", errno=errno.EIO, nth=1))
    world.commit(PATH)
    more = world.commit((*PATH, 4, 5))
    assert (more.new, more.present, more.dropped) == (0, 4, 2)
    world.gate.set()
    with pytest.raises(OSError, match="were not stored"):
        more.wait_durable()
    world.store.close()
