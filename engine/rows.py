"""A step's rows: several sessions' rows side by side, and the model's row-wise pieces computed on tiles of them.

The pieces run on tiles of a fixed number of rows, so that a row's bits do not depend on what is computed with it: not
only matrix products, vectorised elementwise functions too round differently in a tensor's odd tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duokv.engine.config import LOOK_BACK
from duokv.engine.model import IndexQuery, Model, PlaneEntries
from duokv.engine.session import Session
from duokv.kernels.reference import window_positions
from duokv.kernels.rows import row_tiled


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows [first, end) of one session, at `at` in the step's rows."""

    session: Session
    first: int
    end: int
    at: slice


@dataclass(frozen=True, slots=True)
class RowBatch:
    """The rows of a step that go through a layer: n in all.

    runs: one per session that computes rows, in order. positions: int64 [n].
    window_index: int64 [n, window], what each row sees in `window_latents` of the step, -1 for nothing.
    """

    runs: tuple[Run, ...]
    positions: Tensor
    window_index: Tensor

    @classmethod
    def of(cls, spans: Sequence[tuple[Session, int, int]], floors: Sequence[int], window: int) -> RowBatch:
        """Lay out rows [first, end) of each session, whose windows see nothing below its floor.

        Latents come in this order: per session the `window - 1` rows before `session.computed`, then all the batch's.
        """
        runs, positions, index = [], [], []
        kept = window - 1
        total = 0
        for place, ((session, first, end), floor) in enumerate(zip(spans, floors, strict=True)):
            own = torch.arange(first, end)
            seen = window_positions(own, floor=floor, window=window)
            new = seen + (len(spans) * kept + total - first)
            old = seen + (place * kept + kept - session.computed)
            at = torch.where(seen < session.computed, old, new)
            runs.append(Run(session, first, end, slice(total, total + len(own))))
            positions.append(own)
            index.append(at.masked_fill_(seen < 0, -1))
            total += len(own)
        return cls(tuple(runs), torch.cat(positions), torch.cat(index))


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What attention needs of n rows, fp32. query [n, heads, head_dim]; latent [n, head_dim]; index as `IndexQuery`."""

    query: Tensor
    latent: Tensor
    index: IndexQuery | None


def kept_rows(sessions: Sequence[Session], window: int) -> Tensor:
    """Return the `window - 1` ring rows before each session's next one: uint8 [layers, all of them, row_bytes].

    Rows of positions that were never there come too, whatever they hold; the index leads around them.
    """
    gathered = []
    for session in sessions:
        before = torch.arange(session.computed - (window - 1), session.computed) % session.ring.shape[1]
        gathered.append(session.ring[:, before])
    return torch.cat(gathered, dim=1)


def look_back(runs: Sequence[Run]) -> Tensor:
    """Return the token ids that n-grams of each row read: int64 [n, LOOK_BACK + 1], -1 before the text's start."""
    grams = []
    for run in runs:
        first = run.first - LOOK_BACK
        ids = torch.tensor([-1] * max(-first, 0) + run.session.tokens[max(first, 0) : run.end])
        grams.append(ids.unfold(0, LOOK_BACK + 1, 1))
    return torch.cat(grams)


def add_ngrams(model: Model, layer: int, hidden: Tensor, grams: Tensor) -> Tensor:
    """Return the residual stream [n, hidden] with `layer`'s n-grams added."""
    return row_tiled(lambda hidden, grams: hidden + model.engram_rows(layer, hidden, grams), hidden, grams)


def layer_inputs(model: Model, layer: int, hidden: Tensor, positions: Tensor) -> LayerInputs:
    """Project rows [n, hidden] of the residual stream at `positions` [n] for `layer`'s attention."""
    c = model.config
    widths = [c.heads * c.head_dim, c.head_dim]
    source = layer in c.index_sources
    if source:
        widths += [c.index_heads * c.index_dim, c.index_heads]

    def project(hidden: Tensor, positions: Tensor) -> Tensor:
        rows = model.qkv_rows(layer, hidden, positions)
        parts = [rows.query.flatten(1), rows.latent]
        if source:
            index = model.index_q(layer, rows, positions)
            parts += [index.query.flatten(1), index.weight]
        return torch.cat([part.float() for part in parts], dim=-1)

    query, latent, *index = torch.split(row_tiled(project, hidden, positions), widths, dim=-1)
    scored = IndexQuery(torch.unflatten(index[0], -1, (c.index_heads, c.index_dim)), index[1]) if index else None
    return LayerInputs(torch.unflatten(query, -1, (c.heads, c.head_dim)), latent, scored)


def compressor_inputs(model: Model, layer: int, hidden: Tensor) -> Tensor:
    """Return `Model.plane_rows` of rows [n, hidden] of the residual stream, fp32 [n, width]."""
    return row_tiled(lambda hidden: model.plane_rows(layer, hidden).float(), hidden)


def compress(model: Model, layer: int, rows: Tensor, entries: Tensor) -> PlaneEntries:
    """Make entries [m] of their tokens' compressor inputs [m, ratio, width]; fp32."""

    def make(rows: Tensor, entries: Tensor) -> Tensor:
        return torch.cat([part.float() for part in model.compress(layer, rows, entries)], dim=-1)

    widths = [model.config.head_dim, model.config.index_dim]
    latent, index = torch.split(row_tiled(make, rows, entries), widths, dim=-1)
    return PlaneEntries(latent, index)


def layer_outputs(model: Model, layer: int, hidden: Tensor, attended: Tensor, positions: Tensor) -> Tensor:
    """Return the residual stream [n, hidden] after `layer`, given attention's result [n, heads, head_dim]."""

    def finish(hidden: Tensor, attended: Tensor, positions: Tensor) -> Tensor:
        hidden = hidden + model.output_rows(layer, attended, positions)
        return hidden + model.ffn_rows(layer, hidden)

    return row_tiled(finish, hidden, attended, positions)


def embed(model: Model, runs: Sequence[Run]) -> Tensor:
    """Return the residual stream [n, hidden] that the runs' rows enter the first layer with."""
    return model.embed_rows(torch.tensor([token for run in runs for token in run.session.tokens[run.first : run.end]]))
