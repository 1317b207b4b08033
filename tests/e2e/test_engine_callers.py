"""What callers do to an engine: cancel, repeat ids, raise in callbacks, ask for what cannot be."""

from __future__ import annotations

import threading

import pytest
from engine_kit import NS, World, cold_output, finish, greedy, model, parts, serve, text

from duokv.connectors.fs_faulty import Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.engine import Engine, EngineConfig, Handle, Output, Sampling
from duokv.kvstore import (
    CacheGeometry,
    RequestServed,
    StoreConfig,
    StoreError,
    UsageError,
    open_store,
)
from duokv.replay import ReplayPolicy


@pytest.fixture
def world() -> World:
    return World()


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
        given_back = threading.Event()
        late.add_done_callback(lambda _: given_back.set())  # after the engine's own
        released.set()
        assert given_back.wait(60)
        assert world.store.windows.stats().leased == 0
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
