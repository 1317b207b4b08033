"""What a cache without any of our code would hit on a trace: block by block, from the rules published with the traces.

The published figures follow from these rules, to the last digit:

- A lookup walks a prompt's listed blocks from the first to the first absent one. Nothing is capped at the prompt's last
  token: no prompt of the four traces is a whole number of blocks and all hit.
- All blocks of the prompt, hit or not, also those behind the first absent one, are touched at its arrival; nothing else
  ever touches a block, in particular not an output.
- Idle expiry T: a block is present iff it was touched at most T seconds ago.
- LRU of C blocks: touched in the order last block to first, so the head of a prompt is younger than its tail; the
  prompt is looked up before it is touched, and what is over C is dropped after.
- Token hit rate: 128 * hit blocks over *all* input tokens, the incomplete last block included.
- SWA, unbounded bytes: of the requests that hit at least one block without any expiry, those whose last hit block was
  touched within the expiry. "Every block": touched by any prompt, as above. "Prompt end": touched only by prompts whose
  last listed block it is; a hit on it does not renew it, and no shorter prefix is tried.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from duokv.bench.workload import TraceRequest
from duokv.kvstore.keys import BLOCK_TOKENS


def block_ids(request: TraceRequest) -> list[int]:
    """The chain ids of the prompt's blocks, in order."""
    return list(chain.from_iterable(range(first, first + count) for first, count in request.runs))


def expiry_hits(requests: Sequence[TraceRequest], expiries_s: Sequence[float]) -> npt.NDArray[np.int64]:
    """Hit blocks by request and idle expiry (math.inf: never), int64 [requests, expiries]."""
    last_use = _never(requests)
    hits = np.zeros((len(requests), len(expiries_s)), np.int64)
    for k, request in enumerate(requests):
        ids = np.array(block_ids(request), np.int64)
        idle = request.t - last_use[ids]
        for j, expiry in enumerate(expiries_s):
            hits[k, j] = _leading(idle <= expiry)
        last_use[ids] = request.t
    return hits


def lru_hits(requests: Sequence[TraceRequest], capacity: int) -> npt.NDArray[np.int64]:
    """Hit blocks by request under an exact LRU of `capacity` blocks, int64 [requests]."""
    hits = np.zeros(len(requests), np.int64)
    cache: OrderedDict[int, None] = OrderedDict()
    for k, request in enumerate(requests):
        ids = block_ids(request)
        hits[k] = next((n for n, block in enumerate(ids) if block not in cache), len(ids))
        for block in reversed(ids):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def token_hit_rate(requests: Sequence[TraceRequest], hits: npt.NDArray[np.int64]) -> float:
    """Tokens of hit blocks over all input tokens, a fraction; `hits` is int64 [requests]."""
    return BLOCK_TOKENS * int(hits.sum()) / sum(request.input_tokens for request in requests)


@dataclass(frozen=True, slots=True)
class TailIdle:
    """Seconds since the last hit block of every request was touched, float64 [requests].

    NaN where nothing was hit, and in `prompt_end` also where no prompt ever ended there.
    """

    every_block: npt.NDArray[np.float64]
    prompt_end: npt.NDArray[np.float64]
    prefix_hits: int

    def rates(self, expiry_s: float) -> tuple[float, float]:
        """Share of the requests with a prefix hit that find their state: kept at every block, at prompt ends."""
        every = int((self.every_block <= expiry_s).sum())
        end = int((self.prompt_end <= expiry_s).sum())
        return every / self.prefix_hits, end / self.prefix_hits


def tail_idle(requests: Sequence[TraceRequest]) -> TailIdle:
    """How long the hit tails had been idle, under both rules of keeping states."""
    last_use, last_end = _never(requests), _never(requests)
    every, end = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    prefix_hits = 0
    for k, request in enumerate(requests):
        ids = np.array(block_ids(request), np.int64)
        hit = _leading(~np.isnan(last_use[ids]))
        if hit:
            tail = ids[hit - 1]
            every[k], end[k] = request.t - last_use[tail], request.t - last_end[tail]
            prefix_hits += 1
        last_use[ids] = request.t
        last_end[ids[-1:]] = request.t
    return TailIdle(every, end, prefix_hits)


def _never(requests: Sequence[TraceRequest]) -> npt.NDArray[np.float64]:
    """A time for every chain id; NaN, which is within no expiry, for "never"."""
    return np.full(max((sum(run) for request in requests for run in request.runs), default=0), np.nan)


def _leading(present: npt.NDArray[np.bool_]) -> int:
    """Number of True before the first False."""
    return len(present) if present.all() else int(present.argmin())
