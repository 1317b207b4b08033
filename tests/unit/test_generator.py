"""Synthetic streams: reproducible, well formed, and like the traces they are calibrated to."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import pytest
from trace_oracle import block_ids, expiry_hits, token_hit_rate

from duokv.bench.generator import DAY_S, Quantiles, generate
from duokv.bench.keymemo import KeyMemo
from duokv.bench.workload import TraceRequest, with_output_ends
from duokv.kvstore.errors import UsageError

KINDS = ("agent", "chat", "rag")


def some(kind: str, seed: int = 1) -> list[TraceRequest]:
    return list(islice(generate(kind, seed=seed, days=30, requests_per_day=2000), 3000))


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_a_stream(kind: str) -> None:
    assert some(kind) == some(kind)
    assert some(kind) != some(kind, seed=2)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_are_well_formed(kind: str) -> None:
    requests = some(kind)
    assert all(a.t <= b.t for a, b in pairwise(requests))
    assert all(r.blocks == r.input_tokens // 128 and r.input_tokens > 0 for r in requests)
    top = 0
    parents: dict[int, int] = {}
    for request in requests:
        assert all(sum(a) < b[0] for a, b in pairwise(request.runs)), "runs rise and are as long as can be"
        parent = -1
        for first, count in request.runs:
            assert first <= top, "ids are numbered by first appearance"
            top = max(top, first + count)
            assert parents.setdefault(first, parent) == parent, "an id stands for one prefix"
            # Inside a run every block follows the one before.
            assert all(parents.setdefault(k, k - 1) == k - 1 for k in range(first + 1, first + count))
            parent = first + count - 1


def test_horizon_and_rate() -> None:
    requests = list(generate("chat", seed=3, days=3.51, requests_per_day=4000))
    assert 3.4 * DAY_S < requests[-1].t < 3.51 * DAY_S
    # The last half day is the busy half of the cycle, 1.4 of the mean.
    assert len(requests) == pytest.approx(4000 * 3.7, rel=0.05)
    by_hour = [sum(int(r.t // 3600) % 24 == hour for r in requests) for hour in (3, 16)]
    assert by_hour[0] > 10 * by_hour[1], "nights are quiet"


@pytest.mark.parametrize(
    ("kind", "days", "per_day", "rates", "tokens"),
    [
        # The rates and means of weka_agent, mooncake_conversation (its hour is a busy one) and ragpulse.
        ("agent", 4, 4266, (96.4, 89.5), 122_386),
        ("chat", 1 / 24, 12_031 * 24 / 1.29, (37.4, 24.1), 12_035),
        ("rag", 7, 7106 / 7, (31.4, 23.4), 2944),
    ],
)
def test_like_the_real_traces(
    kind: str, days: float, per_day: float, rates: tuple[float, float], tokens: float
) -> None:
    requests = list(generate(kind, seed=1, days=days, requests_per_day=per_day))
    hits = expiry_hits(requests, (math.inf, 180))
    got = [100 * token_hit_rate(requests, hits[:, k]) for k in range(2)]
    assert got == pytest.approx(rates, abs=3)
    assert sum(r.input_tokens for r in requests) / len(requests) == pytest.approx(tokens, rel=0.2)


def test_dated_system_prompts_change_at_midnight() -> None:
    """Of ragpulse's assistants two are dated, one is not and one has its own 8 blocks: all show in the fifth block."""
    uses: dict[int, list[float]] = {}
    for request in generate("rag", seed=1, days=4, requests_per_day=2000):
        for block in block_ids(request)[4:5]:
            uses.setdefault(block, []).append(request.t)
    spans = [times[-1] - times[0] for times in uses.values() if len(times) > 10]
    assert sum(span <= DAY_S for span in spans) == 2 * 5  # four days that begin off midnight touch five dates
    assert sum(span > 3 * DAY_S for span in spans) == 2


def test_agent_answers_are_carried_on() -> None:
    """Most output ends are known, as in weka_agent (89 %), and no answer ends after the prompt that carries it."""
    ends = list(with_output_ends(some("agent")))
    assert sum(end is not None for _, end in ends) > 0.8 * len(ends)
    assert all(end.t == r.answered_at for r, end in ends if end is not None)


def test_keys_can_be_derived() -> None:
    memo = KeyMemo(bytes(32))
    requests = some("rag")[:300]
    assert [len(memo.keys(r.runs)) for r in requests] == [32 * r.blocks for r in requests]


@pytest.mark.parametrize(
    ("kind", "days", "per_day", "message"),
    [
        ("agents", 1, 1, "workload 'agents': no such kind; did you mean 'agent'?"),
        ("chat", 0, 5, "workload chat: 0 days of 5 requests; give numbers above 0"),
        ("chat", 1, math.inf, "workload chat: 1 days of inf requests; give numbers above 0"),
    ],
)
def test_misuse(kind: str, days: float, per_day: float, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        generate(kind, seed=0, days=days, requests_per_day=per_day)
    assert str(caught.value) == message


def test_mean_count_is_the_mean_of_counts() -> None:
    # 1 on half of the draws; 2 and 3 share the rest: their boundary 2.5 lies at 50 % + 50 % * ln(2.5/1.5)/ln(3.5/1.5).
    table = Quantiles((1, 1.4999, 1.5, 3.4999), (0, 49.9999, 50, 100))
    twos = 0.5 * math.log(2.5 / 1.5) / math.log(3.5 / 1.5)
    assert table.mean_count() == pytest.approx(0.5 + 2 * twos + 3 * (0.5 - twos), rel=1e-3)
