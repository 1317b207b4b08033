"""What a replay must come to, by definition: two streams, every row at once, nothing paged, chunked or kept in rings.

The first stream is the unclipped forward pass. Of it come the entries of the adopted blocks, [0, write_floor). The
second starts at the plan's start, its windows clipped at the plan's floors. It reads the first stream's entries and
makes its own from write_floor on. No single masked pass over the whole text is the same: rows between start and
write_floor exist in both streams, with different values.
"""

from __future__ import annotations

from torch import Tensor

from duokv.engine.forward import ForwardPass, Planes, forward
from duokv.engine.model import Model
from duokv.kvstore.errors import UsageError
from duokv.replay import Reason, ReplayPlan


def replayed(model: Model, tokens: Tensor, plan: ReplayPlan, *, adopted: Planes | None = None) -> ForwardPass:
    """Return what a request of token ids [L] comes to under `plan`, which restores no SWA state.

    adopted: the planes that its blocks are taken from; None is the unclipped pass over the same text. Equals a
    `Runner`'s result bit for bit. UsageError for a plan that restores a state.
    """
    if plan.reason is Reason.SWA_HIT:
        raise UsageError("oracle: the plan restores a state, which equals a cold run; compare with `forward`")
    if not plan.start:
        return forward(model, tokens, decoder_start=plan.decoder_start)
    if adopted is None:
        adopted = forward(model, tokens[: plan.write_floor], decoder_start=plan.write_floor - 1).planes
    return forward(
        model, tokens, start=plan.start, decoder_start=plan.decoder_start, adopted=adopted,
        adopted_tokens=plan.write_floor,
    )  # fmt: skip
