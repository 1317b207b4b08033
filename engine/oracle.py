"""What a replay must come to, by definition: two streams, every row at once, nothing paged, chunked or kept in rings.

The first stream is the unclipped forward pass. Of it come the entries of the adopted blocks, [0, write_floor). The
second starts at the plan's start, its windows clipped at the plan's floors. It reads the first stream's entries and
makes its own from write_floor on. No single masked pass over the whole text is the same: rows between start and
write_floor exist in both streams, with different values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from duokv.engine import rows as row
from duokv.engine.config import LOOK_BACK
from duokv.engine.forward import ColdRun, forward
from duokv.engine.model import Model, PlaneEntries
from duokv.engine.rows import LayerInputs
from duokv.kernels.formats import fake_quant
from duokv.kernels.reference import attend, select_entries, window_positions
from duokv.kernels.rows import row_tiled
from duokv.kvstore.errors import UsageError
from duokv.replay import Reason, ReplayPlan


def replayed(model: Model, tokens: Tensor, plan: ReplayPlan) -> ColdRun:
    """Return what a request of token ids [L] comes to under `plan`, which restores no SWA state.

    As `forward` does, but for rows [plan.start, L): windows hold no others, and planes begin with the adopted entries.
    Equals a `Runner`'s result bit for bit. UsageError for a plan that restores a state.
    """
    if plan.reason is Reason.SWA_HIT:
        raise UsageError("oracle: the plan restores a state, which equals a cold run; compare with `forward`")
    unclipped = forward(model, tokens, decoder_start=plan.decoder_start)
    return _clipped(model, tokens, plan, unclipped.planes) if plan.start else unclipped


def _clipped(model: Model, tokens: Tensor, plan: ReplayPlan, adopted: Mapping[int, PlaneEntries]) -> ColdRun:
    c = model.config
    positions = torch.arange(plan.start, len(tokens))
    grams = torch.stack([tokens[p - LOOK_BACK : p + 1] for p in positions.tolist()])
    hidden = model.embed_rows(tokens[positions])
    windows: list[Tensor] = []
    planes: dict[int, PlaneEntries] = {}
    selection: Tensor | None = None
    for layer in range(c.layers):
        if layer in c.engram_layers:
            hidden = row.add_ngrams(model, layer, hidden, grams)
        if layer in c.table.owners:
            planes[layer] = _plane(model, layer, hidden, plan, adopted[layer])
        if layer == c.encoder_layers:
            kept = positions >= plan.decoder_start
            hidden, positions, grams = hidden[kept], positions[kept], grams[kept]
        inputs = row.layer_inputs(model, layer, hidden, positions)
        windows.append(fake_quant(inputs.latent, c.window_format))
        owner = c.plane_of(layer)
        if owner is not None and inputs.index is not None:
            visible = (positions + 1) // c.table.ratios[layer]
            keys = planes[owner].index_k
            selection = select_entries(inputs.index.query, keys, inputs.index.weight, visible, k=c.top_k)
        plane = None if owner is None else planes[owner]
        attended = _attend(model, layer, inputs, windows[layer], positions, plane, selection)
        hidden = row.layer_outputs(model, layer, hidden, attended, positions)
    return ColdRun(row_tiled(model.logits, hidden), windows, planes)


def _plane(model: Model, layer: int, hidden: Tensor, plan: ReplayPlan, adopted: PlaneEntries) -> PlaneEntries:
    """Return the adopted entries and, after them, those made of rows from write_floor on."""
    c = model.config
    ratio = c.table.ratios[layer]
    before = plan.write_floor // ratio
    rows = row.compressor_inputs(model, layer, hidden)[plan.write_floor - plan.start :]
    count = len(rows) // ratio
    numbers = torch.arange(before, before + count)
    made = row.compress(model, layer, torch.unflatten(rows[: count * ratio], 0, (count, ratio)), numbers)
    latent = torch.cat([adopted.latent[:before], fake_quant(made.latent, c.latent_format)])
    return PlaneEntries(latent, torch.cat([adopted.index_k[:before], fake_quant(made.index_k, c.index_format)]))


def _attend(
    model: Model,
    layer: int,
    inputs: LayerInputs,
    window: Tensor,
    positions: Tensor,
    plane: PlaneEntries | None,
    selection: Tensor | None,
) -> Tensor:
    # The rows there are begin where the plan's floor is, in encoder and decoder layers.
    first = int(positions[0])
    seen = window_positions(positions, floor=first, window=model.config.window)
    return attend(
        inputs.query.unsqueeze(0),
        window,
        torch.where(seen < 0, -1, seen - first).unsqueeze(0),
        model.sink(layer),
        scale=model.config.head_dim**-0.5,
        entries=None if plane is None else plane.latent,
        entry_index=None if plane is None or selection is None else selection.unsqueeze(0),
    ).out.squeeze(0)
