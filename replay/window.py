"""Sliding-window rings, the states cut from them at block boundaries, and what a row may see and write.

A ring keeps each encoder layer's newest window rows at slot = absolute position mod slots. It has more slots than the
window so that the rows of a rejected draft do not overwrite the window of the last accepted token. A stored state is a
ring of its own, at one boundary; its layout and the copy rule between rings of different sizes follow DeepInfer 0.1.0
(`load_state_from_store_to_prefill_cache`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duokv.kvstore.errors import UsageError
from duokv.replay.plan import WINDOW_TOKENS, usable

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGeometry:
    """Shape of a stored SWA state: uint8 [layers, slots, row_bytes].

    layers: encoder layers. row_bytes: one position's latent in one layer (528 for fp8 of 512 dims with 16 scales).
    window: sliding window, and the grain of boundaries. rollback: spare slots for drafts (6 for five drafts and one).
    """

    layers: int
    row_bytes: int
    window: int = WINDOW_TOKENS
    rollback: int = 6

    def __post_init__(self) -> None:
        if min(self.layers, self.row_bytes, self.window) < 1 or self.rollback < 0:
            raise UsageError(f"ring geometry {self} has an empty dimension; give positive sizes")

    @property
    def slots(self) -> int:
        """Positions a state has room for."""
        return self.window + self.rollback

    @property
    def state_bytes(self) -> int:
        """Size of a stored state."""
        return self.layers * self.slots * self.row_bytes


def pack_state(
    geometry: RingGeometry,
    ring: Bytes,
    *,
    ring_end: int,
    boundary: int,
    valid_from: int,
    rows: Bytes | None = None,
) -> Bytes:
    """Cut the state at `boundary` from a request's ring and, inside a chunk, the chunk's own rows.

    ring: uint8 [layers, any slots >= window, row_bytes], the newest position being ring_end - 1, rejected drafts
        included. rows: uint8 [layers, n, row_bytes] of positions [ring_end, ring_end + n), not yet in the ring.
    valid_from: first position of the request whose rows may be kept (`duokv.replay.valid_from`).

    Returns a new array uint8 [layers, slots, row_bytes] with the window [boundary - window, boundary) and zeros
    everywhere else, so equal windows give equal bytes and no other request's rows travel along.

    UsageError if a shape is wrong, the boundary is no positive multiple of the window, the state is not usable, or a
    row of the window is not there yet or has been overwritten: a ring gives a boundary back only until `rollback`
    more positions are written, so cut when the computed position crosses it. Reads `ring` and `rows` only.
    """
    _check_ring(geometry, ring)
    chunk = np.empty((geometry.layers, 0, geometry.row_bytes), np.uint8) if rows is None else rows
    _check_shape("chunk rows", chunk, (geometry.layers, chunk.shape[1] if chunk.ndim == 3 else 0, geometry.row_bytes))
    _check_boundary(geometry, boundary, valid_from)
    first = boundary - geometry.window
    ring_slots = ring.shape[1]
    if boundary > ring_end + chunk.shape[1]:
        raise UsageError(f"state at {boundary}: rows end at {ring_end + chunk.shape[1]}; cut it once they are computed")
    if first < ring_end - ring_slots:
        raise UsageError(
            f"state at {boundary}: the ring has gone on to {ring_end} and lost rows of it; "
            f"cut it within {ring_slots - geometry.window} positions"
        )
    state = np.zeros((geometry.layers, geometry.slots, geometry.row_bytes), np.uint8)
    from_ring = np.arange(first, min(boundary, ring_end))
    from_chunk = np.arange(max(first, ring_end), boundary)
    state[:, from_ring % geometry.slots] = ring[:, from_ring % ring_slots]
    state[:, from_chunk % geometry.slots] = chunk[:, from_chunk - ring_end]
    return state


def unpack_state(geometry: RingGeometry, state: Bytes, ring: Bytes, *, boundary: int, valid_from: int) -> None:
    """Fill a request's ring from the state stored at `boundary`; slots outside the window become zero.

    state: uint8 [layers, slots, row_bytes]. ring: uint8 [layers, any slots >= window, row_bytes], overwritten as a
    whole, since whatever it held belongs to an earlier request. valid_from: as stored with the state.

    UsageError, with the ring untouched, if a shape is wrong, the boundary is no positive multiple of the window or the
    state is not usable.
    """
    _check_ring(geometry, ring)
    _check_shape("state", state, (geometry.layers, geometry.slots, geometry.row_bytes))
    _check_boundary(geometry, boundary, valid_from)
    positions = np.arange(boundary - geometry.window, boundary)
    ring[:] = 0
    ring[:, positions % ring.shape[1]] = state[:, positions % geometry.slots]


def window_span(pos: int, floor: int, *, window_tokens: int = WINDOW_TOKENS) -> tuple[int, int]:
    """Return the positions [lo, hi) that row `pos` attends to through its window, itself included.

    floor: the plan's in encoder layers, decoder_start in decoder layers.
    """
    return max(floor, pos - window_tokens + 1, 0), pos + 1


def visible_entries(pos: int, ratio: int) -> int:
    """Return how many global entries row `pos` may choose from: the first n, those whose last token is at most pos."""
    return (pos + 1) // ratio


def writes_entry(entry: int, ratio: int, write_floor: int) -> bool:
    """Return whether a global entry is written: adopted Block KV, whose last token is below write_floor, never is."""
    return (entry + 1) * ratio - 1 >= write_floor


def _check_shape(what: str, array: Bytes, shape: tuple[int, int, int]) -> None:
    if array.dtype != np.uint8 or array.shape != shape:
        raise UsageError(f"{what}: {array.dtype} {list(array.shape)} does not fit; give uint8 {list(shape)}")


def _check_ring(geometry: RingGeometry, ring: Bytes) -> None:
    slots = max(ring.shape[1], geometry.window) if ring.ndim == 3 else geometry.slots
    _check_shape("ring", ring, (geometry.layers, slots, geometry.row_bytes))


def _check_boundary(geometry: RingGeometry, boundary: int, valid_from: int) -> None:
    if boundary < 1 or boundary % geometry.window:
        raise UsageError(f"state at {boundary}: no boundary; give a positive multiple of {geometry.window}")
    if not usable(boundary, valid_from, window_tokens=geometry.window):
        raise UsageError(f"state at {boundary}: its window starts before row {valid_from}; only usable states are kept")
