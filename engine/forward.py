"""The plain forward pass over a whole text: what the engine must equal, bit for bit.

No chunks, no slots, no rings: every layer computes all its rows at once, from the same tiles as the engine's. A pass
may start late, on what an earlier one made; that is what a replay is, by definition.
"""

from __future__ import annotations

from collections.abc import Mapping
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

Planes = Mapping[int, PlaneEntries]
"""Per owner, a plane's entries as stored, from entry 0 on."""


class ForwardPass(NamedTuple):
    """What rows [start, L) of a text come to.

    logits: [L - decoder_start, vocab_size], fp32. windows: per layer, its rows' latents as stored, [rows, head_dim];
    rows below `decoder_start` are missing in decoder layers. planes: adopted entries and the pass's own after them.
    encoded: [L - start, hidden], fp32, what the encoder layers made of the rows.
    """

    logits: Tensor
    windows: list[Tensor]
    planes: dict[int, PlaneEntries]
    encoded: Tensor


def forward(
    model: Model, tokens: Tensor, *, start: int = 0, decoder_start: int = 0, adopted: Planes | None = None,
    adopted_tokens: int = 0, encoded_before: Tensor | None = None,
) -> ForwardPass:  # fmt: skip
    """Run rows [start, L) of token ids [L] through the encoder layers, and those from `decoder_start` on through all.

    Windows hold no rows below these starts. Planes begin with the entries of the first `adopted_tokens` tokens, a
    multiple of 128 and at least `start`, taken from `adopted`; the pass's own rows below it make none.
    encoded_before: `encoded` of rows [0, start) of another pass, for decoder layers that begin below `start`.

    Thread-safe, and independent of the number of threads torch uses.
    """
    c = model.config
    positions = torch.arange(start, len(tokens))
    grams = functional.pad(tokens, (LOOK_BACK, 0), value=-1).unfold(0, LOOK_BACK + 1, 1)
    hidden = encoded = model.embed_rows(tokens[start:])
    windows: list[Tensor] = []
    planes: dict[int, PlaneEntries] = {}
    selection: Tensor | None = None
    for layer in range(c.layers):
        if layer in c.engram_layers:
            hidden = add_ngrams(model, layer, hidden, grams[positions])
        if layer in c.table.owners:
            held = None if adopted is None else adopted[layer]
            planes[layer] = _plane(model, layer, hidden, start, held, adopted_tokens)
        if layer == c.encoder_layers:
            encoded = hidden
            before = hidden[:0] if encoded_before is None else encoded_before[decoder_start:start]
            hidden = torch.cat([before, hidden[max(decoder_start - start, 0) :]])
            positions = torch.arange(len(tokens) - len(hidden), len(tokens))
        rows = layer_inputs(model, layer, hidden, positions)
        windows.append(fake_quant(rows.latent, c.window_format))
        owner = c.plane_of(layer)
        plane = None if owner is None else planes[owner]
        if plane is not None and rows.index is not None:
            visible = (positions + 1) // c.table.ratios[layer]
            selection = select_entries(rows.index.query, plane.index_k, rows.index.weight, visible, k=c.top_k)
        attended = _attend(model, layer, rows, windows[layer], positions, plane, selection)
        hidden = layer_outputs(model, layer, hidden, attended, positions)
    return ForwardPass(row_tiled(model.logits, hidden), windows, planes, encoded)


def _plane(
    model: Model, layer: int, hidden: Tensor, start: int, adopted: PlaneEntries | None, adopted_tokens: int
) -> PlaneEntries:
    """Return the adopted entries and, after them, those of all whole groups of rows [adopted_tokens, L), as stored."""
    c = model.config
    ratio = c.table.ratios[layer]
    before = adopted_tokens // ratio
    inputs = compressor_inputs(model, layer, hidden)[max(adopted_tokens - start, 0) :]
    count = len(inputs) // ratio
    rows = torch.unflatten(inputs[: count * ratio], 0, (count, ratio))
    made = compress(model, layer, rows, torch.arange(before, before + count))
    own = PlaneEntries(fake_quant(made.latent, c.latent_format), fake_quant(made.index_k, c.index_format))
    if adopted is None:
        return own
    return PlaneEntries(
        torch.cat([adopted.latent[:before], own.latent]), torch.cat([adopted.index_k[:before], own.index_k])
    )


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
