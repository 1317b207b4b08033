"""Row-wise computation whose result for a row depends neither on its batch nor on its chunk nor on padding.

Matrix libraries choose the order of a sum by the shape of the call: on a CPU, the bits of a row of `x @ w` change with
the number of rows in `x`. So rows are always computed in tiles of one fixed shape, the last one padded with zeros. What
remains is that inside one call of fixed shape a row's result depends neither on its place nor on the other rows. For
elementwise operations and last-dimension reductions this follows from what they are, as long as a tile is whole
vectors, since torch rounds an odd tail otherwise. (Widths that are multiples of 4, up to 2048, are: tiles of more than
32,768 elements are split among threads, these in two.) For matrix products it is how libraries are built (every output
element is one sum over K, in an order the shape decides) but no promise of theirs: tests check it, for one thread and
for two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

ROW_TILE = 32
"""Rows of a tile. In bf16 with AMX, 32 rows cost what 16 do; more would slow single decode rows in fp32."""
_SUM_BLOCK = 512
"""Longest fp32 sum left to the library: MKL divides longer ones among its threads, whose number must not matter."""
_ALIGNMENT = 64


def row_tiled(fn: Callable[..., Tensor], *rows: Tensor, tile: int = ROW_TILE) -> Tensor:
    """Apply `fn` to tiles of `tile` rows and return its rows, one after another.

    rows: tensors [n, ...] of equal n, any dtype.
    fn: maps tensors [tile, ...] to one [tile, ...], row by row; it is only ever called with these shapes, zeros in the
        rows beyond n. Use `linear` in it, and return several results concatenated along the last dimension.
    """
    count = rows[0].shape[0]
    if any(x.shape[0] != count for x in rows):
        raise ValueError(f"tensors of {[x.shape[0] for x in rows]} rows cannot be tiled together; pass equal counts")
    tiles = [fn(*(_tile(x, start, tile) for x in rows)) for start in range(0, max(count, 1), tile)]
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles))[:count]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [tile, K] @ weight [N, K].T + bias [N]: a matrix product for use inside `row_tiled`.

    fp32 sums are cut into blocks of 512, added in order, so that the number of threads does not change them. Weights
    should own their memory (not be views at odd offsets): alignment, too, can change the order inside a library.
    """
    width = x.shape[-1]
    if x.dtype != torch.float32 or width <= _SUM_BLOCK:
        return functional.linear(x, weight, bias)
    total = functional.linear(x[..., :_SUM_BLOCK], weight[:, :_SUM_BLOCK], bias)
    for start in range(_SUM_BLOCK, width, _SUM_BLOCK):
        block = slice(start, start + _SUM_BLOCK)
        total += functional.linear(x[..., block], weight[:, block])
    return total


def row_tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: int = ROW_TILE) -> Tensor:
    """Return x [..., K] @ weight [N, K].T + bias [N] as [..., N], each row's bits independent of all others."""
    flat = row_tiled(lambda rows: linear(rows, weight, bias), x.reshape(-1, x.shape[-1]), tile=tile)
    return flat.view(*x.shape[:-1], weight.shape[0])


def _tile(x: Tensor, start: int, tile: int) -> Tensor:
    """Return rows [start, start + tile) as a contiguous, aligned tensor, zeros beyond the last."""
    part = x[start : start + tile]
    if part.shape[0] == tile and part.is_contiguous() and part.data_ptr() % _ALIGNMENT == 0:
        return part
    padded = x.new_zeros((tile, *x.shape[1:]))
    padded[: part.shape[0]] = part
    return padded
