"""A row's bits are its own: the same in any chunk, batch and step, and after any hit that claims to be exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from engine_kit import CONFIG, model, text
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_kit import GENERATED, Bench, Outcome, cold_plan, policy, run_alone
from torch import Tensor

from duokv.engine.forward import ColdRun, forward
from duokv.engine.model import PlaneEntries
from duokv.engine.oracle import replayed
from duokv.engine.runner import Truncation, Work
from duokv.engine.session import Session
from duokv.engine.slots import BlockSlots, PlaneSlots
from duokv.kernels.formats import decode
from duokv.replay import Mode, Reason, ReplayPlan, plan_replay, swa_candidates, usable, valid_from

LONGEST = 700
WORDS = text(7, LONGEST + GENERATED)
KEEPS = (128, 140)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tests run in several processes; more threads than cores wait for each other. Two are tried once, below."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def cold(length: int, keep_rows: int = 140) -> Outcome:
    """The first `length` tokens and those generated after them, the prompt in one step."""
    return run_alone(WORDS[: length + GENERATED], length, cold_plan(length, keep_rows))


def same(found: Outcome, right: Outcome, *, blocks_from: int = 0, states_from: int = 0) -> None:
    """Compare logits, blocks from a block on, states from a boundary on, and both last windows."""
    assert torch.equal(found.logits, right.logits)
    assert torch.equal(found.blocks[blocks_from:], right.blocks[blocks_from:])
    wanted = {end: state for end, state in right.states.items() if end >= states_from}
    assert {end: state for end, state in found.states.items() if end >= states_from} == wanted
    for mine, theirs in zip(found.rings, right.rings, strict=True):
        n = min(mine.shape[1], theirs.shape[1])
        assert torch.equal(mine[:, -n:], theirs[:, -n:])


def entries(memory: Tensor, layer: int, count: int) -> PlaneEntries:
    """Decode the first `count` entries of a plane from payloads."""
    slots = BlockSlots(CONFIG.cache, len(memory))
    slots.memory[:] = memory
    plane = PlaneSlots(CONFIG, layer, slots)
    table = list(range(len(memory)))
    return PlaneEntries(plane.latents(plane.places(table, torch.arange(count))), plane.index_keys(table)[:count])


def same_as_pass(found: Outcome, right: ColdRun, plan: ReplayPlan, prompt: int, blocks_from: int = 0) -> None:
    """Compare with a pass that computed rows from the plan's start on."""
    assert torch.equal(found.logits, right.logits[prompt - 1 - plan.decoder_start :])
    for layer, plane in right.planes.items():
        ratio = CONFIG.table.ratios[layer]
        part = slice(blocks_from * 128 // ratio, found.tokens // ratio)
        stored = entries(found.memory, layer, part.stop)
        assert torch.equal(stored.latent[part], plane.latent[part])
        assert torch.equal(stored.index_k[part], plane.index_k[part])
    for ring, layers in zip(found.rings, (slice(0, 3), slice(3, 6)), strict=True):
        windows = torch.stack(right.windows[layers])
        assert torch.equal(decode(ring, CONFIG.window_format, torch.float32), windows[:, -ring.shape[1] :])


@pytest.mark.parametrize("keep_rows", KEEPS)
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_a_prompt_in_one_step_equals_the_plain_pass(length: int, keep_rows: int) -> None:
    plan = cold_plan(length, keep_rows)
    right = forward(model(), torch.tensor(WORDS[: length + GENERATED]), decoder_start=plan.decoder_start)
    found = cold(length, keep_rows)
    same_as_pass(found, right, plan, length)
    assert found.rows == length + GENERATED
    assert found.decoder_rows == min(length, keep_rows) + GENERATED


@pytest.mark.parametrize("chunks", [(1,), (3,), (17,), (127,), (128,), (129, 1), (5, 250)], ids=str)
def test_chunks_do_not_show(chunks: Sequence[int]) -> None:
    same(run_alone(WORDS[: 301 + GENERATED], 301, cold_plan(301), chunks=chunks), cold(301))


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(st.sampled_from([2, 100, 129, 256, 301]), st.lists(st.integers(1, 200), min_size=1, max_size=4)),
        min_size=2, max_size=5,
    )
)  # fmt: skip
def test_batches_and_their_chunks_do_not_show(asked: list[tuple[int, list[int]]]) -> None:
    """Requests of one text at different stages, decoding beside prefilling."""
    bench = Bench()
    requests = [
        bench.request(WORDS[: length + GENERATED], length, cold_plan(length), chunks=chunks) for length, chunks in asked
    ]
    bench.run(*requests)
    for (length, _), request in zip(asked, requests, strict=True):
        same(bench.outcome(request), cold(length))


def test_threads_do_not_show() -> None:
    torch.set_num_threads(2)
    try:
        found = run_alone(WORDS[: 301 + GENERATED], 301, cold_plan(301), chunks=(90,))
    finally:
        torch.set_num_threads(1)
    same(found, cold(301))


@pytest.mark.parametrize("keep_rows", KEEPS)
def test_truncation_changes_no_stored_byte(keep_rows: int) -> None:
    """The encoder is causal: blocks and states are the same whatever the decoder layers leave out."""
    whole = run_alone(WORDS[:700], 700, cold_plan(700, keep_rows), truncation="off", chunks=(333,))
    masked = run_alone(WORDS[:700], 700, cold_plan(700, keep_rows), truncation="mask", chunks=(333,))
    compact = run_alone(WORDS[:700], 700, cold_plan(700, keep_rows), chunks=(333,))
    same(masked, compact)
    assert torch.equal(whole.blocks, compact.blocks)
    assert whole.states == compact.states
    assert torch.equal(whole.logits[0], forward(model(), torch.tensor(WORDS[:700])).logits[-1])
    assert not torch.equal(whole.logits, compact.logits)
    assert [run.decoder_rows for run in (whole, masked, compact)] == [700, 700, keep_rows]
    assert [run.rows for run in (whole, masked, compact)] == [700] * 3


def hit_plan(length: int, hit: int, *, swa: int | None, mode: Mode = "bounded", keep_rows: int = 140) -> ReplayPlan:
    """A plan for a hit. swa: which of the candidate boundaries has a state, None for none."""
    rules = policy(mode, keep_rows)
    at = None
    if swa is not None:
        at = swa_candidates(hit_tokens=hit, prompt_tokens=length, policy=rules)[swa]
    return plan_replay(hit_tokens=hit, prompt_tokens=length, swa_at=at, policy=rules)


def exact_hit(length: int, plan: ReplayPlan, mode: Mode, keep_rows: int, chunks: Sequence[int] = (1 << 20,)) -> Outcome:
    """Run a plan over what the longest cold run left, and compare with this prompt's own cold run."""
    donor = cold(LONGEST)
    state = donor.states[plan.start] if plan.reason is Reason.SWA_HIT else None
    found = run_alone(
        WORDS[: length + GENERATED], length, plan, chunks=chunks, blocks=donor.blocks, state=state
    )
    good = valid_from(plan, policy(mode, keep_rows))
    first = next(end for end in range(128, 2000, 128) if usable(end, good) and end > plan.start)
    same(found, cold(length, keep_rows), states_from=first)
    assert found.rows == length - plan.start + GENERATED
    assert found.decoder_rows == min(length, keep_rows) + GENERATED
    return found


LENGTHS = (257, 268, 269, 300, 396, 513, 524, 653, 683)


@pytest.mark.parametrize("keep_rows", KEEPS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_swa_hit_equals_the_cold_run(length: int, keep_rows: int) -> None:
    """Every adoptable hit, every boundary a state can serve it at."""
    tried = 0
    for hit in range(256, length, 128):
        candidates = swa_candidates(hit_tokens=hit, prompt_tokens=length, policy=policy(keep_rows=keep_rows))
        for place in range(len(candidates)):
            exact_hit(length, hit_plan(length, hit, swa=place, keep_rows=keep_rows), "bounded", keep_rows, (97,))
            tried += 1
    assert tried or length - keep_rows < 128
