"""The oracle reproduces the figures published with the traces, and agrees with plainer code on small streams."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_oracle import block_ids, expiry_hits, lru_hits, tail_idle, token_hit_rate

from duokv.bench.workload import TraceRequest, read_trace

EXPIRIES_S = (math.inf, 180, 3600, 3 * 86400, 7 * 86400)
CAPACITIES = (4096, 65536)
STATE_EXPIRIES_S = (60, 180, 600, 3600)

# The README of the traces, in percent: by expiry, by capacity, SWA by expiry, SWA at prompt ends after 180 s.
Row = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], float]
WEKA: Row = ((96.4, 89.5, 96.0, 96.4, 96.4), (85.2, 96.4), (82.1, 92.6, 97.0, 99.5), 89.4)
SMALL: tuple[tuple[str, Row], ...] = (
    ("mooncake_conversation", ((37.4, 24.1, 37.4, 37.4, 37.4), (4.6, 27.4), (69.6, 85.9, 97.9, 100.0), 6.4)),
    ("ragpulse", ((31.4, 23.4, 31.0, 31.4, 31.4), (31.4, 31.4), (44.3, 67.3, 88.9, 98.7), 0.0)),
    ("lmcache_miniswe", ((92.6, 92.5, 92.6, 92.6, 92.6), (92.6, 92.6), (99.5, 99.5, 100.0, 100.0), 99.2)),
)


def percent(fraction: float) -> float:
    return round(100 * fraction, 1)


def measured(requests: list[TraceRequest]) -> Row:
    hits = expiry_hits(requests, EXPIRIES_S)
    idle = tail_idle(requests)
    return (
        tuple(percent(token_hit_rate(requests, hits[:, k])) for k in range(len(EXPIRIES_S))),
        tuple(percent(token_hit_rate(requests, lru_hits(requests, capacity))) for capacity in CAPACITIES),
        tuple(percent(idle.rates(expiry)[0]) for expiry in STATE_EXPIRIES_S),
        percent(idle.rates(180)[1]),
    )


@pytest.mark.parametrize(("name", "row"), SMALL)
def test_published_figures(data_dir: Path, name: str, row: Row) -> None:
    assert measured(list(read_trace(data_dir / f"traces/{name}.jsonl.gz"))) == row


@pytest.mark.torture
def test_published_figures_of_the_large_trace(data_dir: Path) -> None:
    assert measured(list(read_trace(data_dir / "traces/weka_agent.jsonl.gz"))) == WEKA


def test_boundless_lru_is_no_expiry(data_dir: Path) -> None:
    requests = list(read_trace(data_dir / "traces/weka_agent.jsonl.gz", limit=2000))
    blocks = len({block for request in requests for block in block_ids(request)})
    never = expiry_hits(requests, (math.inf,))[:, 0]
    assert (lru_hits(requests, blocks) == never).all()
    assert lru_hits(requests, 4096).sum() < never.sum()


@st.composite
def streams(draw: st.DrawFn) -> list[TraceRequest]:
    """Prompts that branch anywhere from earlier ones, in whole seconds, so that gaps equal to an expiry occur."""
    prompts: list[list[int]] = [[]]
    requests, t, fresh = [], 0, 0
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(prompts))
        head, new = draw(st.integers(0, len(base))), draw(st.integers(0, 3))
        prompt = [*base[:head], *range(fresh, fresh + new)]
        fresh += new
        t += draw(st.integers(0, 3))
        prompts.append(prompt)
        requests.append(TraceRequest(t, "", 128 * len(prompt) + 1, 0, tuple((block, 1) for block in prompt)))
    return requests


def plain_hits(
    requests: list[TraceRequest], present: Callable[[dict[int, tuple[float, int]], int, float], bool]
) -> list[int]:
    """Walk with one dictionary: block -> (time, number) of its last touch; numbers fall along a prompt."""
    touched: dict[int, tuple[float, int]] = {}
    hits, clock = [], 0
    for request in requests:
        ids = block_ids(request)
        hit = 0
        while hit < len(ids) and present(touched, ids[hit], request.t):
            hit += 1
        hits.append(hit)
        clock += len(ids)
        for place, block in enumerate(ids):
            touched[block] = (request.t, clock - place)
    return hits


@given(streams(), st.sampled_from([0, 1, 2, 5, math.inf]))
def test_expiry_against_one_dictionary(requests: list[TraceRequest], expiry: float) -> None:
    want = plain_hits(requests, lambda touched, block, t: block in touched and t - touched[block][0] <= expiry)
    assert expiry_hits(requests, (expiry,))[:, 0].tolist() == want


@given(streams(), st.integers(1, 12))
def test_lru_against_the_stack_distance(requests: list[TraceRequest], capacity: int) -> None:
    """An LRU holds exactly the `capacity` blocks of the latest touches."""

    def present(touched: dict[int, tuple[float, int]], block: int, _: float) -> bool:
        return block in touched and sum(use >= touched[block] for use in touched.values()) <= capacity

    assert lru_hits(requests, capacity).tolist() == plain_hits(requests, present)


def test_state_rules() -> None:
    def at(t: float, *blocks: int) -> TraceRequest:
        return TraceRequest(t, "", 128 * len(blocks) + 1, 0, tuple((block, 1) for block in blocks))

    # The third prompt hits up to block 1, where the first one ended 10 s and the second one passed 4 s before; the
    # fourth hits the same tail, which the hit at 10 s touched as a block, but no prompt has ended there since 0 s.
    idle = tail_idle([at(0, 0, 1), at(6, 0, 1, 2), at(10, 0, 1, 3), at(12, 0, 1, 4), at(12, 5)])
    np.testing.assert_array_equal(idle.every_block, [np.nan, 6, 4, 2, np.nan])
    np.testing.assert_array_equal(idle.prompt_end, [np.nan, 6, 10, 12, np.nan])
    assert idle.rates(4) == (2 / 3, 0)
    assert idle.rates(6) == (1, 1 / 3)
