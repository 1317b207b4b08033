"""The engine over a store: what a hit, a miss, a fault, a full memory and a crowd may change of an output: nothing."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import wait
from typing import get_args

import numpy as np
import pytest
import torch
from engine_kit import CONFIG, NS, FakeRunner, World, cold_output, greedy, model, policy, text
from hypothesis import given, settings
from hypothesis import strategies as st

from duokv.connectors.fs_faulty import Corrupt, Delay, Fail, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.engine import Engine, EngineConfig, Handle, Output, Sampling, namespace_of
from duokv.engine.admission import Adoption
from duokv.engine.live import LiveBlocks
from duokv.engine.runner import Runner, Truncation, Work
from duokv.engine.session import Session
from duokv.engine.slots import BlockSlots
from duokv.engine.weights import ASSETS, weights_revision
from duokv.kvstore import (
    CacheGeometry,
    Origin,
    RequestServed,
    StoreConfig,
    StoreError,
    SwaWindow,
    UsageError,
    chain_keys,
    open_store,
)
from duokv.kvstore.events import Degraded
from duokv.replay import Mode, Reason, ReplayPolicy, TokenPartition, plan_replay

DRAWN = Sampling(max_tokens=6, temperature=1.0, top_p=0.9, seed=11)


@pytest.fixture
def world() -> World:
    return World()


def serve(engine: Engine, *prompts: Sequence[int], sampling: Sampling | None = None) -> list[Output]:
    """Outputs in the order of the prompts."""
    outputs = engine.generate(prompts, ns=NS, sampling=sampling or greedy(4))
    return sorted(outputs, key=lambda output: output.handle.index)


def parts(output: Output) -> tuple[int, int, int, int]:
    """swa_hit, block_hit, replayed, computed."""
    part = output.report.partition
    assert part is not None
    return part.swa_hit, part.block_hit, part.replayed, part.computed


def finish(engine: Engine) -> dict[str, Output]:
    """Step until all is done."""
    done: dict[str, Output] = {}
    while engine.stats().running or engine.stats().waiting:
        done |= {output.handle.request_id: output for output in engine.step()}
    return done


# A hit is the cold run


@settings(max_examples=12)
@given(
    lengths=st.lists(st.integers(1, 420), min_size=2, max_size=4),
    chunk=st.sampled_from([1, 37, 128, 300, 4096]),
    keep=st.sampled_from([128, 140, 200]),
    between=st.lists(st.sampled_from(["nothing", "lose windows", "restart", "evict"]), min_size=3, max_size=3),
)
def test_exact_hits_equal_the_cold_run_over_turns(
    lengths: list[int], chunk: int, keep: int, between: list[str]
) -> None:
    world = World()
    tokens: list[int] = []
    for turn, more in enumerate(lengths):
        tokens = tokens + text(turn, more)
        cold = World()
        expected = cold.ask(tokens, "exact", keep_rows=keep, n=5)
        cold.close()
        output = world.ask(tokens, "exact", keep_rows=keep, n=5, chunk_tokens=chunk)
        assert output.tokens == expected.tokens
        assert sum(parts(output)) == len(tokens)
        assert output.report.rows == sum(parts(output)[2:]) + 4, "never the hit again"
        tokens = [*tokens, *output.tokens]
        match between[turn % 3]:
            case "lose windows":
                world.lose_windows(tokens)
            case "restart":
                world.restart()
            case "evict":
                world.evict(tokens, keep=max(1, len(tokens) // 300))
            case _:
                pass
    world.close()


def test_every_way_of_a_real_hit_equals_the_cold_run() -> None:
    """The real runner, once through: cold, SWA hit, exact miss after a restart, and a bounded miss by its oracle."""
    world = World(fake=False)
    first = text(1, 300)
    with world.engine("exact") as engine:
        (output,) = serve(engine, first, sampling=greedy(2))
    tokens = [*first, *output.tokens, *text(2, 110)]
    expected = cold_output(tokens, 2, fake=False)
    with world.engine("exact", chunk_tokens=64) as engine:
        (hit,) = serve(engine, tokens, sampling=greedy(2))
    assert hit.report.reason is Reason.SWA_HIT
    world.restart()
    with world.engine("exact") as engine:
        (miss,) = serve(engine, tokens, sampling=greedy(2))
    assert miss.report.reason is Reason.SWA_MISS
    assert hit.tokens == miss.tokens == expected.tokens
    world.lose_windows(tokens)
    stored = world.blocks()
    with world.engine("bounded") as engine:
        (bounded,) = serve(engine, tokens, sampling=greedy(2))
    assert bounded.report.reason is Reason.SWA_MISS
    assert bounded.tokens == replayed_tokens(world, tokens, 384, 2)
    assert world.blocks() == stored
    world.close()


def test_the_shipped_model_goes_on_with_a_program_it_has_not_seen() -> None:
    world = World(fake=False)
    source = (ASSETS / "held_out.txt").read_bytes()[:300]
    with Engine.open(EngineConfig(num_slots=8), store=world.store, clock=world.clock) as engine:
        ns = namespace_of(CONFIG, weights_revision())
        outputs = [next(engine.generate([list(source)], ns=ns, sampling=greedy(4))) for _ in range(2)]
    assert outputs[0].tokens == outputs[1].tokens
    assert bytes(outputs[0].tokens).isascii()
    assert [output.report.reason for output in outputs] == [Reason.NO_HIT, Reason.SWA_HIT]
    world.close()


def replayed_tokens(world: World, tokens: Sequence[int], hit: int, n: int) -> tuple[int, ...]:
    """The output of a bounded replay by its definition: stored blocks adopted, rows from the floor on, nothing else."""
    plan = plan_replay(hit_tokens=hit, prompt_tokens=len(tokens), swa_at=None, policy=policy())
    stored = world.blocks()
    slots = BlockSlots(CONFIG.cache, len(tokens) // 128 + 2, poison=True)
    table = slots.allocate(len(tokens) // 128 + 2)
    for slot, key in zip(table, chain_keys(NS, tokens)[: plan.write_floor // 128], strict=False):
        slots.memory[slot] = torch.from_numpy(np.frombuffer(stored[key][1], np.uint8).copy())
    session = Session.begin(CONFIG, plan, list(tokens), slots=table, poison=True)
    runner = FakeRunner(slots) if world.fake else Runner(model(), slots)
    for _ in range(n):
        (logits,) = runner.step([Work(session, len(session.tokens), True)]).logits
        assert logits is not None
        session.tokens.append(int(logits.argmax()))
    return tuple(session.tokens[len(tokens) :])


def test_batch_mates_change_nothing(world: World) -> None:
    """Prompts of all lengths, some sharing a prefix, decoded together and alone."""
    shared = text(0, 300)
    prompts = [text(1, 5), shared + text(2, 200), text(3, 500), shared + text(4, 1), shared, text(5, 129)]
    alone = [cold_output(prompt, sampling=DRAWN).tokens for prompt in prompts]
    for _ in range(2):
        with world.engine("exact", chunk_tokens=100) as engine:
            together = serve(engine, *prompts, sampling=DRAWN)
        assert [output.tokens for output in together] == alone
    assert {output.report.reason for output in together} >= {Reason.SWA_HIT}
    world.close()


@pytest.mark.parametrize("truncation", get_args(Truncation))
def test_a_hit_equals_the_cold_run_of_the_same_truncation(truncation: Truncation) -> None:
    world = World(fake=False)
    with world.engine("exact", truncation=truncation) as engine:
        cold, hit = (serve(engine, text(1, 280), sampling=greedy(1))[0] for _ in range(2))
    assert hit.tokens == cold.tokens
    assert parts(hit)[3] == 280 - 256
    world.close()


# How tokens are come by


def test_case_16_a_lost_state_replays_128_and_a_retry_counts_nothing(world: World) -> None:
    """1,000 tokens, 768 present, SWA lost, K = 128; then the same request id again."""
    tokens = text(1, 1000)
    world.ask(tokens, n=1)
    world.evict(tokens, keep=6)
    world.lose_windows(tokens)
    with world.engine(keep_rows=128) as engine:
        engine.submit(tokens, ns=NS, sampling=greedy(1), request_id="one")
        output = finish(engine)["one"]
        assert output.report.partition == TokenPartition(0, 640, 128, 232)
        assert output.report.rows == engine.stats().rows == 360
        before = world.store.stats().counts
        world.lose_windows(tokens)
        engine.submit(tokens, ns=NS, sampling=greedy(1), request_id="one")
        finish(engine)
    after = world.store.stats().counts
    counted = ("lookups", "query_tokens", "hit_tokens", "miss_tokens", "request_tokens")
    assert {name: n for name, n in before.items() if name.startswith(counted)} == {
        name: n for name, n in after.items() if name.startswith(counted)
    }
    served = [event for event in world.events if isinstance(event, RequestServed)]
    assert served[1] == RequestServed("chat", 0, 640, 128, 232)
    assert served[2].retry
    assert len(served) == 3
    world.close()


def test_case_18_another_slot_with_an_empty_swa_tier_replays_once(world: World) -> None:
    """The same prompt in other slots and another ring: exactly 128 rows again, and the output that its floor gives."""
    tokens = text(1, 1000)
    world.ask(tokens, n=1)
    world.lose_windows(tokens)
    expected = replayed_tokens(world, tokens, 896, 4)
    with world.engine() as engine:
        engine.submit(text(2, 100), ns=NS, sampling=greedy(40))
        engine.step()
        handle = engine.submit(tokens, ns=NS, sampling=greedy(4))
        output = finish(engine)[handle.request_id]
    assert parts(output) == (0, 768, 128, 104)
    assert output.report.rows == 128 + 104 + 3
    assert output.tokens == expected
    assert not output.report.exact
    world.close()


def test_case_20_short_hits(world: World) -> None:
    """A hit of 128 tokens or fewer is cold; H = 256 replays 128 if L >= 268, else up to 140; blocks stay."""
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    world.lose_windows(tokens)
    for length, present, expected in (
        (400, 2, (0, 128, 128, 144)),
        (268, 2, (0, 128, 128, 12)),
        (257, 2, (0, 116, 140, 1)),
        (130, 1, (0, 0, 0, 130)),
    ):
        world.evict(tokens, keep=present)
        stored = world.blocks()
        output = world.ask(tokens[:length], n=1)
        assert parts(output) == expected
        world.lose_windows(tokens)
        assert {key: world.blocks()[key] for key in stored} == stored
    world.close()


def test_a_state_lives_180_s_after_its_last_use_on_the_store_s_clock(world: World) -> None:
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    for seconds, reason in ((180, Reason.SWA_HIT), (180, Reason.SWA_HIT), (181, Reason.SWA_MISS)):
        world.now += seconds
        assert world.ask(tokens, n=1).report.reason is reason
    world.close()


def test_a_replay_keeps_the_state_at_the_end_of_its_hit(world: World) -> None:
    """So that the next prompt that leaves the text there restores it."""
    tokens = text(1, 900)
    world.ask(tokens, n=1)
    world.evict(tokens, keep=2)
    world.lose_windows(tokens)
    assert parts(world.ask(tokens, n=1)) == (0, 128, 128, 644)
    assert [world.store.windows.contains(key) for key in chain_keys(NS, tokens)] == [0, 1, 0, 0, 1, 1, 1]
    assert world.ask([*tokens[:256], *text(2, 300)], n=1).report.reason is Reason.SWA_HIT
    world.close()


def test_a_state_stays_leased_while_its_request_runs(world: World) -> None:
    """Though newer states want its place and its time is over."""
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    with world.engine() as engine:
        engine.submit(tokens, ns=NS, sampling=greedy(8))
        while not engine.stats().running:
            engine.step()
        world.now += 1000
        world.store.maintain()
        assert world.store.stats().windows.leased == 1
        (output,) = finish(engine).values()
        assert output.report.reason is Reason.SWA_HIT
        assert world.store.stats().windows.leased == 0
    world.close()


@pytest.mark.parametrize(("valid_from", "reason"), [(0, Reason.SWA_HIT), (1, Reason.SWA_MISS)])
def test_a_state_whose_window_is_not_whole_is_not_used(world: World, valid_from: int, reason: Reason) -> None:
    """Rows below `valid_from` are anybody's."""
    tokens = text(1, 600)
    expected = world.ask(tokens, "exact", n=1)
    key = chain_keys(NS, tokens)[2]
    with world.store.lease_window(key) as window:
        assert window is not None
        data = bytes(window.data or b"")
    world.lose_windows(tokens)
    world.store.put_window(key, SwaWindow(384, memoryview(data), 256 + valid_from, Origin.EXACT))
    output = world.ask(tokens, "exact", n=1)
    assert output.report.reason is reason
    assert output.tokens == expected.tokens
    assert world.store.stats().windows.leased == 0
    world.close()


# What goes wrong


def test_a_load_never_stalls_others(world: World) -> None:
    """B's blocks do not come; A decodes to its end meanwhile, and B is served when they do."""
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    released = threading.Event()
    world.backend.inject(Stall(kind="read", until=released))
    with world.engine() as engine:
        engine.submit(text(2, 50), ns=NS, sampling=greedy(30), request_id="A")
        engine.submit(tokens, ns=NS, sampling=greedy(4), request_id="B")
        done: list[Output] = []
        while not done:
            done = engine.step()
        assert [output.handle.request_id for output in done] == ["A"]
        assert (engine.stats().running, engine.stats().waiting) == (0, 1)
        released.set()
        assert parts(finish(engine)["B"]) == (384, 0, 128, 88)
    world.close()


def test_blocks_that_come_too_late_are_a_miss(world: World) -> None:
    tokens = text(1, 600)
    expected = world.ask(tokens)
    world.backend.inject(Delay(kind="read", seconds=60, lasting=True))
    output = world.ask(tokens, load_deadline_s=0.5)
    assert output.tokens == expected.tokens
    assert parts(output) == (0, 0, 0, 600)
    assert output.report.hit_tokens == 512
    world.close()


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("bad", range(4))
def test_a_short_load_plans_again_with_the_verified_blocks(world: World, mode: Mode, bad: int) -> None:
    """Block `bad` is damaged, and only once loaded does anybody know."""
    tokens = text(1, 600)
    expected = world.ask(tokens, n=1)
    world.backend.inject(Corrupt(bit=bad * 8 * CONFIG.cache.slot_bytes))
    output = world.ask(tokens, mode, n=1)
    assert output.report.hit_tokens == 512
    used = bad * 128 if bad > 1 else 0
    assert parts(output)[3] == 600 - used
    if mode == "bounded" and bad == 2:
        assert parts(output) == (0, 128, 128, 344), "no state is kept so far before the prompt's end"
        assert output.tokens == replayed_tokens(world, tokens, 256, 1)
    else:
        assert output.tokens == expected.tokens
    world.close()


def test_a_state_below_a_short_load_is_still_of_use(world: World) -> None:
    """The plan made anew asks the SWA tier anew, for the anchor of the shorter hit."""
    world.ask(text(1, 300), n=1)
    world.ask(text(1, 600), n=1)
    world.backend.inject(Corrupt(bit=2 * 8 * CONFIG.cache.slot_bytes))
    output = world.ask(text(1, 600), n=1)
    assert output.report.reason is Reason.SWA_HIT
    assert parts(output) == (256, 0, 0, 344)
    assert output.tokens == cold_output(text(1, 600), 1).tokens
    assert world.store.stats().windows.leased == 0
    world.close()


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.ENOSPC])
def test_a_backend_that_always_fails_costs_no_request(world: World, mode: Mode, code: int) -> None:
    tokens = text(1, 600)
    expected = cold_output(tokens)
    world.ask(tokens, mode, n=1)
    world.backend.inject(Fail(kind=None, errno=code, lasting=True))
    with world.engine(mode) as engine:
        for _ in range(2):
            (output,) = serve(engine, tokens)
            assert output.tokens == expected.tokens
            assert output.report.exact
    world.close()


def test_a_store_that_is_closed_under_the_engine_costs_no_request(world: World) -> None:
    tokens = text(1, 600)
    expected = cold_output(tokens)
    with world.engine() as engine:
        assert serve(engine, tokens)[0].tokens == expected.tokens
        handle = engine.submit(tokens, ns=NS, sampling=greedy(4))
        while not engine.stats().running:
            engine.step()
        world.store.close()
        assert finish(engine)[handle.request_id].tokens == expected.tokens
        (output,) = serve(engine, tokens)
        assert output.tokens == expected.tokens
        assert output.report.reason is Reason.NO_HIT
    assert {event.what for event in world.events if isinstance(event, Degraded)} >= {"admission", "write-back"}


def test_a_full_write_back_queue_drops_and_never_waits(world: World) -> None:
    """The backend does not take the first prompt's blocks; the others are served and what they left is dropped."""
    released = threading.Event()
    world.backend.inject(Stall(kind="write", until=released))
    prompts = [text(seed, 300) for seed in range(4)]
    with world.engine(write_queue_bytes=1 << 17, load_deadline_s=0.0) as engine:
        outputs = serve(engine, *prompts)
        assert [output.tokens for output in outputs] == [cold_output(prompt).tokens for prompt in prompts]
        stats = engine.stats()
        assert stats.dropped_blocks > 0
        assert stats.dropped_windows > 0
        released.set()
        assert engine.flush(60.0)
        stored = len(world.blocks())
        assert 0 < stored < 8
    with world.engine() as engine:
        serve(engine, *prompts)
    assert len(world.blocks()) == 8, "what was dropped is computed and stored the next time"
    world.close()


def test_what_was_dropped_at_the_prompt_s_end_is_offered_again_at_the_output_s(world: World) -> None:
    released = threading.Event()
    world.backend.inject(Stall(kind="write", until=released))
    with world.engine(write_queue_bytes=0) as engine:
        engine.submit(text(1, 300), ns=NS, sampling=greedy(1))
        finish(engine)
        engine.submit(text(2, 300), ns=NS, sampling=greedy(20))
        while not engine.stats().dropped_blocks:
            engine.step()
        released.set()
        assert engine.flush(60.0)
        finish(engine)
    assert len(world.blocks()) == 4
    world.close()


# A full memory


def crowd(engine: Engine, younger: Sequence[int], sampling: Sampling) -> None:
    """Let two requests run that grow until slots for both run out, and step until the younger has given way."""
    engine.submit(text(2, 200), ns=NS, sampling=greedy(440), request_id="older")
    engine.submit(younger, ns=NS, sampling=sampling, request_id="younger")
    for _ in range(2):
        engine.step()
        engine.check_integrity()  # waits for loads
    assert engine.stats().running == 2
    while not engine.stats().preemptions:
        engine.step()
        assert engine.stats().running == 2 or engine.stats().preemptions


@pytest.mark.parametrize("mode", ["exact", "bounded"])
@pytest.mark.parametrize("reason", [Reason.NO_HIT, Reason.SWA_HIT, Reason.SWA_MISS])
def test_a_preempted_request_ends_as_if_it_had_not_been(mode: Mode, reason: Reason) -> None:
    """It starts over from its own plan, though the store holds more by then, and no state but the one it leased."""
    younger = text(1, 600)
    sampling = Sampling(max_tokens=100, temperature=1.0, seed=5)
    alone, crowded = World(), World()
    for world in (alone, crowded):
        if reason is not Reason.NO_HIT:
            world.ask(younger, mode, n=1)
            world.evict(younger, keep=3)
        if reason is Reason.SWA_MISS:
            world.lose_windows(younger)
    with alone.engine(mode) as engine:
        (expected,) = serve(engine, younger, sampling=sampling)
    with crowded.engine(mode, num_slots=8, chunk_tokens=60) as engine:
        crowd(engine, younger, sampling)
        assert engine.flush(60.0)
        assert len(crowded.blocks()) >= 5
        crowded.lose_windows(younger)
        done = finish(engine)
    assert done["younger"].report.preemptions == 1
    assert done["older"].report.preemptions == 0
    assert done["younger"].tokens == expected.tokens
    assert done["younger"].report.partition == expected.report.partition
    assert done["younger"].report.reason is reason
    assert done["younger"].report.hit_tokens == expected.report.hit_tokens
    assert done["older"].tokens == cold_output(text(2, 200), 440).tokens
    alone.close()
    crowded.close()


def test_a_preempted_request_whose_blocks_are_gone_plans_anew_from_its_decoder_start(world: World) -> None:
    tokens = text(1, 600)
    world.ask(tokens, "exact", n=1)
    world.lose_windows(tokens)
    with world.engine("exact", num_slots=8) as engine:
        crowd(engine, tokens, greedy(100))
        world.evict(tokens, keep=2)
        world.lose_windows(tokens)
        output = finish(engine)["younger"]
    assert output.tokens == cold_output(tokens, 100).tokens
    assert output.report.exact
    world.close()


def test_a_replayed_request_that_plans_anew_is_not_called_exact_and_leaves_all_its_blocks(world: World) -> None:
    """Its first tokens came of the replay; what it computes anew from row 0 is a cold run's."""
    shared = text(5, 400)
    world.ask(shared, n=1)
    world.lose_windows(shared)
    prompt = [*shared, *text(6, 150)]
    with world.engine(num_slots=8) as engine:
        crowd(engine, prompt, greedy(150))
        assert engine.flush(60.0)
        world.evict(shared, keep=0)
        output = finish(engine)["younger"]
        assert engine.flush(60.0)
    assert output.report.reason is Reason.SWA_MISS
    assert not output.report.exact
    keys = chain_keys(NS, [*prompt, *output.tokens])
    assert [world.blocks()[key][0] for key in keys[:5]] == [Origin.EXACT] * 5
    world.close()


def test_requests_share_the_slots_of_a_common_prefix(world: World) -> None:
    shared = text(0, 512)
    world.ask([*shared, 1], n=1)
    with world.engine(load_threads=1) as engine:
        free = engine.stats().free_slots
        for seed in range(3):
            engine.submit([*shared, *text(seed, 50)], ns=NS, sampling=greedy(20))
        while engine.stats().running < 3:
            engine.step()
            engine.check_integrity()
        assert free - engine.stats().free_slots == 4 + 3
        loads = sum(operation.kind == "read" for operation in world.backend.log)
        outputs = finish(engine)
        assert engine.stats().free_slots == free
        assert sum(operation.kind == "read" for operation in world.backend.log) == loads
    expected = [cold_output([*shared, *text(seed, 50)], 20).tokens for seed in range(3)]
    assert sorted(output.tokens for output in outputs.values()) == sorted(expected)
    world.close()


def test_blocks_that_another_request_loaded_meanwhile_are_shared(world: World) -> None:
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    live = LiveBlocks(BlockSlots(CONFIG.cache, 16, poison=True))
    hit = world.store.lookup(NS, tokens)
    with Adoption(world.store, live, hit) as late:
        assert late.load(512, 60.0) == 512
        with Adoption(world.store, live, hit) as early:
            assert early.load(256, 60.0) == 256
            first = early.place(256, 300)
        second = late.place(512, 600)
    assert second.slots[:2] == first.slots[:2]
    assert live.free == 16 - 3 - 3
    stored = world.blocks()
    for slot, key in zip(second.slots, hit.keys, strict=False):
        assert live.slots.memory[slot].numpy().tobytes() == stored[key][1]
    live.release([*first.slots, *second.slots])
    live.check_integrity([])
    world.close()


def test_a_shared_prefix_too_short_to_adopt_is_given_back(world: World) -> None:
    shared = text(0, 128)
    with world.engine() as engine:
        engine.submit([*shared, *text(1, 300)], ns=NS, sampling=greedy(40))
        while not engine.stats().rows > 428:
            engine.step()
        assert engine.flush(60.0)
        prompt = [*shared, *text(2, 60)]
        handle = engine.submit(prompt, ns=NS, sampling=greedy(4))
        output = finish(engine)[handle.request_id]
        assert output.report.reason is Reason.SHORT_HIT
        assert output.tokens == cold_output(prompt).tokens
    world.close()


def test_slots_that_are_gone_when_the_blocks_have_come_send_a_request_back_to_wait(world: World) -> None:
    """A decodes into them while B is loaded; B comes in when A has ended."""
    tokens = text(1, 600)
    world.ask(tokens, "exact", n=1)
    released = threading.Event()
    world.backend.inject(Stall(kind="read", until=released))
    with world.engine("exact", num_slots=7) as engine:
        engine.submit(text(2, 100), ns=NS, sampling=greedy(250), request_id="A")
        while not engine.stats().running:
            engine.step()
        engine.submit(tokens, ns=NS, sampling=greedy(4), request_id="B")
        while engine.stats().free_slots > 4:
            engine.step()
        assert engine.stats().waiting == 1
        released.set()
        done = finish(engine)
        assert engine.stats().preemptions == 0
    assert done["B"].tokens == cold_output(tokens).tokens
    assert done["B"].report.reason is Reason.SWA_HIT
    world.close()


def test_more_requests_than_slots_are_served_in_turn(world: World) -> None:
    prompts = [text(seed, 100 + 40 * seed) for seed in range(8)]
    with world.engine(num_slots=4, max_batch=3) as engine:
        outputs = serve(engine, *prompts)
    assert [output.tokens for output in outputs] == [cold_output(prompt).tokens for prompt in prompts]
    world.close()


# The caller


def test_a_callback_that_raises_keeps_no_token_from_the_others(world: World) -> None:
    heard: list[int] = []

    def gone(handle: Handle, _: int) -> None:
        raise RuntimeError(f"the client of {handle.request_id} is gone")

    with world.engine() as engine:
        engine.submit(text(2, 50), ns=NS, sampling=greedy(6), request_id="A", on_token=gone)
        engine.submit(
            text(3, 50), ns=NS, sampling=greedy(6), request_id="B", on_token=lambda _, token: heard.append(token)
        )
        done: list[Output] = []
        told = 0
        while len(done) < 2:
            try:
                done += engine.step()
            except RuntimeError:
                told += 1
    assert told == 6
    assert heard == list(cold_output(text(3, 50), 6).tokens)
    world.close()


def test_cancelling_gives_everything_back_at_any_time(world: World) -> None:
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    released = threading.Event()
    world.backend.inject(Stall(kind="read", until=released))
    with world.engine(max_batch=2, chunk_tokens=100) as engine:
        running = engine.submit(text(2, 300), ns=NS, sampling=greedy(50))
        loading = engine.submit(tokens, ns=NS, sampling=greedy(50))
        waiting = engine.submit(tokens, ns=NS, sampling=greedy(50))
        for _ in range(6):
            engine.step()
        assert [engine.cancel(handle) for handle in (waiting, loading, running)] == [True] * 3
        assert not engine.cancel(running)
        outputs = engine.step()
        assert [output.handle for output in outputs] == [waiting, loading, running]
        assert {output.finish for output in outputs} == {"cancelled"}
        assert [len(output.tokens) > 0 for output in outputs] == [False, False, True]
        assert outputs[0].report.partition is None
        released.set()
        engine.check_integrity()
        assert engine.stats().free_slots == 64
        assert serve(engine, tokens)[0].tokens == cold_output(tokens).tokens
    world.close()


def test_a_request_id_sent_again_is_not_answered_by_the_load_of_the_cancelled_one(world: World) -> None:
    tokens, other = text(1, 600), text(3, 300)
    world.ask(tokens, n=1)
    released = threading.Event()
    world.backend.inject(Stall(kind="read", until=released))
    with world.engine() as engine:
        first = engine.submit(tokens, ns=NS, sampling=greedy(4), request_id="B")
        engine.submit(text(2, 50), ns=NS, sampling=greedy(20), request_id="A")
        while not engine.stats().running:
            engine.step()
        engine.cancel(first)
        engine.submit(other, ns=NS, sampling=greedy(4), request_id="B")
        released.set()
        done = [output for _ in range(40) for output in engine.step()]
        assert engine.stats().waiting == 0
    served = {output.handle.request_id: output for output in done if output.finish == "length"}
    assert served["B"].report.prompt_tokens == 300
    assert served["B"].tokens == cold_output(other).tokens
    world.close()


def test_a_load_that_ends_after_the_engine_gives_back_what_it_brings(world: World) -> None:
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    released = threading.Event()
    world.backend.inject(Stall(kind="read", until=released))
    with world.engine() as engine:
        engine.submit(tokens, ns=NS, sampling=greedy(4))
        engine.submit(text(2, 50), ns=NS, sampling=greedy(20))
        while not engine.stats().running:
            engine.step()
        (late,) = engine._loads
        engine.close(0.0)
        assert world.store.windows.stats().leased == 1
        released.set()
        wait([late])
        while world.store.windows.stats().leased:  # `wait` may return before the callbacks have run
            pass
        assert engine.stats().free_slots == 64
    world.close()


def test_a_cancelled_prompt_leaves_the_blocks_it_computed(world: World) -> None:
    with world.engine("exact", chunk_tokens=100) as engine:
        handle = engine.submit(text(1, 600), ns=NS, sampling=greedy(1))
        while not engine.stats().rows >= 300:
            engine.step()
        engine.cancel(handle)
        engine.flush()
        assert len(world.blocks()) == engine.stats().rows // 128 == 2
        (output,) = serve(engine, text(1, 600))
        assert output.tokens == cold_output(text(1, 600)).tokens
        assert parts(output) == (256, 0, 0, 344)
    served = [event for event in world.events if isinstance(event, RequestServed)]
    assert len(served) == 1, "a prompt that was never computed was not served"
    world.close()


def test_leaving_generate_cancels_the_rest(world: World) -> None:
    with world.engine() as engine:
        outputs = engine.generate([text(1, 10), text(2, 10), text(3, 600)], ns=NS, sampling=greedy(5))
        assert next(outputs).finish == "length"
        outputs.close()  # type: ignore[attr-defined]
        assert engine.step() == []
        engine.check_integrity()
        assert engine.stats().free_slots == 64
    world.close()


def test_generate_leaves_the_outputs_of_others_to_step(world: World) -> None:
    with world.engine() as engine:
        other = engine.submit(text(9, 30), ns=NS, sampling=greedy(2))
        assert len(serve(engine, text(1, 300), text(2, 10))) == 2
        assert [output.handle for output in engine.step()] == [other]
    world.close()


def test_generate_does_not_wait_for_outputs_that_a_step_of_the_caller_took(world: World) -> None:
    with world.engine(max_batch=1) as engine:  # one at a time, so that they never end in one step
        outputs = engine.generate([text(1, 10), text(2, 300)], ns=NS, sampling=greedy(4))
        first = next(outputs)
        taken = finish(engine)
        assert len(taken) == 1
        assert first.handle.request_id not in taken
        assert list(outputs) == []
    world.close()


def test_tokens_are_streamed_in_order_and_a_callback_may_cancel(world: World) -> None:
    said: dict[Handle, list[int]] = {}

    def listen(handle: Handle, token: int) -> None:
        said.setdefault(handle, []).append(token)
        if handle.index == 1 and len(said[handle]) == 3:
            engine.cancel(handle)

    with world.engine() as engine:
        outputs = list(engine.generate([text(1, 50), text(2, 50)], ns=NS, sampling=greedy(6), on_token=listen))
    assert {output.handle: list(output.tokens) for output in outputs} == said
    assert {output.handle.index: (len(output.tokens), output.finish) for output in outputs} == {
        0: (6, "length"), 1: (3, "cancelled"),
    }  # fmt: skip
    world.close()


def test_a_callback_that_raises_leaves_the_engine_whole(world: World) -> None:
    def fail(handle: Handle, token: int) -> None:
        raise RuntimeError("the caller's own")

    with world.engine() as engine:
        with pytest.raises(RuntimeError, match="own"):
            list(engine.generate([text(1, 50), text(2, 50)], ns=NS, sampling=greedy(6), on_token=fail))
        engine.check_integrity()
        assert serve(engine, text(1, 50))[0].tokens == cold_output(text(1, 50)).tokens
    world.close()


def test_a_stop_token_ends_the_output(world: World) -> None:
    full = cold_output(text(1, 200), 8).tokens
    stop = Sampling(max_tokens=8, stop=(full[3],))
    with world.engine() as engine:
        (output,) = serve(engine, text(1, 200), sampling=stop)
    assert output.tokens == full[: full.index(full[3]) + 1]
    assert output.finish == "stop"
    world.close()


def test_a_seed_makes_draws_repeat_and_none_makes_them_differ(world: World) -> None:
    with world.engine() as engine:
        drawn = [
            serve(engine, text(1, 20), sampling=Sampling(max_tokens=20, temperature=1.0, seed=seed))[0].tokens
            for seed in (1, 1, 2, None, None)
        ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 4
    world.close()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "at least one"),
        ([300], "vocabulary"),
        ([-1], "vocabulary"),
        ([1] * 8192, "room for 8192"),
        ([1.5], "float64"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(world: World, prompt: list[int], reason: str) -> None:
    with world.engine() as engine, pytest.raises(UsageError, match=reason) as caught:
        engine.submit(prompt, ns=NS, sampling=greedy(2))
    assert "\n" not in str(caught.value)
    world.close()


def test_an_unknown_traffic_class_is_refused_at_once(world: World) -> None:
    with world.engine() as engine:
        engine.submit(text(1, 50), ns=NS, sampling=greedy(4))
        with pytest.raises(UsageError, match="agent"):
            engine.submit(text(2, 50), ns=NS, sampling=greedy(4), traffic="agnet")
        (output,) = finish(engine).values()
    assert output.tokens == cold_output(text(1, 50)).tokens
    world.close()


def test_an_engine_is_of_its_model_and_store(world: World) -> None:
    with pytest.raises(UsageError, match="encoder_layers = 20"):
        Engine(model(), EngineConfig(replay=ReplayPolicy()), store=world.store)
    other = CacheGeometry.opaque("other", payload_bytes=100)
    with (
        open_store("memory://other", geometry=other, config=StoreConfig(swa_bytes=0), backend=MemoryBackend()) as store,
        pytest.raises(UsageError, match="'other' cannot hold"),
    ):
        Engine(model(), EngineConfig(), store=store)
    with pytest.raises(UsageError, match="num_slots = 0"):
        EngineConfig(num_slots=0)
    world.close()


def test_closing_ends_all_threads_and_requests(world: World) -> None:
    with world.engine() as engine:
        serve(engine, text(1, 300))
        engine.submit(text(2, 300), ns=NS, sampling=greedy(50))
        engine.step()
        mine = [thread for thread in threading.enumerate() if thread.name.startswith(("duokv-load", "duokv-writeback"))]
        assert len(mine) >= 2
        engine.close()
        assert not any(thread.is_alive() for thread in mine)
        with pytest.raises(StoreError, match="closed"):
            engine.submit([1], ns=NS, sampling=greedy(1))
    assert world.store.stats().windows.leased == 0
    world.close()
