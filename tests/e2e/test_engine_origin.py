"""A label of EXACT is a promise of a cold run's bytes, whatever mixture of hits and misses came before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import pytest
from engine_kit import NS, World, cold_output, compute, greedy, text
from hypothesis import given, settings
from hypothesis import strategies as st

from duokv.connectors.fs_faulty import Corrupt, Fail
from duokv.engine import Output
from duokv.kvstore import Origin, chain_keys
from duokv.replay import Mode, Reason, TokenPartition

What = Literal["bounded", "exact", "mixed", "lose windows", "restart", "evict", "damage", "unreadable"]
Happening = tuple[What, int, int]
"""What happens (the first three are turns, the third one of each mode), to which conversation, with what number."""


class Talk:
    """Two conversations with one beginning over one store."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.texts = [text(0, 420) + text(1, 30), text(0, 420) + text(2, 150)]
        self.reasons: set[Reason | None] = set()
        self.serial = 100

    def happen(self, what: What, which: int, tokens: int) -> None:
        world, said = self.world, self.texts[which]
        match what:
            case "bounded" | "exact":
                self.turns({which: what}, tokens)
            case "mixed":
                self.turns({which: "bounded", 1 - which: "exact"}, tokens)
            case "lose windows":
                world.lose_windows(said)
            case "restart":
                world.restart()
            case "evict":
                world.evict(said, keep=tokens // 64)
            case "damage":
                world.backend.inject(Corrupt(bit=tokens))
            case "unreadable":
                world.backend.inject(Fail(kind="read", nth=1 + tokens % 2))

    def turns(self, modes: dict[int, Mode], tokens: int) -> None:
        """Say something more in each conversation, step by step in turn, each by an engine of its mode."""
        self.serial += 1
        outputs: dict[int, Output] = {}
        with ExitStack() as stack:
            open_engine = partial(self.world.engine, chunk_tokens=150)
            engines = {which: stack.enter_context(open_engine(mode)) for which, mode in modes.items()}
            for which, engine in engines.items():
                self.texts[which] = self.texts[which] + text(self.serial, tokens)
                engine.submit(self.texts[which], ns=NS, sampling=greedy(3))
            while len(outputs) < len(engines):
                for which, engine in engines.items():
                    outputs.update((which, output) for output in engine.step())
        self.world.backend.heal()
        for which, output in outputs.items():
            self.reasons.add(output.report.reason)
            if modes[which] == "exact":
                assert output.report.exact
                assert output.tokens == cold_output(self.texts[which], 3, fake=self.world.fake).tokens
            self.texts[which] = [*self.texts[which], *output.tokens]


def check_labels(world: World, texts: Sequence[Sequence[int]]) -> int:
    """Compare what is labelled EXACT, of these texts, with their cold runs; returns how many blocks are."""
    stored = world.blocks()
    exact = set()
    wrong = []
    for tokens in texts:
        cold = compute(tokens, fake=world.fake)
        for block, key in enumerate(chain_keys(NS, tokens)):
            origin, payload = stored.pop(key, (None, b""))
            if origin is Origin.EXACT:
                exact.add(key)
                wrong += [f"block {block}"] if payload != cold.blocks[block].tobytes() else []
            with world.store.lease_window(key, require=Origin.EXACT) as window:
                if window is not None and bytes(window.data or b"") != cold.states[window.end]:
                    wrong.append(f"window at {window.end}")
    assert not wrong
    assert not stored, "a block is stored that no text has"
    return len(exact)


happenings = st.lists(
    st.tuples(
        st.sampled_from(["bounded", "exact", "mixed", "lose windows", "restart", "evict", "damage", "unreadable"]),
        st.integers(0, 1),
        st.integers(1, 300),
    ),
    min_size=4,
    max_size=9,
)


@settings(max_examples=15)
@given(happenings)
def test_exact_labels_are_true_after_anything(story: list[Happening]) -> None:
    world = World()
    talk = Talk(world)
    talk.turns({0: "exact", 1: "bounded"}, 1)
    for what, which, tokens in story:
        talk.happen(what, which, tokens)
    check_labels(world, talk.texts)
    world.close()


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_approximate_blocks_are_told_apart_until_an_exact_turn_replaces_them(fake: bool) -> None:
    world = World(fake=fake)
    talk = Talk(world)

    def origins() -> list[Origin]:
        stored = world.blocks()
        return [stored[key][0] for key in chain_keys(NS, talk.texts[0]) if key in stored]

    talk.turns({0: "bounded"}, 1)
    world.lose_windows(talk.texts[0])
    talk.turns({0: "bounded"}, 200)
    assert talk.reasons == {Reason.NO_HIT, Reason.SWA_MISS}
    assert origins() == [Origin.EXACT] * 3 + [Origin.APPROX] * 2
    talk.turns({0: "bounded"}, 130)
    assert talk.reasons == {Reason.NO_HIT, Reason.SWA_MISS, Reason.SWA_HIT}
    assert origins() == [Origin.EXACT] * 3 + [Origin.APPROX] * 3, "an approximate state makes approximate blocks"
    check_labels(world, talk.texts[:1])
    talk.turns({0: "exact"}, 10)
    assert origins() == [Origin.EXACT] * 6
    assert check_labels(world, talk.texts[:1]) == 6
    world.close()


def test_an_approximate_state_taints_even_when_the_blocks_under_it_are_exact_by_now() -> None:
    """The state is of a bounded replay; then an exact run replaced the blocks, and its own states were lost."""
    world = World()
    talk = Talk(world)
    talk.turns({0: "bounded"}, 1)
    world.lose_windows(talk.texts[0])
    talk.turns({0: "bounded"}, 300)
    left = {}
    for key in chain_keys(NS, talk.texts[0]):
        with world.store.lease_window(key) as window:
            if window is not None:
                left[key] = dataclasses.replace(window, data=memoryview(bytes(window.data or b"")))
    assert {window.origin for window in left.values()} == {Origin.APPROX}
    world.ask(talk.texts[0], "exact", 1)
    assert {origin for origin, _ in world.blocks().values()} == {Origin.EXACT}
    world.lose_windows(talk.texts[0])
    for key, window in left.items():
        world.store.put_window(key, window)
    talk.turns({0: "bounded"}, 150)
    assert Reason.SWA_HIT in talk.reasons
    assert Origin.APPROX in {origin for origin, _ in world.blocks().values()}
    check_labels(world, talk.texts[:1])
    talk.reasons.clear()
    talk.turns({0: "exact"}, 1)
    assert talk.reasons == {Reason.SWA_MISS}, "nor does it ever serve an exact turn"
    world.close()


def test_approximate_blocks_taint_even_under_an_exact_state() -> None:
    """The tail of an exact run's blocks was evicted and replayed anew, its exact state at the end is still there."""
    world = World()
    talk = Talk(world)
    talk.turns({1: "exact"}, 1)
    world.evict(talk.texts[1], keep=2)
    talk.turns({1: "bounded"}, 1)
    assert talk.reasons == {Reason.NO_HIT, Reason.SWA_MISS}
    assert [origin for origin, _ in world.blocks().values()].count(Origin.APPROX) == 2
    talk.turns({1: "bounded"}, 200)
    assert talk.reasons == {Reason.NO_HIT, Reason.SWA_MISS, Reason.SWA_HIT}
    assert [origin for origin, _ in world.blocks().values()].count(Origin.APPROX) == 4
    check_labels(world, talk.texts[1:])
    world.close()


def test_an_exact_replay_keeps_no_state_of_its_own_first_rows() -> None:
    """They saw clipped windows; each encoder layer takes the first exact row one window further."""
    world = World()
    tokens = text(3, 601)
    world.ask(tokens, "exact", n=1)
    world.lose_windows(tokens)
    output = world.ask(tokens, "exact", n=1)
    assert output.report.partition == TokenPartition(0, 77, 435, 89)
    keys = chain_keys(NS, tokens)
    assert [world.store.windows.contains(key) for key in keys] == [False, False, False, True]
    assert check_labels(world, [tokens]) == 4
    world.close()
