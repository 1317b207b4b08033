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
