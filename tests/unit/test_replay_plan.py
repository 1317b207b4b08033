"""Replay plans against numbers worked out by hand, and what a plan says about states, origin and token counts."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from duokv.kvstore.errors import UsageError
from duokv.replay import (
    Mode,
    Reason,
    ReplayPlan,
    ReplayPolicy,
    TokenPartition,
    anchor,
    is_exact,
    kept_boundaries,
    plan_replay,
    swa_candidates,
    usable,
    valid_from,
)

NO_HIT, SHORT_HIT, SWA_HIT, SWA_MISS = Reason.NO_HIT, Reason.SHORT_HIT, Reason.SWA_HIT, Reason.SWA_MISS
K128, K134, K140, K300 = (ReplayPolicy(keep_rows=rows) for rows in (128, 134, 140, 300))
EXACT, EXACT_3 = ReplayPolicy(mode="exact"), ReplayPolicy(mode="exact", encoder_layers=3)
SPAN_64, SPAN_256 = ReplayPolicy(span_tokens=64), ReplayPolicy(span_tokens=256)

GOLDEN = [
    # policy, hit, prompt, decoder_start given, swa_at -> start, floor, write_floor, decoder_start, reason, candidates
    (K140, 0, 1, None, None, 0, 0, 0, 0, NO_HIT, ()),
    (K140, 0, 140, None, None, 0, 0, 0, 0, NO_HIT, ()),
    (K140, 0, 141, None, None, 0, 0, 0, 1, NO_HIT, ()),
    (K140, 0, 1000, None, None, 0, 0, 0, 860, NO_HIT, ()),
    (K140, 127, 1000, None, None, 0, 0, 0, 860, NO_HIT, ()),
    (K140, 128, 128, None, None, 0, 0, 0, 0, NO_HIT, ()),
    (K140, 128, 1000, None, None, 0, 0, 0, 860, SHORT_HIT, ()),
    (K140, 255, 1000, None, None, 0, 0, 0, 860, SHORT_HIT, ()),
    (K140, 256, 256, None, None, 0, 0, 0, 116, SHORT_HIT, ()),
    (K140, 256, 257, None, None, 116, 116, 256, 117, SWA_MISS, ()),
    (K140, 256, 258, None, None, 118, 118, 256, 118, SWA_MISS, ()),
    (K140, 256, 259, None, None, 118, 118, 256, 119, SWA_MISS, ()),
    (K140, 256, 267, None, None, 126, 126, 256, 127, SWA_MISS, ()),
    (K140, 256, 268, None, None, 128, 128, 256, 128, SWA_MISS, (128,)),
    (K140, 256, 268, None, 128, 128, 0, 256, 128, SWA_HIT, (128,)),
    (K140, 256, 395, None, None, 128, 128, 256, 255, SWA_MISS, (128,)),
    (K140, 256, 396, None, None, 128, 128, 256, 256, SWA_MISS, (256, 128)),
    (K140, 256, 396, None, 256, 256, 0, 256, 256, SWA_HIT, (256, 128)),
    (K140, 256, 396, None, 128, 128, 0, 256, 256, SWA_HIT, (256, 128)),
    (K140, 768, 1000, None, None, 640, 640, 768, 860, SWA_MISS, (768, 640)),
    (K140, 895, 1000, None, None, 640, 640, 768, 860, SWA_MISS, (768, 640)),
    (K140, 768, 1000, None, 768, 768, 0, 768, 860, SWA_HIT, (768, 640)),
    (K140, 896, 1000, None, None, 768, 768, 896, 860, SWA_MISS, (768, 640)),
    (K140, 1000, 1000, None, 768, 768, 0, 896, 860, SWA_HIT, (768, 640)),
    (K140, 1024, 1024, None, None, 768, 768, 896, 884, SWA_MISS, (768, 640)),
    (K140, 1024, 1025, None, None, 884, 884, 1024, 885, SWA_MISS, (768, 640)),
    (K140, 1024, 1025, None, 640, 640, 0, 1024, 885, SWA_HIT, (768, 640)),
    (K140, 77_000, 77_000, None, None, 76_800, 76_800, 76_928, 76_860, SWA_MISS, (76_800, 76_672)),
    (K128, 256, 257, None, None, 128, 128, 256, 129, SWA_MISS, (128,)),
    (K128, 768, 1000, None, None, 640, 640, 768, 872, SWA_MISS, (768, 640)),
    (K134, 256, 257, None, None, 122, 122, 256, 123, SWA_MISS, ()),
    (K134, 256, 262, None, None, 128, 128, 256, 128, SWA_MISS, (128,)),
    (K300, 256, 300, None, None, 0, 0, 0, 0, SHORT_HIT, ()),
    (K300, 256, 301, None, None, 0, 0, 0, 1, SHORT_HIT, ()),
    (K300, 256, 302, None, None, 2, 2, 256, 2, SWA_MISS, ()),
    (SPAN_64, 768, 1000, None, None, 704, 704, 768, 860, SWA_MISS, (768, 640)),
    (SPAN_64, 128, 1000, None, None, 0, 0, 0, 860, SHORT_HIT, ()),
    (SPAN_256, 256, 1000, None, None, 0, 0, 0, 860, SHORT_HIT, (256, 128)),
    (SPAN_256, 256, 1000, None, 256, 256, 0, 256, 860, SWA_HIT, (256, 128)),
    (SPAN_256, 384, 1000, None, None, 128, 128, 384, 860, SWA_MISS, (384, 256)),
    (EXACT, 128, 1000, None, None, 0, 0, 0, 860, SHORT_HIT, ()),
    (EXACT, 768, 1000, None, None, 0, 0, 768, 860, SWA_MISS, (768, 640)),
    (EXACT, 4096, 5000, None, None, 1536, 1536, 4096, 4860, SWA_MISS, (4096, 3968)),
    (EXACT, 4992, 5000, None, None, 2300, 2300, 4992, 4860, SWA_MISS, (4736, 4608)),
    (EXACT, 4992, 5000, None, 4736, 4736, 0, 4992, 4860, SWA_HIT, (4736, 4608)),
    (EXACT, 77_000, 77_000, None, None, 74_300, 74_300, 76_928, 76_860, SWA_MISS, (76_800, 76_672)),
    (EXACT_3, 768, 1000, None, None, 384, 384, 768, 860, SWA_MISS, (768, 640)),
    (EXACT_3, 1024, 1025, None, None, 501, 501, 1024, 885, SWA_MISS, (768, 640)),
    # Preempted: prompts of 200, 1000, 130 and 1025 tokens have grown.
    (K140, 512, 600, 60, None, 60, 60, 512, 60, SWA_MISS, ()),
    (K140, 1280, 1300, 860, None, 860, 860, 1280, 860, SWA_MISS, (768, 640)),
    (K140, 1280, 1300, 860, 768, 768, 0, 1280, 860, SWA_HIT, (768, 640)),
    (K140, 384, 400, 0, None, 0, 0, 0, 0, SHORT_HIT, ()),
    (K140, 1280, 1300, 885, None, 884, 884, 1280, 885, SWA_MISS, (768, 640)),
    (EXACT, 384, 400, 0, None, 0, 0, 384, 0, SWA_MISS, ()),
    (EXACT_3, 1280, 1300, 860, None, 476, 476, 1280, 860, SWA_MISS, (768, 640)),
]


Row = tuple[ReplayPolicy, int, int, int | None, int | None, int, int, int, int, Reason, tuple[int, ...]]


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row[0].mode}-K{row[0].keep_rows}-{row[1]}of{row[2]}")
def test_plan_equals_the_hand_computed_row(row: Row) -> None:
    policy, hit, prompt, given, swa_at, start, floor, write_floor, decoder_start, reason, candidates = row
    plan = plan_replay(hit_tokens=hit, prompt_tokens=prompt, swa_at=swa_at, policy=policy, decoder_start=given)
    assert plan == ReplayPlan(start, floor, write_floor, decoder_start, reason)
    asked = swa_candidates(hit_tokens=hit, prompt_tokens=prompt, policy=policy, decoder_start=given)
    assert asked == candidates
    best = anchor(hit_tokens=hit, prompt_tokens=prompt, policy=policy, decoder_start=given)
    assert best == max(candidates, default=0)


def test_case_16_a_lost_window_moves_exactly_one_window_from_block_hit_to_replayed() -> None:
    """vLLM PR #30522: 768 of 1,000 tokens were stored and their SWA state was gone."""
    plan = plan_replay(hit_tokens=768, prompt_tokens=1000, swa_at=None, policy=K128)
    assert plan.partition(1000) == TokenPartition(swa_hit=0, block_hit=640, replayed=128, computed=232)
    assert plan.adopted_tokens == 768
    assert plan.partition(1000).amplification == 1000 / 360

    restored = plan_replay(hit_tokens=768, prompt_tokens=1000, swa_at=768, policy=K128)
    assert restored.partition(1000) == TokenPartition(swa_hit=768, block_hit=0, replayed=0, computed=232)


def test_case_18_a_second_request_without_its_window_replays_128_rows_once() -> None:
    """ATOM #1417: the same prompt came back after the SWA tier had been emptied."""
    for prompt in range(780, 1100):
        plan = plan_replay(hit_tokens=768, prompt_tokens=prompt, swa_at=None, policy=K140)
        assert plan == ReplayPlan(640, 640, 768, prompt - 140, SWA_MISS)
        assert plan.partition(prompt).replayed == 128


def test_case_20_hits_near_one_window_are_dropped_or_replayed_by_128_to_140_rows() -> None:
    """vLLM PR #56227: replay ran, or wrote, where the hit was hardly longer than the window."""
    for hit in range(129):
        cold = plan_replay(hit_tokens=hit, prompt_tokens=1000, swa_at=None, policy=K140)
        assert (cold.start, cold.floor, cold.write_floor) == (0, 0, 0)
        assert cold.partition(1000) == TokenPartition(0, 0, 0, 1000)
    for prompt in range(268, 500):
        plan = plan_replay(hit_tokens=256, prompt_tokens=prompt, swa_at=None, policy=K140)
        assert (plan.partition(prompt).replayed, plan.write_floor) == (128, 256)
    shortest = plan_replay(hit_tokens=256, prompt_tokens=257, swa_at=None, policy=K140)
    assert (shortest.partition(257).replayed, shortest.write_floor) == (140, 256)


def test_partition_of_a_restored_window_before_the_hits_end() -> None:
    plan = plan_replay(hit_tokens=1024, prompt_tokens=1025, swa_at=640, policy=K140)
    assert plan.partition(1025) == TokenPartition(swa_hit=640, block_hit=0, replayed=384, computed=1)


def test_an_exact_miss_that_reaches_row_0_still_adopts_its_blocks() -> None:
    plan = plan_replay(hit_tokens=768, prompt_tokens=1000, swa_at=None, policy=EXACT)
    assert plan.partition(1000) == TokenPartition(swa_hit=0, block_hit=0, replayed=768, computed=232)


@pytest.mark.parametrize(
    ("plan", "policy", "first"),
    [
        (ReplayPlan(0, 0, 0, 860, NO_HIT), K140, 0),
        (ReplayPlan(768, 0, 768, 860, SWA_HIT), K140, 640),
        (ReplayPlan(768, 0, 768, 860, SWA_HIT), EXACT, 640),
        (ReplayPlan(640, 640, 768, 860, SWA_MISS), K140, 640),
        (ReplayPlan(0, 0, 768, 860, SWA_MISS), EXACT, 0),
        (ReplayPlan(1536, 1536, 4096, 4860, SWA_MISS), EXACT, 1536 + 19 * 127),
        (ReplayPlan(384, 384, 768, 860, SWA_MISS), EXACT_3, 638),
    ],
)
def test_rows_may_be_kept_from(plan: ReplayPlan, policy: ReplayPolicy, first: int) -> None:
    assert valid_from(plan, policy) == first


def test_a_state_is_usable_only_with_its_whole_window() -> None:
    assert usable(768, 640)
    assert not usable(768, 641)
    assert usable(128, 0)
    assert not usable(128, 1)
    assert usable(16, 8, window_tokens=8)
    assert not usable(16, 9, window_tokens=8)


@pytest.mark.parametrize(
    ("total", "policy", "kept"),
    [
        (0, K140, ()),
        (127, K140, ()),
        (128, K140, (128,)),
        (256, K140, (128, 256)),
        (1000, K140, (768, 896)),
        (1024, K140, (768, 896, 1024)),
        (1035, K140, (768, 896, 1024)),
        (1036, K140, (896, 1024)),
        (1024, K128, (896, 1024)),
        (1023, K128, (768, 896)),
    ],
)
def test_boundaries_kept_at_the_end(total: int, policy: ReplayPolicy, kept: tuple[int, ...]) -> None:
    assert kept_boundaries(total, policy) == kept


@pytest.mark.parametrize("mode", ["bounded", "exact"])
@pytest.mark.parametrize("blocks_exact", [True, False])
def test_a_result_is_exact_only_if_nothing_it_used_was_approximate(mode: Mode, blocks_exact: bool) -> None:
    policy = ReplayPolicy(mode=mode)
    cold = plan_replay(hit_tokens=128, prompt_tokens=1000, swa_at=None, policy=policy)
    miss = plan_replay(hit_tokens=768, prompt_tokens=1000, swa_at=None, policy=policy)
    hit = plan_replay(hit_tokens=768, prompt_tokens=1000, swa_at=768, policy=policy)
    assert is_exact(cold, policy, blocks_exact=blocks_exact)
    assert is_exact(miss, policy, blocks_exact=blocks_exact) is (blocks_exact and mode == "exact")
    assert is_exact(hit, policy, blocks_exact=blocks_exact, state_exact=True) is blocks_exact
    assert not is_exact(hit, policy, blocks_exact=blocks_exact, state_exact=False)
    with pytest.raises(UsageError, match="when a state was restored"):
        is_exact(hit, policy, blocks_exact=blocks_exact)
    with pytest.raises(UsageError, match="when a state was restored"):
        is_exact(miss, policy, blocks_exact=blocks_exact, state_exact=True)


@pytest.mark.parametrize(
    ("hit", "prompt", "swa_at", "decoder_start", "message"),
    [
        (-1, 10, None, None, "hit_tokens"),
        (0, 0, None, None, "prompt_tokens"),
        (768, -5, None, None, "prompt_tokens"),
        (768, 1000, 512, None, "give 768 or 640 or None"),
        (768, 1000, 700, None, "give 768 or 640 or None"),
        (768, 1000, 0, None, "give 768 or 640 or None"),
        (128, 1000, 128, None, "give None"),
        (1280, 1300, 1152, 860, "give 768 or 640 or None"),
        (768, 1000, None, -1, "decoder_start"),
        (768, 1000, None, 861, "decoder_start"),
    ],
)
def test_misuse_raises(hit: int, prompt: int, swa_at: int | None, decoder_start: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_replay(hit_tokens=hit, prompt_tokens=prompt, swa_at=swa_at, policy=K140, decoder_start=decoder_start)


def test_other_misuse_raises() -> None:
    with pytest.raises(UsageError, match="total_tokens"):
        kept_boundaries(-1, K140)
    with pytest.raises(UsageError, match="adopts 768"):
        ReplayPlan(640, 640, 768, 860, SWA_MISS).partition(768)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ReplayPolicy(span_tokens=0), "span_tokens"),
        (lambda: ReplayPolicy(span_tokens=33), "span_tokens"),
        (lambda: ReplayPolicy(window_tokens=7), "window_tokens"),
        (lambda: ReplayPolicy(keep_rows=127), "at least 128"),
        (lambda: ReplayPolicy(encoder_layers=0), "encoder_layers"),
        (lambda: ReplayPolicy(mode="exakt"), "did you mean 'exact'"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(UsageError, match=message):
        build()


def test_plans_and_policies_are_values() -> None:
    assert hash(K140) == hash(ReplayPolicy(span_tokens=128, keep_rows=140, encoder_layers=20, mode="bounded"))
    with pytest.raises(FrozenInstanceError):
        K140.keep_rows = 1  # type: ignore[misc]
    assert f"{Reason.SWA_MISS}" == "SWA_MISS"
