"""What every plan must satisfy, whatever the hit, the prompt and the policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.replay import (
    Mode,
    Reason,
    ReplayPlan,
    ReplayPolicy,
    anchor,
    kept_boundaries,
    plan_replay,
    swa_candidates,
    usable,
    valid_from,
    window_span,
)

W = 128
KEEPS = (128, 134, 140)
policies = st.builds(
    ReplayPolicy,
    span_tokens=st.sampled_from((32, 64, 128, 256)),
    keep_rows=st.sampled_from((*KEEPS, 256, 300)),
    encoder_layers=st.sampled_from((1, 3, 20)),
    mode=st.sampled_from(("bounded", "exact")),
)


def check(plan: ReplayPlan, hit: int, prompt: int, policy: ReplayPolicy) -> None:
    assert 0 <= plan.start <= plan.decoder_start, "the decoder's first window lacks encoder outputs"
    assert plan.start <= plan.write_floor <= min(hit, prompt - 1)
    assert plan.write_floor % W == 0
    assert plan.write_floor != W
    assert plan.floor == (0 if plan.reason is Reason.SWA_HIT else plan.start)
    assert (plan.write_floor == 0) == (plan.reason in (Reason.NO_HIT, Reason.SHORT_HIT))
    partition = plan.partition(prompt)
    assert partition.input_tokens == prompt
    assert min(partition.swa_hit, partition.block_hit, partition.replayed) >= 0 < partition.computed
    assert partition.swa_hit + partition.block_hit + partition.replayed == plan.adopted_tokens
    if plan.reason is Reason.SWA_HIT:
        lo, _ = window_span(plan.start, plan.floor)
        assert plan.start % W == 0
        assert lo >= valid_from(plan, policy), "a row's window needs more than was restored"
    if plan.reason is Reason.SWA_MISS and policy.mode == "bounded":
        assert plan.start % 2 == 0
        assert partition.block_hit == plan.start > 0


@pytest.mark.parametrize("mode", ["bounded", "exact"])
@pytest.mark.parametrize("keep", KEEPS)
def test_every_hit_and_short_suffix(keep: int, mode: Mode) -> None:
    policy = ReplayPolicy(keep_rows=keep, mode=mode)
    for hit in range(4 * W + 1):
        for suffix in (0, 1, 2, 5, 6, 7, 11, 12, 13, 127, 128, 129, keep - 1, keep, keep + 1, 500):
            prompt = max(1, hit + suffix)
            plan = plan_replay(hit_tokens=hit, prompt_tokens=prompt, swa_at=None, policy=policy)
            check(plan, hit, prompt, policy)
            if mode == "bounded" and plan.adopted_tokens:
                replayed = plan.partition(prompt).replayed
                assert W <= replayed <= keep
                assert replayed == W or prompt - plan.adopted_tokens < keep - W


@given(policy=policies, hit=st.integers(0, 2000), prompt=st.integers(1, 2000), data=st.data())
def test_any_plan(policy: ReplayPolicy, hit: int, prompt: int, data: st.DataObject) -> None:
    first = max(0, prompt - policy.keep_rows)
    given_start = data.draw(st.none() | st.integers(0, first))
    candidates = swa_candidates(hit_tokens=hit, prompt_tokens=prompt, policy=policy, decoder_start=given_start)
    best = anchor(hit_tokens=hit, prompt_tokens=prompt, policy=policy, decoder_start=given_start)
    assert all(best - W <= boundary <= best and boundary > 0 for boundary in candidates)
    for swa_at in (None, *candidates):
        plan = plan_replay(
            hit_tokens=hit, prompt_tokens=prompt, swa_at=swa_at, policy=policy, decoder_start=given_start
        )
        check(plan, hit, prompt, policy)
        assert plan.decoder_start == (first if given_start is None else given_start)
        assert (plan.reason is Reason.SWA_HIT) == (swa_at is not None)


@given(policy=policies, hit=st.integers(0, 2000), prompt=st.integers(1, 2000), grown=st.integers(0, 600))
def test_a_preempted_request_keeps_its_anchor(policy: ReplayPolicy, hit: int, prompt: int, grown: int) -> None:
    """Only the prompt was a hit, so after it has grown the same rows serve it: the same plan comes out."""
    hit = min(hit, prompt - 1)
    before = plan_replay(hit_tokens=hit, prompt_tokens=prompt, swa_at=None, policy=policy)
    after = plan_replay(
        hit_tokens=hit,
        prompt_tokens=prompt + grown,
        swa_at=None,
        policy=policy,
        decoder_start=before.decoder_start,
    )
    assert after == before


@given(policy=policies, total=st.integers(1, 2000), suffix=st.integers(0, 600))
def test_what_is_kept_serves_every_prompt_that_goes_on_from_it(policy: ReplayPolicy, total: int, suffix: int) -> None:
    best = anchor(hit_tokens=total, prompt_tokens=total + suffix, policy=policy)
    assert best == 0 or best in kept_boundaries(total, policy)


@given(policy=policies, hit=st.integers(0, 2000), suffix=st.integers(1, 600), output=st.integers(0, 300))
def test_the_next_prompt_finds_a_usable_state(policy: ReplayPolicy, hit: int, suffix: int, output: int) -> None:
    """After a cold run or an SWA hit always; after a bounded replay once `keep_rows` new rows followed the hit."""
    prompt = hit + suffix
    best = anchor(hit_tokens=prompt, prompt_tokens=prompt + output, policy=policy)
    bounded = policy.mode == "bounded" and policy.span_tokens >= W
    for swa_at in (None, *swa_candidates(hit_tokens=hit, prompt_tokens=prompt, policy=policy)):
        plan = plan_replay(hit_tokens=hit, prompt_tokens=prompt, swa_at=swa_at, policy=policy)
        promised = bounded and prompt - plan.adopted_tokens >= policy.keep_rows
        if best and (plan.reason is not Reason.SWA_MISS or promised):
            assert best in kept_boundaries(prompt, policy)
            assert usable(best, valid_from(plan, policy))
