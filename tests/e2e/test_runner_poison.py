"""Bytes that a request was not given change nothing: free and unwritten slots, other rings, rows outside a window."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from engine_kit import CONFIG, text
from runner_kit import GENERATED, Bench, Outcome, Request, cold_plan, policy, run_alone
from torch import Tensor

from duokv.engine.session import ring_geometry
from duokv.kvstore.errors import UsageError
from duokv.replay import Reason, ReplayPlan, plan_replay, unpack_state, usable

LENGTH = 426
WORDS = text(11, LENGTH + GENERATED)
GARBAGE = {
    "ones": lambda memory: memory.fill_(0xFF),
    "random": lambda memory: memory.random_(256, generator=torch.Generator().manual_seed(3)),
    "plausible": lambda memory: memory.fill_(0x38),
}
Fill = Callable[[Tensor], Tensor]
garbage = pytest.mark.parametrize("fill", GARBAGE.values(), ids=list(GARBAGE))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def donor() -> Outcome:
    return run_alone(WORDS, LENGTH, cold_plan(LENGTH))


def plan(swa_at: int | None) -> ReplayPlan:
    return plan_replay(hit_tokens=384, prompt_tokens=LENGTH, swa_at=swa_at, policy=policy())


def spoil(area: Tensor, keep: Tensor, fill: Fill) -> None:
    """Fill an area [rows, ...] but for the rows to keep."""
    kept = area[keep].clone()
    fill(area)
    area[keep] = kept


PLANS = {"cold": cold_plan(LENGTH), "swa hit": plan(256), "bounded replay": plan(None)}


def restored(of: ReplayPlan, donor: Outcome) -> bytes | None:
    return donor.states[of.start] if of.reason is Reason.SWA_HIT else None


def admit(bench: Bench, of: ReplayPlan, donor: Outcome, state: bytes | None = None) -> Request:
    state = state or restored(of, donor)
    return bench.request(WORDS, LENGTH, of, chunks=(77,), blocks=donor.blocks, state=state)


@garbage
@pytest.mark.parametrize("of", PLANS.values(), ids=list(PLANS))
def test_memory_a_request_does_not_own_changes_nothing(of: ReplayPlan, fill: Fill, donor: Outcome) -> None:
    """All slots but the adopted blocks, the ring outside the restored window, and both rings of a bystander."""
    bench = Bench(num_slots=16)
    request, bystander = admit(bench, of, donor), admit(bench, cold_plan(LENGTH), donor)
    session = request.session
    spoil(bench.slots.memory, torch.tensor(session.slots[: of.write_floor // 128], dtype=torch.int64), fill)
    by_slot = session.ring.transpose(0, 1)
    encoder = by_slot[:, : CONFIG.encoder_layers]
    spoil(encoder, torch.arange(session.held_from, session.computed) % by_slot.shape[0], fill)
    fill(by_slot[:, CONFIG.encoder_layers :])
    fill(bystander.session.ring)
    bench.run(request)
    found = bench.outcome(request)
    right = run_alone(WORDS, LENGTH, of, chunks=(77,), blocks=donor.blocks, state=restored(of, donor))
    assert torch.equal(found.logits, right.logits)
    assert bool(found.logits.isfinite().all())
    used = CONFIG.cache.planes[-1].offset + CONFIG.cache.planes[-1].nbytes
    assert torch.equal(found.blocks[:, :used], right.blocks[:, :used])
    assert found.states == right.states
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.rings, right.rings, strict=True))


@garbage
def test_a_bystander_in_the_batch_changes_nothing(fill: Fill, donor: Outcome) -> None:
    """A neighbour whose own cache is garbage, NaN in every product it has a part in."""
    bench = Bench()
    request = admit(bench, cold_plan(LENGTH), donor)
    neighbour = admit(bench, plan(None), donor)
    spoilt = neighbour.session.slots[:3]
    bench.slots.memory[spoilt] = fill(bench.slots.memory[spoilt])
    bench.run(request, neighbour)
    found = bench.outcome(request)
    assert torch.equal(found.logits, donor.logits)
    assert torch.equal(found.blocks, donor.blocks)
    assert found.states == donor.states


@garbage
def test_spare_slots_of_a_state_change_nothing(fill: Fill, donor: Outcome) -> None:
    """A stored state has six slots beyond its window."""
    geometry = ring_geometry(CONFIG)
    stored = torch.frombuffer(bytearray(donor.states[256]), dtype=torch.uint8).view(geometry.layers, geometry.slots, -1)
    spoil(stored.transpose(0, 1), torch.arange(128, 256) % geometry.slots, fill)
    bench = Bench()
    request = admit(bench, plan(256), donor, state=stored.numpy().tobytes())
    bench.run(request)
    found = bench.outcome(request)
    assert torch.equal(found.logits, donor.logits)
    assert found.states == {end: state for end, state in donor.states.items() if end > 256}


def test_a_state_whose_window_is_not_whole_is_refused(donor: Outcome) -> None:
    geometry = ring_geometry(CONFIG)
    state = torch.frombuffer(bytearray(donor.states[256]), dtype=torch.uint8).view(geometry.layers, geometry.slots, -1)
    ring = torch.zeros_like(state)
    assert not usable(256, 129)
    with pytest.raises(UsageError, match="only usable states"):
        unpack_state(geometry, state.numpy(), ring.numpy(), boundary=256, valid_from=129)
    assert not ring.any()


@pytest.mark.parametrize("length", [386, 391, 395])
def test_no_state_is_cut_whose_window_was_not_computed(length: int, donor: Outcome) -> None:
    """A replay that starts between boundaries passes one whose window begins before it."""
    of = plan_replay(hit_tokens=384, prompt_tokens=length, swa_at=None, policy=policy())
    assert of.start % 128
    assert list(run_alone(WORDS[:length], length, of, blocks=donor.blocks).states) == [384]


@garbage
def test_adopted_blocks_are_never_written(fill: Fill, donor: Outcome) -> None:
    """Whatever they hold, and however many of their rows are replayed."""
    for mode in ("bounded", "exact"):
        of = plan_replay(hit_tokens=384, prompt_tokens=LENGTH, swa_at=None, policy=policy(mode))
        foreign = fill(donor.blocks.clone())
        found = run_alone(WORDS, LENGTH, of, chunks=(50, 1), blocks=foreign)
        assert of.start < 384
        assert torch.equal(found.blocks, foreign[: len(found.blocks)])


def test_two_requests_on_the_same_blocks(donor: Outcome) -> None:
    """Adopted slots are shared, not copied; one request's rows never reach the other through them."""
    bench = Bench()
    first = admit(bench, plan(256), donor)
    words, state = [*WORDS[:400], *text(5, 30)], donor.states[256]
    other = bench.request(words, LENGTH, plan(256), chunks=(33,), blocks=donor.blocks, state=state)
    bench.slots.release(other.session.slots[:3])
    other.session.slots[:3] = first.session.slots[:3]
    bench.slots.retain(first.session.slots[:3])
    bench.run(first, other)
    assert torch.equal(bench.outcome(first).logits, donor.logits)
    alone = run_alone(words, LENGTH, plan(256), chunks=(33,), blocks=donor.blocks, state=state)
    assert torch.equal(bench.outcome(other).logits, alone.logits)
