"""What a simulated run looked like, as one HTML file: rates, their course, reuse gaps, the life of SWA states.

Give an `Observer` to `simulate` as `on_request`, then call `write_report`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duokv.bench import report_page as page
from duokv.bench.cache_hit import SimOptions, SimReport
from duokv.bench.observer import Observer
from duokv.bench.table import FIGURES, published, rate
from duokv.kvstore.errors import StoreError
from duokv.kvstore.policy import DAY_S
from duokv.kvstore.units import UNBOUNDED, format_bytes, format_duration

PUBLISHED_EXPIRY_S = 180.0
"""Life of an SWA state in the published production system (DeepSeek-V4.1 paper, arXiv 2609.19969)."""
PRODUCTION_SHARE = 0.98
"""Of the SWA states asked for, more than this share are found there; same source."""

PARTS: Mapping[str, str] = {
    "swa_hit": "Block KV used and the sliding window's state restored: nothing to compute",
    "block_hit": "Block KV used; the window's state was gone, so the last rows were replayed",
    "replayed": "Block KV used as well, but computed once more to fill the sliding window",
    "computed": "not in the store: prefill",
}
"""The parts of a prompt's tokens, for people; each token is in one of them."""

_WINDOWS = 96
_TICKS = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (21_600, "6 h"), (DAY_S, "1 d"),
          (7 * DAY_S, "7 d"))  # fmt: skip
_GAPS = page.Axis(1, 14 * DAY_S, _TICKS, log=True)
_GAP_POINTS = np.geomspace(_GAPS.low, _GAPS.high, 300)
_CLOCK_STEPS = (
    *((float(n), 1.0, "s") for n in (1, 2, 5, 10, 30)),
    *((60.0 * n, 60.0, "min") for n in (1, 2, 5, 10, 20)),
    *((3600.0 * n, 3600.0, "h") for n in (1, 2, 4, 8, 12)),
    *((DAY_S * n, DAY_S, "d") for n in (1, 2, 7, 30)),
)
"""(step, unit, its name) in seconds, for about nine labels on a time axis."""


@dataclass(frozen=True, slots=True)
class Source:
    """What was replayed: its name for people, and the trace's file if it is one, `whole` or only its head."""

    name: str
    trace: Path | None = None
    whole: bool = False

    def published(self, figure: str) -> str:
        """The figure published for the trace, as text; empty if there is none."""
        percent = None if self.trace is None else published(self.trace, figure)
        if percent is None:
            return ""
        return f"{percent} %" if self.whole else f"{percent} % (whole trace)"


@dataclass(frozen=True, slots=True)
class Figure:
    """One result for people. `published` says what is known from elsewhere, empty if nothing is."""

    name: str
    here: str
    published: str
    meaning: str


def figures(observer: Observer, report: SimReport, options: SimOptions, source: Source) -> list[Figure]:
    """The results of a finished run in order of weight, beside what is published."""
    expiry = options.swa_expiry_s
    idle = f"{_life(expiry)} after last use"
    within = math.inf if expiry is None else expiry
    every, end = observer.swa_every_block().at(within), observer.swa_prompt_end().at(within)
    production = f"over {100 * PRODUCTION_SHARE:.0f} % (production)"
    at_published = expiry == PUBLISHED_EXPIRY_S
    return [
        Figure("token hit rate", _percent(rate(report, "token_hit_rate")), _published_hit_rate(options, source),
               "input tokens that the index of stored blocks knew"),
        Figure("adopted rate", _percent(rate(report, "adopted_rate")), "",
               "the same without hits of at most 128 tokens, which save nothing"),
        Figure("SWA state alive", _percent(rate(report, "swa_alive_share")), production if at_published else "",
               f"hits whose tail still had its sliding-window state, {idle}; kept at: {options.swa_keep}"),
        Figure("\u2026 if kept at every block", _percent(every),
               source.published("SWA, every block, 180 s") if at_published else "", "what the trace itself allows"),
        Figure("\u2026 if kept at prompt ends", _percent(end),
               source.published("SWA, prompt end, 180 s") if at_published else "", "the cheapest place to keep them"),
        Figure("replay share of hits", _percent(rate(report, "replay_share_of_hits")), "",
               "adopted hits that had to replay the window, as its state was gone"),
        Figure("amplification", f"{rate(report, 'amplification'):.1f} x", "",
               "input tokens served for each token computed or replayed"),
    ]  # fmt: skip


def _published_hit_rate(options: SimOptions, source: Source) -> str:
    ttl_s = options.policy.classes[options.traffic].ttl_s
    for name, run in FIGURES.items():
        if (run.ttl_s, run.capacity_blocks) == (ttl_s, options.capacity_blocks) and options.capacity is None:
            return source.published(name)
    return ""


def write_report(path: Path, observer: Observer, report: SimReport, options: SimOptions, source: Source) -> None:
    """Write the report of a finished run; its folder is made if need be. StoreError if the file cannot be written."""
    text = page.document(
        "DuoKV cache report",
        f"{source.name}: {report.requests:,} requests over {_span(observer.span_s)}, "
        f"{report.input_tokens:,} input tokens, traffic class {options.traffic}",
        [
            _headline(report),
            _partition(report),
            _course(observer, report, options),
            page.pair(_reuse(observer, options), _swa_life(observer, report, options)),
            _figures(figures(observer, report, options, source)),
            page.pair(_bytes(report), _settings(options)),
        ],
        "Simulated by DuoKV's own keys, index, lives, reclaim and SWA tier under a virtual clock. A prompt's blocks "
        "are stored or renewed at its arrival; generated tokens count only where a later prompt carries them.",
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); name another folder") from error


def _headline(report: SimReport) -> str:
    return page.tiles(
        [
            ("Token hit rate", _percent(rate(report, "token_hit_rate")), "of the input tokens were in the store"),
            ("Adopted rate", _percent(rate(report, "adopted_rate")), "were used; hits of up to 128 tokens are not"),
            (
                "Replay share",
                _percent(rate(report, "replay_share_of_hits")),
                "of the adopted hits had lost their SWA state and replayed its window",
            ),
            (
                "Amplification",
                f"{rate(report, 'amplification'):.1f} \u00d7",
                "input tokens served per token computed or replayed",
            ),
        ]
    )


def _partition(report: SimReport) -> str:
    whole = max(1, report.input_tokens)
    colors = (page.BLUE, page.LIGHT_BLUE, page.ORANGE, page.GREY)
    return page.section(
        "Where the prompt tokens came from",
        "Every input token is counted in exactly one part.",
        page.partition_bar(
            [
                (name, report.tokens[name] / whole, color, f"{report.tokens[name]:,}", meaning)
                for (name, meaning), color in zip(PARTS.items(), colors, strict=True)
            ]
        ),
    )


def _course(observer: Observer, report: SimReport, options: SimOptions) -> str:
    windows = observer.windows(_WINDOWS)
    span = float(windows.starts_s[-1] - windows.starts_s[0])
    edges = windows.starts_s - windows.starts_s[0]
    axis = page.Axis(0, span, _clock_ticks(span))
    chart = page.Chart(1070, 250, axis, page.PERCENT, label="Token hit rate over time")
    chart.line(np.array([0.0, span]), np.full(2, rate(report, "token_hit_rate")), page.GREY, dashed=True)
    chart.line((edges[:-1] + edges[1:]) / 2, windows.hit_rate, page.BLUE)
    most = max(float(windows.input_tokens.max()), 1.0)
    volume = page.Chart(
        1070, 110, axis, page.Axis(0, most, ((0, "0"), (most, _tokens(most)))), label="Input tokens over time"
    )
    volume.bars(edges, windows.input_tokens, page.LIGHT_BLUE)
    return page.section(
        "Hit rate over time",
        f"Each point is {_span(span / _WINDOWS)} of traffic. Below it are the input tokens of the same window: where "
        "they are few, one new session can pull the rate far down.",
        page.legend([(page.BLUE, "token hit rate"), (page.GREY, "mean"), (page.LIGHT_BLUE, "input tokens")]),
        chart.svg(),
        volume.svg(),
    )


def _reuse(observer: Observer, options: SimOptions) -> str:
    curve = observer.reuse()
    lives = [(f"SWA {_life(options.swa_expiry_s)}", options.swa_expiry_s)]
    lives += [(f"{name} {_life(rule.ttl_s)}", rule.ttl_s) for name, rule in options.policy.classes.items()]
    marks = sorted((seconds, name) for name, seconds in lives if seconds is not None)
    chart = page.Chart(540, 350, _GAPS, page.PERCENT, label="Reuse gaps, cumulative", marks=len(marks))
    chart.line(_GAP_POINTS, curve.sampled(_GAP_POINTS), page.BLUE)
    for seconds, name in marks:
        chart.mark(seconds, f"{name}: {_percent(curve.at(seconds))}")
        chart.dot(seconds, curve.at(seconds), page.BLUE, f"{name}: {_percent(curve.at(seconds))}")
    return page.section(
        "How soon prompts come back",
        "Share of the input tokens whose block an earlier prompt used, by the time since that use. Read at T, it "
        "is the hit rate of a store that keeps blocks T after their last use; where flat, longer is no better.",
        chart.svg(),
    )


def _swa_life(observer: Observer, report: SimReport, options: SimOptions) -> str:
    every, end = observer.swa_every_block(), observer.swa_prompt_end()
    chart = page.Chart(540, 330, _GAPS, page.PERCENT, label="SWA states alive against the expiry", marks=3)
    chart.line(np.array([_GAPS.low, _GAPS.high]), np.full(2, PRODUCTION_SHARE), page.GREEN, dashed=True)
    chart.line(_GAP_POINTS, every.sampled(_GAP_POINTS), page.BLUE)
    chart.line(_GAP_POINTS, end.sampled(_GAP_POINTS), page.ORANGE)
    at = PUBLISHED_EXPIRY_S
    chart.mark(at, f"{_life(at)}: {_percent(every.at(at))} / {_percent(end.at(at))}")
    reaches = " This traffic has no such pauses and reaches it." if every.at(at) > PRODUCTION_SHARE else ""
    alive = rate(report, "swa_alive_share")
    if options.swa_expiry_s is not None:
        chart.dot(options.swa_expiry_s, alive, page.INK, f"this run, {options.swa_keep}: {_percent(alive)}")
    return page.section(
        "How long SWA states must live",
        "Share of the hits whose tail still has its sliding-window state, by the expiry after last use. The published "
        f"production rate of over 98\u00a0% at {_life(at)} is not reached by human-paced public traces: people "
        f"pause for longer than that.{reaches}",
        page.legend(
            [
                (page.BLUE, "kept at every block"),
                (page.ORANGE, "kept at prompt ends"),
                (page.GREEN, "98 %, production"),
                (page.INK, f"this run ({options.swa_keep}): {_percent(alive)}"),
            ]
        ),
        chart.svg(),
    )


def _figures(rows: Sequence[Figure]) -> str:
    return page.section(
        "In figures",
        "",
        page.table(
            ("figure", "this run", "published", "meaning"),
            [(row.name, row.here, row.published or "\u2013", row.meaning) for row in rows],
            numbers=(1,),
            narrow=(0, 2),
        ),
    )


def _bytes(report: SimReport) -> str:
    meanings = {"stored": "Block KV at the end", "written": "written", "read": "read", "freed": "given back"}
    rows = [(meaning, format_bytes(report.bytes[name])) for name, meaning in meanings.items()]
    rows += [(f"blocks evicted: {reason}", f"{blocks:,}") for reason, blocks in sorted(report.evictions.items())]
    if not report.evictions:
        rows.append(("blocks evicted", "none"))
    return page.section("Bytes and evictions", "", page.table(("what", "amount"), rows, numbers=(1,)))


def _settings(options: SimOptions) -> str:
    rows = [
        ("block geometry", options.geometry),
        *((f"life of class {name}", f"{_life(rule.ttl_s)}, {rule.mode}")
          for name, rule in options.policy.classes.items()),
        ("capacity", UNBOUNDED if options.capacity is None else format_bytes(options.capacity)),
        ("capacity in blocks", UNBOUNDED if options.capacity_blocks is None else f"{options.capacity_blocks:,}"),
        ("SWA expiry", _life(options.swa_expiry_s)),
        ("SWA memory", UNBOUNDED if options.swa_bytes is None else format_bytes(options.swa_bytes)),
        ("SWA states kept at", options.swa_keep + (", and the hit's end" if options.keep_hit_boundary else "")),
        ("decoder rows kept", f"{options.keep_rows}"),
        ("payload", "metadata only" if options.payload == "none" else "real bytes"),
    ]  # fmt: skip
    return page.section("Settings", "", page.table(("setting", "value"), rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _life(seconds: float | None) -> str:
    """A life or expiry; "180 s" as it is published, not "3m"."""
    return f"{seconds:g} s" if seconds is not None and seconds < 600 else format_duration(seconds)


def _tokens(count: float) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} K"


def _span(seconds: float) -> str:
    """A duration for people, in the unit that leaves at least 1.5 of it."""
    for unit, length in (("days", DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def _clock_ticks(span: float) -> list[tuple[float, str]]:
    step, unit, name = next(
        (step for step in _CLOCK_STEPS if span <= 9 * step[0]), (float(math.ceil(span / 9 / DAY_S)) * DAY_S, DAY_S, "d")
    )
    return [(tick, f"{tick / unit:.0f} {name}") for tick in np.arange(0, span * (1 + 1e-9), step).tolist()]
