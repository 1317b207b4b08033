"""Rows arrive where their indices and positions say, and nothing else moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from duokv.kernels import copy


def rows(n: int, nbytes: int = 24) -> Tensor:
    return torch.randint(0, 256, (n, nbytes), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)


def test_rows_go_to_their_slots_and_back() -> None:
    slots, index = rows(10), torch.tensor([7, -1, 2, 0], dtype=torch.int32)
    before, new = slots.clone(), rows(4)
    copy.scatter_rows(slots, index, new)
    assert torch.equal(slots[[7, 2, 0]], new[[0, 2, 3]])
    untouched = [1, 3, 4, 5, 6, 8, 9]
    assert torch.equal(slots[untouched], before[untouched])
    back = copy.gather_rows(slots, index)
    assert torch.equal(back[[0, 2, 3]], new[[0, 2, 3]])
    assert not back[1].any()


@pytest.mark.parametrize("index", [[3, 0, 8], [3, -1, 8], [-1, -1, -1]])
def test_rows_may_lie_apart(index: list[int]) -> None:
    """Slots that are part of larger ones, rows lent with room behind them."""
    at = torch.tensor(index)
    pool, lent = rows(9, 40), rows(3, 64)
    slots, room = pool[:, 8:32], lent[:, :24]
    found = copy.gather_rows(slots, at, room)
    assert found.data_ptr() == lent.data_ptr()
    assert torch.equal(lent[:, :24], copy.gather_rows(slots, at))
    assert torch.equal(lent[:, 24:], rows(3, 64)[:, 24:])
    copy.scatter_rows(slots, at, rows(3, 48)[:, 24:])
    want = rows(9, 40)
    for row, slot in enumerate(index):
        if slot >= 0:
            want[slot, 8:32] = rows(3, 48)[row, 24:]
    assert torch.equal(pool, want)


def ring_of(positions: range, slots: int, layers: int = 2) -> Tensor:
    """A ring of one-byte rows that holds these positions, 255 elsewhere."""
    ring = torch.full((layers, slots, 1), 255, dtype=torch.uint8)
    for layer in range(layers):
        for position in positions:
            ring[layer, position % slots] = position % 200 + layer
    return ring


@pytest.mark.parametrize("end", [0, 100, 128, 131, 134, 256, 1000])
@pytest.mark.parametrize(("held", "slots"), [(134, 134), (134, 128), (128, 134), (262, 134), (134, 200)])
def test_a_ring_moves_by_position(end: int, held: int, slots: int) -> None:
    moved = copy.move_ring(ring_of(range(max(end - held, 0), end), held), end=end, slots=slots)
    assert moved.shape == (2, slots, 1)
    kept = range(max(end - 128, 0), end)
    want = ring_of(kept, slots)
    want[want == 255] = 0
    assert torch.equal(moved, want)


def test_a_ring_smaller_than_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 128 rows does not fit rings of 134 and 100 slots"):
        copy.move_ring(ring_of(range(0), 134), end=0, slots=100)
