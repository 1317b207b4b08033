"""From a row of logits to a token id: greedy, temperature and top-p, each draw a function of (seed, position) alone.

So a request draws the same tokens whatever batch it is computed in, and again after it was preempted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from duokv.kvstore.errors import UsageError

SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request's output is chosen and when it ends.

    max_tokens: output tokens at most, at least 1. temperature: 0 takes the likeliest token.
    top_p: the draw is among the likeliest tokens that together have this probability.
    seed: in [0, 2**64); None takes a random one. stop: token ids that end the output; the one met is its last token.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise UsageError(f"sampling: max_tokens = {self.max_tokens} asks for no output; give at least 1")
        if not 0.0 <= self.temperature < math.inf:
            raise UsageError(f"sampling: temperature = {self.temperature} is no temperature; give 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"sampling: top_p = {self.top_p} is no probability to draw from; give one in (0, 1]")
        if self.seed is not None and not 0 <= self.seed < 1 << SEED_BITS:
            raise UsageError(f"sampling: seed = {self.seed} is out of range; give one in [0, 2**{SEED_BITS})")


def sample(logits: Tensor, sampling: Sampling, *, seed: int, position: int) -> int:
    """Return the token id at `position`, drawn from logits [vocab] fp32. Pure; equal arguments give equal tokens.

    Ties go to the smaller id. seed: the request's own, used whatever `sampling.seed` says.
    """
    scores = logits.numpy(force=True)
    if sampling.temperature == 0.0:
        return int(scores.argmax())
    scores = scores.astype(np.float64)
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order])
    if sampling.top_p < 1.0:
        mass = mass[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    # A counter-based generator: no state to carry, and no draw depends on how many came before.
    draw = np.random.Generator(np.random.Philox(key=seed, counter=position)).random() * mass[-1]
    return int(order[min(int(np.searchsorted(mass, draw, side="right")), len(mass) - 1)])
