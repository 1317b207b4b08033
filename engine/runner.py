"""Executes steps: rows of any sessions, in one ragged batch, over paged Block KV and private rings.

A row's result does not depend on the steps, chunks and batches it and its neighbours are computed in, bit for bit:
pieces run on tiles of fixed shape, attention always gathers a full window and a full top-k, and what is attended to is
always the decoded record, whether it was restored, computed earlier or is the step's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from duokv.engine import rows as row
from duokv.engine.model import IndexQuery, Model
from duokv.engine.rows import RowBatch, Run
from duokv.engine.session import Session, ring_geometry
from duokv.engine.slots import BlockSlots, PlaneSlots
from duokv.kernels.formats import decode, encode
from duokv.kernels.reference import attend, select_entries
from duokv.kernels.rows import row_tiled
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.geometry import ROLLBACK_TOKENS
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import RingGeometry, pack_state, usable

Truncation = Literal["off", "mask", "compact"]
"""What decoder layers do with rows below a plan's decoder_start: compute and show them, compute and mask, skip."""


@dataclass(frozen=True, slots=True)
class Work:
    """Compute rows [session.computed, end). logits: return those of row end - 1."""

    session: Session
    end: int
    logits: bool = False


@dataclass(frozen=True, slots=True)
class BoundaryState:
    """The SWA state at position `end`, a multiple of 128: data uint8 [swa_bytes], a copy.

    Every row of its window was computed or restored; whether they may be kept is for `replay.usable` to say.
    """

    end: int
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StepResult:
    """By work: logits fp32 [vocab_size] where asked, and the states of the boundaries crossed, ascending.

    rows, decoder_rows: rows that went through the encoder and through the decoder layers.
    """

    logits: list[Tensor | None]
    states: list[list[BoundaryState]]
    rows: int
    decoder_rows: int


@dataclass(frozen=True, slots=True)
class _Selection:
    """Entries attended to: latents fp32 [u, head_dim], and each row's choice of them [n, top_k], -1 for none."""

    latents: Tensor
    index: Tensor


class Runner:
    """Runs one model over one set of slots. Not thread-safe: one step at a time.

    While a step runs, torch uses one thread of its own, whatever it is set to.

    truncation: see `Truncation`. "off" equals a run without truncation only for plans that start at 0: others have no
        encoder outputs below their start.
    """

    def __init__(self, model: Model, slots: BlockSlots, *, truncation: Truncation = "compact") -> None:
        if truncation not in get_args(Truncation):
            raise UsageError(f"truncation {truncation!r} is unknown; {nearest(truncation, get_args(Truncation))}")
        self._model = model
        self._truncation = truncation
        self._planes = {owner: PlaneSlots(model.config, owner, slots) for owner in model.config.table.owners}
        self._geometry = ring_geometry(model.config)

    def step(self, works: Sequence[Work]) -> StepResult:
        """Compute every work's rows, write their entries, rings and open entries, and advance the sessions.

        Entries of adopted blocks are never written. UsageError, with nothing changed, for a session twice, and for a
        work without rows, beyond its tokens, slots or the model's positions, or with logits of a row that no decoder
        layer computes.
        """
        for work in works:
            self._check(work)
        if len({id(work.session) for work in works}) < len(works):
            raise UsageError("step: a session is in it twice; give its rows as one work")
        if not works:
            return StepResult([], [], 0, 0)
        with _one_thread(), torch.inference_mode():
            return _Step(self._model, self._planes, self._truncation, works).run(self._geometry)

    def _check(self, work: Work) -> None:
        session, end = work.session, work.end
        room = min(len(session.tokens), len(session.slots) * BLOCK_TOKENS, len(self._model.rope))
        if not session.computed < end <= room:
            raise UsageError(
                f"step to row {end}: the session is at {session.computed} of {len(session.tokens)} tokens "
                f"with {len(session.slots)} slots, the model's positions end at {len(self._model.rope)}; "
                "end after the first and within the others"
            )
        if work.logits and end - 1 < _decoder_floor(session, self._truncation):
            raise UsageError(
                f"logits of row {end - 1}: decoder layers start at {session.plan.decoder_start}; ask for a later row"
            )


class _Step:
    """One step: its rows in the encoder and in the decoder layers, and what it will leave in the sessions."""

    def __init__(
        self, model: Model, planes: dict[int, PlaneSlots], truncation: Truncation, works: Sequence[Work]
    ) -> None:
        self._model = model
        self._planes = planes
        self._works = works
        window = model.config.window
        self._sessions = [work.session for work in works]
        floors = [_decoder_floor(session, truncation) for session in self._sessions]
        encoder, decoder = [], []
        for work, floor in zip(works, floors, strict=True):
            first = work.session.computed
            encoder.append((work.session, first, work.end))
            skipped = min(max(first, floor), work.end)
            decoder.append((work.session, first if truncation == "mask" else skipped, work.end))
        self._encoder = RowBatch.of(encoder, [session.plan.floor for session in self._sessions], window)
        self._decoder = RowBatch.of(decoder, floors, window)
        self._recent: list[dict[int, Tensor]] = [{} for _ in works]

    def run(self, geometry: RingGeometry) -> StepResult:
        """Compute the rows and settle the sessions."""
        model, c = self._model, self._model.config
        batch = self._encoder
        kept = decode(row.kept_rows(self._sessions, c.window), c.window_format, torch.float32)
        grams = row.look_back(batch.runs)
        hidden = row.embed(model, batch.runs)
        selection: _Selection | None = None
        records: list[Tensor] = []
        for layer in range(c.layers):
            if layer in c.engram_layers:
                hidden = row.add_ngrams(model, layer, hidden, grams)
            if layer in self._planes:
                self._write_plane(layer, hidden, batch)
            if layer == c.encoder_layers:
                going_on = self._decoder_rows()
                hidden, grams, batch = hidden[going_on], grams[going_on], self._decoder
                if not len(going_on):
                    break
            inputs = row.layer_inputs(model, layer, hidden, batch.positions)
            if inputs.index is not None:
                selection = self._select(layer, inputs.index, batch)
            records.append(encode(inputs.latent, c.window_format))
            window = torch.cat([kept[layer], decode(records[-1], c.window_format, torch.float32)])
            attended = self._attend(layer, inputs.query, window, batch, selection)
            hidden = row.layer_outputs(model, layer, hidden, attended, batch.positions)
        states = self._settle(geometry, records)
        return StepResult(self._logits(hidden), states, len(self._encoder.positions), len(self._decoder.positions))

    def _decoder_rows(self) -> Tensor:
        """Return which of the encoder's rows go on into the decoder layers."""
        pairs = zip(self._encoder.runs, self._decoder.runs, strict=True)
        return torch.cat([torch.arange(run.at.stop - (on.end - on.first), run.at.stop) for run, on in pairs])

    def _write_plane(self, layer: int, hidden: Tensor, batch: RowBatch) -> None:
        """Store `layer`'s entries that the step completes, and remember the rows of those it leaves open."""
        plane = self._planes[layer]
        inputs = row.compressor_inputs(self._model, layer, hidden)
        rows, entries, places = [], [], []
        for run, recent in zip(batch.runs, self._recent, strict=True):
            before = run.session.recent.get(layer)
            held = inputs[run.at] if before is None else torch.cat([before, inputs[run.at]])
            own = _completed(run, plane.ratio)
            if own:
                origin = run.end - len(held)
                rows.append(held[own.start * plane.ratio - origin : own.stop * plane.ratio - origin])
                entries.append(torch.arange(own.start, own.stop))
                places.append(plane.places(run.session.slots, entries[-1]))
            if plane.ratio > 1:
                recent[layer] = held[-(ROLLBACK_TOKENS + plane.ratio - 1) :].clone()
        if rows:
            grouped = torch.unflatten(torch.cat(rows), 0, (-1, plane.ratio))
            plane.write(torch.cat(places), row.compress(self._model, layer, grouped, torch.cat(entries)))

    def _select(self, layer: int, query: IndexQuery, batch: RowBatch) -> _Selection:
        """Choose each row's entries of the plane that `layer` reads."""
        owner = self._model.config.plane_of(layer)
        assert owner is not None, f"layer {layer} selects entries and reads no plane"
        plane = self._planes[owner]
        chosen = []
        for run in batch.runs:
            if run.first == run.end:
                continue
            table = run.session.slots[: -(-run.end // BLOCK_TOKENS)]
            visible = (batch.positions[run.at] + 1) // plane.ratio
            keys = plane.index_keys(table)
            best = select_entries(query.query[run.at], keys, query.weight[run.at], visible, k=self._model.config.top_k)
            chosen.append(plane.places(table, best.clamp(min=0)).masked_fill_(best < 0, -1))
        places = torch.cat(chosen)
        used, index = torch.unique(places, return_inverse=True)
        return _Selection(plane.latents(used.clamp(min=0)), index.masked_fill(places < 0, -1))

    def _attend(
        self, layer: int, query: Tensor, window: Tensor, batch: RowBatch, selection: _Selection | None
    ) -> Tensor:
        read = selection if self._model.config.plane_of(layer) is not None else None
        return attend(
            query.unsqueeze(0),
            window,
            batch.window_index.unsqueeze(0),
            self._model.sink(layer),
            scale=self._model.config.head_dim**-0.5,
            entries=None if read is None else read.latents,
            entry_index=None if read is None else read.index.unsqueeze(0),
        ).out.squeeze(0)

    def _logits(self, hidden: Tensor) -> list[Tensor | None]:
        asked = [run.at.stop - 1 for work, run in zip(self._works, self._decoder.runs, strict=True) if work.logits]
        if not asked:
            return [None] * len(self._works)
        made = iter(row_tiled(self._model.logits, hidden[asked]))
        return [next(made) if work.logits else None for work in self._works]

    def _settle(self, geometry: RingGeometry, records: list[Tensor]) -> list[list[BoundaryState]]:
        """Cut the states of boundaries crossed, then bring every session up to the end of its work."""
        encoder = torch.stack(records[: geometry.layers])
        decoder = torch.stack(records[geometry.layers :]) if len(records) > geometry.layers else None
        states = []
        for run, on, recent in zip(self._encoder.runs, self._decoder.runs, self._recent, strict=True):
            session = run.session
            states.append(_cut(geometry, run, encoder[:, run.at]))
            _fill(session.ring[: geometry.layers], run, encoder[:, run.at])
            if decoder is not None:
                _fill(session.ring[geometry.layers :], on, decoder[:, on.at])
            session.advance(run.end, recent)
        return states


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use the calling thread only, whatever it is set to: a tile of rows is too little to divide.

    With two threads on two busy cores, most of a step was waiting for the other thread: 18 s of CPU instead of 3.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _decoder_floor(session: Session, truncation: Truncation) -> int:
    return session.plan.start if truncation == "off" else session.plan.decoder_start


def _completed(run: Run, ratio: int) -> range:
    """Return the entries whose last token is one of the run's rows and not adopted."""
    first = max(run.session.plan.write_floor, run.first - run.first % ratio)
    return range(first // ratio, run.end // ratio)


def _cut(geometry: RingGeometry, run: Run, rows: Tensor) -> list[BoundaryState]:
    """Cut the states at the boundaries in (first, end], before the ring moves on."""
    ring = run.session.ring[: geometry.layers].numpy()
    states = []
    for end in range((run.first // BLOCK_TOKENS + 1) * BLOCK_TOKENS, run.end + 1, BLOCK_TOKENS):
        held_from = run.session.held_from
        if usable(end, held_from):
            state = pack_state(
                geometry, ring, ring_end=run.first, boundary=end, valid_from=held_from, rows=rows.numpy()
            )
            states.append(BoundaryState(end, state.reshape(-1)))
    return states


def _fill(ring: Tensor, run: Run, rows: Tensor) -> None:
    """Write the run's rows [layers, n, row_bytes] into a ring, those that fit."""
    slots = ring.shape[1]
    first = max(run.first, run.end - slots)
    ring[:, torch.arange(first, run.end) % slots] = rows[:, first - run.first :]
