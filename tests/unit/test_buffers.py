"""Aligned memory, and a pool that never lends a byte twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore import buffers
from duokv.kvstore.buffers import HUGE_PAGE, PAGE, BufferPool, Lent, Stages, address, aligned
from duokv.kvstore.errors import UsageError

SLOT = 28 * PAGE


def start(lent: Lent) -> int:
    return address(lent.rows.data)


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, PAGE + 1, 5 * PAGE])
def test_aligned_memory_is_zeroed_writable_and_on_a_page(nbytes: int) -> None:
    view = aligned(nbytes)
    assert view.nbytes == nbytes
    assert address(view) % PAGE == 0
    assert not any(view)
    view[-1] = 7
    assert view[-1] == 7


@pytest.mark.parametrize("nbytes", [HUGE_PAGE, HUGE_PAGE + 1, 5 * HUGE_PAGE - PAGE])
@pytest.mark.parametrize("advice", [buffers._POPULATE_WRITE, 9999], ids=["this kernel", "an older one"])
def test_much_memory_begins_on_a_huge_page(nbytes: int, advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_POPULATE_WRITE", advice)
    view = aligned(nbytes)
    assert view.nbytes == nbytes
    assert address(view) % HUGE_PAGE == 0
    content = np.frombuffer(view, np.uint8)
    assert not content.any()
    content[:] = 7
    del view
    gc.collect()
    assert (content == 7).all()


def test_aligned_memory_outlives_the_first_view() -> None:
    tail = aligned(2 * PAGE)[PAGE:]
    gc.collect()
    tail[:] = b"x" * PAGE
    assert bytes(tail) == b"x" * PAGE


def test_nothing_is_allowed_less_than_nothing_is_not() -> None:
    assert aligned(0).nbytes == 0
    with pytest.raises(UsageError):
        aligned(-1)
    with pytest.raises(UsageError):
        BufferPool(-1)
    pool = BufferPool(PAGE)
    assert pool.lend(0, SLOT).rows.shape == (0, SLOT)
    for n, row_bytes in ((-1, SLOT), (1, 0)):
        with pytest.raises(UsageError):
            pool.lend(n, row_bytes)


def test_rows_have_the_asked_shape_and_lie_on_pages() -> None:
    with BufferPool(1 << 20).lend(3, SLOT) as lent:
        assert lent.rows.shape == (3, SLOT)
        assert lent.rows.dtype == np.uint8
        assert lent.rows.flags.c_contiguous
        assert lent.rows.flags.writeable
        assert all(address(row.data) % PAGE == 0 for row in lent.rows)


def test_released_memory_is_lent_again_also_for_somewhat_less() -> None:
    pool = BufferPool(1 << 20)
    lent = pool.lend(4, SLOT)
    first = start(lent)
    lent.release()
    for n in (4, 3):
        again = pool.lend(n, SLOT)
        assert start(again) == first
        again.release()
    assert start(pool.lend(1, SLOT)) != first, "a far larger region is kept for those who need it"


def test_the_smallest_region_that_fits_is_taken() -> None:
    pool = BufferPool(1 << 20)
    lents = [pool.lend(n, SLOT) for n in (4, 3)]
    starts = [start(lent) for lent in lents]
    for lent in lents:
        lent.release()
    assert start(pool.lend(3, SLOT)) == starts[1]


def test_idle_memory_stays_under_the_cap_and_the_oldest_goes() -> None:
    pool = BufferPool(10 * SLOT)
    lents = [pool.lend(4, SLOT) for _ in range(3)]
    starts = [start(lent) for lent in lents]
    for lent in lents:
        lent.release()
        assert pool.idle_bytes <= 10 * SLOT
    kept = {start(lent) for lent in [pool.lend(4, SLOT) for _ in range(2)]}
    assert kept == set(starts[1:])
    assert pool.idle_bytes == 0


def test_a_request_beyond_the_cap_is_served_and_not_kept() -> None:
    pool = BufferPool(2 * SLOT)
    small = pool.lend(1, SLOT)
    small.release()
    idle = pool.idle_bytes
    with pool.lend(64, SLOT) as lent:
        lent.rows[:] = 1
    assert pool.idle_bytes == idle > 0


def test_memory_with_a_late_read_is_not_lent_until_it_has_ended() -> None:
    pool = BufferPool(1 << 20)
    lent = pool.lend(2, SLOT)
    late = lent.retain()
    first = start(lent)
    lent.release()
    lent.release()
    other = pool.lend(2, SLOT)
    assert start(other) != first
    late.rows[:] = 0xAB
    assert not (other.rows == 0xAB).any()
    late.release()
    assert start(pool.lend(2, SLOT)) == first
    with pytest.raises(UsageError):
        late.retain()


def test_a_second_release_does_not_take_the_next_borrowers_memory() -> None:
    pool = BufferPool(1 << 20)
    lent = pool.lend(2, SLOT)
    lent.release()
    borrowed = pool.lend(2, SLOT)
    lent.release()
    assert start(pool.lend(2, SLOT)) != start(borrowed)


def test_a_dropped_handle_takes_its_memory_along() -> None:
    pool = BufferPool(1 << 20)
    rows = pool.lend(2, SLOT).rows
    gc.collect()
    rows[:] = 5
    assert pool.owns(rows) is None
    assert pool.idle_bytes == 0
    pool.lend(2, SLOT).rows[:] = 6
    assert (rows == 5).all()


def test_a_pool_knows_its_own() -> None:
    pool, other = BufferPool(1 << 20), BufferPool(1 << 20)
    one, two = pool.lend(2, SLOT), pool.lend(2, SLOT)
    assert pool.owns(one.rows) is one
    assert pool.owns(two.rows[1:]) is two
    assert pool.owns(two.rows[1, 5:9]) is two
    assert other.owns(one.rows) is None
    assert pool.owns(np.zeros((2, SLOT), np.uint8)) is None
    rows = one.rows
    one.release()
    assert pool.owns(rows) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=40))
def test_no_two_borrowers_share_a_byte(steps: list[tuple[int, int]]) -> None:
    pool = BufferPool(6 * PAGE)
    live: list[tuple[Lent, int]] = []
    for tag, (n, action) in enumerate(steps):
        if action == 0 or not live:
            lent = pool.lend(n, PAGE)
            lent.rows[:] = tag
            live.append((lent, tag))
        elif action == 1:
            live.pop(n % len(live))[0].release()
        else:
            lent, mark = live.pop(n % len(live))
            live.append((lent.retain(), mark))
            lent.release()
        assert all((lent.rows == mark).all() for lent, mark in live)
        assert pool.idle_bytes <= 6 * PAGE


def test_threads_never_meet_in_one_buffer() -> None:
    pool = BufferPool(8 * PAGE)

    def work(tag: int) -> bool:
        for i in range(50):
            with pool.lend(1 + (tag + i) % 3, PAGE) as lent:
                lent.rows[:] = tag
                if not (lent.rows == tag).all():
                    return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(16)))
    assert pool.idle_bytes <= 8 * PAGE


def test_stages_are_pieces_of_one_slab_on_pages_and_come_back() -> None:
    stages = Stages(3, 4, SLOT)
    lent = [stages.lend(n) for n in (1, 4, 2)]
    assert all(stage.rows.shape == (4, SLOT) for stage in lent)
    places = sorted(address(stage.rows.data) for stage in lent)
    assert places[0] % PAGE == 0
    assert [place - places[0] for place in places] == [0, 4 * SLOT, 8 * SLOT]
    for stage in lent:
        stage.release()
    assert sorted(address(stages.lend(4).rows.data) for _ in range(3)) == places


def test_a_stage_beyond_the_slab_or_larger_than_a_piece_is_served_and_not_kept() -> None:
    stages = Stages(2, 4, SLOT)
    larger = stages.lend(5)
    assert larger.rows.shape == (5, SLOT)
    larger.release()
    lent = [stages.lend(4) for _ in range(5)]
    assert len({address(stage.rows.data) for stage in lent}) == 5
    for value, stage in enumerate(lent):
        stage.rows[:] = value
    assert [set(np.unique(stage.rows)) for stage in lent] == [{value} for value in range(5)]
    held = [address(stage.rows.data) for stage in lent]
    for stage in lent:
        stage.release()
    again = [stages.lend(4) for _ in range(3)]
    assert {address(stage.rows.data) for stage in again[:2]} <= set(held)
    assert all(stage.rows.base is again[0].rows.base for stage in again[:2])
    assert again[2].rows.base is not again[0].rows.base


def test_all_memory_of_a_pool_is_pinned_from_its_making_to_its_end() -> None:
    pinned: dict[int, int] = {}

    def pin(memory: memoryview) -> Callable[[], None]:
        at = address(memory)
        pinned[at] = memory.nbytes

        def undo() -> None:
            del pinned[at]

        return undo

    pool = BufferPool(4 * PAGE, pin)
    kept, large, dropped = pool.lend(2, PAGE), pool.lend(8, PAGE), pool.lend(3, PAGE)
    for lent in (kept, large, dropped):
        assert pinned[start(lent)] >= lent.rows.nbytes
    place = start(kept)
    kept.release()
    large.release()
    del dropped, lent
    gc.collect()
    assert list(pinned) == [place]
    assert start(pool.lend(2, PAGE)) == place
    # One that goes as others come back, over the cap.
    first, second = pool.lend(3, PAGE), pool.lend(3, PAGE)
    held = start(second)
    first.release()
    second.release()
    del first, second
    gc.collect()
    assert list(pinned) == [held]
