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

from duokv.engine.forward import ForwardPass, forward
from duokv.engine.model import PlaneEntries
from duokv.engine.oracle import replayed
from duokv.engine.runner import Work
from duokv.engine.session import Session
from duokv.engine.slots import BlockSlots, PlaneSlots
from duokv.kernels.formats import decode
from duokv.kvstore.errors import UsageError
from duokv.replay import Reason, ReplayPlan, ReplayPolicy, plan_replay, swa_candidates, usable, valid_from

LONGEST = 700
WORDS = text(7, LONGEST + GENERATED)
KEEPS = (128, 140)
some_chunks = st.tuples(st.integers(1, 9), st.integers(60, 300))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For the passes that tests compare with: several processes with several threads each wait for each other."""
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


def same_as_pass(found: Outcome, right: ForwardPass, plan: ReplayPlan, prompt: int, blocks_from: int = 0) -> None:
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


@pytest.mark.parametrize(("length", "keep_rows"), [(1, 140), (2, 140), (127, 128), (128, 128), (129, 140), (300, 140)])
def test_a_prompt_in_one_step_equals_the_plain_pass(length: int, keep_rows: int) -> None:
    plan = cold_plan(length, keep_rows)
    right = forward(model(), torch.tensor(WORDS[: length + GENERATED]), decoder_start=plan.decoder_start)
    found = cold(length, keep_rows)
    same_as_pass(found, right, plan, length)
    assert found.rows == length + GENERATED
    assert found.decoder_rows == min(length, keep_rows) + GENERATED


@pytest.mark.parametrize("chunks", [(31,), (127, 1), (128,), (5, 250)], ids=str)
def test_chunks_do_not_show(chunks: Sequence[int]) -> None:
    same(run_alone(WORDS[: 301 + GENERATED], 301, cold_plan(301), chunks=chunks), cold(301))


@settings(max_examples=5)
@given(
    st.lists(
        st.tuples(st.sampled_from([2, 129, 301]), some_chunks),
        min_size=2, max_size=3,
    )
)  # fmt: skip
def test_batches_and_their_chunks_do_not_show(asked: list[tuple[int, tuple[int, int]]]) -> None:
    """Requests of one text at different stages, decoding beside prefilling."""
    bench = Bench()
    requests = [
        bench.request(WORDS[: length + GENERATED], length, cold_plan(length), chunks=chunks) for length, chunks in asked
    ]
    bench.run(*requests)
    for (length, _), request in zip(asked, requests, strict=True):
        same(bench.outcome(request), cold(length))


def test_rows_one_by_one_equal_rows_at_once() -> None:
    """From the second window on, where every row has as much to see as it can."""
    same(run_alone(WORDS[: 301 + GENERATED], 301, cold_plan(301), chunks=(271, *[1] * 30)), cold(301))


def test_truncation_changes_no_stored_byte() -> None:
    """The encoder is causal: blocks and states are the same whatever the decoder layers leave out."""
    whole = run_alone(WORDS[:700], 700, cold_plan(700), truncation="off", chunks=(333,))
    masked = run_alone(WORDS[:700], 700, cold_plan(700), truncation="mask", chunks=(333,))
    compact = run_alone(WORDS[:700], 700, cold_plan(700), chunks=(333,))
    same(masked, compact)
    assert torch.equal(whole.blocks, compact.blocks)
    assert whole.states == compact.states
    assert torch.equal(whole.logits[0], forward(model(), torch.tensor(WORDS[:700])).logits[-1])
    assert not torch.equal(whole.logits, compact.logits)
    assert [run.decoder_rows for run in (whole, masked, compact)] == [700, 700, 140]
    assert [run.rows for run in (whole, masked, compact)] == [700] * 3


def check_hits(length: int, plans: Sequence[ReplayPlan], rules: ReplayPolicy, chunks: Sequence[int]) -> None:
    """Run plans for one prompt side by side on what the longest cold run left; all must equal this prompt's own one."""
    donor = cold(LONGEST)
    bench = Bench(num_slots=128)
    requests = [
        bench.request(
            WORDS[: length + GENERATED], length, plan, chunks=chunks, blocks=donor.blocks,
            state=donor.states[plan.start] if plan.reason is Reason.SWA_HIT else None,
        )
        for plan in plans
    ]  # fmt: skip
    bench.run(*requests)
    right = cold(length, rules.keep_rows)
    for plan, request in zip(plans, requests, strict=True):
        good = valid_from(plan, rules)
        same(
            bench.outcome(request), right, states_from=next(p for p in right.boundaries(plan.start) if usable(p, good))
        )
    assert bench.rows == sum(length - plan.start + GENERATED for plan in plans)
    assert bench.decoder_rows == len(plans) * (min(length, rules.keep_rows) + GENERATED)


def exact_plans(length: int, rules: ReplayPolicy) -> list[ReplayPlan]:
    """Every adoptable hit of a prompt with every state that can serve it, and replayed exactly."""
    plans = []
    for hit in range(256, length, 128):
        candidates = swa_candidates(hit_tokens=hit, prompt_tokens=length, policy=rules)
        plans += [
            plan_replay(hit_tokens=hit, prompt_tokens=length, swa_at=at, policy=rules) for at in (*candidates, None)
        ]
    return plans


@pytest.mark.parametrize(("length", "keep_rows"), [(257, 140), (268, 128), (396, 140), (524, 128), (653, 140)])
def test_every_hit_equals_the_cold_run(length: int, keep_rows: int) -> None:
    """SWA hits at either boundary and exact replays, where suffixes are short, of one window, and long."""
    rules = policy("exact", keep_rows)
    check_hits(length, exact_plans(length, rules), rules, (97,))


@settings(max_examples=6)
@given(st.data(), st.integers(257, LONGEST), st.sampled_from(KEEPS), some_chunks)
def test_any_hit_equals_the_cold_run(data: st.DataObject, length: int, keep_rows: int, chunks: tuple[int, int]) -> None:
    rules = policy("exact", keep_rows)
    plan = data.draw(st.sampled_from(exact_plans(length, rules)))
    check_hits(length, [plan], rules, chunks)


@pytest.mark.torture
@pytest.mark.parametrize("keep_rows", KEEPS)
def test_every_hit_of_many_lengths_equals_the_cold_run(keep_rows: int) -> None:
    rules = policy("exact", keep_rows)
    for length in range(257, LONGEST, 7):
        check_hits(length, exact_plans(length, rules), rules, (97,))


def bounded_plans(length: int, keep_rows: int) -> list[ReplayPlan]:
    rules = policy(keep_rows=keep_rows)
    plans = [
        plan_replay(hit_tokens=hit, prompt_tokens=length, swa_at=None, policy=rules) for hit in range(256, length, 128)
    ]
    return [plan for plan in plans if plan.start]


def check_bounded(length: int, plans: Sequence[ReplayPlan], chunks: Sequence[int]) -> None:
    """Run bounded replays of one prompt side by side; each must equal its own two streams."""
    donor = cold(LONGEST)
    bench = Bench(num_slots=128)
    words = WORDS[: length + GENERATED]
    requests = [bench.request(words, length, plan, chunks=chunks, blocks=donor.blocks) for plan in plans]
    bench.run(*requests)
    for plan, request in zip(plans, requests, strict=True):
        found, adopted = bench.outcome(request), plan.write_floor // 128
        same_as_pass(found, replayed(model(), torch.tensor(words), plan), plan, length)
        assert torch.equal(found.blocks[:adopted], donor.blocks[:adopted])
        assert min(found.states, default=512) >= plan.start + 128
    assert bench.rows == sum(length - plan.start + GENERATED for plan in plans)


@pytest.mark.parametrize(("length", "keep_rows"), [(257, 140), (268, 140), (300, 128), (524, 140)])
def test_bounded_replay_equals_its_two_streams(length: int, keep_rows: int) -> None:
    check_bounded(length, bounded_plans(length, keep_rows), (61,))


@settings(max_examples=5)
@given(st.data(), st.integers(270, 600), st.sampled_from(KEEPS), some_chunks)
def test_any_bounded_replay_equals_its_two_streams(
    data: st.DataObject, length: int, keep_rows: int, chunks: tuple[int, int]
) -> None:
    check_bounded(length, [data.draw(st.sampled_from(bounded_plans(length, keep_rows)))], chunks)


def test_bounded_replay_is_not_the_cold_run() -> None:
    """Else the oracle of two streams would prove nothing."""
    plan = bounded_plans(524, 140)[-1]
    words = torch.tensor(WORDS[:524])
    whole = forward(model(), words, decoder_start=plan.decoder_start)
    assert not torch.equal(replayed(model(), words, plan).logits, whole.logits)


@pytest.mark.parametrize("at", [256, 384])
def test_ngrams_look_back_across_a_restored_boundary(at: int) -> None:
    """A row at the boundary reads the three tokens before it, which no state holds, and no token before those."""
    donor, length = cold(LONGEST), 540
    plan = plan_replay(hit_tokens=at, prompt_tokens=length, swa_at=at, policy=policy())
    right = cold(length).logits[0]
    for back in range(1, 6):
        words = list(WORDS[:length])
        words[at - back] ^= 1
        found = run_alone(words, length, plan, blocks=donor.blocks, state=donor.states[at]).logits[0]
        assert torch.equal(found, right) == (back > 3), back


@pytest.mark.parametrize("length", [250, 255])
@pytest.mark.parametrize("draft", [1, 5])
def test_rejected_drafts_leave_no_trace(length: int, draft: int) -> None:
    """Rows of wrong tokens are computed, across a boundary too, and taken back at an odd or even row."""
    bench = Bench()
    table = bench.slots.allocate(3)
    session = Session.begin(CONFIG, cold_plan(length), list(WORDS[:length]), slots=table, poison=True)
    logits = bench.runner.step([Work(session, length, logits=True)]).logits
    states: dict[int, bytes] = {}
    for count in range(GENERATED):
        session.tokens += [WORDS[length + count], *text(count, draft)]
        bench.runner.step([Work(session, len(session.tokens))])
        session.truncate(length + count)
        session.tokens.append(WORDS[length + count])
        done = bench.runner.step([Work(session, length + count + 1, logits=True)])
        logits += done.logits
        states |= {state.end: state.data.tobytes() for state in done.states[0]}
    right = cold(length)
    assert torch.equal(torch.stack([one for one in logits if one is not None]), right.logits)
    assert torch.equal(bench.slots.memory[table][: right.tokens // 128], right.blocks)
    assert states == {end: state for end, state in right.states.items() if end > length}


@pytest.mark.parametrize(
    ("end", "logits", "message"),
    [
        (0, False, "step to row 0: the session is at 0 of 300 tokens"),
        (301, False, "of 300 tokens"),
        (257, False, "with 2 slots"),
        (160, True, "logits of row 159: decoder layers start at 160"),
    ],
)
def test_what_cannot_be_computed_is_refused(end: int, logits: bool, message: str) -> None:
    bench = Bench(num_slots=2)
    session = Session.begin(CONFIG, cold_plan(300), list(WORDS[:300]), slots=bench.slots.allocate(2), poison=True)
    other = Session.begin(CONFIG, cold_plan(300), list(WORDS[:300]), slots=session.slots, poison=True)
    with pytest.raises(UsageError, match=message):
        bench.runner.step([Work(other, 5), Work(session, end, logits)])
    with pytest.raises(UsageError, match="a session is in it twice"):
        bench.runner.step([Work(other, 5), Work(other, 6)])
    assert session.computed == other.computed == 0
    assert bool((session.ring == 0xFF).all())


def test_an_empty_step_is_no_step() -> None:
    done = Bench().runner.step([])
    assert (done.logits, done.states, done.rows, done.decoder_rows) == ([], [], 0, 0)


def test_an_unknown_truncation_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'compct' is unknown.*compact"):
        Bench(truncation="compct")  # type: ignore[arg-type]
