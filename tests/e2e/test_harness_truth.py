"""The harness, which is the product's code under a virtual clock, gives the figures of an oracle without any of it."""

from __future__ import annotations

import heapq
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from trace_oracle import expiry_hits, lru_hits, tail_idle, token_hit_rate

from duokv.bench.cache_hit import Served, SimOptions, SimReport, parse_keep, simulate
from duokv.bench.generator import generate
from duokv.bench.workload import OutputEnd, Run, TraceRequest, read_trace, trace_class, with_output_ends
from duokv.kvstore import CacheGeometry, ClassRule, Policy, UsageError
from duokv.replay.plan import (
    Reason,
    ReplayPlan,
    ReplayPolicy,
    kept_boundaries,
    plan_replay,
    swa_candidates,
    usable,
    valid_from,
)

SMALL = (("lmcache_miniswe", None), ("ragpulse", 2500), ("mooncake_conversation", 1500), ("weka_agent", 800))
WHOLE = ("lmcache_miniswe", "ragpulse", "mooncake_conversation", "weka_agent")


def options(traffic: str, ttl_s: float | None = None) -> SimOptions:
    policy = Policy({traffic: ClassRule(ttl_s)}, traffic).numbered()
    return SimOptions(traffic=traffic, policy=policy)


def run(requests: Sequence[TraceRequest], chosen: SimOptions) -> tuple[SimReport, npt.NDArray[np.int64]]:
    hits: list[int] = []
    report = simulate(requests, chosen, on_request=lambda served: hits.append(served.hit_blocks))
    return report, np.array(hits, np.int64)


def trace(data: Path, name: str, limit: int | None) -> tuple[list[TraceRequest], SimOptions]:
    path = data / f"traces/{name}.jsonl.gz"
    return list(read_trace(path, limit=limit)), options(trace_class(path))


@pytest.mark.parametrize(("name", "limit"), SMALL)
@pytest.mark.parametrize("ttl_s", [math.inf, 180, 3600])
def test_idle_expiry_hits_what_the_oracle_hits(data_dir: Path, name: str, limit: int | None, ttl_s: float) -> None:
    requests, chosen = trace(data_dir, name, limit)
    chosen = options(chosen.traffic, None if math.isinf(ttl_s) else ttl_s)
    report, hits = run(requests, chosen)
    expected = expiry_hits(requests, (ttl_s,))[:, 0]
    assert np.flatnonzero(hits != expected).tolist() == []
    assert report.as_json()["token_hit_rate"] == pytest.approx(token_hit_rate(requests, expected), abs=1e-12)


@pytest.mark.parametrize(("name", "limit"), SMALL)
@pytest.mark.parametrize("capacity", [300, 4096])
def test_lru_counting_written_slots_is_the_block_lru(
    data_dir: Path, name: str, limit: int | None, capacity: int
) -> None:
    requests, chosen = trace(data_dir, name, limit)
    _, hits = run(requests, replace(chosen, capacity_blocks=capacity))
    assert np.flatnonzero(hits != lru_hits(requests, capacity)).tolist() == []


@pytest.mark.parametrize(("name", "limit"), SMALL)
def test_physical_capacity_costs_at_most_half_a_point(data_dir: Path, name: str, limit: int | None) -> None:
    requests, chosen = trace(data_dir, name, limit)
    slot = CacheGeometry.preset(chosen.geometry).slot_bytes
    report, _ = run(requests, replace(chosen, capacity=4096 * slot))
    ideal = token_hit_rate(requests, lru_hits(requests, 4096))
    assert abs(float(str(report.as_json()["token_hit_rate"])) - ideal) <= 0.005


@pytest.mark.parametrize(("name", "limit"), SMALL)
def test_swa_columns_are_the_oracles(data_dir: Path, name: str, limit: int | None) -> None:
    requests, chosen = trace(data_dir, name, limit)
    idle = tail_idle(requests)
    for expiry in (60.0, 180.0, 3600.0):
        every, _ = run(requests, replace(chosen, swa_keep="every-block", swa_expiry_s=expiry))
        ends, _ = run(requests, replace(chosen, swa_keep="prompt-end", swa_expiry_s=expiry))
        expected = idle.rates(expiry)
        assert every.as_json()["swa_alive_share"] == pytest.approx(expected[0], abs=1e-9)
        assert ends.as_json()["swa_alive_share"] == pytest.approx(expected[1], abs=1e-9)


@pytest.mark.parametrize("kind", ["agent", "chat", "rag"])
def test_generated_traffic_sums_up_for_every_keep(kind: str) -> None:
    requests = list(generate(kind, seed=3, days=0.2, requests_per_day=1500))
    traffic = "agent" if kind == "agent" else "chat"
    for keep in ("every-block", "prompt-end+hit-boundary", "prompt-and-output-end+hit-boundary"):
        place, boundary = parse_keep(keep)
        report, _ = run(requests, SimOptions(traffic=traffic, swa_keep=place, keep_hit_boundary=boundary))
        assert sum(report.tokens.values()) == report.input_tokens == sum(r.input_tokens for r in requests)


def test_keeping_more_states_never_replays_more(data_dir: Path) -> None:
    requests, chosen = trace(data_dir, "weka_agent", 600)
    shares = []
    for keep in ("prompt-end", "prompt-end+hit-boundary", "prompt-and-output-end+hit-boundary", "every-block"):
        place, boundary = parse_keep(keep)
        report, _ = run(requests, replace(chosen, swa_keep=place, keep_hit_boundary=boundary))
        shares.append(report.replayed_requests)
    assert shares == sorted(shares, reverse=True)


def test_real_payload_moves_real_bytes_and_hits_the_same() -> None:
    requests = list(generate("chat", seed=5, days=0.02, requests_per_day=3000))[:40]
    requests = [request for request in requests if request.blocks < 60]
    chosen = SimOptions(traffic="chat", geometry="tiny")
    nothing, hits = run(requests, chosen)
    real, real_hits = run(requests, replace(chosen, payload="real"))
    assert real_hits.tolist() == hits.tolist()
    assert real.bytes["written"] == nothing.bytes["written"] > 0
    assert real.bytes["read"] == int(hits.sum()) * CacheGeometry.preset("tiny").slot_bytes
    assert real.tokens == nothing.tokens


def test_hashing_every_block_changes_no_figure(data_dir: Path) -> None:
    requests, chosen = trace(data_dir, "weka_agent", 200)
    memo, hits = run(requests, chosen)
    hashed, hashed_hits = run(requests, replace(chosen, keys="hashed"))
    assert hashed_hits.tolist() == hits.tolist()
    assert {**hashed.as_json(), "seconds": 0} == {**memo.as_json(), "seconds": 0}


def planned(
    requests: Sequence[TraceRequest], hits: npt.NDArray[np.int64], expiry_s: float, boundary_too: bool
) -> list[ReplayPlan]:
    """The plans of a run, from what its prompts hit, with SWA states kept at ends in a plain dictionary by chain id."""
    policy = ReplayPolicy()
    used: dict[int, float] = {}
    ends: list[tuple[float, int, OutputEnd, int]] = []
    plans = []

    def keep(boundaries: Sequence[int], runs: Sequence[Run], valid: int, t: float) -> None:
        ids = [block for first, count in runs for block in range(first, first + count)]
        for boundary in boundaries:
            if usable(boundary, valid) and boundary // 128 <= len(ids):
                used[ids[boundary // 128 - 1]] = t

    for number, (request, end) in enumerate(with_output_ends(requests)):
        while ends and ends[0][0] <= request.t:
            t, _, ended, valid = heapq.heappop(ends)
            keep(kept_boundaries(ended.tokens, policy), ended.runs, valid, t)
        ids = [block for first, count in request.runs for block in range(first, first + count)]
        length = max(request.input_tokens, 1)
        hit = int(hits[number]) * 128
        candidates = swa_candidates(hit_tokens=hit, prompt_tokens=length, policy=policy)
        alive = [at for at in candidates if request.t - used.get(ids[at // 128 - 1], -math.inf) <= expiry_s]
        plan = plan_replay(hit_tokens=hit, prompt_tokens=length, swa_at=alive[0] if alive else None, policy=policy)
        plans.append(plan)
        if alive:
            used[ids[alive[0] // 128 - 1]] = request.t
        valid = valid_from(plan, policy)
        keep(kept_boundaries(request.input_tokens, policy), request.runs, valid, request.t)
        if boundary_too and plan.reason is Reason.SWA_MISS:
            keep((plan.write_floor,), request.runs, valid, request.t)
        if end is not None:
            heapq.heappush(ends, (end.t, number, end, valid))
    return plans


@pytest.mark.parametrize(("name", "limit"), SMALL)
@pytest.mark.parametrize("boundary_too", [True, False])
@pytest.mark.parametrize("expiry_s", [20.0, 180.0])
def test_plans_are_those_of_states_in_a_dictionary(
    data_dir: Path, name: str, limit: int | None, boundary_too: bool, expiry_s: float
) -> None:
    requests, chosen = trace(data_dir, name, limit)
    served: list[Served] = []
    simulate(requests, replace(chosen, swa_expiry_s=expiry_s, keep_hit_boundary=boundary_too), on_request=served.append)
    hits = np.array([one.hit_blocks for one in served])
    expected = planned(requests, hits, expiry_s, boundary_too)
    assert [i for i, (one, plan) in enumerate(zip(served, expected, strict=True)) if one.plan != plan] == []


def test_a_prompt_that_lists_fewer_blocks_than_it_fills_keeps_states_of_listed_ones() -> None:
    requests = [TraceRequest(float(t), "x", 1000, 1, ((0, 5),)) for t in range(3)]
    served: list[Served] = []
    report = simulate(requests, SimOptions("chat", geometry="tiny"), on_request=served.append)
    assert [one.plan for one in served] == planned(requests, np.array([0, 5, 5]), 180.0, boundary_too=True)
    assert report.tokens["swa_hit"] == 5 * 128  # the first hit's end, kept by the replay of the second prompt


def test_an_unknown_place_to_keep_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'prompt-ends'.*'prompt-end'"):
        parse_keep("prompt-ends")


@pytest.mark.torture
@pytest.mark.parametrize("name", WHOLE)
def test_whole_traces_give_the_published_figures(data_dir: Path, name: str) -> None:
    requests, chosen = trace(data_dir, name, None)
    for ttl_s in (math.inf, 180, 3600, 3 * 86400, 7 * 86400):
        report, _ = run(requests, options(chosen.traffic, None if math.isinf(ttl_s) else ttl_s))
        expected = token_hit_rate(requests, expiry_hits(requests, (ttl_s,))[:, 0])
        assert abs(float(str(report.as_json()["token_hit_rate"])) - expected) < 0.001
    for capacity in (4096, 65536):
        _, hits = run(requests, replace(chosen, capacity_blocks=capacity))
        assert np.flatnonzero(hits != lru_hits(requests, capacity)).tolist() == []


@pytest.mark.torture
def test_the_whole_agent_trace_fits_in_half_a_gibibyte(data_dir: Path) -> None:
    code = (
        "import json, sys; from duokv.bench.cache_hit import *; from duokv.bench.workload import read_trace;"
        "r = simulate(read_trace(sys.argv[1]), SimOptions(traffic='agent'));"
        # Not getrusage: what that tells begins with the parent's size.
        "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'));"
        "print(json.dumps([r.requests, int(peak)]))"
    )
    path = data_dir / "traces/weka_agent.jsonl.gz"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    requests, peak_kib = json.loads(done.stdout)
    assert requests == 33_825
    assert peak_kib < 1 << 19
