"""The SWA arena, one rule at a time. What they add up to is checked against a model in tests/stateful."""

from __future__ import annotations

import numpy as np
import pytest
from swa_kit import APPROX, EXACT, PITCH, WINDOW, World, content, mark, window

from duokv.kvstore.errors import UsageError
from duokv.kvstore.events import WindowEvicted, WindowLeased, WindowStored
from duokv.kvstore.origin import Origin
from duokv.kvstore.swa import SwaArena, SwaWindow


def test_a_lease_gives_back_what_was_put() -> None:
    world = World()
    assert world.arena.put(b"k", window(b"k", APPROX, valid_from=128, end=384))
    with world.arena.lease(b"k") as lent:
        assert lent is not None
        assert lent.data is not None
        assert (lent.end, lent.valid_from, lent.origin) == (384, 128, APPROX)
        assert (bytes(lent.data), lent.data.readonly) == (content(b"k"), True)
    assert world.events == [WindowStored(b"k"), WindowLeased(b"k", hit=True)]


def test_put_copies() -> None:
    world = World()
    buffer = bytearray(content(b"k"))
    world.arena.put(b"k", SwaWindow(256, memoryview(buffer), 0, EXACT))
    buffer[:] = bytes(WINDOW)
    assert world.read(b"k") == content(b"k")


def test_absent_is_a_miss() -> None:
    world = World()
    assert world.read(b"k") is None
    assert world.events == [WindowLeased(b"k", hit=False)]
    assert not world.arena.contains(b"k")


def test_a_lent_view_ends_with_its_lease() -> None:
    world = World()
    world.arena.put(b"k", window(b"k"))
    with world.arena.lease(b"k") as lent:
        assert lent is not None
        data = lent.data
    assert data is not None
    with pytest.raises(ValueError, match="released"):
        data[0]


def test_a_lease_ends_when_its_body_raises() -> None:
    world = World(slots=1)
    world.arena.put(b"k", window(b"k"))
    with pytest.raises(ZeroDivisionError), world.arena.lease(b"k"):
        _ = 1 // 0
    assert world.arena.stats().leased == 0
    assert world.arena.put(b"other", window(b"other"))


def test_a_lease_ends_though_arrays_of_its_view_live_on() -> None:
    world = World(slots=1)
    world.arena.put(b"k", window(b"k"))
    with world.arena.lease(b"k") as lent:
        assert lent is not None
        assert lent.data is not None
        array = np.frombuffer(lent.data, dtype=np.uint8)
    assert array.size == WINDOW
    assert world.arena.stats().leased == 0


@pytest.mark.parametrize("payload", [True, False])
def test_a_window_lives_to_its_expiry_inclusive(payload: bool) -> None:
    world = World(payload=payload)
    world.arena.put(b"k", window(b"k") if payload else mark())
    world.now += 180.0
    assert world.arena.contains(b"k")
    assert world.arena.expire() == 0
    world.now += 0.5
    assert not world.arena.contains(b"k")
    assert world.arena.expire() == 1
    assert world.arena.stats().used_bytes == 0
    assert world.events == ([WindowStored(b"k"), WindowEvicted(b"k", "expired")] if payload else [])


def test_a_lease_is_a_use_until_its_end_and_a_peek_is_none() -> None:
    world = World()
    world.arena.put(b"leased", window(b"leased"))
    world.arena.put(b"peeked", window(b"peeked"))
    with world.arena.lease(b"leased"):
        world.now += 170.0
        assert world.arena.contains(b"peeked")
        world.now += 170.0
        assert world.arena.expire() == 1
        assert world.arena.contains(b"leased")
    world.now += 180.0
    assert world.arena.contains(b"leased")


def test_a_missed_requirement_is_no_use() -> None:
    world = World()
    world.arena.put(b"k", window(b"k", APPROX))
    world.now += 100.0
    assert world.read(b"k", require=EXACT) is None
    assert not world.arena.contains(b"k", require=EXACT)
    assert world.arena.contains(b"k", require=APPROX)
    world.now += 100.0
    assert world.read(b"k") is None


def test_the_least_recently_used_goes_first() -> None:
    world = World(slots=2)
    for key in (b"a", b"b"):
        world.arena.put(key, window(key))
    world.read(b"a")
    world.events.clear()
    assert world.arena.put(b"c", window(b"c"))
    assert world.events == [WindowEvicted(b"b", "capacity"), WindowStored(b"c")]
    assert world.read(b"a") == content(b"a")
    assert world.read(b"c") == content(b"c")


def test_without_expiry_only_capacity_evicts() -> None:
    world = World(slots=1, expiry_s=None)
    world.arena.put(b"k", window(b"k"))
    world.now += 1e9
    assert world.arena.expire() == 0
    assert world.read(b"k") == content(b"k")


def test_a_put_is_dropped_when_everything_is_leased() -> None:
    world = World(slots=1)
    world.arena.put(b"k", window(b"k"))
    with world.arena.lease(b"k") as lent:
        assert not world.arena.put(b"other", window(b"other"))
        assert not world.arena.put(b"k", window(b"new", valid_from=-128))
        assert lent is not None
        assert lent.data is not None
        assert bytes(lent.data) == content(b"k")
    assert world.arena.put(b"other", window(b"other"))
    assert not world.arena.contains(b"k")


def test_replacing_a_leased_window_leaves_its_bytes_alone() -> None:
    world = World(slots=2)
    world.arena.put(b"k", window(b"old", APPROX))
    with world.arena.lease(b"k") as lent:
        assert world.arena.put(b"k", window(b"new", EXACT))
        assert world.read(b"k") == content(b"new")
        assert world.arena.put(b"other", window(b"other"))  # takes the new one's slot, not the leased one's
        assert lent is not None
        assert lent.data is not None
        assert bytes(lent.data) == content(b"old")
        assert world.arena.stats().used_bytes == 2 * PITCH
    assert world.arena.stats().used_bytes == PITCH
    assert world.read(b"k") is None


def test_two_leased_versions_of_a_key_end_in_any_order() -> None:
    world = World(slots=2)
    world.arena.put(b"k", window(b"old", APPROX))
    with world.arena.lease(b"k"):
        world.arena.put(b"k", window(b"new", EXACT))
        newer = world.arena.lease(b"k")
        newer.__enter__()
    assert (world.arena.stats().leased, world.arena.stats().used_bytes) == (1, PITCH)
    newer.__exit__(None, None, None)
    assert world.read(b"k") == content(b"new")


def test_overlapping_leases_hold_until_the_last_ends() -> None:
    world = World(slots=1)
    world.arena.put(b"k", window(b"k"))
    with world.arena.lease(b"k"):
        with world.arena.lease(b"k") as inner:
            assert inner is not None
        assert world.arena.stats().leased == 1
        assert not world.arena.put(b"other", window(b"other"))
    assert world.arena.stats().leased == 0


@pytest.mark.parametrize(
    ("first", "second", "left"),
    [
        (window(b"1", EXACT, 0), window(b"2", APPROX, -128), b"1"),
        (window(b"1", APPROX, 0), window(b"2", EXACT, 128), b"2"),
        (window(b"1", EXACT, 128), window(b"2", EXACT, 0), b"2"),
        (window(b"1", EXACT, 0), window(b"2", EXACT, 128), b"1"),
        (window(b"1", APPROX, 0), window(b"2", APPROX, 0), b"1"),
    ],
)
@pytest.mark.parametrize("slots", [1, 2])
def test_exact_wins_then_the_larger_coverage(first: SwaWindow, second: SwaWindow, left: bytes, slots: int) -> None:
    world = World(slots=slots)
    assert world.arena.put(b"k", first)
    assert world.arena.put(b"k", second)
    assert world.read(b"k") == content(left)
    assert world.arena.stats().used_bytes == PITCH


@pytest.mark.parametrize(("origin", "alive"), [(EXACT, True), (APPROX, False)])
def test_only_a_put_of_the_same_origin_refreshes(origin: Origin, alive: bool) -> None:
    world = World()
    world.arena.put(b"k", window(b"k", EXACT))
    world.now += 100.0
    assert world.arena.put(b"k", window(b"k", origin))
    world.now += 100.0
    assert world.arena.contains(b"k") is alive


def test_drop_forgets_at_once_but_a_lease_goes_on() -> None:
    world = World(slots=1)
    world.arena.put(b"k", window(b"k"))
    with world.arena.lease(b"k") as lent:
        assert world.arena.drop(b"k")
        assert not world.arena.drop(b"k")
        assert not world.arena.contains(b"k")
        assert not world.arena.put(b"k", window(b"new"))
        assert lent is not None
        assert lent.data is not None
        assert bytes(lent.data) == content(b"k")
    assert world.arena.stats().used_bytes == 0
    assert world.arena.put(b"k", window(b"new"))
    assert world.arena.drop(b"k")
    assert world.arena.stats().used_bytes == 0


def test_an_arena_of_no_capacity_drops_all() -> None:
    world = World(slots=0)
    assert not world.arena.put(b"k", window(b"k"))
    assert world.arena.stats().capacity_bytes == 0


def test_misuse_is_refused() -> None:
    arena, marks = World().arena, World(payload=False).arena
    for bad in (SwaWindow(256, memoryview(bytes(WINDOW - 1)), 0, EXACT), mark()):
        with pytest.raises(UsageError, match="SWA window at 256"):
            arena.put(b"k", bad)
    strided = memoryview(bytes(2 * WINDOW))[::2]
    with pytest.raises(UsageError, match="not contiguous"):
        arena.put(b"k", SwaWindow(256, strided, 0, EXACT))
    with pytest.raises(UsageError, match="keeps none"):
        marks.put(b"k", window(b"k"))
    with pytest.raises(UsageError, match="payload=False"):
        arena.put_marks([b"k"], 128, valid_from=0, origin=EXACT)
    assert arena.stats().used_bytes == 0


@pytest.mark.parametrize(("window_bytes", "capacity"), [(0, PITCH), (WINDOW, None), (WINDOW, PITCH - 1), (WINDOW, -1)])
def test_impossible_arenas_are_refused(window_bytes: int, capacity: int | None) -> None:
    with pytest.raises(UsageError):
        SwaArena(window_bytes, capacity_bytes=capacity, expiry_s=None, monotonic=lambda: 0.0, emit=lambda event: None)


def test_capacity_counts_whole_pages_and_never_grows() -> None:
    world = World(slots=3)
    for key in (b"a", b"b", b"c", b"d"):
        assert world.arena.put(key, window(key))
        stats = world.arena.stats()
        assert stats.used_bytes == stats.windows * PITCH <= 3 * PITCH == stats.capacity_bytes


def test_marks_number_their_boundaries() -> None:
    world = World(slots=None, payload=False)
    assert world.arena.put_marks([b"a", b"b", b"c"], 256, valid_from=128, origin=EXACT) == 0
    with world.arena.lease(b"c") as lent:
        assert lent == SwaWindow(512, None, 128, EXACT)


def test_marks_follow_the_rules_of_puts() -> None:
    world = World(slots=None, payload=False)
    world.arena.put_marks([b"exact"], 256, valid_from=128, origin=EXACT)
    world.arena.put_marks([b"approx"], 256, valid_from=0, origin=APPROX)
    world.now += 100.0
    world.arena.put_marks([b"exact"], 256, valid_from=0, origin=APPROX)
    world.arena.put_marks([b"approx"], 256, valid_from=128, origin=EXACT)
    with world.arena.lease(b"approx") as lent:
        assert lent == mark(EXACT, valid_from=128)
    world.now += 100.0
    assert not world.arena.contains(b"exact")


@pytest.mark.parametrize("slots", [None, 3])
def test_a_mark_that_replaces_another_takes_no_more_room_and_is_the_youngest(slots: int | None) -> None:
    world = World(slots=slots, payload=False)
    world.arena.put_marks([b"k"], 256, valid_from=0, origin=APPROX)
    world.now += 100.0
    world.arena.put_marks([b"other"], 256, valid_from=0, origin=EXACT)
    world.arena.put_marks([b"k"], 256, valid_from=0, origin=EXACT)
    assert world.arena.stats().used_bytes == 2 * PITCH
    world.now += 100.0
    world.arena.put_marks([b"other"], 256, valid_from=0, origin=EXACT)
    world.now += 90.0
    assert world.arena.expire() == 1
    assert [world.arena.contains(key) for key in (b"k", b"other")] == [False, True]
    assert world.arena.stats().used_bytes == PITCH


def test_marks_in_a_bounded_arena_evict_in_order_and_count_drops() -> None:
    world = World(slots=2, payload=False)
    assert world.arena.put_marks([b"a", b"b", b"c"], 128, valid_from=0, origin=EXACT) == 0
    assert [world.arena.contains(key) for key in (b"a", b"b", b"c")] == [False, True, True]
    with world.arena.lease(b"b"), world.arena.lease(b"c"):
        assert world.arena.put_marks([b"b", b"d", b"e"], 128, valid_from=0, origin=EXACT) == 2


def test_a_copy_that_is_interrupted_gives_its_slot_back() -> None:
    class Slab:
        """Memory during whose copy somebody presses Ctrl-C."""

        def __setitem__(self, place: slice, data: memoryview) -> None:
            raise KeyboardInterrupt

    world = World()
    slab, world.arena._slab = world.arena._slab, Slab()  # type: ignore[assignment]
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            world.arena.put(b"k", window(b"k"))
    world.arena._slab = slab
    for key in (b"a", b"b"):
        assert world.arena.put(key, window(key))
    assert [world.read(key) for key in (b"a", b"b")] == [content(b"a"), content(b"b")]
