"""Why a block is there or is not, and why a prompt hits no further: as lookups and the files themselves have it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from inspection_kit import (
    GEOMETRY,
    NS,
    Place,
    block_of,
    flip,
    held,
    key_of,
    payload,
    place_fixture,  # noqa: F401
    prompt,
)

from duokv.kvstore.errors import UsageError
from duokv.kvstore.explain import Absent, BlockView, explain, find_prefix
from duokv.kvstore.keys import Namespace, chain_keys
from duokv.kvstore.operation import evict, plan_key
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore

# -- explain -----------------------------------------------------------------------------------------------------------


def test_explain_finds_the_bytes_and_the_reason(place: Place) -> None:
    path = [1, 2, 3]
    place.store(([9], "brief"), (path, "brief"))
    place.now += 5
    with place.engine() as store:
        store.lookup(NS, prompt(path[:2]), traffic="long")
    found = block_of(place, path[:2])
    assert found.key == key_of(path[:2])
    assert (found.alive, found.keeper, found.until_s) == (True, "long", place.now + 100)
    assert (found.stored_s, found.stored_by, found.origin) == (place.now - 5, "brief", "exact")
    assert (found.chain_pos, found.first_token, found.extent_blocks) == (1, 128, 3)
    assert (found.content, found.parent) == ("whole", key_of(path[:1]))
    uses = {use.name: (use.last_use_s, use.until_s, use.alive) for use in found.uses}
    assert uses["brief"] == (place.now - 5, place.now + 5, True)
    assert uses["long"] == (place.now, place.now + 100, True)
    assert uses["keep"] == (None, None, False)
    raw = (place.folder / found.file).read_bytes()
    assert raw[found.file_offset :][: GEOMETRY.payload_bytes] == payload(path[:2])
    assert block_of(place, path).keeper == "brief", "the use covered only the first two blocks"


def test_explain_tells_pins_and_fixed_lives_and_expiry(place: Place) -> None:
    with place.engine() as store:
        store.commit(NS, prompt([1]), [payload([1])], traffic="still")
        store.pin(chain_keys(NS, prompt([1])), ttl_s=60)
    start = place.now
    place.now += 55
    found = block_of(place, [1])
    assert (found.alive, found.keeper, found.until_s, found.pinned_until_s) == (True, "(pin)", start + 60, start + 60)
    assert [(use.until_s, use.alive) for use in found.uses if use.name == "still"] == [(start + 50, False)]
    place.now += 10
    assert not block_of(place, [1]).alive
    assert block_of(place, [1]).parent is None, "the first block's parent is the tenant's root"


def test_explain_takes_the_beginning_of_a_key(place: Place) -> None:
    place.store(*[([number], "brief") for number in range(40)])
    whole = key_of([5])
    with place.inspect() as view:
        for digits in (whole, whole[:32], whole[:17], whole[:12].upper()):
            found = explain(view, digits)
            assert isinstance(found, BlockView)
            assert found.key == whole
        assert explain(view, whole[:32] + "0" * 32) == Absent(whole[:32] + "0" * 32, False, ())
        assert explain(view, "0123456789") == Absent("0123456789", False, ())
        for bad in ("xyz", "abc", "12 45", "0" * 65):
            with pytest.raises(UsageError, match="hex digits"):
                explain(view, bad)


def test_explain_asks_for_more_digits_where_several_blocks_fit(place: Place) -> None:
    with place.engine() as store:
        keys = [bytes([0xAB, 0xCD, number]) + bytes(29) for number in range(3)] + [b"inside \xab\xcd" + bytes(23)]
        store.blocks.commit(b"".join(keys), 4, "brief", first=0, payload=None, origin=Origin.EXACT)
    with place.inspect() as view, pytest.raises(UsageError, match="fits 3 blocks; give more digits"):
        explain(view, "abcd")


def test_explain_knows_what_was_cut_and_what_was_damaged(place: Place) -> None:
    path = [1, 2, 3, 4]
    place.store((path, "brief"))
    with place.operate() as view, view.snapshot() as txn:
        cut = plan_key(txn, key_of(path))
    with place.operate() as view:
        evict(view, cut)
    flip(place, block_of(place, path[:2]))
    found = block_of(place, path[:2])
    assert (found.content, found.key) == ("checksum", key_of(path[:2])[:32])
    with place.engine() as store:
        assert len(read(store, path)) == 1
    with place.inspect() as view:
        gone, damaged = explain(view, key_of(path)), explain(view, key_of(path[:2]))
    assert gone == Absent(key_of(path), True, ())
    assert isinstance(damaged, Absent)
    assert [(one.reason, one.found_s) for one in damaged.damage] == [("checksum", place.now)]


def read(store: KVStore, path: Sequence[int]) -> list[bytes]:
    hit = store.lookup(NS, prompt(path))
    out = np.zeros((max(1, len(hit.keys)), GEOMETRY.payload_bytes), np.uint8)
    return [row.tobytes() for row in out[: store.load(hit, out, deadline_s=60)]]


# -- prefix ------------------------------------------------------------------------------------------------------------


def test_prefix_says_where_a_hit_ends_and_why(place: Place) -> None:
    path = [1, 2, 3, 4]
    place.store((path[:2], "brief"), (path, "long"))
    with place.inspect() as view:
        whole = find_prefix(view, NS, prompt(path))
        assert (whole.hit_blocks, whole.hit_tokens, whole.blocks, whole.reason, whole.miss_key) == (
            4,
            512,
            4,
            None,
            None,
        )
        longer = find_prefix(view, NS, prompt([*path, 5, 6]))
        assert (longer.hit_blocks, longer.reason, longer.miss_block) == (4, "absent", 4)
        assert longer.miss_key == key_of([*path, 5])
        exactly = find_prefix(view, NS, prompt(path, tail=0))
        assert (exactly.blocks, exactly.hit_tokens) == (3, 384), "a row is left to compute"
        assert find_prefix(view, Namespace("other", "w", "t", "f"), prompt(path)).hit_blocks == 0
    place.now += 1000
    with place.inspect() as view:
        gone = find_prefix(view, NS, prompt(path))
    assert (gone.hit_blocks, gone.reason, gone.stored_blocks) == (0, "expired", 4)


def test_prefix_ends_at_approximate_blocks_if_asked(place: Place) -> None:
    path = [1, 2, 3]
    place.store((path[:1], "keep"))
    place.store((path, "keep"), origin=Origin.APPROX)
    with place.inspect() as view:
        assert find_prefix(view, NS, prompt(path)).hit_blocks == 3
        found = find_prefix(view, NS, prompt(path), exact_only=True)
    assert (found.hit_blocks, found.reason, found.miss_block) == (1, "approx", 1)


def test_asking_uses_nothing(place: Place) -> None:
    place.store(([1], "brief"))
    until = block_of(place, [1]).until_s
    place.now += 5
    assert held(place, [1]) == [1]
    assert block_of(place, [1]).until_s == until
