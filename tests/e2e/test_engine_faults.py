"""What goes wrong in the store under an engine changes no output, and ends no request."""

from __future__ import annotations

import errno
import threading

import pytest
from engine_kit import CONFIG, NS, World, cold_output, finish, greedy, parts, replayed_tokens, serve, text

from duokv.connectors.fs_faulty import Corrupt, Delay, Fail, Stall
from duokv.engine import Output
from duokv.kvstore.events import Degraded
from duokv.replay import Mode, Reason


@pytest.fixture
def world() -> World:
    return World()


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
