"""Synthetic request streams of any length, calibrated to public traces.

Three kinds: `agent` follows weka_agent (33,825 requests of 526 coding-agent sessions in 8 days), `chat` follows
mooncake_conversation (12,031 requests of one hour), `rag` follows ragpulse (7,106 requests of a week). The numbers
below are measured on them. Mooncake names no sessions: there, one is a subtree below the system prompt's blocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duokv.bench.workload import Run, TraceRequest, head_runs
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.keys import BLOCK_TOKENS

HOUR_S = 3600
DAY_S = 24 * HOUR_S


# The percents at which the traces were measured; the last but one keeps heavy tails from being drawn too heavy.
_PERCENT = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A positive distribution by measured quantiles: `values[i]`, never falling, lies at `percent[i]`."""

    values: tuple[float, ...]
    percent: tuple[float, ...] = _PERCENT

    def at(self, share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The quantiles at shares in [0, 1], log-linear between the measured ones; float64 of the same shape."""
        return np.exp(np.interp(share * 100, self.percent, np.log(self.values)))

    def sample(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        """Draw float64 [n]."""
        return self.at(rng.random(n))

    def counts(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.int64]:
        """Draw whole numbers, int64 [n]."""
        return np.rint(self.sample(rng, n)).astype(np.int64)

    def mean_count(self) -> float:
        """The mean of `counts`, to 1e-3 of itself."""
        steps = 1 << 14
        return float(np.rint(self.at((np.arange(steps) + 0.5) / steps)).mean())


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks at the start of prompts, the same in all sessions; a `dated` part is another one every day."""

    name: str
    blocks: int
    dated: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """How a `share` of the sessions begin: their common parts, and their prompt lengths as a factor of the kind's."""

    share: float
    parts: tuple[Part, ...] = ()
    scale: float = 1.0

    @property
    def blocks(self) -> int:
        """Blocks of all parts."""
        return sum(part.blocks for part in self.parts)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of traffic; lengths in tokens, times in seconds.

    A session of `turns` prompts starts with `first` tokens. A later one adds the answer before it and `growth` more,
    but a share `branches` of them keeps just a fraction `kept` of the prompt before (never less than the opening) and
    adds `rewritten`.
    """

    openings: tuple[Opening, ...]
    turns: Quantiles
    gap_s: Quantiles
    first: Quantiles
    growth: Quantiles
    branches: float
    kept: Quantiles
    rewritten: Quantiles
    output: Quantiles
    # Prompt lengths and growth fall with this power of the session's turns over their median.
    taper: float = 0.0
    # (seconds to the first token, tokens a second): how long a response takes, where the trace says it.
    response: tuple[float, float] | None = None


# Requests an hour over the mean, ragpulse, from its first hour: the only public week with a rhythm. Weka's sessions
# were spread over the week by its publisher and mooncake is a single hour, so both borrow it.
_DAY_CYCLE = (
    *(1.29, 1.43, 1.62, 1.64, 1.51, 1.28, 1.47, 1.56, 1.27, 1.26, 1.34, 1.10),
    *(1.08, 0.36, 0.22, 0.08, 0.07, 0.07, 0.12, 0.36, 0.78, 1.05, 1.50, 1.54),
)
# The hour of that clock at which ragpulse's dated system prompts change: its midnight.
_MIDNIGHT_H = 20

_AGENT = Kind(
    # 43 of the sessions share their first 69-103 blocks with others, in groups of these sizes; the rest share nothing.
    openings=(
        Opening(483 / 526),
        *(Opening(n / 526, (Part(f"tools-{k}", 80),)) for k, n in enumerate((12, 8, 6, 5, 4, 3, 3, 2))),
    ),
    turns=Quantiles((3, 3, 4, 6, 14, 36, 89, 158, 234, 328, 475, 514)),
    # Tool calls below a minute, people above it: 17.8 % of the gaps exceed 60 s, 7.2 % 180 s, 0.4 % one hour.
    gap_s=Quantiles((1, 6, 7, 8, 11, 18, 39, 129, 308, 2121, 19991, 77611)),
    first=Quantiles((6343, 9078, 9977, 11720, 17733, 21626, 93010, 218614, 320298, 567011, 848713, 851858)),
    growth=Quantiles((1, 1, 1, 1, 47, 270, 962, 2922, 5701, 15989, 63102, 234962)),
    # 1.9 % of the prompts lose more than 8 blocks: edited tool lists, compaction, a subagent's fresh context.
    branches=0.0194,
    kept=Quantiles((0.001, 0.001, 0.001, 0.001, 0.076, 0.108, 0.222, 0.487, 0.69, 0.982, 0.991, 0.991)),
    rewritten=Quantiles((524, 1148, 6012, 12446, 24996, 57903, 107374, 217293, 246229, 410731, 580572, 697351)),
    output=Quantiles((1, 63, 92, 107, 140, 221, 439, 923, 1623, 3871, 8073, 15390)),
    # Sessions of 3-15 turns start at 111 K tokens and of over 160 at 37 K, with a mean prompt of 121 K in both.
    taper=0.2,
    # Least squares of `a` over `o`.
    response=(2.7, 72.0),
)

_CHAT = Kind(
    # One system prompt of 512 tokens, on every request but one.
    openings=(Opening(1.0, (Part("system", 4),)),),
    # 69.4 % have one turn, 17.8 two, 6.3 three, ...; seen through one hour, so long conversations are cut.
    turns=Quantiles((1, 1.5, 2.5, 3.5, 4.5, 8, 17, 43), (0, 69.4, 87.1, 93.4, 96.1, 99, 99.9, 100)),
    gap_s=Quantiles((1, 12, 30, 42, 66, 123, 264, 480, 615, 1477, 2639, 3030)),
    first=Quantiles((891, 894, 897, 905, 1336, 5264, 13056, 25559, 38494, 89868, 121160, 126195)),
    growth=Quantiles((1, 1, 1, 1, 9, 26, 371, 4257, 7022, 16703, 37462, 91467)),
    # 14 % of the later prompts lose more than one 512-token id of the trace: an edited or shortened history.
    branches=0.14,
    kept=Quantiles((0.015, 0.031, 0.05, 0.067, 0.108, 0.196, 0.404, 0.627, 0.872, 0.952, 0.989, 0.991)),
    rewritten=Quantiles((10, 370, 1650, 3699, 6993, 9991, 15219, 20602, 26713, 41196, 76105, 94968)),
    output=Quantiles((1, 3, 10, 24, 156, 350, 472, 597, 698, 1119, 2000, 2000)),
)

_RAG = Kind(
    # Five assistants by their shares of the requests; the documents that follow differ every time, also within a
    # session, so that prompts share nothing else. Query rewriting ("rewrite") has short prompts.
    openings=(
        Opening(0.452, (Part("system", 4), Part("campus", 4, dated=True))),
        Opening(0.263, (Part("system", 4), Part("service", 4, dated=True))),
        Opening(0.052, (Part("system", 4), Part("undated", 4))),
        Opening(0.197, (Part("rewrite", 4),), scale=0.38),
        Opening(0.036, (Part("long", 8),), scale=1.33),
    ),
    # 58.8 % of the sessions have one turn, 24.1 two, 9.4 three, 3.8 four, ...
    turns=Quantiles((1, 1.5, 2.5, 3.5, 4.5, 8, 14, 25), (0, 58.8, 82.9, 92.3, 96.1, 99, 99.9, 100)),
    gap_s=Quantiles((1, 6, 11, 15, 23, 40, 89, 300, 1024, 35479, 307890, 524100)),
    first=Quantiles((1488, 1740, 2636, 2771, 2930, 3098, 3262, 3390, 3454, 3592, 4082, 5506)),
    growth=Quantiles((1, 1), (0, 100)),  # never drawn: every later prompt branches
    branches=1.0,
    kept=Quantiles((0.001, 0.001), (0, 100)),
    # Later prompts without their first 8 blocks.
    rewritten=Quantiles((466, 891, 1791, 1987, 2215, 2492, 2867, 3386, 3789, 4561, 5963, 6656)),
    output=Quantiles((7, 36, 66, 83, 131, 234, 385, 563, 670, 891, 1182, 2183)),
)

_KINDS: Mapping[str, Kind] = {"agent": _AGENT, "chat": _CHAT, "rag": _RAG}


def generate(kind: str, *, seed: int, days: float, requests_per_day: float) -> Iterator[TraceRequest]:
    """Yield the requests of `days` days in arrival order, the same ones for the same arguments.

    `kind` is "agent", "chat" or "rag". `requests_per_day` is the long-run mean; sessions start inside the horizon, so
    the first hours of long-session traffic bring fewer. Chain ids are dense and numbered by first appearance; every
    prompt lists all its full blocks. Raises UsageError for an unknown kind or an empty horizon or rate.
    """
    if kind not in _KINDS:
        raise UsageError(f"workload {kind!r}: no such kind; {nearest(kind, _KINDS)}")
    if not (0 < days < math.inf and 0 < requests_per_day < math.inf):
        raise UsageError(f"workload {kind}: {days:g} days of {requests_per_day:g} requests; give numbers above 0")
    return _requests(kind, np.random.default_rng(seed), days * DAY_S, requests_per_day)


def _requests(name: str, rng: np.random.Generator, end: float, requests_per_day: float) -> Iterator[TraceRequest]:
    kind = _KINDS[name]
    per_hour = requests_per_day / kind.turns.mean_count() / 24
    chain = _Chain()
    started = 0
    # Live sessions by the time of their next prompt; the number decides between equal times.
    live: list[tuple[float, int, _Session]] = []
    for hour in range(math.ceil(end / HOUR_S)):
        starts = hour * HOUR_S + HOUR_S * rng.random(rng.poisson(per_hour * _DAY_CYCLE[hour % 24]))
        for session in _sessions(kind, rng, starts):
            heapq.heappush(live, (session.times[0], started, session))
            started += 1
        until = min(end, (hour + 1) * HOUR_S)
        while live and live[0][0] < until:
            _, number, session = live[0]
            yield session.prompt(f"{name}-{number}", chain)
            if session.turn < len(session.times):
                heapq.heapreplace(live, (session.times[session.turn], number, session))
            else:
                heapq.heappop(live)


class _Chain:
    """Numbers new blocks, and remembers the parts that sessions share."""

    def __init__(self) -> None:
        self._next = 0
        self._parts: dict[tuple[str, int], Run] = {}

    def new(self, blocks: int) -> Run:
        run = (self._next, blocks)
        self._next += blocks
        return run

    def part(self, part: Part, t: float) -> Run:
        day = int((t / HOUR_S - _MIDNIGHT_H) // 24) if part.dated else 0
        run = self._parts.get((part.name, day))
        if run is None:
            run = self._parts[part.name, day] = self.new(part.blocks)
        return run


def _joined(runs: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    if runs and sum(runs[-1]) == run[0]:
        return (*runs[:-1], (runs[-1][0], runs[-1][1] + run[1]))
    return (*runs, run)


class _Session:
    """A session and its prompt so far; `times`, `added`, `kept` and `output` have one entry a turn."""

    __slots__ = ("_added", "_kept", "_opening", "_output", "_response", "_runs", "_tokens", "times", "turn")

    def __init__(
        self,
        opening: Opening,
        times: list[float],
        added: list[int],
        kept: list[float],
        output: list[int],
        response: tuple[float, float] | None,
    ) -> None:
        self.times = times
        self.turn = 0
        self._opening = opening
        self._added = added
        self._kept = kept
        self._output = output
        self._response = response
        self._runs: tuple[Run, ...] = ()
        self._tokens = 0

    def prompt(self, name: str, chain: _Chain) -> TraceRequest:
        """The next prompt, at `times[turn]`."""
        turn, t = self.turn, self.times[self.turn]
        blocks = self._tokens // BLOCK_TOKENS
        if self._kept[turn] < 1:
            common = self._opening.blocks
            blocks = int(self._kept[turn] * blocks)
            if blocks > common:
                self._runs = head_runs(self._runs, blocks)
            else:
                blocks, self._runs = common, ()
                for part in self._opening.parts:
                    self._runs = _joined(self._runs, chain.part(part, t))
            self._tokens = blocks * BLOCK_TOKENS
        self._tokens += self._added[turn]
        if new := self._tokens // BLOCK_TOKENS - blocks:
            self._runs = _joined(self._runs, chain.new(new))
        self.turn += 1
        return TraceRequest(t, name, self._tokens, self._output[turn], self._runs, self._response_s(turn))

    def _response_s(self, turn: int) -> float | None:
        if self._response is None:
            return None
        wait, rate = self._response
        taken = wait + self._output[turn] / rate
        # The next prompt carries this answer.
        return min(taken, self.times[turn + 1] - self.times[turn]) if turn + 1 < len(self.times) else taken


def _sessions(kind: Kind, rng: np.random.Generator, starts: npt.NDArray[np.float64]) -> Iterator[_Session]:
    """Draw whole sessions at once: a draw by itself costs more than all else about a request."""
    turns = kind.turns.counts(rng, len(starts))
    ends = np.cumsum(turns)
    first = ends - turns
    total = int(turns.sum())
    shares = np.array([opening.share for opening in kind.openings])
    opening = rng.choice(len(shares), size=len(starts), p=shares / shares.sum())
    scale = np.array([opening.scale for opening in kind.openings])[opening]
    scale *= (turns / kind.turns.at(np.array(0.5))) ** -kind.taper
    branch = rng.random(total) < kind.branches
    added = np.where(branch, kind.rewritten.sample(rng, total), kind.growth.sample(rng, total))
    added[first] = kind.first.sample(rng, len(starts))
    added = np.rint(added * np.repeat(scale, turns)).astype(np.int64)
    added[first] -= BLOCK_TOKENS * np.array([opening.blocks for opening in kind.openings])[opening]
    branch[first] = True
    output = kind.output.counts(rng, total)
    added[1:] += np.where(branch[1:], 0, output[:-1])
    added = np.maximum(added, 1)
    kept = np.where(branch, kind.kept.sample(rng, total), 1.0)
    times = kind.gap_s.sample(rng, total)
    times[first] = starts
    for k, (a, b) in enumerate(zip(first.tolist(), ends.tolist(), strict=True)):
        yield _Session(
            kind.openings[opening[k]],
            np.cumsum(times[a:b]).tolist(),
            added[a:b].tolist(),
            kept[a:b].tolist(),
            output[a:b].tolist(),
            kind.response,
        )
