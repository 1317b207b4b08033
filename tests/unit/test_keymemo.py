"""Tokens and keys of a trace's blocks, derived once, here or in another process."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Literal

import numpy as np
import pytest

from duokv.bench import cache_hit
from duokv.bench.cache_hit import SimOptions, simulate
from duokv.bench.generator import generate
from duokv.bench.keymemo import KeyMemo, Piece, block_tokens
from duokv.bench.keys_ahead import PiecesAhead, PromptsAhead
from duokv.bench.workload import Run
from duokv.kvstore.errors import UsageError
from duokv.kvstore.keys import chain_blob

ROOT = bytes(range(32))


def test_block_tokens_are_golden() -> None:
    # The first three outputs of splitmix64 seeded with 0, as published with its reference code.
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    tokens = block_tokens(np.array([0, 1, 2**27]))
    assert tokens.shape == (3, 128)
    assert tokens.dtype == np.uint32
    assert tokens[0, :6].tolist() == [half >> 15 for z in outputs for half in (z & 0xFFFFFFFF, z >> 32)]
    assert int(tokens.max()) < 2**17
    digest = hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
    assert digest == "9eacab4653e9768315c520dff841f055172df7ea65a4b6818cc261bffa4598cc"


def chain(parent: bytes, ids: list[int]) -> list[bytes]:
    keys = []
    for chain_id in ids:
        parent = hashlib.sha256(parent + block_tokens(np.array([chain_id])).astype("<u4").tobytes()).digest()
        keys.append(parent)
    return keys


def test_keys_follow_the_chain() -> None:
    memo = KeyMemo(ROOT)
    first = chain(ROOT, [0, 1, 2])
    assert memo.keys([(0, 3)]) == b"".join(first)
    branch = chain(first[1], [50, 51, 7])
    assert memo.keys([(0, 2), (50, 2), (7, 1)]) == b"".join(first[:2] + branch)
    # Longer along a known run, and shorter.
    assert memo.keys([(0, 5)]) == b"".join(first + chain(first[2], [3, 4]))
    assert memo.keys([(0, 2), (50, 1)]) == b"".join([*first[:2], branch[0]])
    # Longer along a known run and beyond it.
    longer = first + chain(first[2], [3, 4, 5])
    assert memo.keys([(0, 6), (60, 1)]) == b"".join(longer + chain(longer[-1], [60]))
    assert memo.keys([]) == b""
    assert memo.distinct == 10


def test_keys_of_some_blocks() -> None:
    memo = KeyMemo(ROOT)
    runs = [(0, 2), (50, 2), (7, 1)]
    whole = KeyMemo(ROOT).keys(runs)
    for first in range(5):
        for end in range(first + 1, 6):
            assert memo.part(runs, first, end) == whole[32 * first : 32 * end]
    assert memo.distinct == 5


def test_keys_are_derived_once() -> None:
    asked: list[tuple[bytes, int]] = []

    def links(parent: bytes, tokens: bytes, blocks: int) -> bytes:
        assert len(tokens) == 512 * blocks
        asked.append((parent, blocks))
        return chain_blob(parent, tokens, blocks)

    memo = KeyMemo(ROOT, links)
    for runs in ([(0, 3)], [(0, 3)], [(0, 1), (3, 1)], [(0, 1), (3, 1), (4, 300)], [(0, 2)]):
        memo.keys(runs)
    first, second, branch = (memo.part([(0, 1), (3, 2)], at, at + 1) for at in range(3))
    assert asked == [(ROOT, 3), (first, 1), (second, 300)]
    assert memo.distinct == 304
    assert branch == memo.keys([(0, 1), (3, 2)])[64:]


@pytest.mark.parametrize("token_bytes", [1, 1 << 20])
def test_keys_hashed_anew_are_the_same(token_bytes: int) -> None:
    """However the runs lie to the pages in which tokens are derived, and however many of these are kept."""
    hashing = KeyMemo(ROOT, token_bytes=token_bytes)
    for runs in ([(0, 1)], [(0, 128), (128, 5)], [(0, 100), (200, 300)], [(0, 2), (127, 2), (511, 1), (126, 1)], []):
        assert hashing.hashed(runs) == KeyMemo(ROOT).keys(runs)
        assert hashing.hashed(runs) == b"".join(chain(ROOT, [i for at, count in runs for i in range(at, at + count)]))
    assert hashing.distinct == 0


@pytest.mark.parametrize("runs", [[(7, 1), (1, 1)], [(0, 1), (9, 2), (9, 1)], [(7, 1), (0, 2)]])
def test_an_id_cannot_stand_for_two_prefixes(runs: list[Run]) -> None:
    memo = KeyMemo(ROOT)
    memo.keys([(0, 3)])
    with pytest.raises(UsageError, match=r"^chain id \d: stands for two prefixes.*; number the trace's blocks anew$"):
        memo.keys([*runs, (100, 1)])


PROMPTS: list[list[Run]] = [[(0, 3)], [(0, 2), (500, 2)], [(0, 3), (3, 300)], [(0, 2), (500, 2), (700, 1)]]


def test_what_is_planned_is_derived_in_the_order_of_need() -> None:
    memo = KeyMemo(ROOT)
    pieces = memo.plan(PROMPTS)
    assert pieces == (Piece(-1, 0, 3), Piece(1, 500, 2), Piece(2, 3, 300), Piece(501, 700, 1))
    assert memo.distinct == 0
    memo.keys(PROMPTS[1])
    assert memo.distinct == 5
    assert [memo.keys(runs) for runs in PROMPTS] == [KeyMemo(ROOT).keys(runs) for runs in PROMPTS]


def test_another_process_derives_the_same_keys() -> None:
    memo = KeyMemo(ROOT, lambda *_: pytest.fail("derived here"))
    with PiecesAhead(ROOT, memo.plan(PROMPTS)) as ahead:
        memo.take_from(ahead.keys)
        assert [memo.keys(runs) for runs in PROMPTS] == [KeyMemo(ROOT).keys(runs) for runs in PROMPTS]
        assert memo.distinct == 306


def test_a_process_that_ends_early_is_not_missed() -> None:
    memo = KeyMemo(ROOT)
    pieces = memo.plan(PROMPTS)
    with PiecesAhead(ROOT, pieces[:2]) as ahead:
        memo.take_from(ahead.keys)
        assert [memo.keys(runs) for runs in PROMPTS] == [KeyMemo(ROOT).keys(runs) for runs in PROMPTS]
    # Of a prompt that was not planned too.
    assert memo.keys([(0, 1), (900, 2)]) == KeyMemo(ROOT).keys([(0, 1), (900, 2)])


@pytest.mark.parametrize("processors", [1, 3, 64])
def test_other_processes_hash_prompts_the_same(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    with PromptsAhead(ROOT, PROMPTS) as ahead:
        assert [ahead.keys(runs) for runs in PROMPTS] == [KeyMemo(ROOT).keys(runs) for runs in PROMPTS]
        # There are no more: hashed here.
        assert ahead.keys([(0, 1)]) == KeyMemo(ROOT).keys([(0, 1)])
    assert ahead.keys(PROMPTS[0]) == KeyMemo(ROOT).keys(PROMPTS[0])


@pytest.mark.parametrize("keys", ["memo", "hashed"])
@pytest.mark.parametrize("executable", [sys.executable, "/nowhere/python"])
def test_a_simulation_finds_the_same_whoever_derives_its_keys(
    monkeypatch: pytest.MonkeyPatch, executable: str, keys: Literal["memo", "hashed"]
) -> None:
    requests = list(generate("agent", seed=3, days=0.1, requests_per_day=2000))
    alone = simulate(requests, SimOptions(traffic="agent")).as_json()
    monkeypatch.setattr(cache_hit, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(sys, "executable", executable)
    together = simulate(requests, SimOptions(traffic="agent", keys=keys)).as_json()
    assert {**together, "seconds": 0} == {**alone, "seconds": 0}
