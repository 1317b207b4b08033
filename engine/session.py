"""One request's private state: its tokens, block table, sliding-window rings and unfinished compressed entries."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from duokv.engine.config import ModelConfig
from duokv.kvstore.errors import UsageError
from duokv.kvstore.geometry import ROLLBACK_TOKENS
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import Reason, ReplayPlan, RingGeometry, unpack_state


def ring_geometry(config: ModelConfig) -> RingGeometry:
    """Return the shape of the model's stored SWA states: the encoder layers' rings."""
    return RingGeometry(
        layers=config.encoder_layers,
        row_bytes=config.window_format.nbytes,
        window=config.window,
        rollback=ROLLBACK_TOKENS,
    )


@dataclass(slots=True, eq=False)
class Session:
    """Made by `begin`, advanced by `Runner.step`. Not thread-safe; sessions share nothing but the slots they hold.

    tokens: prompt and generated ids; the engine appends. slots: block table, a slot per 128 tokens, the last one
    perhaps partly filled; the engine appends.
    computed: next position to compute.
    ring: uint8 [layers, 134, row_bytes], encoder and decoder windows, slot = position mod 134. Rows of positions not
    computed here nor restored are never read.
    held_from: first position whose encoder rows were computed here or restored.
    recent: per owning layer of ratio > 1, the compressor's input for the last rows before `computed`: those of the
    entry an odd cut left open and, for `truncate`, of the entries open up to 6 rows earlier.
    """

    config: ModelConfig
    plan: ReplayPlan
    tokens: list[int]
    slots: list[int]
    ring: Tensor
    computed: int
    held_from: int
    recent: dict[int, Tensor] = field(default_factory=dict)
    _furthest: int = 0

    @classmethod
    def begin(
        cls,
        config: ModelConfig,
        plan: ReplayPlan,
        tokens: list[int],
        *,
        slots: list[int],
        window: memoryview | None = None,
        poison: bool = False,
    ) -> Session:
        """Return a session that has computed nothing yet, its window restored if the plan says so.

        tokens, slots: taken over, not copied; slots cover and hold the adopted blocks, [0, plan.write_floor).
        window: the `swa_bytes` stored at plan.start, copied; given on an SWA hit and only then.
        poison: ring rows that hold nothing are 0xFF instead of 0, for tests.

        UsageError if these do not fit the plan or the model.
        """
        if (window is None) == (plan.reason is Reason.SWA_HIT):
            given = "no SWA state" if window is None else "an SWA state"
            raise UsageError(f"session with {given} on {plan.reason}; give one exactly when the plan restores it")
        if not plan.start <= plan.decoder_start:
            raise UsageError(
                f"session: decoder rows from {plan.decoder_start} lack encoder outputs below {plan.start}; plan anew"
            )
        if len(tokens) <= plan.write_floor or len(slots) * BLOCK_TOKENS < plan.write_floor:
            raise UsageError(
                f"session of {len(tokens)} tokens and {len(slots)} slots cannot adopt {plan.write_floor} tokens; "
                "give the prompt and the blocks of its plan"
            )
        geometry = ring_geometry(config)
        ring = torch.zeros((config.layers, geometry.slots, geometry.row_bytes), dtype=torch.uint8)
        held_from = plan.start
        if window is not None:
            held_from = plan.start - geometry.window
            _restore(geometry, ring[: geometry.layers], window, plan.start)
        if poison:
            empty = torch.ones(ring.shape[:2], dtype=torch.bool)
            empty[: geometry.layers, torch.arange(held_from, plan.start) % geometry.slots] = False
            ring[empty] = 0xFF
        return cls(config, plan, tokens, slots, ring, computed=plan.start, held_from=held_from)

    def advance(self, end: int, recent: dict[int, Tensor]) -> None:
        """Note that rows up to `end` are computed, which leaves the compressors with `recent`; for the runner."""
        self.computed = end
        self.recent = recent
        self._furthest = max(self._furthest, end)

    def truncate(self, accepted: int) -> None:
        """Keep the first `accepted` tokens: what follows was a rejected draft. Slots are left to the caller.

        At most 6 computed rows may go back, as many as the ring has room for beyond the window, none of them adopted or
        before the plan's start. UsageError, with nothing changed, otherwise.
        """
        back = self.computed - accepted
        if back > 0:
            if self._furthest - accepted > ROLLBACK_TOKENS or accepted < max(self.plan.start, self.plan.write_floor):
                raise UsageError(
                    f"session computed to {self._furthest} cannot go back to {accepted}: "
                    f"at most {ROLLBACK_TOKENS} rows and none adopted; begin a new one"
                )
            self.recent = {layer: rows[: max(rows.shape[0] - back, 0)] for layer, rows in self.recent.items()}
            self.computed = accepted
        del self.tokens[accepted:]


def _restore(geometry: RingGeometry, ring: Tensor, window: memoryview, boundary: int) -> None:
    data = np.frombuffer(window, np.uint8)
    if data.size != geometry.state_bytes:
        raise UsageError(f"SWA state of {data.size} bytes is not this model's; give {geometry.state_bytes}")
    state = data.reshape(geometry.layers, geometry.slots, geometry.row_bytes)
    unpack_state(geometry, state, ring.numpy(), boundary=boundary, valid_from=boundary - geometry.window)
