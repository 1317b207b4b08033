"""The cost of a replay is measured on what the engine computes, and every case does what its name says."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from engine_kit import model, policy  # noqa: E402
from torch import Tensor  # noqa: E402

from duokv.bench import replay_measure  # noqa: E402
from duokv.bench.replay_measure import (  # noqa: E402
    EXACT,
    SCORED,
    Case,
    Comparison,
    Scored,
    TinySubject,
    byte_texts,
    measure,
    score,
)
from duokv.engine.forward import ForwardPass, forward  # noqa: E402
from duokv.engine.oracle import replayed  # noqa: E402
from duokv.replay import plan_replay  # noqa: E402

DATA = bytes((i * i + i // 7) % 251 for i in range(4000))
(TEXT,) = byte_texts(DATA, 1024, 1)
HIT = 1024 - SCORED


@pytest.fixture(scope="module")
def subject() -> TinySubject:
    with torch.inference_mode():
        return TinySubject(model(), TEXT)


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.inference_mode():
        yield


def test_a_replay_is_the_one_that_the_engine_s_oracle_does(subject: TinySubject) -> None:
    rows = TEXT[:-1]
    keep = replay_measure.SCORED
    plan = plan_replay(hit_tokens=HIT, prompt_tokens=1024, swa_at=None, policy=policy(keep_rows=keep))
    assert (plan.start, plan.decoder_start) == (HIT - 128, HIT)
    cold = forward(model(), rows, decoder_start=HIT)
    right = score(cold.logits, replayed(model(), rows, plan).logits, TEXT[1:][-SCORED:])
    assert subject.run(Case("replay", 128)) == right
    assert right.kl_bits > 0


def test_more_rows_come_closer_and_enough_are_exact(subject: TinySubject) -> None:
    found = [subject.run(Case("replay", span)).kl_bits for span in (0, 64, 256, EXACT)]
    assert found[0] > found[1] > found[2] > found[3]
    assert abs(found[3]) < 1e-7
    assert subject.run(Case("replay", EXACT)).equal
    assert not subject.run(Case("replay", 256)).equal


def test_an_exact_replay_of_too_few_rows_is_not_called_equal(
    subject: TinySubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is compared with is made from row 0, by no means that it uses itself."""
    monkeypatch.setattr(subject, "_encoder_reach", 128)
    assert not subject.run(Case("replay", EXACT)).equal


@pytest.mark.parametrize("kind", ["encoder", "decoder", "both"])
def test_a_side_alone_comes_closer_with_its_rows(subject: TinySubject, kind: replay_measure.Kind) -> None:
    few, many = subject.run(Case(kind, 32)), subject.run(Case(kind, 256))
    assert few.kl_bits > many.kl_bits > 0
    assert few.cold_bits == many.cold_bits


def test_both_sides_are_further_off_than_either(subject: TinySubject) -> None:
    encoder, decoder, both = (subject.run(Case(kind, 64)).kl_bits for kind in ("encoder", "decoder", "both"))
    assert both > max(encoder, decoder)


def test_a_side_s_cold_run_has_all_decoder_rows(subject: TinySubject) -> None:
    logits = forward(model(), TEXT[:-1]).logits[-SCORED:]
    right = score(logits, logits, TEXT[1:][-SCORED:])
    assert subject.run(Case("encoder", 64)).cold_bits == right.bits
    assert subject.run(Case("replay", 64)).cold_bits != right.bits


def test_earlier_replays_change_the_blocks_that_are_adopted(
    subject: TinySubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = []

    def seen(*args: object, adopted_tokens: int = 0, start: int = 0, **more: object) -> ForwardPass:
        hits.append((start, adopted_tokens))
        run: Callable[..., ForwardPass] = forward
        return run(*args, adopted_tokens=adopted_tokens, start=start, **more)

    monkeypatch.setattr(replay_measure, "forward", seen)
    none, some = subject.run(Case("earlier", 0)), subject.run(Case("earlier", 3))
    assert none == subject.run(Case("replay", 128))
    assert some != none
    assert some.cold_bits == none.cold_bits
    assert [hit for hit in hits if hit[1] < HIT] == [(HIT - n * 128, HIT - n * 128 + 128) for n in (4, 3, 2)]


def test_scores_are_right_for_known_distributions() -> None:
    cold, other = torch.tensor([[0.75, 0.25]]).log(), torch.tensor([[0.25, 0.75]]).log()
    found = score(cold, other, torch.tensor([1]))
    assert found.cold_bits == pytest.approx(2.0)
    assert found.bits == pytest.approx(0.415, abs=1e-3)
    assert found.kl_bits == pytest.approx(0.5 * 1.585, abs=1e-3)
    assert found.agreement == 0.0


def test_comparisons_average_texts_and_know_their_error() -> None:
    found = Comparison.of([Scored(1.0, 1.1, 0.2, 1.0, True), Scored(2.0, 2.3, 0.4, 0.5, False)])
    assert found.excess_bits == pytest.approx(0.2)
    assert found.error_bits == pytest.approx(0.1)
    assert found.agreement == 0.75
    assert not found.equal


def test_texts_do_not_overlap_and_start_with_bos() -> None:
    texts = byte_texts(DATA, 1000, 2)
    assert [len(text) for text in texts] == [1001, 1001]
    assert [text[1:].tolist() for text in texts] == [list(DATA[:1000]), list(DATA[3000:])]


def test_every_case_is_carried_out_on_every_text() -> None:
    class Fixed:
        def __init__(self, tokens: Tensor) -> None:
            self.tokens = tokens

        def run(self, case: Case) -> Scored:
            return Scored(float(self.tokens[1]), float(case.amount), 0.0, 1.0, False)

    cases = [Case("replay", 1), Case("earlier", 2)]
    ticks: list[None] = []
    texts = [torch.tensor([256, 3]), torch.tensor([256, 5])]
    with ThreadPoolExecutor(2) as pool:
        found = measure(Fixed, texts, cases, pool, partial(ticks.append, None))
    assert [found[case].bits for case in cases] == [1.0, 2.0]
    assert found[cases[0]].cold_bits == 4.0
    assert len(ticks) == 2


def test_one_text_has_no_error() -> None:
    assert math.isnan(Comparison.of([Scored(1.0, 1.0, 0.0, 1.0, True)]).error_bits)
