"""What a lost window costs, and that nothing else changes by it: cases 18 and 20."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from engine_kit import CONFIG, NS, World, bounded_plan, cold_output, greedy, model, policy, text

from duokv.engine import Output
from duokv.engine.oracle import replayed
from duokv.kvstore import chain_keys
from duokv.replay import Reason, TokenPartition

GENERATED = 3
WORDS = text(18, 550)


@pytest.fixture
def served() -> Iterator[World]:
    """A store without anything in it, for engines that run the real model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    world = World(fake=False)
    yield world
    world.close()
    torch.set_num_threads(threads)


def block_bytes(world: World, tokens: Sequence[int]) -> list[bytes]:
    """The stored payloads of a text's whole blocks."""
    held = world.blocks()
    return [held[key][1] for key in chain_keys(NS, tokens)]


def check_replay(world: World, length: int, hit: int, output: Output) -> None:
    """The output of a prompt served with its windows lost: rows counted, tokens those of the two streams."""
    plan = bounded_plan(length, hit)
    assert output.report.reason is Reason.SWA_MISS
    assert output.report.partition == TokenPartition(0, plan.start, hit - plan.start, length - hit)
    assert output.report.rows == length - plan.start + GENERATED - 1
    words = torch.tensor([*WORDS[:length], *output.tokens[:-1]])
    logits = replayed(model(), words, plan).logits[length - 1 - plan.decoder_start :]
    assert output.tokens == tuple(logits.argmax(-1).tolist())


@pytest.mark.parametrize("length", [396, 420])
def test_case_18_a_second_slot_replays_one_window(served: World, length: int) -> None:
    """The same prompt from a second slot found the blocks but not the window, and went on from the first slot's ring.

    With at least K - 128 tokens after the hit exactly 128 rows are replayed, once, on a ring that begins empty (here:
    full of garbage), and the output is that of a pass whose windows end at the replay's start.
    """
    prompt = WORDS[:length]
    with served.engine() as engine:
        (first,) = engine.generate([prompt], ns=NS, sampling=greedy(GENERATED))
        assert first.report.rows == length + GENERATED - 1
        before = block_bytes(served, prompt)
        served.lose_windows([*prompt, *first.tokens])
        rows = engine.stats().rows
        (second,) = engine.generate([prompt], ns=NS, sampling=greedy(GENERATED))
        assert engine.stats().rows - rows == second.report.rows
        check_replay(served, length, 384, second)
        assert second.report.partition == TokenPartition(0, 256, 128, length - 384)
        assert block_bytes(served, prompt) == before
        # Not again: the replay left a window at the hit's end, which serves whoever goes on from there.
        (third,) = engine.generate([WORDS[: length + 130]], ns=NS, sampling=greedy(GENERATED))
        assert third.report.reason is Reason.SWA_HIT
        assert third.report.partition == TokenPartition(384, 0, 0, length + 130 - 384)


@pytest.mark.parametrize("stored", [100, 128, 130, 255])
def test_case_20_a_hit_of_one_window_is_not_adopted(served: World, stored: int) -> None:
    """A hit no longer than the window was replayed whole and its blocks rewritten; here the run is cold."""
    prompt = WORDS[:300]
    served.ask(prompt[:stored], n=1)
    held = block_bytes(served, prompt[:stored])
    assert len(held) == stored // 128
    served.lose_windows(prompt)
    output = served.ask(prompt, n=GENERATED)
    assert output.report.reason is (Reason.SHORT_HIT if held else Reason.NO_HIT)
    assert output.report.partition == TokenPartition(0, 0, 0, 300)
    assert output.report.rows == 300 + GENERATED - 1
    assert output.tokens == cold_output(prompt, GENERATED, fake=False).tokens
    assert block_bytes(served, prompt[:stored]) == held


@pytest.mark.parametrize(("length", "rows"), [(268, 128), (269, 128), (384, 128), (257, 140), (262, 134)])
def test_case_20_the_replay_is_as_long_as_the_decoder_needs(served: World, length: int, rows: int) -> None:
    """A window too few was replayed where fewer than K rows follow the hit: the decoder's first rows saw nothing.

    With K = 140 and a hit of 256 tokens, 12 rows after it need 128 replayed, one needs 140. No adopted byte changes.
    """
    served.ask(WORDS[:256], n=1)
    before = block_bytes(served, WORDS[:256])
    assert len(before) == 2
    served.lose_windows(WORDS[:256])
    output = served.ask(WORDS[:length], n=GENERATED)
    assert output.report.partition == TokenPartition(0, 256 - rows, rows, length - 256)
    check_replay(served, length, 256, output)
    assert block_bytes(served, WORDS[:256]) == before


def test_case_20_the_rows_kept_are_those_of_the_policy() -> None:
    """The numbers above are for the published 140."""
    assert policy().keep_rows == 140
    assert CONFIG.window == 128
