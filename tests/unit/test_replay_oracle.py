"""Every plan carried out on a float64 toy of the same shape and compared with the run it stands for.

Window and block are 8 tokens, so that all lengths around a boundary are covered quickly; the rules do not know 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import pytest

from duokv.replay import (
    Mode,
    Reason,
    ReplayPlan,
    ReplayPolicy,
    kept_boundaries,
    plan_replay,
    swa_candidates,
    usable,
    valid_from,
)
from duokv.replay.oracle import Ints, Memory, Run, Toy, ToyShape

W, E = 8, 3
TOY = Toy(ToyShape(encoder_layers=E, window=W))
RNG = np.random.default_rng(7)
EARLIER = RNG.integers(0, TOY.shape.vocab, 96)
SUFFIX = RNG.integers(0, TOY.shape.vocab, 96)
STORED = TOY.cold(EARLIER, decoder_start=96 - W).memory

KEEPS = (8, 9, 10)
HITS = (16, 24, 32, 40, 48)
SUFFIXES = (1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 15, 16, 17, 19)


def policy_of(keep: int, mode: Mode, span: int = W) -> ReplayPolicy:
    return ReplayPolicy(span_tokens=span, keep_rows=keep, encoder_layers=E, mode=mode, window_tokens=W)


def prompt_of(hit: int, suffix: int) -> Ints:
    """A prompt that shares its first `hit` tokens with the earlier request."""
    return np.concatenate([EARLIER[:hit], SUFFIX[:suffix]])


@cache
def cold_run(hit: int, suffix: int, decoder_start: int) -> Run:
    return TOY.cold(prompt_of(hit, suffix), decoder_start=decoder_start)


def grid(keeps: tuple[int, ...] = KEEPS) -> Iterator[tuple[int, int, int]]:
    return product(keeps, HITS, SUFFIXES)


def off_by(got: Run, wanted: Run, first_row: int) -> float:
    """Largest difference in outputs, all global entries, and SWA rows from `first_row` on; inf where one is missing."""
    pairs = [(got.output, wanted.output), (got.memory.swa[:, first_row:], wanted.memory.swa[:, first_row:])]
    pairs += zip(got.memory.planes, wanted.memory.planes, strict=True)
    worst = max(float(np.abs(a - b).max(initial=0.0)) for a, b in pairs)
    return float("inf") if np.isnan(worst) else worst


def carry_out(tokens: Ints, plan: ReplayPlan, stored: Memory) -> Run:
    """Run a plan on what it may use: the adopted blocks, and the window before its start if that was restored."""
    swa = (plan.start - W, plan.start) if plan.reason is Reason.SWA_HIT else (0, 0)
    return TOY.run(tokens, plan, TOY.stored(stored, len(tokens), adopted=plan.write_floor, swa=swa))


def two_streams(tokens: Ints, plan: ReplayPlan, stored: Memory) -> Run:
    """Bounded replay by definition: every row computed, those from the floor on with their windows cut there, adopted
    entries from the uncut forward."""
    everything = ReplayPlan(0, plan.floor, plan.write_floor, plan.decoder_start, plan.reason)
    return TOY.run(tokens, everything, TOY.stored(stored, len(tokens), adopted=plan.write_floor))


def test_swa_hits_equal_the_cold_run() -> None:
    hits = 0
    for keep, hit, suffix in grid():
        policy, tokens = policy_of(keep, "bounded"), prompt_of(hit, suffix)
        candidates = swa_candidates(hit_tokens=hit, prompt_tokens=len(tokens), policy=policy)
        for swa_at in candidates:
            plan = plan_replay(hit_tokens=hit, prompt_tokens=len(tokens), swa_at=swa_at, policy=policy)
            run = carry_out(tokens, plan, STORED)
            assert off_by(run, cold_run(hit, suffix, plan.decoder_start), valid_from(plan, policy)) < 1e-12
            hits += 1
    assert hits > 300


def test_exact_misses_equal_the_cold_run() -> None:
    for keep, hit, suffix in grid():
        policy, tokens = policy_of(keep, "exact"), prompt_of(hit, suffix)
        plan = plan_replay(hit_tokens=hit, prompt_tokens=len(tokens), swa_at=None, policy=policy)
        assert plan.reason is Reason.SWA_MISS
        run = carry_out(tokens, plan, STORED)
        assert off_by(run, cold_run(hit, suffix, plan.decoder_start), valid_from(plan, policy)) < 1e-12


@pytest.mark.parametrize(("span", "keeps"), [(4, (9,)), (8, KEEPS), (16, (9,))])
def test_bounded_misses_equal_their_two_stream_definition(span: int, keeps: tuple[int, ...]) -> None:
    replays = 0
    for keep, hit, suffix in grid(keeps):
        policy, tokens = policy_of(keep, "bounded", span), prompt_of(hit, suffix)
        plan = plan_replay(hit_tokens=hit, prompt_tokens=len(tokens), swa_at=None, policy=policy)
        if plan.reason is Reason.SWA_MISS:
            run = carry_out(tokens, plan, STORED)
            assert off_by(run, two_streams(tokens, plan, STORED), valid_from(plan, policy)) < 1e-12
            assert off_by(run, cold_run(hit, suffix, plan.decoder_start), plan.start) > 1e-6, "not bounded at all"
            replays += 1
    assert replays >= 50 * len(keeps)


def test_one_masked_forward_is_not_what_bounded_replay_computes() -> None:
    policy, tokens = policy_of(9, "bounded"), prompt_of(48, 20)
    plan = plan_replay(hit_tokens=48, prompt_tokens=68, swa_at=None, policy=policy)
    masked = TOY.run(
        tokens, ReplayPlan(0, plan.floor, 0, plan.decoder_start, plan.reason), TOY.nothing_held(len(tokens))
    )
    run = carry_out(tokens, plan, STORED)
    assert np.abs(run.output - masked.output).max() > 1e-6


def test_an_exact_start_one_row_later_than_the_bound_is_wrong() -> None:
    for keep, (hit, suffix) in product(KEEPS, ((40, 1), (40, 5), (48, 2), (48, 9), (48, 30))):
        tokens = prompt_of(hit, suffix)
        decoder_start = len(tokens) - keep
        cold = cold_run(hit, suffix, decoder_start)
        latest = min(hit, decoder_start) - E * (W - 1)
        errors = [
            off_by(
                carry_out(tokens, ReplayPlan(start, start, hit, decoder_start, Reason.SWA_MISS), STORED),
                cold,
                len(tokens),
            )
            for start in (latest, latest + 1)
        ]
        assert errors[0] < 1e-12
        assert errors[1] > 1e-9


def test_rows_kept_after_an_exact_miss_begin_where_they_are_exact() -> None:
    policy, tokens = policy_of(9, "exact"), prompt_of(48, 20)
    plan = plan_replay(hit_tokens=48, prompt_tokens=68, swa_at=None, policy=policy)
    first = valid_from(plan, policy)
    run, cold = carry_out(tokens, plan, STORED), cold_run(48, 20, plan.decoder_start)
    assert off_by(run, cold, first) < 1e-12
    assert off_by(run, cold, first - 1) > 1e-9


@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_case_20_stored_blocks_are_the_same_before_and_after(mode: Mode) -> None:
    """vLLM PR #56227: replayed rows must not rewrite the Block KV of the hit they belong to."""
    for hit, suffix in ((16, 2), (16, 20), (48, 2), (48, 20)):
        policy, tokens = policy_of(10, mode), prompt_of(hit, suffix)
        plan = plan_replay(hit_tokens=hit, prompt_tokens=len(tokens), swa_at=None, policy=policy)
        held = TOY.stored(STORED, len(tokens), adopted=plan.write_floor)
        run = TOY.run(tokens, plan, held)
        assert plan.write_floor == hit
        for before, after, ratio in zip(held.planes, run.memory.planes, TOY.shape.ratios, strict=True):
            assert before[: hit // ratio].tobytes() == after[: hit // ratio].tobytes()
            assert not np.isnan(after).any()


def test_starting_at_the_hit_on_a_short_suffix_starves_the_decoder() -> None:
    """Why there is an anchor: with fewer than `keep_rows` new tokens the decoder's window begins below the hit."""
    tokens = prompt_of(48, 4)
    run = carry_out(tokens, ReplayPlan(48, 0, 48, len(tokens) - 9, Reason.SWA_HIT), STORED)
    assert np.isnan(run.output).all()


def test_every_start_looks_back_exactly_three_token_ids() -> None:
    policy, tokens = policy_of(9, "bounded"), prompt_of(48, 20)
    plan = plan_replay(hit_tokens=48, prompt_tokens=68, swa_at=48, policy=policy)
    run = carry_out(tokens, plan, STORED)
    for back, matters in ((1, True), (2, True), (3, True), (4, False)):
        other = tokens.copy()
        other[plan.start - back] = (other[plan.start - back] + 1) % TOY.shape.vocab
        changed = np.abs(carry_out(other, plan, STORED).output - run.output).max() > 1e-9
        assert changed == matters


def test_what_is_stored_does_not_depend_on_keep_rows() -> None:
    tokens = prompt_of(48, 20)
    runs = [TOY.cold(tokens, decoder_start=68 - keep) for keep in (8, 9, 12, 68)]
    for run in runs[1:]:
        assert np.array_equal(run.memory.swa, runs[0].memory.swa)
        for mine, theirs in zip(run.memory.planes, runs[0].memory.planes, strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("mode", ["bounded", "exact"])
def test_a_conversation_served_from_kept_states_equals_cold_runs(mode: Mode) -> None:
    """Each turn restores what an earlier one kept; in the third that state is lost, and a bounded replay then taints
    all that follows."""
    policy = policy_of(10, mode)
    memory, states, total = TOY.nothing_held(0), set[int](), 0
    exact = True
    for turn, length in enumerate((19, 37, 39, 70, 93)):
        tokens, hit = EARLIER[:length], total // W * W
        candidates = swa_candidates(hit_tokens=hit, prompt_tokens=length, policy=policy)
        swa_at = next((b for b in candidates if b in states and turn != 2), None)
        plan = plan_replay(hit_tokens=hit, prompt_tokens=length, swa_at=swa_at, policy=policy)
        assert (plan.reason is Reason.SWA_HIT) == (turn in (1, 3, 4)) or mode == "exact"
        exact = exact and not (mode == "bounded" and plan.reason is Reason.SWA_MISS)
        run = carry_out(tokens, plan, memory)
        first = valid_from(plan, policy)
        error = off_by(run, TOY.cold(tokens, decoder_start=plan.decoder_start), first)
        assert error < 1e-12 if exact else 1e-9 < error < float("inf")
        memory, total = run.memory, length
        states |= {b for b in kept_boundaries(length, policy) if usable(b, first, window_tokens=W)}


@pytest.mark.parametrize("mode", ["bounded", "exact"])
@pytest.mark.parametrize("grown", [1, 7, 8, 30])
def test_a_preempted_request_goes_on_as_if_it_had_not_been(mode: Mode, grown: int) -> None:
    policy, prompt = policy_of(9, mode), 52
    decoder_start = prompt - 9
    tokens = prompt_of(48, 4 + grown)
    cold = cold_run(48, 4 + grown, decoder_start)
    length = len(tokens)
    candidates = swa_candidates(hit_tokens=48, prompt_tokens=length, policy=policy, decoder_start=decoder_start)
    for swa_at in (None, *candidates):
        plan = plan_replay(
            hit_tokens=48, prompt_tokens=length, swa_at=swa_at, policy=policy, decoder_start=decoder_start
        )
        wanted = two_streams(tokens, plan, STORED) if swa_at is None and mode == "bounded" else cold
        assert off_by(carry_out(tokens, plan, STORED), wanted, valid_from(plan, policy)) < 1e-12
