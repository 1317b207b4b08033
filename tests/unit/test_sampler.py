"""Sampling: what is drawn depends on the logits, the seed and the position, and on nothing else."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from duokv.engine import Sampling
from duokv.engine.sampler import sample
from duokv.kvstore import UsageError

LOGITS = torch.tensor([0.5, 3.0, -1.0, 2.5, 3.0, -math.inf, 0.0])


def draws(sampling: Sampling, n: int = 2000, logits: Tensor = LOGITS) -> Counter[int]:
    return Counter(sample(logits, sampling, seed=1, position=position) for position in range(n))


def test_zero_temperature_takes_the_first_of_the_likeliest() -> None:
    assert draws(Sampling(max_tokens=1), 5) == {1: 5}


def test_draws_have_the_softmax_s_frequencies() -> None:
    expected = torch.softmax(LOGITS.double() / 1.5, 0)
    found = draws(Sampling(max_tokens=1, temperature=1.5))
    for token, share in enumerate(expected.tolist()):
        # Four standard deviations of 2,000 draws.
        assert abs(found[token] / 2000 - share) <= 4 * math.sqrt(share * (1 - share) / 2000)


def test_a_low_temperature_tends_to_the_greedy_token_without_overflow() -> None:
    assert draws(Sampling(max_tokens=1, temperature=1e-9), 200, LOGITS[:4]) == {1: 200}
    huge = torch.tensor([1e30, 2e30, -1e30])
    assert draws(Sampling(max_tokens=1, temperature=1e-3), 50, huge) == {1: 50}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {1}), (0.3, {1}), (0.4, {1, 4}), (0.70, {1, 4}), (0.75, {1, 4, 3}), (0.95, {1, 4, 3, 0})],
)
def test_top_p_keeps_the_fewest_tokens_that_have_the_mass(top_p: float, kept: set[int]) -> None:
    """Shares, sorted: 0.363, 0.363, 0.220, 0.030, 0.018, ... ties go to the smaller id."""
    assert set(draws(Sampling(max_tokens=1, temperature=1.0, top_p=top_p))) == kept


def test_a_draw_is_a_function_of_seed_and_position() -> None:
    sampling = Sampling(max_tokens=1, temperature=5.0)
    forwards = [sample(LOGITS, sampling, seed=3, position=position) for position in range(100)]
    backwards = [sample(LOGITS, sampling, seed=3, position=position) for position in reversed(range(100))]
    assert forwards == backwards[::-1]
    assert forwards != [sample(LOGITS, sampling, seed=4, position=position) for position in range(100)]
    assert len(set(forwards)) > 3
    assert sample(LOGITS, sampling, seed=2**64 - 1, position=2**40) in range(7)


def test_draws_are_pinned() -> None:
    """A seed promises the same output tomorrow and on another machine."""
    sampling = Sampling(max_tokens=1, temperature=2.0, top_p=0.95)
    drawn = [sample(LOGITS, sampling, seed=7, position=position) for position in range(12)]
    assert "".join(map(str, drawn)) == "011414413463"


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} = [^\n]+; give|is out of range"):
        Sampling(**{"max_tokens": 1, **wrong})  # type: ignore[arg-type]
