"""States cut from rings and put back, byte for byte, and the rules of what a row sees and writes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from duokv.kvstore.errors import UsageError
from duokv.replay import RingGeometry, pack_state, unpack_state, visible_entries, window_span, writes_entry

Bytes = NDArray[np.uint8]

REAL = RingGeometry(layers=20, row_bytes=528)
SMALL = RingGeometry(layers=3, row_bytes=5, window=8, rollback=2)
FOREIGN = 255


def request_rows(geometry: RingGeometry, total: int, seed: int = 0) -> Bytes:
    """One request's rows by position; never 0 and never the byte another request left in a ring."""
    return np.random.default_rng(seed).integers(1, FOREIGN, (geometry.layers, total, geometry.row_bytes), np.uint8)


def ring_of(rows: Bytes, end: int, slots: int) -> Bytes:
    """A ring that another request used before this one wrote its rows [0, end)."""
    ring = np.full((rows.shape[0], slots, rows.shape[2]), FOREIGN, np.uint8)
    for pos in range(end):
        ring[:, pos % slots] = rows[:, pos]
    return ring


def state_of(geometry: RingGeometry, rows: Bytes, boundary: int) -> Bytes:
    """A stored state by definition."""
    state = np.zeros((geometry.layers, geometry.slots, geometry.row_bytes), np.uint8)
    for pos in range(boundary - geometry.window, boundary):
        state[:, pos % geometry.slots] = rows[:, pos]
    return state


def test_sizes_of_the_published_state() -> None:
    assert REAL.slots == 134
    assert REAL.state_bytes == 134 * 528 * 20 == 1_415_040
    state = pack_state(REAL, ring_of(request_rows(REAL, 256), 256, 134), ring_end=256, boundary=256, valid_from=0)
    assert state.nbytes == REAL.state_bytes
    assert state.flags.c_contiguous


@pytest.mark.parametrize("past", range(7))
def test_a_ring_of_134_gives_the_boundary_back_for_six_more_positions(past: int) -> None:
    rows = request_rows(REAL, 400)
    ring = ring_of(rows, 256 + past, 134)
    state = pack_state(REAL, ring, ring_end=256 + past, boundary=256, valid_from=0)
    assert np.array_equal(state, state_of(REAL, rows, 256))


@pytest.mark.parametrize("past", [7, 8, 100, 127])
def test_a_ring_that_has_gone_on_is_refused(past: int) -> None:
    ring = ring_of(request_rows(REAL, 400), 256 + past, 134)
    with pytest.raises(UsageError, match="cut it within 6 positions"):
        pack_state(REAL, ring, ring_end=256 + past, boundary=256, valid_from=0)


def test_the_first_state_carries_nothing_of_the_request_before() -> None:
    """Of boundary 128 the six rollback slots belong to positions below 0, which hold whatever was in the ring."""
    rows = request_rows(REAL, 128)
    state = pack_state(REAL, ring_of(rows, 128, 134), ring_end=128, boundary=128, valid_from=0)
    assert not state[:, 128:].any()
    assert not (state == FOREIGN).any()
    assert np.array_equal(state[:, :128], rows)


def test_rows_below_valid_from_do_not_travel() -> None:
    rows = request_rows(REAL, 384)
    state = pack_state(REAL, ring_of(rows, 384, 134), ring_end=384, boundary=384, valid_from=256)
    assert not state[:, [pos % 134 for pos in range(250, 256)]].any()


@pytest.mark.parametrize("slots", [128, 134, 140, 256])
def test_a_state_fills_a_ring_of_any_size(slots: int) -> None:
    rows = request_rows(REAL, 384)
    ring = np.full((20, slots, 528), FOREIGN, np.uint8)
    unpack_state(REAL, state_of(REAL, rows, 384), ring, boundary=384, valid_from=256)
    held = {pos % slots: pos for pos in range(256, 384)}
    for slot in range(slots):
        assert np.array_equal(ring[:, slot], rows[:, held[slot]]) if slot in held else not ring[:, slot].any()


@given(
    slots=st.integers(8, 20),
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    restored=st.integers(0, 3),
    store_rollback=st.integers(0, 5),
)
def test_states_cut_while_chunks_go_by(slots: int, chunks: list[int], restored: int, store_rollback: int) -> None:
    """From row 0 or a restored state on, each boundary cut from ring + chunk as it is crossed is the defined state."""
    geometry = RingGeometry(layers=2, row_bytes=3, window=8, rollback=store_rollback)
    rows = request_rows(geometry, 24 + sum(chunks))
    end = restored * 8
    ring = np.full((2, slots, 3), FOREIGN, np.uint8)
    valid_from = max(0, end - 8)
    if restored:
        unpack_state(geometry, state_of(geometry, rows, end), ring, boundary=end, valid_from=valid_from)
    for length in chunks:
        chunk = rows[:, end : end + length]
        for boundary in range(8, end + length + 1, 8):
            if boundary > end and boundary - 8 >= valid_from:
                state = pack_state(geometry, ring, ring_end=end, boundary=boundary, valid_from=valid_from, rows=chunk)
                assert np.array_equal(state, state_of(geometry, rows, boundary))
        for pos in range(end, end + length):
            ring[:, pos % slots] = rows[:, pos]
        end += length


def test_case_18_a_slot_keeps_no_row_of_its_last_request() -> None:
    """ATOM #1417: a second request ran in a slot whose ring still held the first one's window."""
    first, second = request_rows(SMALL, 40, seed=1), request_rows(SMALL, 40, seed=2)
    ring = ring_of(first, 37, 10)
    unpack_state(SMALL, state_of(SMALL, second, 16), ring, boundary=16, valid_from=8)
    assert np.array_equal(ring, state_of(SMALL, second, 16))


@pytest.mark.parametrize(
    ("boundary", "valid_from", "message"),
    [
        (0, 0, "positive multiple of 8"),
        (-8, 0, "positive multiple of 8"),
        (12, 0, "positive multiple of 8"),
        (16, 9, "before row 9"),
    ],
)
def test_no_state_is_cut_or_restored_at_an_unusable_boundary(boundary: int, valid_from: int, message: str) -> None:
    rows = request_rows(SMALL, 16)
    ring = ring_of(rows, 16, 10)
    before = ring.copy()
    with pytest.raises(UsageError, match=message):
        pack_state(SMALL, ring, ring_end=16, boundary=boundary, valid_from=valid_from)
    with pytest.raises(UsageError, match=message):
        unpack_state(SMALL, state_of(SMALL, rows, 16), ring, boundary=boundary, valid_from=valid_from)
    assert np.array_equal(ring, before)


def test_rows_that_are_not_computed_yet_are_refused() -> None:
    rows = request_rows(SMALL, 30)
    with pytest.raises(UsageError, match="rows end at 15"):
        pack_state(SMALL, ring_of(rows, 10, 10), ring_end=10, boundary=16, valid_from=0, rows=rows[:, 10:15])


@pytest.mark.parametrize(
    ("ring", "chunk"),
    [
        (np.zeros((3, 7, 5), np.uint8), None),
        (np.zeros((2, 10, 5), np.uint8), None),
        (np.zeros((3, 10, 6), np.uint8), None),
        (np.zeros((3, 10), np.uint8), None),
        (np.zeros((3, 10, 5), np.int8), None),
        (np.zeros((3, 10, 5), np.uint8), np.zeros((3, 4, 6), np.uint8)),
        (np.zeros((3, 10, 5), np.uint8), np.zeros((4, 5), np.uint8)),
    ],
)
def test_wrong_shapes_are_refused(ring: Bytes, chunk: Bytes | None) -> None:
    with pytest.raises(UsageError, match="does not fit; give uint8"):
        pack_state(SMALL, ring, ring_end=16, boundary=16, valid_from=0, rows=chunk)
    if chunk is None:
        with pytest.raises(UsageError, match="does not fit; give uint8"):
            unpack_state(SMALL, np.zeros((3, 10, 5), np.uint8), ring, boundary=16, valid_from=0)


def test_a_state_of_another_geometry_is_refused() -> None:
    with pytest.raises(UsageError, match="state: uint8 "):
        unpack_state(SMALL, np.zeros((3, 8, 5), np.uint8), np.zeros((3, 10, 5), np.uint8), boundary=16, valid_from=0)
    with pytest.raises(UsageError, match="empty dimension"):
        RingGeometry(layers=0, row_bytes=528)


@pytest.mark.parametrize(
    ("pos", "floor", "span"),
    [(0, 0, (0, 1)), (127, 0, (0, 128)), (128, 0, (1, 129)), (700, 640, (640, 701)), (767, 640, (640, 768)),
     (768, 640, (641, 769)), (640, 640, (640, 641))],
)  # fmt: skip
def test_window_span(pos: int, floor: int, span: tuple[int, int]) -> None:
    assert window_span(pos, floor) == span


def test_an_entry_is_seen_from_its_last_token_on() -> None:
    assert [visible_entries(pos, 2) for pos in range(6)] == [0, 1, 1, 2, 2, 3]
    assert [visible_entries(pos, 1) for pos in range(3)] == [1, 2, 3]


def test_adopted_entries_are_not_written() -> None:
    assert [entry for entry in range(390) if not writes_entry(entry, 2, 768)] == list(range(384))
    assert [entry for entry in range(780) if not writes_entry(entry, 1, 768)] == list(range(768))
    assert all(writes_entry(entry, 2, 0) for entry in range(3))
