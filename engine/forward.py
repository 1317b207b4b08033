"""The plain forward pass over a whole text: what the engine must equal, bit for bit, when it starts from nothing.

No cache, no chunks, no slots: every layer computes all its rows at once, from the same tiles as the engine's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import LOOK_BACK
from duokv.engine.model import Model, PlaneEntries
from duokv.engine.rows import LayerInputs, add_ngrams, compress, compressor_inputs, layer_inputs, layer_outputs
from duokv.kernels.formats import fake_quant
from duokv.kernels.reference import attend, select_entries, window_positions
from duokv.kernels.rows import row_tiled


class ColdRun(NamedTuple):
    """What a text of L tokens comes to.

    logits: [L - decoder_start, vocab_size], fp32. windows: per layer, its rows' latents as stored, [rows, head_dim];
    rows below `decoder_start` are missing in decoder layers. planes: per owner, its entries as stored.
    """

    logits: Tensor
    windows: list[Tensor]
    planes: dict[int, PlaneEntries]


def forward(model: Model, tokens: Tensor, *, decoder_start: int = 0) -> ColdRun:
    """Run token ids [L] through all layers; decoder layers compute only rows from `decoder_start` on.

    Thread-safe, and independent of the number of threads torch uses.
    """
    c = model.config
    positions = torch.arange(tokens.shape[0])
    grams = functional.pad(tokens, (LOOK_BACK, 0), value=-1).unfold(0, LOOK_BACK + 1, 1)
    hidden = model.embed_rows(tokens)
    windows: list[Tensor] = []
    planes: dict[int, PlaneEntries] = {}
    selection: Tensor | None = None
    for layer in range(c.layers):
        if layer in c.engram_layers:
            hidden = add_ngrams(model, layer, hidden, grams[positions])
        if layer in c.table.owners:
            planes[layer] = _plane(model, layer, hidden)
        if layer == c.encoder_layers:
            hidden, positions = hidden[decoder_start:], positions[decoder_start:]
        rows = layer_inputs(model, layer, hidden, positions)
        windows.append(fake_quant(rows.latent, c.window_format))
        owner = c.plane_of(layer)
        plane = None if owner is None else planes[owner]
        if plane is not None and rows.index is not None:
            visible = (positions + 1) // c.table.ratios[layer]
            selection = select_entries(rows.index.query, plane.index_k, rows.index.weight, visible, k=c.top_k)
        attended = _attend(model, layer, rows, windows[layer], positions, plane, selection)
        hidden = layer_outputs(model, layer, hidden, attended, positions)
    return ColdRun(row_tiled(model.logits, hidden), windows, planes)


def _plane(model: Model, layer: int, hidden: Tensor) -> PlaneEntries:
    """Return the entries of all whole groups of rows, as stored."""
    c = model.config
    ratio = c.table.ratios[layer]
    count = hidden.shape[0] // ratio
    rows = torch.unflatten(compressor_inputs(model, layer, hidden)[: count * ratio], 0, (count, ratio))
    latent, index = compress(model, layer, rows, torch.arange(count))
    return PlaneEntries(fake_quant(latent, c.latent_format), fake_quant(index, c.index_format))


def _attend(
    model: Model,
    layer: int,
    rows: LayerInputs,
    window: Tensor,
    positions: Tensor,
    plane: PlaneEntries | None,
    selection: Tensor | None,
) -> Tensor:
    first = int(positions[0])
    seen = window_positions(positions, floor=first, window=model.config.window)
    out = attend(
        rows.query.unsqueeze(0),
        window,
        torch.where(seen < 0, -1, seen - first).unsqueeze(0),
        model.sink(layer),
        scale=model.config.head_dim**-0.5,
        entries=None if plane is None else plane.latent,
        entry_index=None if plane is None or selection is None else selection.unsqueeze(0),
    ).out
    return out.squeeze(0)
