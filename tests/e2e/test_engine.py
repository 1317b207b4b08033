"""The engine over a store: whatever a hit may be come by, its output is the cold run's."""

from __future__ import annotations

from typing import get_args

import pytest
from engine_kit import (
    CONFIG,
    NS,
    World,
    cold_output,
    finish,
    greedy,
    parts,
    replayed_tokens,
    serve,
    text,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from duokv.engine import Engine, EngineConfig, Sampling, namespace_of
from duokv.engine.runner import Truncation
from duokv.engine.weights import ASSETS, weights_revision
from duokv.kvstore import (
    Origin,
    RequestServed,
    SwaWindow,
    chain_keys,
)
from duokv.replay import Reason, TokenPartition

DRAWN = Sampling(max_tokens=6, temperature=1.0, top_p=0.9, seed=11)


@pytest.fixture
def world() -> World:
    return World()


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
