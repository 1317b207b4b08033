"""The report: what the observer collects agrees with plain code and with the store, and the page holds its parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from duokv.bench.cache_hit import SimOptions, SimReport, simulate
from duokv.bench.generator import generate
from duokv.bench.observer import Curve, Observer
from duokv.bench.report import Source, figures, write_report
from duokv.bench.table import Run, rate
from duokv.bench.workload import TraceRequest
from duokv.kvstore.errors import StoreError
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.kvstore.policy import ClassRule, Policy

TIMES_S = (0, 1, 5, 30, 60, 180, 600, 3600, 86_400, math.inf)


def generated(kind: str, count: int) -> list[TraceRequest]:
    return list(itertools.islice(generate(kind, seed=3, days=2, requests_per_day=2_000), count))


def observed(requests: list[TraceRequest], options: SimOptions) -> tuple[Observer, SimReport]:
    observer = Observer()
    return observer, simulate(requests, options, on_request=observer)


def share_within(
    requests: list[TraceRequest], seconds: float, touch: Callable[[list[int]], list[int]]
) -> tuple[float, float]:
    """Block by block: (share of the input tokens used at most so long ago, share of the hits with such a tail)."""
    used: dict[int, float] = {}
    touched: dict[int, float] = {}
    reused = hits = alive = 0
    for request in requests:
        blocks = [block for first, count in request.runs for block in range(first, first + count)]
        reused += sum(block in used and request.t - used[block] <= seconds for block in blocks)
        hit = list(itertools.takewhile(used.__contains__, blocks))
        if hit:
            hits += 1
            alive += (
                request.t - touched.get(hit[-1], -math.inf) <= seconds if seconds < math.inf else hit[-1] in touched
            )
        used.update(dict.fromkeys(blocks, request.t))
        touched.update(dict.fromkeys(touch(blocks), request.t))
    return BLOCK_TOKENS * reused / sum(request.input_tokens for request in requests), alive / hits


@pytest.mark.parametrize("kind", ["agent", "chat", "rag"])
def test_curves_equal_counting_block_by_block(kind: str) -> None:
    requests = generated(kind, 250)
    observer, _ = observed(requests, Run().options("agent"))
    for seconds in TIMES_S:
        reused, every_block = share_within(requests, seconds, lambda blocks: blocks)
        _, prompt_end = share_within(requests, seconds, lambda blocks: blocks[-1:])
        assert observer.reuse().at(seconds) == pytest.approx(reused, abs=1e-12)
        assert observer.swa_every_block().at(seconds) == pytest.approx(every_block, abs=1e-12)
        assert observer.swa_prompt_end().at(seconds) == pytest.approx(prompt_end, abs=1e-12)


@pytest.mark.parametrize("seconds", [30, 180])
def test_curves_foretell_what_the_store_hits(seconds: int) -> None:
    """Read at T, a curve is what a run with that life gets from the store's own index and SWA tier."""
    requests = generated("agent", 250)
    observer, _ = observed(requests, Run().options("agent"))
    life = simulate(requests, Run(ttl_s=seconds).options("agent"))
    assert rate(life, "token_hit_rate") == pytest.approx(observer.reuse().at(seconds))
    every = simulate(requests, Run(swa_expiry_s=seconds, swa_keep="every-block").options("agent"))
    assert rate(every, "swa_alive_share") == pytest.approx(observer.swa_every_block().at(seconds))
    ends = simulate(requests, Run(swa_expiry_s=seconds).options("agent"))
    assert rate(ends, "swa_alive_share") == pytest.approx(observer.swa_prompt_end().at(seconds))


def test_a_curve_steps_at_its_gaps() -> None:
    curve = Curve.of(np.array([5.0, 2.0, np.inf, 5.0]), np.array([1.0, 2.0, 4.0, 1.0]), 8)
    assert [curve.at(t) for t in (0, 1.9, 2, 4.9, 5, 1e9)] == [0, 0, 0.25, 0.25, 0.5, 0.5]


def test_windows_cut_the_run_and_lose_nothing() -> None:
    requests = generated("agent", 250)
    observer, report = observed(requests, SimOptions("agent"))
    windows = observer.windows(7)
    assert windows.starts_s[0] == requests[0].t
    assert windows.starts_s[-1] == requests[-1].t
    assert windows.input_tokens.sum() == report.input_tokens
    assert np.nansum(windows.input_tokens * windows.hit_rate) == pytest.approx(report.index_hit_tokens)
    quiet = [TraceRequest(0, "", 300, 0, ((0, 2),)), TraceRequest(9, "", 300, 0, ((0, 2),))]
    rates = observed(quiet, SimOptions("agent"))[0].windows(3).hit_rate
    np.testing.assert_allclose(rates, [0, np.nan, 256 / 300])


class Page(HTMLParser):
    """What a page shows and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_report_holds_its_parts(tmp_path: Path) -> None:
    policy = Policy({"agent": ClassRule(600.0), "chat": ClassRule(None)}, "chat").numbered()
    options = SimOptions("agent", policy=policy, capacity_blocks=3000)
    observer, report = observed(generated("agent", 200), options)
    path = tmp_path / "new" / "report.html"
    write_report(path, observer, report, options, Source("a <b>trace</b>"))
    raw = path.read_text()
    page = Page(raw)
    assert page.open == []
    assert page.addresses == []
    assert "url(" not in raw
    assert "a <b>trace</b>" in page.text
    assert page.tags.count("svg") == 4
    for heading in ("Where the prompt", "Hit rate over time", "How soon", "How long SWA", "Bytes and", "Settings"):
        assert heading in page.text
    for name in ("token_hit_rate", "adopted_rate", "replay_share_of_hits"):
        assert f"{100 * rate(report, name):.1f} %" in page.text
    assert all(f"{tokens:,}" in page.text for tokens in report.tokens.values())
    assert f"agent 10m: {100 * observer.reuse().at(600):.1f} %" in page.text
    assert "is not reached by human-paced public traces" in page.text
    assert report.evictions["capacity"] > 0
    assert f"{report.evictions['capacity']:,}" in page.text


def test_report_of_nothing(tmp_path: Path) -> None:
    observer, report = observed([], SimOptions("agent"))
    write_report(tmp_path / "report.html", observer, report, SimOptions("agent"), Source("nothing"))
    assert Page((tmp_path / "report.html").read_text()).open == []


def test_report_in_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    observer, report = observed(generated("agent", 5), SimOptions("agent"))
    with pytest.raises(StoreError, match=r"file/report\.html: cannot be written"):
        write_report(tmp_path / "file/report.html", observer, report, SimOptions("agent"), Source("x"))


def test_published_figures_stand_where_they_apply() -> None:
    observer, report = observed(generated("agent", 20), SimOptions("agent"))

    def published(options: SimOptions, source: Source) -> list[str]:
        return [row.published for row in figures(observer, report, options, source)]

    weka = Path("traces/weka_agent.jsonl.gz")
    standard = SimOptions("agent")
    assert published(standard, Source("x", weka, whole=True))[0] == "96.4 %"
    assert published(standard, Source("x", weka))[0] == "96.4 % (whole trace)"
    assert published(SimOptions("agent", capacity_blocks=4096), Source("x", weka))[0] == ""
    assert published(Run(capacity_blocks=4096).options("agent"), Source("x", weka, whole=True))[0] == "85.2 %"
    assert published(standard, Source("x", Path("other.jsonl")))[0] == ""
    assert published(standard, Source("x", weka, whole=True))[3:5] == ["92.6 %", "89.4 %"]
    assert published(SimOptions("agent", swa_expiry_s=60), Source("x", weka, whole=True))[2:5] == ["", "", ""]
