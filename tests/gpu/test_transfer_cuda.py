"""Rows between host memory and a GPU's slots, on a GPU: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from store_kit import GEOMETRY, NS, Hands, config, payloads, prompt

from duokv.kernels.transfer import DeviceTransfer, pin_memory, transfer_for
from duokv.kvstore import open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SLOTS, NBYTES, WIDTH = 300, 114_048, 114_688


def filled(n: int, width: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, width), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("width", [NBYTES, WIDTH])
@pytest.mark.parametrize("count", [0, 1, 36, 37, 250])
def test_rows_reach_their_slots_and_come_back(count: int, width: int, pinned: bool) -> None:
    slots = torch.zeros((SLOTS, NBYTES), dtype=torch.uint8, device="cuda")
    moves = transfer_for(slots)
    assert isinstance(moves, DeviceTransfer)
    index = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(0))[:count]
    index[::7] = -1
    rows = filled(count, width, 1)
    rows = rows.pin_memory() if pinned else rows
    wanted = rows[:, :NBYTES].clone()
    wanted[::7] = 0
    moves.put(index, rows)
    rows.fill_(0xCC)
    held = torch.zeros((SLOTS, NBYTES), dtype=torch.uint8)
    held[index[index >= 0]] = wanted[index >= 0]
    # Of the current stream, which nobody waited for.
    assert torch.equal(slots.cpu(), held)
    moves.get(index, rows)
    assert torch.equal(rows[:, :NBYTES], wanted)


def test_what_the_current_stream_writes_before_is_read(tmp_path: Path) -> None:
    slots = torch.zeros((SLOTS, NBYTES), dtype=torch.uint8, device="cuda")
    moves = transfer_for(slots)
    rows = torch.zeros((50, NBYTES), dtype=torch.uint8)
    for value in range(1, 20):
        # Long enough that a copy which does not wait would come first.
        torch.randn(4096, 4096, device="cuda") @ torch.randn(4096, 4096, device="cuda")
        slots.fill_(value)
        moves.get(torch.arange(50), rows)
        assert (rows == value).all()


def test_rows_that_a_store_lends_are_pinned(tmp_path: Path) -> None:
    settings = config(index_path=str(tmp_path))
    store = open_store("memory://test", geometry=GEOMETRY, config=settings, clock=Hands().clock, pin_memory=pin_memory)
    path = tuple(range(6))
    store.commit(NS, prompt(path), payloads(path), traffic="keep")
    slots = torch.zeros((8, GEOMETRY.payload_bytes), dtype=torch.uint8, device="cuda")
    hit = store.lookup(NS, prompt(path), "keep")
    with store.buffers(6) as lent:
        rows = torch.from_numpy(lent.rows)
        assert rows.is_pinned()
        assert store.load(hit, lent.rows) == 6
        transfer_for(slots).put(torch.arange(6), rows)
    assert [bytes(row.tolist()) for row in slots.cpu()[:6]] == payloads(path)
    store.close()
