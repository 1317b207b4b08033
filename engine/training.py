"""The batched, differentiable forward pass: banded windows, gathered entries, records' rounding in the loop.

It computes what `forward` computes, from the same row-wise pieces, with products and roundings of its own: close to it,
not bit-identical. Texts are [B, T], T a multiple of 64, and start at position 0. A selection of entries cannot be
differentiated, so the indexer learns from a loss of its own: its softmax over a row's visible entries shall be the
mass that the heads' attention gives them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import LOOK_BACK, ModelConfig
from duokv.engine.model import IndexQuery, Model, PlaneEntries, Projections, SavedTensors
from duokv.kernels.formats import fake_quant

_CHUNK = 64
"""Rows that share a band of keys, a divisor of the window: narrower bands waste less, wider ones multiply faster."""
_MASKED = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """How a forward pass differs from inference.

    quantise: window and entries are rounded to their records, gradients passing straight through.
    planes: False leaves the windows alone, as if no compressed KV had ever been kept.
    select: False lets rows attend to every visible entry: until attention has learnt what to look for, an indexer that
        has not cannot show it.
    learn_rows: positions at which the indexers' loss is taken and experts' load is counted; None: nowhere.
    """

    quantise: bool = True
    planes: bool = True
    select: bool = True
    learn_rows: slice | None = None


class BatchOutput(NamedTuple):
    """Residual stream [B * T, hidden] after the last layer; the indexers' loss; by layer, experts' loads [experts]."""

    hidden: Tensor
    index_loss: Tensor
    loads: dict[int, Tensor]


class _Selection(NamedTuple):
    """Entries for layers to attend to, an additive mask, and the query they were selected with.

    Each row's own, [B * T, k, head_dim] and [B * T, 1, k]; or each text's, [B, E, head_dim] and [T, 1, E].
    """

    entries: Tensor
    mask: Tensor
    query: IndexQuery


def batch_forward(model: Model, tokens: Tensor, how: Pass) -> BatchOutput:
    """Run token ids [B, T] through all layers."""
    c = model.config
    batch, length = tokens.shape
    positions = torch.arange(length).repeat(batch)
    grams = functional.pad(tokens, (LOOK_BACK, 0), value=-1).unfold(1, LOOK_BACK + 1, 1).flatten(0, 1)
    hidden = model.embed_rows(tokens.flatten())
    index_loss, loads = hidden.new_zeros(()), {}
    plane: PlaneEntries | None = None
    selection: _Selection | None = None
    for layer in range(c.layers):
        if layer in c.engram_layers:
            hidden = hidden + model.engram_rows(layer, hidden, grams)
        if how.planes and layer in c.table.owners:
            plane = _plane(model, layer, hidden, batch, how)
        rows = model.qkv_rows(layer, hidden, positions)
        if plane is not None and layer in c.index_sources:
            selection = _select(c, model.index_q(layer, rows, positions), plane, how)
        latent = fake_quant(rows.latent, c.window_format) if how.quantise else rows.latent
        if plane is not None and selection is not None and how.learn_rows is not None:
            index_loss = index_loss + _index_loss(c, rows, plane, selection.query, how.learn_rows)
        attended = _attend(model, layer, rows, torch.unflatten(latent, 0, (batch, length)), selection)
        hidden = hidden + model.output_rows(layer, attended, positions)
        if how.learn_rows is not None and layer not in c.dense_layers:
            with torch.no_grad():
                sample = torch.unflatten(hidden, 0, (batch, length))[:, how.learn_rows].flatten(0, 1)
                loads[layer] = (model.expert_gates(layer, sample) > 0).float().mean(0)
        hidden = hidden + model.ffn_rows(layer, hidden)
    return BatchOutput(hidden, index_loss, loads)


def _plane(model: Model, layer: int, hidden: Tensor, batch: int, how: Pass) -> PlaneEntries:
    """Return entries [B, E, head_dim] and [B, E, index_dim]."""
    c = model.config
    source = model.plane_rows(layer, hidden)
    ratio = c.table.ratios[layer]
    count = source.shape[0] // batch // ratio
    latent, index = model.compress(layer, torch.unflatten(source, 0, (-1, ratio)), torch.arange(count).repeat(batch))
    if how.quantise:
        latent, index = fake_quant(latent, c.latent_format), fake_quant(index, c.index_format)
    return PlaneEntries(torch.unflatten(latent, 0, (batch, count)), torch.unflatten(index, 0, (batch, count)))


def _visible(positions: Tensor, count: int, ratio: int) -> Tensor:
    """Return [n, count]: whether the row at each of `positions` [n] sees each of the first `count` entries."""
    return (torch.arange(count) + 1) * ratio <= positions.unsqueeze(-1) + 1


def _scores(query: IndexQuery, index: Tensor) -> Tensor:
    """Return scores [B, n, E], fp32, of queries [B, n, h, d], weights [B, n, h], for indexer K [B, E, d]."""
    batch, rows, heads, _ = query.query.shape
    scores = torch.relu(torch.bmm(query.query.flatten(1, 2), index.transpose(1, 2))).view(batch, rows, heads, -1)
    return (scores * query.weight.unsqueeze(-1).to(scores.dtype)).sum(2, dtype=torch.float32)


def _select(c: ModelConfig, query: IndexQuery, plane: PlaneEntries, how: Pass) -> _Selection:
    batch, count, dim = plane.latent.shape
    query = IndexQuery(torch.unflatten(query.query, 0, (batch, -1)), torch.unflatten(query.weight, 0, (batch, -1)))
    length = query.query.shape[1]
    ratio = length // count
    if not how.select:
        mask = torch.where(_visible(torch.arange(length), count, ratio), 0.0, _MASKED)
        return _Selection(plane.latent, mask.to(plane.latent.dtype).unsqueeze(1), query)
    indices = torch.zeros(batch, length, c.top_k, dtype=torch.int64)
    mask = torch.full((batch, length, c.top_k), _MASKED, dtype=plane.latent.dtype)
    with torch.no_grad():
        for start in range(0, length, c.window):
            rows = slice(start, start + c.window)
            near = min(rows.stop, length) // ratio
            seen = _visible(torch.arange(length)[rows], near, ratio)
            scores = _scores(IndexQuery(query.query[:, rows], query.weight[:, rows]), plane.index_k[:, :near])
            best = scores.masked_fill_(~seen, -torch.inf).topk(min(c.top_k, near), sorted=False)
            indices[:, rows, : best.indices.shape[-1]] = best.indices
            mask[:, rows, : best.indices.shape[-1]] = torch.where(best.values > -torch.inf, 0.0, _MASKED).to(mask.dtype)
    flat = (indices + torch.arange(batch).view(-1, 1, 1) * count).flatten()
    entries = plane.latent.flatten(0, 1).index_select(0, flat).view(-1, c.top_k, dim)
    return _Selection(entries, mask.view(-1, 1, c.top_k), query)


def _index_loss(c: ModelConfig, rows: Projections, plane: PlaneEntries, query: IndexQuery, at: slice) -> Tensor:
    """Return the mean KL divergence of the indexer's softmax from attention's mass, over the rows at positions `at`."""
    batch, length = query.weight.shape[:2]
    ratio = length // plane.latent.shape[1]
    count = at.stop // ratio
    seen = _visible(torch.arange(length)[at], count, ratio)
    with torch.no_grad():
        asked = torch.unflatten(rows.query, 0, (batch, length))[:, at].flatten(1, 2) * c.head_dim**-0.5
        logits = torch.unflatten(torch.bmm(asked, plane.latent[:, :count].transpose(1, 2)), 1, (-1, c.heads))
        mass = logits.float().masked_fill_(~seen.unsqueeze(1), _MASKED).exp_().sum(2)
        target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-20)
    scores = _scores(IndexQuery(query.query[:, at], query.weight[:, at]), plane.index_k[:, :count])
    logs = functional.log_softmax(scores.masked_fill(~seen, _MASKED), dim=-1)
    return torch.where(seen, torch.special.xlogy(target, target) - target * logs, 0.0).sum(-1).mean()


def _attend(model: Model, layer: int, rows: Projections, latent: Tensor, selection: _Selection | None) -> Tensor:
    """Return attended values [B * T, heads, head_dim], fp32, given the window's latents [B, T, head_dim]."""
    window = model.config.window
    chunks = latent.shape[1] // _CHUNK
    before = window // _CHUNK
    blocks = functional.pad(torch.unflatten(latent, 1, (chunks, _CHUNK)), (0, 0, 0, 0, before, 0))
    keys = torch.cat([blocks[:, i : i + chunks] for i in range(before + 1)], dim=2).flatten(0, 1)
    row, column = torch.arange(_CHUNK).unsqueeze(1) + window, torch.arange(window + _CHUNK)
    exists = column + torch.arange(chunks).view(-1, 1, 1) * _CHUNK >= window
    seen = (column <= row) & (column > row - window) & exists
    band = torch.where(seen, 0.0, _MASKED).to(latent.dtype).unsqueeze(2)
    if selection is None:
        entries = latent.new_zeros(rows.query.shape[0], 1, latent.shape[2])
        mask = latent.new_full((rows.query.shape[0], 1, 1), _MASKED)
    else:
        entries, mask = selection.entries, selection.mask
    scaled = rows.query * model.config.head_dim**-0.5
    out: Tensor = _JointSoftmax.apply(scaled, keys, entries, band, mask, model.sink(layer))  # type: ignore[no-untyped-call]
    return out


class _JointSoftmax(torch.autograd.Function):
    """Attention of rows to their window, to their entries and to a sink, under one softmax.

    Written out because autograd would keep the logits several times over. No maximum is subtracted: queries and latents
    are normed, so exponents stay far from overflow.

    query [n, H, D]; keys [n / chunk, window + chunk, D]; entries [n / rows that share them, k, D]; band [chunks of a
    text, chunk, 1, window + chunk] and mask [n or fewer rows, 1, k] are added to logits, repeating; sink [H]. Returns
    fp32 [n, H, D].
    """

    @staticmethod
    def forward(
        ctx: SavedTensors, query: Tensor, keys: Tensor, entries: Tensor, band: Tensor, mask: Tensor, sink: Tensor
    ) -> Tensor:
        n, heads, dim = query.shape
        near = torch.bmm(query.view(keys.shape[0], -1, dim), keys.transpose(1, 2))
        near.view(-1, *band.shape[:2], heads, band.shape[3]).add_(band)
        near.exp_()
        far = torch.bmm(query.view(entries.shape[0], -1, dim), entries.transpose(1, 2))
        far.view(-1, mask.shape[0], heads, mask.shape[2]).add_(mask)
        far.exp_()
        total = near.sum(-1, dtype=torch.float32).view(n, heads) + sink.exp()
        total += far.sum(-1, dtype=torch.float32).view(n, heads)
        out = torch.bmm(near, keys).view(n, heads, dim).float()
        out += torch.bmm(far, entries).view(n, heads, dim)
        out /= total.unsqueeze(-1)
        ctx.save_for_backward(query, keys, entries, near, far, total, out, sink)
        return out

    @staticmethod
    def backward(ctx: SavedTensors, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, Tensor]:
        (grad,) = grads
        query, keys, entries, near, far, total, out, sink = ctx.saved_tensors
        shift = (grad * out).sum(-1) / total
        scaled = (grad / total.unsqueeze(-1)).to(query.dtype)
        low = shift.to(query.dtype)
        bands, groups = (keys.shape[0], -1, query.shape[2]), (entries.shape[0], -1, query.shape[2])
        near_diff = torch.bmm(scaled.view(bands), keys.transpose(1, 2))
        near_diff.sub_(low.view(keys.shape[0], -1, 1)).mul_(near)
        far_diff = torch.bmm(scaled.view(groups), entries.transpose(1, 2))
        far_diff.sub_(low.view(entries.shape[0], -1, 1)).mul_(far)
        grad_query = torch.bmm(near_diff, keys).view_as(query) + torch.bmm(far_diff, entries).view_as(query)
        grad_keys = torch.bmm(near_diff.mT, query.view(bands)) + torch.bmm(near.mT, scaled.view(bands))
        grad_entries = torch.bmm(
            torch.cat([far_diff, far], 1).mT, torch.cat([query.view(groups), scaled.view(groups)], 1)
        )
        return grad_query, grad_keys, grad_entries, None, None, -(shift * sink.exp()).sum(0)
