"""Rows of bytes between where they are computed and where they are kept: paged slots and rings.

Plain torch, for any device, stateless; `triton_kernels` has the first two for CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(slots: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows uint8 [n, nbytes] of slots uint8 [m, nbytes]: row i is slot index[i], zeros where that is -1.

    index: [n] int32 or int64 within [-1, m). out: rows to fill and return, on the same device, in memory with room
    between them or none; first touch of new memory takes longer than the copy.
    """
    rows = torch.index_select(slots, 0, index.clamp(min=0), out=out)
    # By row: a mask over all bytes takes ten times as long as the copy.
    return rows.index_fill_(0, _where(index < 0), 0)


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor) -> None:
    """Write rows uint8 [n, nbytes] into slots uint8 [m, nbytes]: row i into slot index[i], nowhere if that is -1.

    index: [n] int32 or int64 within [-1, m), each slot at most once: which of two rows would win is not defined.
    """
    kept = _where(index >= 0)
    if len(kept) < len(index):
        index, rows = index[kept], rows.index_select(0, kept)
    if slots.device.type == "cpu":
        # Whole rows at a time; torch copies a byte at a time, which takes six times as long.
        slots.numpy()[index.numpy()] = rows.numpy()
    else:
        slots.index_copy_(0, index.to(torch.int64), rows)


def move_ring(ring: Tensor, *, end: int, slots: int, window: int = 128) -> Tensor:
    """Return the window below position `end` in a ring of another size: uint8 [layers, slots, nbytes].

    ring: uint8 [layers, any number of slots, nbytes]; position p is at slot p mod the number of slots. The result holds
    positions [max(end - window, 0), end) and zeros elsewhere, so that no other request's bytes leave with it. The same
    rule selects a state to store and loads it (DeepInfer 0.1.0, `select_state_slice_to_store` and
    `load_state_from_store_to_prefill_cache`). ValueError if the window does not fit either ring.
    """
    layers, held, nbytes = ring.shape
    if window > min(held, slots):
        raise ValueError(f"a window of {window} rows does not fit rings of {held} and {slots} slots; use larger rings")
    positions = torch.arange(max(end - window, 0), end, device=ring.device)
    moved = ring.new_zeros((layers, slots, nbytes))
    moved[:, positions % slots] = ring[:, positions % held]
    return moved


def _where(chosen: Tensor) -> Tensor:
    return chosen.nonzero().squeeze(1)
