"""An engine whose slots run out: requests give way, wait, share, and end as if they had been alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engine_kit import CONFIG, NS, World, cold_output, finish, greedy, serve, text

from duokv.connectors.fs_faulty import Stall
from duokv.engine import Engine, Handle, Sampling
from duokv.engine.admission import Adoption
from duokv.engine.live import LiveBlocks
from duokv.engine.request import Request
from duokv.engine.slots import BlockSlots, SlotsExhausted
from duokv.kvstore import BlockKeys, Origin, PrefixHit, chain_keys
from duokv.kvstore.reader import Rows
from duokv.replay import Mode, Reason


@pytest.fixture
def world() -> World:
    return World()


def request(tokens: int) -> Request:
    """One of so many tokens."""
    return Request(
        handle=Handle("asking"), number=0, namespace=NS, traffic=None, tokens=[0] * tokens, prompt_tokens=tokens,
        keys=BlockKeys(), sampling=greedy(1), seed=0, on_token=None, submitted_s=0.0, decoder_start=None,
    )  # fmt: skip


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
    with Adoption(world.store, live, hit, request(600)) as late:
        assert late.load(512, 60.0) == 512
        with Adoption(world.store, live, hit, request(300)) as early:
            assert early.load(256, 60.0) == 256
            first = early.place(256)
        second = late.place(512)
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


def test_blocks_are_in_their_slots_before_the_next_ones_are_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = text(1, 140 * 128 + 1)
    payloads = np.random.default_rng(0).integers(0, 256, (140, CONFIG.cache.payload_bytes), dtype=np.uint8)
    world.store.commit(NS, tokens, payloads)
    live = LiveBlocks(BlockSlots(CONFIG.cache, 141))
    load_iter, leads = world.store.load_iter, []

    def checked(hit: PrefixHit, out: Rows, *, first_block: int = 0, deadline_s: float | None = None) -> Iterator[int]:
        for lead in load_iter(hit, out, first_block=first_block, deadline_s=deadline_s):
            yield lead
            assert np.array_equal(live.slots.memory.numpy()[:lead], payloads[:lead])
            leads.append(lead)

    monkeypatch.setattr(world.store, "load_iter", checked)
    with Adoption(world.store, live, world.store.lookup(NS, tokens), request(len(tokens))) as blocks:
        assert blocks.load(140 * 128, 60.0) == 140 * 128
        assert blocks.place(140 * 128).slots == list(range(141))
    assert len(leads) > 1, "segments are of 64 blocks"
    world.close()


def test_a_load_that_finds_too_few_slots_reads_nothing_and_holds_nothing(world: World) -> None:
    tokens = text(1, 600)
    world.ask(tokens, n=1)
    live = LiveBlocks(BlockSlots(CONFIG.cache, 4))
    asking = request(600)
    loads = sum(operation.kind == "read" for operation in world.backend.log)
    with pytest.raises(SlotsExhausted), Adoption(world.store, live, world.store.lookup(NS, tokens), asking) as blocks:
        blocks.load(512, 60.0)
    assert sum(operation.kind == "read" for operation in world.backend.log) == loads
    assert (live.free, asking.taken) == (4, 0)
    world.close()


def test_a_request_whose_load_finds_too_few_slots_waits_for_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken between the scheduler's count and the load's."""
    tokens = text(1, 600)
    world.ask(tokens, "exact", n=1)
    lookup, gone = world.store.lookup, []
    with world.engine("exact", num_slots=7) as engine:

        def late(*args: object, **named: object) -> PrefixHit:
            monkeypatch.undo()
            gone.extend(engine._live.allocate(3))
            return lookup(*args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(world.store, "lookup", late)
        engine.submit(tokens, ns=NS, sampling=greedy(4), request_id="B")
        engine.step()
        assert len(gone) == 3
        assert (engine.stats().running, engine.stats().waiting, engine.stats().free_slots) == (0, 1, 4)
        engine._live.release(gone)
        done = finish(engine)
    assert done["B"].tokens == cold_output(tokens).tokens
    assert done["B"].report.reason is Reason.SWA_HIT
    world.close()


def test_an_older_request_gets_the_slots_of_one_that_was_still_loading(world: World) -> None:
    """A needs a slot while B, younger, has taken the rest for what it loads: B gives way once its load has ended."""
    tokens = text(1, 600)
    world.ask(tokens, "exact", n=1)
    released = threading.Event()
    world.backend.inject(Stall(kind="read", until=released))
    with world.engine("exact", num_slots=7) as engine:
        engine.submit(text(2, 100), ns=NS, sampling=greedy(250), request_id="A")
        while not engine.stats().running:
            engine.step()
        engine.submit(tokens, ns=NS, sampling=greedy(4), request_id="B")
        while engine.stats().rows < 256:
            engine.step()
        assert (engine.stats().waiting, engine.stats().free_slots) == (1, 0)
        released.set()
        done = finish(engine)
    assert (done["A"].report.preemptions, done["B"].report.preemptions) == (0, 1)
    assert done["A"].tokens == cold_output(text(2, 100), 250).tokens
    assert done["B"].tokens == cold_output(tokens).tokens
    world.close()


def test_more_requests_than_slots_are_served_in_turn(world: World) -> None:
    prompts = [text(seed, 100 + 40 * seed) for seed in range(8)]
    with world.engine(num_slots=4, max_batch=3) as engine:
        outputs = serve(engine, *prompts)
    assert [output.tokens for output in outputs] == [cold_output(prompt).tokens for prompt in prompts]
    world.close()
