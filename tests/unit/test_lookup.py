"""What a lookup hashes of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from store_kit import NS, Hands, die, open_test_store, payloads, prompt

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import store as store_module
from duokv.kvstore.keys import Media, chain_blob, chain_keys

PATH = (1, 2, 3, 4)


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks were hashed, call by call."""
    calls: list[int] = []

    def counted(root: bytes, ids: bytes | memoryview, blocks: int, media: Sequence[Media] = ()) -> bytes:
        calls.append(blocks)
        return chain_blob(root, ids, blocks, media)

    monkeypatch.setattr(store_module, "chain_blob", counted)
    return calls


def test_a_stranger_costs_the_hash_of_one_block(tmp_path: Path, hashed: list[int]) -> None:
    with open_test_store(MemoryBackend(), tmp_path, Hands()) as store:
        store.commit(NS, prompt(PATH), payloads(PATH))
        hashed.clear()
        hit = store.lookup(NS, prompt((9, 2, 3, 4)))
        assert (hit.tokens, hit.miss_reason, len(hit.keys)) == (0, "absent", 0)
        assert hashed == [1]


@pytest.mark.parametrize("met", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("asked", [(), (1,), (1, 2), (1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 9, 3, 4)])
def test_hits_are_the_same_whether_their_extents_were_met_before(
    tmp_path: Path, asked: tuple[int, ...], blocks: int, met: bool
) -> None:
    backend, hands = MemoryBackend(), Hands()
    store = open_test_store(backend, tmp_path, hands)
    store.commit(NS, prompt(PATH[:blocks]), payloads(PATH[:blocks]))
    if not met:
        store.close()
        store = open_test_store(backend, tmp_path, hands)
    shared = next((i for i, (a, b) in enumerate(zip(asked, PATH[:blocks], strict=False)) if a != b), None)
    expected = min(len(asked), blocks) if shared is None else shared
    hit = store.lookup(NS, prompt(asked))
    assert hit.tokens == 128 * expected
    assert hit.keys == chain_keys(NS, prompt(asked))[:expected]
    assert hit.miss_reason == (None if expected == len(asked) else "absent")
    die(store)


@pytest.mark.parametrize("other", [0, 1, 2])
def test_keys_that_agree_in_their_prefix_are_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    """Block 3's prefix is that of a block before it: a walk goes neither there nor round in circles."""

    def colliding(root: bytes, ids: bytes | memoryview, blocks: int, media: Sequence[Media] = ()) -> bytes:
        keys = bytearray(chain_blob(root, ids, blocks, media))
        if blocks > 3:
            keys[3 * 32 : 3 * 32 + 16] = keys[other * 32 : other * 32 + 16]
        return bytes(keys)

    monkeypatch.setattr(store_module, "chain_blob", colliding)
    path = (1, 2, 3, 4, 5, 6)
    with open_test_store(MemoryBackend(), tmp_path, Hands()) as store:
        for blocks in (1, 2, 3):
            store.commit(NS, prompt(path[:blocks]), payloads(path[:blocks]))
        for blocks in (6, 5, 4, 6):
            assert store.lookup(NS, prompt(path[:blocks])).tokens == 3 * 128
