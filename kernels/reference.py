"""The arithmetic of sparse latent attention in plain torch, with the contract of FlashMLA 1.0.0.

Every function gives each row the same bits whatever it is batched, chunked or padded with; see `rows` for why. Compute
is fp32 whatever the inputs are. Stateless, so safe from any thread. Sizes: b sequences, s_q query rows each, h heads,
D latent dimensions (one latent is both key and value), m cached rows, n compressed entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from duokv.kernels.rows import row_tiled

_ATTENTION_TILE = 16
"""Rows of attention computed at once: their gathered fp32 latents (16 x 256 x 64 dims) fit a core's L2 cache."""
_KEY_TILE = 512
"""Indexer keys of one product; the last tile is padded with zeros, so that an entry always meets the same shape."""
_HIDDEN = torch.iinfo(torch.int64).min


class Attention(NamedTuple):
    """out [b, s_q, h, D] in the dtype of q; lse [b, h, s_q] fp32, natural logarithm, without the sink."""

    out: Tensor
    lse: Tensor


def attend(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    sink: Tensor,
    *,
    scale: float,
    entries: Tensor | None = None,
    entry_index: Tensor | None = None,
) -> Attention:
    """Attend to gathered latents of the sliding window and of the compressed entries under one softmax.

    q: [b, s_q, h, D].
    window, entries: decoded latents [m, D], shared by all sequences.
    window_index, entry_index: [b, s_q, slots] int32 or int64 rows of them; -1 is no row.
    sink: [h], per head; -inf for none. It scales out by exp(lse) / (exp(lse) + exp(sink)) and leaves lse alone.

    A row without any valid slot gives out 0 and lse +inf. The bits of a row depend on the number of slots and on their
    order, so a caller that wants them equal keeps both: always the full window (`window_positions`) and the full top-k
    (`select_entries`). Invalid slots contribute exact zeros, whatever the caches hold.
    """
    b, s_q, h, dim = q.shape
    sources = [window] if entries is None else [window, entries]
    indices = [window_index] if entry_index is None else [window_index, entry_index]
    if len(sources) != len(indices):
        raise ValueError("attend: entries and entry_index belong together; pass both or neither")
    flat = row_tiled(
        lambda rows, *index: _attend_tile(rows, sources, index, sink.to(torch.float32), scale),
        q.reshape(-1, h, dim),
        *(index.reshape(b * s_q, index.shape[-1]) for index in indices),
        tile=_ATTENTION_TILE,
    )
    out, lse = flat[..., :dim], flat[..., dim]
    return Attention(out.to(q.dtype).view(b, s_q, h, dim), lse.view(b, s_q, h).transpose(1, 2).contiguous())


def window_positions(positions: Tensor, *, floor: int = 0, window: int = 128) -> Tensor:
    """Return the positions that rows at `positions` [n] see: int64 [n, window], ascending to the row's own.

    Positions below `floor` are -1. This is the slot order to keep for `attend`; map positions to cached rows with it.
    """
    seen = positions.to(torch.int64).unsqueeze(-1) + torch.arange(1 - window, 1, device=positions.device)
    return seen.masked_fill(seen < max(floor, 0), -1)


def select_entries(q: Tensor, keys: Tensor, weights: Tensor, visible: Tensor, *, k: int) -> Tensor:
    """Choose the entries each row attends to: `top_k` of `index_scores`, a tile of rows at a time.

    q: [s, Hi, Di]; keys: [n, Di]; weights: [s, Hi]; visible: [s] integers, each row sees entries [0, visible).
    Returns int32 [s, k], ascending, -1 at the end. Scores are not computed where every visible entry is chosen anyway.
    """

    tiles = _key_tiles(keys)

    def choose(q: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
        most = int(visible.max())
        if most > k:
            return top_k(_score(q, weights, tiles[: -(-most // _KEY_TILE)]), visible, k=k)
        every = torch.arange(k, dtype=torch.int32, device=q.device).expand(visible.shape[0], k)
        return every.masked_fill(every >= visible.unsqueeze(-1), -1)

    return row_tiled(choose, q, weights, visible)


def index_scores(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return the indexer's scores: sum over heads of weights [s, Hi] * relu(q [s, Hi, Di] . keys [n, Di]), fp32 [s, n].

    Heads are added in order, each by its own elementwise operation.
    """
    tiles = _key_tiles(keys)
    return row_tiled(lambda q, weights: _score(q, weights, tiles), q, weights)[:, : keys.shape[0]]


def top_k(scores: Tensor, visible: Tensor, *, k: int) -> Tensor:
    """Return the k best of the visible entries of each row: int32 [s, k], ascending, -1 at the end.

    scores: fp32 [s, n]; visible: [s] integers, row i chooses among entries [0, visible[i]).
    Equal scores are won by the lowest index: each score and its index make one unique 64-bit key, so no library's way
    with ties shows. Ascending order, not order of score, is what makes `attend` add up equal choices equally.
    """
    n = scores.shape[-1]
    index = torch.arange(n, device=scores.device)
    # + 0.0 turns -0 into 0. Flipping a negative float's magnitude bits makes signed integers order like floats.
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    keys = ordered.to(torch.int64).mul_(2**32).sub_(index)
    keys.masked_fill_(index >= visible.unsqueeze(-1), _HIDDEN)
    best = functional.pad(keys, (0, max(k - n, 0)), value=_HIDDEN).topk(k, dim=-1, sorted=False).values
    hidden = best == _HIDDEN
    chosen = (-best & 0xFFFFFFFF).masked_fill(hidden, 0xFFFFFFFF).sort(dim=-1).values
    return chosen.masked_fill(chosen == 0xFFFFFFFF, -1).to(torch.int32)


def compress(values: Tensor, gates: Tensor, bias: Tensor) -> Tensor:
    """Return one entry per group of rows: per dimension, the values weighted by the softmax of gates + bias.

    values, gates: [n, ratio, D], a group's rows in order; bias: [ratio, D], learned, by place in the group.
    Returns fp32 [n, D]. An entry depends on its own group only. At ratio 1 it is its row's values, bit for bit.
    """
    if values.shape[1] == 1:
        return values[:, 0].to(torch.float32)

    def combine(values: Tensor, gates: Tensor) -> Tensor:
        logits = gates.to(torch.float32) + bias.to(torch.float32)
        raised = (logits - logits.amax(1, keepdim=True)).exp_()
        total, norm = values[:, 0].to(torch.float32) * raised[:, 0], raised[:, 0]
        for row in range(1, values.shape[1]):
            total = total + values[:, row].to(torch.float32) * raised[:, row]
            norm = norm + raised[:, row]
        return total / norm

    return row_tiled(combine, values, gates)


def rope_table(length: int, dim: int, *, theta: float = 10_000.0) -> Tensor:
    """Return cosines and sines for positions [0, length): fp32 [length, dim // 2, 2], `dim` being rotated dimensions.

    Pair j turns by theta ** (-2 j / dim) per position. Computed in fp64 by tiles of positions, so that a longer table
    begins with the same bits.
    """
    rates = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def turn(positions: Tensor) -> Tensor:
        angles = positions.unsqueeze(-1) * rates
        return torch.stack([angles.cos(), angles.sin()], dim=-1).to(torch.float32)

    return row_tiled(turn, torch.arange(length, dtype=torch.float64))


def apply_rope(x: Tensor, table: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the last dimensions of x [..., D], as many as the table has, in interleaved pairs (2 j, 2 j + 1).

    table: rows of `rope_table` for the positions of x, broadcastable to [..., pairs, 2]; for x [n, h, D] pass
    `table[positions].unsqueeze(1)`. `inverse` turns back, as attention's output needs where latents are values too.
    Returns the dtype of x; the dimensions before the rotated ones are copied.
    """
    pairs = table.shape[-2]
    plain, turned = torch.split(x, [x.shape[-1] - 2 * pairs, 2 * pairs], dim=-1)
    even, odd = torch.unflatten(turned.to(torch.float32), -1, (pairs, 2)).unbind(-1)
    cos, sin = table.unbind(-1)
    sin = -sin if inverse else sin
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([plain, rotated.to(x.dtype)], dim=-1)


def _key_tiles(keys: Tensor) -> tuple[Tensor, ...]:
    """Return keys [n, Di] as transposed fp32 tiles [Di, 512], the last one padded."""
    tiles = -(-keys.shape[0] // _KEY_TILE)
    padded = functional.pad(keys.to(torch.float32), (0, 0, 0, tiles * _KEY_TILE - keys.shape[0]))
    return padded.view(tiles, _KEY_TILE, keys.shape[1]).transpose(1, 2).unbind(0)


def _score(q: Tensor, weights: Tensor, key_tiles: Sequence[Tensor]) -> Tensor:
    """Return scores of one tile of rows, fp32 [rows, 512 * tiles]."""
    rows, heads, dim = q.shape
    by_head = q.to(torch.float32).transpose(0, 1).reshape(heads * rows, dim)
    head_weights = weights.to(torch.float32).t().unsqueeze(-1)
    scores = torch.empty((rows, len(key_tiles), _KEY_TILE), dtype=torch.float32, device=q.device)
    for place, tile in enumerate(key_tiles):
        dots = (by_head @ tile).relu_().view(heads, rows, _KEY_TILE).mul_(head_weights)
        total = dots[0]
        for head in dots[1:]:
            total += head
        scores[:, place] = total
    return scores.flatten(1)


def _attend_tile(q: Tensor, sources: Sequence[Tensor], indices: Sequence[Tensor], sink: Tensor, scale: float) -> Tensor:
    """Return out and lse side by side, fp32 [rows, h, D + 1], for q [rows, h, D]."""
    scaled = q.to(torch.float32) * scale
    invalid = torch.cat([index < 0 for index in indices], dim=-1)
    latents = [_gather(source, index) for source, index in zip(sources, indices, strict=True)]
    scores = torch.cat([torch.bmm(scaled, latent.transpose(1, 2)) for latent in latents], dim=-1)
    if bool(invalid.any()):
        scores.masked_fill_(invalid.unsqueeze(1), -torch.inf)
    # The clamp keeps a row without valid slots from computing -inf - -inf.
    largest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
    raised = (scores - largest).exp_()
    total = raised.sum(-1, keepdim=True)
    shares = torch.split(raised, [latent.shape[1] for latent in latents], dim=-1)
    out = torch.bmm(shares[0], latents[0])
    for share, latent in zip(shares[1:], latents[1:], strict=True):
        out += torch.bmm(share, latent)
    # exp(lse) / (exp(lse) + exp(sink)) / total, without the overflow of exp(lse)
    out /= total + (sink.view(-1, 1) - largest).exp_()
    empty = total == 0
    lse = (largest + total.log()).masked_fill_(empty, torch.inf)
    return torch.cat([out.masked_fill_(empty, 0.0), lse], dim=-1)


def _gather(source: Tensor, index: Tensor) -> Tensor:
    """Return rows of source [m, D] as fp32 [rows, slots, D]: zeros where there is none, as 0 * NaN would be NaN."""
    invalid = index < 0
    if not source.shape[0]:
        return torch.zeros((*index.shape, source.shape[1]), dtype=torch.float32, device=source.device)
    flat = source.index_select(0, index.clamp(min=0).view(-1)).to(torch.float32).view(*index.shape, -1)
    return flat.masked_fill_(invalid.unsqueeze(-1), 0.0) if bool(invalid.any()) else flat
