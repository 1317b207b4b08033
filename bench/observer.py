"""What a report needs to know of a simulated run, collected request by request at little cost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duokv.bench.cache_hit import Served
from duokv.bench.workload import Run
from duokv.kvstore.keys import BLOCK_TOKENS

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising step function: at `seconds[i]` it becomes `share[i]`, before the first it is 0. float64 [n] each."""

    seconds: Floats
    share: Floats

    @classmethod
    def of(cls, gaps_s: Floats, weights: Floats, total: float) -> Curve:
        """The share of `total` whose gap is at most so long; infinite gaps are never reached."""
        finite = np.isfinite(gaps_s)
        gaps, at = np.unique(gaps_s[finite], return_inverse=True)
        sums = np.bincount(at, weights=weights[finite], minlength=len(gaps))
        return cls(gaps, np.cumsum(sums) / total if total else np.zeros(len(gaps)))

    def sampled(self, seconds: Floats) -> Floats:
        """Its values at float64 [m] places."""
        return np.append(0.0, self.share)[np.searchsorted(self.seconds, seconds, side="right")]

    def at(self, seconds: float) -> float:
        """Its value at one place."""
        return float(self.sampled(np.array([seconds]))[0])


@dataclass(frozen=True, slots=True)
class Windows:
    """A run cut into equal spans of time. Seconds on the trace's clock; rates NaN where no request came; float64 [n].

    `starts_s` has one more entry, the end of the last window.
    """

    starts_s: Floats
    input_tokens: Floats
    hit_rate: Floats


class Observer:
    """Collects what the report draws: call it with every `Served` of a run, in order. Not thread-safe.

    Takes 16 bytes a chain id and about 60 a request.
    """

    def __init__(self) -> None:
        self._touched = np.empty(0)
        self._ended = np.empty(0)
        self._t = array("d")
        self._input = array("q")
        self._hit = array("q")
        self._gaps = array("d")
        self._gap_blocks = array("q")
        self._tail_gaps = array("d")
        self._end_gaps = array("d")

    def __call__(self, served: Served) -> None:
        """Note one request."""
        request = served.request
        self._t.append(request.t)
        self._input.append(request.input_tokens)
        self._hit.append(served.hit_blocks * BLOCK_TOKENS)
        if not request.runs:
            return
        ids = _ids(request.runs)
        self._grow(max(first + count for first, count in request.runs))
        touched = self._touched[ids]
        # Every use covers a prefix, so the last uses along a prompt form a few steps: note steps, not blocks.
        lasts = np.append(np.flatnonzero(touched[1:] != touched[:-1]), len(ids) - 1)
        self._gaps.extend((request.t - touched[lasts]).tolist())
        self._gap_blocks.extend(np.diff(lasts, prepend=-1).tolist())
        if served.hit_blocks:
            tail = ids[served.hit_blocks - 1]
            self._tail_gaps.append(request.t - self._touched[tail])
            self._end_gaps.append(request.t - self._ended[tail])
        self._touched[ids] = request.t
        self._ended[ids[-1]] = request.t

    @property
    def span_s(self) -> float:
        """From the first arrival to the last, in seconds."""
        return self._t[-1] - self._t[0] if self._t else 0.0

    def reuse(self) -> Curve:
        """The share of all input tokens in blocks that an earlier prompt used, and used at most so long ago.

        Since uses cover prefixes, its value at T is the token hit rate under an idle expiry of T and no other limit.
        """
        return Curve.of(_floats(self._gaps), BLOCK_TOKENS * _floats(self._gap_blocks), float(sum(self._input)))

    def swa_every_block(self) -> Curve:
        """The share of requests with a prefix hit whose hit tail was used at most so long ago.

        It is what an SWA tier without a bound of bytes finds with that expiry, if states are kept at every block.
        """
        return Curve.of(_floats(self._tail_gaps), np.ones(len(self._tail_gaps)), len(self._tail_gaps))

    def swa_prompt_end(self) -> Curve:
        """The same if states are kept at the ends of prompts only: prompts whose last block is this hit's tail."""
        return Curve.of(_floats(self._end_gaps), np.ones(len(self._end_gaps)), len(self._end_gaps))

    def windows(self, count: int) -> Windows:
        """Cut the run into `count` windows."""
        t, tokens, hits = _floats(self._t), _floats(self._input), _floats(self._hit)
        first = float(t[0]) if len(t) else 0.0
        starts = np.linspace(first, first + max(self.span_s, 1.0), count + 1)
        at = np.clip(np.searchsorted(starts, t, side="right") - 1, 0, count - 1)
        tokens_in = np.bincount(at, weights=tokens, minlength=count).astype(np.float64, copy=False)
        hits_in = np.bincount(at, weights=hits, minlength=count)
        rate = np.divide(hits_in, tokens_in, out=np.full(count, np.nan), where=tokens_in > 0)
        return Windows(starts, tokens_in, rate)

    def _grow(self, ids: int) -> None:
        have = len(self._touched)
        if ids <= have:
            return
        room = np.full(max(ids, 2 * have) - have, -np.inf)
        self._touched = np.concatenate([self._touched, room])
        self._ended = np.concatenate([self._ended, room])


def _ids(runs: Sequence[Run]) -> npt.NDArray[np.int64]:
    table = np.array(runs, np.int64)
    counts = table[:, 1]
    ends = counts.cumsum()
    return np.arange(int(ends[-1])) + np.repeat(table[:, 0] - (ends - counts), counts)


def _floats(values: array[float] | array[int]) -> Floats:
    return np.array(values, np.float64)
