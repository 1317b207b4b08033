"""The batched, differentiable forward pass: banded windows, gathered entries, quantisation in the loop.

It computes what `forward` computes from the same row-wise pieces, with other products: neither is bit-identical to the
other. Texts are [B, T] with T a multiple of the window; positions start at 0 in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import LOOK_BACK, ModelConfig
from duokv.engine.model import IndexQuery, Model, PlaneEntries, Projections
from duokv.kernels.formats import fake_quant

_MASKED = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What attention computes in a training pass.

    top_k: entries a row attends to; None for all visible ones. quantise: store through the record formats.
    plane: False cuts the compressed KV off, leaving the windows.
    """

    top_k: int | None
    quantise: bool
    plane: bool = True


class BatchOutput(NamedTuple):
    """Residual stream [B * T, hidden] after the last layer; the indexers' loss; each expert layer's load [experts]."""

    hidden: Tensor
    index_loss: Tensor
    loads: dict[int, Tensor]


class _Selection(NamedTuple):
    """A source's entries: [B * T, K] indices of rows of the flattened plane, additive mask [B * T, 1, K]; scores' inputs."""

    entries: Tensor
    mask: Tensor
    query: IndexQuery


def batch_forward(model: Model, tokens: Tensor, attention: Attention, *, sampled_chunk: int | None) -> BatchOutput:
    """Run texts [B, T] through all layers. `sampled_chunk`: chunk of window rows that teaches the indexer, None: none."""
    c = model.config
    batch, length = tokens.shape
    positions = torch.arange(length).repeat(batch)
    hidden = model.embed_rows(tokens.flatten())
    grams = look_back_rows(tokens)
    index_loss, loads = hidden.new_zeros(()), {}
    plane, selection = None, None
    for layer in range(c.layers):
        if layer in c.engram_layers:
            hidden = hidden + model.engram_rows(layer, hidden, grams)
        rows = model.qkv_rows(layer, hidden, positions)
        if attention.plane and layer in c.table.owners:
            plane = _make_plane(model, layer, hidden, batch, attention)
        if plane is not None and layer in c.index_sources:
            selection = _select(model, layer, rows, positions, plane, attention)
        latent = fake_quant(rows.latent, c.window_format) if attention.quantise else rows.latent
        latent = latent.view(batch, length, -1)
        if plane is not None and selection is not None and sampled_chunk is not None:
            index_loss = index_loss + _index_loss(model, layer, rows, plane, selection, batch, sampled_chunk)
        attended = _attend(model, layer, rows.query, latent, selection)
        hidden = hidden + model.output_rows(layer, attended.to(rows.query.dtype), positions)
        if sampled_chunk is not None and layer not in c.dense_layers:
            with torch.no_grad():
                loads[layer] = (model.expert_gates(layer, hidden[-512:]) > 0).float().mean(0)
        hidden = hidden + model.ffn_rows(layer, hidden)
    return BatchOutput(hidden, index_loss, loads)


def look_back_rows(tokens: Tensor) -> Tensor:
    """Return [B * T, LOOK_BACK + 1] token ids of texts [B, T], -1 before the start."""
    padded = functional.pad(tokens, (LOOK_BACK, 0), value=-1)
    return padded.unfold(1, LOOK_BACK + 1, 1).reshape(-1, LOOK_BACK + 1)


def _make_plane(model: Model, layer: int, hidden: Tensor, batch: int, attention: Attention) -> PlaneEntries:
    """Return entries [B, E, head_dim] and [B, E, index_dim]."""
    ratio = model.config.table.ratios[layer]
    source = model.plane_rows(layer, hidden)
    count = source.shape[0] // batch // ratio
    made = model.compress(layer, source.unflatten(0, (-1, ratio)), torch.arange(count).repeat(batch))
    # The indexer learns from its own loss alone.
    latent, index = made
    if attention.quantise:
        latent = fake_quant(latent, model.config.latent_format)
        index = fake_quant(index, model.config.index_format)
    return PlaneEntries(latent.view(batch, count, -1), index.view(batch, count, -1))


def _scores(query: IndexQuery, index: Tensor) -> Tensor:
    """Scores [B, n, E] of queries [B * n, h, d] for indexer K [B, E, d]."""
    batch = index.shape[0]
    heads = query.query.shape[1]
    q = query.query.reshape(batch, -1, query.query.shape[-1])
    scores = torch.relu(torch.bmm(q, index.transpose(1, 2))).view(batch, -1, heads, index.shape[1])
    weight = query.weight.view(batch, -1, heads, 1).to(scores.dtype)
    return (scores * weight).sum(2, dtype=torch.float32)


def visible(positions: Tensor, count: int, ratio: int) -> Tensor:
    """Return [n, count]: whether the row at each position sees each entry."""
    return (torch.arange(count) + 1) * ratio <= positions.unsqueeze(-1) + 1


def _select(
    model: Model, layer: int, rows: Projections, positions: Tensor, plane: PlaneEntries, attention: Attention
) -> _Selection:
    query = model.index_q(layer, rows, positions)
    batch, count, _ = plane.index.shape
    length = rows.normed.shape[0] // batch
    ratio = length // count
    span = model.config.window
    if attention.top_k is None or attention.top_k >= count:
        seen = visible(torch.arange(length), count, ratio)
        return _Selection(plane.latent, torch.where(seen, 0.0, _MASKED).to(rows.query.dtype), query)
    k = attention.top_k
    indices = torch.zeros(batch, length, k, dtype=torch.long)
    mask = torch.full((batch, length, k), _MASKED, dtype=rows.query.dtype)
    with torch.no_grad():
        q = query.query.unflatten(0, (batch, length))
        w = query.weight.unflatten(0, (batch, length))
        for start in range(0, length, span):
            stop = start + span
            seen = visible(torch.arange(start, stop), stop // ratio, ratio)
            chunk = IndexQuery(q[:, start:stop].flatten(0, 1), w[:, start:stop].flatten(0, 1))
            scores = _scores(chunk, plane.index[:, : stop // ratio]).masked_fill(~seen, -torch.inf)
            best = scores.topk(min(k, stop // ratio), sorted=False)
            n = best.indices.shape[-1]
            indices[:, start:stop, :n] = best.indices
            mask[:, start:stop, :n] = torch.where(best.values > -torch.inf, 0.0, _MASKED).to(mask.dtype)
    flat = indices + torch.arange(batch).view(-1, 1, 1) * count
    entries = plane.latent.flatten(0, 1).index_select(0, flat.view(-1)).view(-1, k, plane.latent.shape[-1])
    return _Selection(entries, mask.view(-1, 1, k), query)


def _index_loss(
    model: Model, layer: int, rows: Projections, plane: PlaneEntries, selection: _Selection, batch: int, chunk: int
) -> Tensor:
    """KL of the indexer's softmax from attention's mass on visible entries, for one chunk of window rows."""
    c = model.config
    count = plane.latent.shape[1]
    length = rows.query.shape[0] // batch
    ratio = length // count
    start, stop = chunk * c.window, (chunk + 1) * c.window
    seen = visible(torch.arange(start, stop), stop // ratio, ratio)
    query = (rows.query * c.head_dim**-0.5).view(batch, length, c.heads, -1)[:, start:stop].flatten(1, 2)
    with torch.no_grad():
        logits = torch.bmm(query, plane.latent[:, : stop // ratio].transpose(1, 2)).float()
        logits = logits.view(batch, -1, c.heads, stop // ratio).masked_fill(~seen[:, None], _MASKED)
        mass = logits.exp().mean(2)
        target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-20)
    part = IndexQuery(
        selection.query.query.view(batch, length, *selection.query.query.shape[1:])[:, start:stop].flatten(0, 1),
        selection.query.weight.view(batch, length, -1)[:, start:stop].flatten(0, 1),
    )
    scores = _scores(part, plane.index[:, : stop // ratio]).masked_fill(~seen, _MASKED)
    logs = functional.log_softmax(scores, dim=-1)
    terms = torch.where(seen, torch.special.xlogy(target, target) - target * logs, 0.0)
    return terms.sum(-1).mean()


def _attend(
    model: Model, layer: int, query: Tensor, latent: Tensor, selection: _Selection | None
) -> Tensor:
    """Return attended values [B * T, heads, head_dim], fp32."""
    window = model.config.window
    batch, length, dim = latent.shape
    chunks = length // window
    blocks = latent.view(batch, chunks, window, dim)
    before = functional.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0))
    keys = torch.cat([before, blocks], dim=2).flatten(0, 1)
    row, column = torch.arange(window).unsqueeze(1) + window, torch.arange(2 * window)
    band = (column <= row) & (column > row - window)
    band = band & ((torch.arange(chunks) > 0).view(-1, 1, 1) | (column >= window))
    band = torch.where(band, 0.0, _MASKED).to(query.dtype).unsqueeze(2)
    if selection is None:
        entries, mask = latent.new_zeros(query.shape[0], 1, dim), band.new_full((query.shape[0], 1, 1), _MASKED)
    else:
        entries, mask = selection.entries, selection.mask
    query = query * model.config.head_dim**-0.5
    out: Tensor = _JointSoftmax.apply(query, keys, entries, band, mask, model.sink(layer))
    return out


class _JointSoftmax(torch.autograd.Function):
    """Attention of rows to their window, to entries and to a sink, under one softmax.

    Written out because eager autograd would keep and pass over the logits twice as often. No maximum is subtracted:
    queries and latents are normed, so logits stay far below what overflows.

    query [n, H, D]; keys [chunks, 2 W, D]; entries [n, K, D] gathered or [B, E, D] whole; band [chunks of a text, W, 1,
    2 W]; mask [n, 1, K] or [T, E]; sink [H].
    """

    @staticmethod
    def forward(ctx, query, keys, entries, band, mask, sink):
        n, heads, dim = query.shape
        near = torch.bmm(query.view(keys.shape[0], -1, dim), keys.transpose(1, 2))
        near.view(-1, band.shape[0], band.shape[1], heads, band.shape[-1]).add_(band)
        near.exp_()
        groups = query.view(entries.shape[0], -1, dim)
        far = torch.bmm(groups, entries.transpose(1, 2))
        if mask.ndim == 2:
            far.view(-1, mask.shape[0], heads, mask.shape[1]).add_(mask.unsqueeze(1))
        else:
            far.add_(mask)
        far.exp_()
        total = near.sum(-1, dtype=torch.float32).view(n, heads) + sink.exp()
        total += far.sum(-1, dtype=torch.float32).view(n, heads)
        out = torch.bmm(near, keys).view(n, heads, dim).float()
        out += torch.bmm(far, entries).view(n, heads, dim)
        out /= total.unsqueeze(-1)
        ctx.save_for_backward(query, keys, entries, near, far, total, out, sink)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, keys, entries, near, far, total, out, sink = ctx.saved_tensors
        n, heads, dim = query.shape
        shift = (grad * out).sum(-1) / total
        scaled = (grad / total.unsqueeze(-1)).to(query.dtype)
        low = shift.to(query.dtype)
        near_rows, near_grad = query.view(keys.shape[0], -1, dim), scaled.view(keys.shape[0], -1, dim)
        near_diff = torch.bmm(near_grad, keys.transpose(1, 2))
        near_diff -= low.view(keys.shape[0], -1, 1)
        near_diff *= near
        far_rows, far_grad = query.view(entries.shape[0], -1, dim), scaled.view(entries.shape[0], -1, dim)
        far_diff = torch.bmm(far_grad, entries.transpose(1, 2))
        far_diff -= low.view(entries.shape[0], -1, 1)
        far_diff *= far
        grad_query = torch.bmm(near_diff, keys).view_as(query) + torch.bmm(far_diff, entries).view_as(query)
        grad_keys = torch.bmm(near_diff.transpose(1, 2), near_rows) + torch.bmm(near.transpose(1, 2), near_grad)
        grad_entries = torch.bmm(torch.cat([far_diff, far], 1).transpose(1, 2), torch.cat([far_rows, far_grad], 1))
        return grad_query, grad_keys, grad_entries, None, None, -(shift * sink.exp()).sum(0)
