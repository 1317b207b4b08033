"""Sums and lists of what a store holds: every number checked against the store itself and its files."""

from __future__ import annotations

import pytest
from inspection_kit import (
    NS,
    SLOT,
    Place,
    key_of,
    payload,
    place_fixture,  # noqa: F401
    prompt,
    segment_files,
)

from duokv.kvstore.census import list_extents, list_segments, read_stat
from duokv.kvstore.errors import UsageError
from duokv.kvstore.keys import chain_keys


def test_stat_counts_by_class_and_life(place: Place) -> None:
    with place.engine() as store:
        for path, traffic in (([1, 2, 3], "brief"), ([4, 5], "long")):
            store.commit(NS, prompt(path), [payload(path[: i + 1]) for i in range(len(path))], traffic=traffic)
        store.lookup(NS, prompt([1]), traffic="long")
        store.pin(chain_keys(NS, prompt([4])), ttl_s=1000)
    place.now += 20
    with place.inspect() as view:
        found = read_stat(view)
    assert (found.blocks, found.alive, found.expired, found.pinned) == (5, 3, 2, 1)
    assert {c.name: (c.alive, c.expired) for c in found.classes} == {
        "brief": (0, 3), "long": (3, 0), "still": (0, 0), "keep": (0, 0),
    }  # fmt: skip
    assert (found.extents, found.segments, found.active_segments, found.damage) == (2, 2, 0, 0)
    assert found.live_bytes == 5 * SLOT
    assert found.physical_bytes == found.live_bytes + found.dead_bytes
    assert found.physical_bytes == sum(path.stat().st_blocks * 512 for path in segment_files(place))
    assert found.index_bytes_per_block == found.index_bytes / 5
    assert (found.default_class, found.policy_version, found.writers, found.doubtful) == ("brief", 1, (), None)


def test_lists_filter_and_stop(place: Place) -> None:
    place.store(([1, 2, 3], "brief"), ([4, 5], "long"), ([6], "long"))
    place.now += 20
    with place.inspect() as view:
        every, total = list_extents(view)
        assert total == 3
        assert [(one.blocks, one.alive, one.keeper) for one in every] == [
            (3, 0, "brief"),
            (2, 2, "long"),
            (1, 1, "long"),
        ]
        assert every[0].key == key_of([1])[:32]
        shown, total = list_extents(view, traffic="long", limit=1)
        assert ([one.key for one in shown], total) == ([key_of([4])[:32]], 2)
        assert list_extents(view, state="expired")[1] == 1
        assert list_extents(view, state="alive")[1] == 2
        assert list_extents(view, state="pinned")[1] == 0
        assert list_extents(view, segment=every[0].segment)[1] == 1
        with pytest.raises(UsageError, match="did you mean 'long'"):
            list_extents(view, traffic="lnog")
        files = list_segments(view)
    assert [place.folder / one.file for one in files] == segment_files(place)
    assert [(one.stored_by, one.used, one.live, one.sealed) for one in files] == [
        ("brief", 3, 3, True), ("long", 3, 3, True),
    ]  # fmt: skip
