"""What a request holds by itself: how it begins, what it takes over from a stored state, how far it can go back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from duokv.engine.config import ModelConfig
from duokv.engine.session import Session, ring_geometry
from duokv.kvstore.errors import UsageError
from duokv.replay import ReplayPlan, ReplayPolicy, plan_replay

CONFIG = ModelConfig.preset("tiny")
GEOMETRY = ring_geometry(CONFIG)
POLICY = ReplayPolicy(encoder_layers=CONFIG.encoder_layers)
LENGTH = 420
TOKENS = list(range(200)) + [1] * (LENGTH - 200)


def plan(swa_at: int | None = None, hit: int = 256) -> ReplayPlan:
    return plan_replay(hit_tokens=hit, prompt_tokens=LENGTH, swa_at=swa_at, policy=POLICY)


def begin(
    of: ReplayPlan,
    window: bytes | memoryview | None = None,
    *,
    slots: int = 4,
    tokens: int = LENGTH,
    poison: bool = False,
) -> Session:
    view = None if window is None else memoryview(window)
    return Session.begin(CONFIG, of, TOKENS[:tokens], slots=list(range(slots)), window=view, poison=poison)


def state() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(1, 255, GEOMETRY.state_bytes, np.uint8)


def test_the_rings_are_those_of_the_stored_state() -> None:
    assert GEOMETRY.state_bytes == CONFIG.cache.swa_bytes
    session = begin(plan(hit=0))
    assert session.ring.shape == (CONFIG.layers, 134, CONFIG.window_format.nbytes)
    assert (session.computed, session.held_from) == (0, 0)


@pytest.mark.parametrize("poison", [False, True])
def test_a_restored_window_is_all_the_ring_holds(poison: bool) -> None:
    """The rows of the boundary's window lie at their positions; the spare slots and the decoder's rows are empty."""
    data = state()
    session = begin(plan(256), data.tobytes(), poison=poison)
    stored = torch.from_numpy(data).view(GEOMETRY.layers, GEOMETRY.slots, GEOMETRY.row_bytes)
    positions = torch.arange(128, 256) % 134
    assert torch.equal(session.ring[:3, positions], stored[:, positions])
    empty = torch.ones(session.ring.shape[:2], dtype=torch.bool)
    empty[:3, positions] = False
    assert bool((session.ring[empty] == (0xFF if poison else 0)).all())
    assert (session.computed, session.held_from) == (256, 128)


def test_a_restored_window_is_a_copy() -> None:
    data = state()
    session = begin(plan(256), data.data)
    before = session.ring.clone()
    data[:] = 0
    assert torch.equal(session.ring, before)


def test_a_replay_holds_nothing_yet() -> None:
    session = begin(plan())
    assert (session.computed, session.held_from) == (128, 128)
    assert not session.ring.any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: begin(plan(256)), "no SWA state on SWA_HIT"),
        (lambda: begin(plan(), state().tobytes()), "an SWA state on SWA_MISS"),
        (lambda: begin(plan(256), state().tobytes()[:-1]), "bytes is not this model's"),
        (lambda: begin(plan(), slots=1), "cannot adopt 256"),
        (lambda: begin(plan(), tokens=256), "cannot adopt 256"),
        (lambda: begin(ReplayPlan(128, 128, 256, 100, plan().reason)), "rows from 100 lack encoder outputs below 128"),
    ],
    ids=["state missing", "state too many", "other model", "blocks missing", "nothing to compute", "decoder too early"],
)
def test_what_does_not_fit_the_plan_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def computed(to: int) -> Session:
    session = begin(plan())
    session.advance(to, {1: torch.arange(7.0).unsqueeze(1)})
    return session


def test_going_back_drops_tokens_and_rows() -> None:
    session = computed(300)
    session.truncate(297)
    assert session.computed == 297
    assert session.tokens == TOKENS[:297]
    assert session.recent[1].flatten().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_tokens_not_yet_computed_can_be_dropped() -> None:
    session = computed(300)
    session.truncate(301)
    assert (session.computed, len(session.tokens)) == (300, 301)


def test_the_ring_cannot_be_emptied_step_by_step() -> None:
    """Six rows back are six from the furthest one, however they are divided."""
    session = computed(300)
    session.truncate(296)
    with pytest.raises(UsageError, match="computed to 300 cannot go back to 293"):
        session.truncate(293)
    assert (session.computed, len(session.tokens)) == (296, 296)
    session.truncate(294)
    session.advance(301, session.recent)
    session.truncate(295)


def test_adopted_rows_stay() -> None:
    session = computed(258)
    with pytest.raises(UsageError, match="none adopted"):
        session.truncate(255)
    session.truncate(256)
