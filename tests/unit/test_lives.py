"""The extents kept in memory: a walk over them finds what the index has, whoever wrote to it last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duokv.kvstore.extent import PREFIX_BYTES, Extent, Life, stamp_of
from duokv.kvstore.hop import Walked
from duokv.kvstore.index import Index, IndexTxn, WriteTxn
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.lives import ExtentCache
from duokv.kvstore.origin import Origin

CLASS = 1
NOW = stamp_of(1_790_000_000)


def chain(blocks: int, salt: int = 0) -> bytes:
    return b"".join(bytes([salt, i]) * (KEY_BYTES // 2) for i in range(blocks))


def prefixes(blob: bytes) -> bytes:
    return b"".join(blob[at : at + PREFIX_BYTES] for at in range(0, len(blob), KEY_BYTES))


class Place:
    """An index, a cache that is told of its writes, and `others`, whose writes the cache is not told of."""

    def __init__(self, folder: Path) -> None:
        self.index = Index(folder, map_bytes=1 << 24)
        self.cache = ExtentCache()
        self.index.watch(self.tell)
        self.asked = 0
        self.telling = True

    def tell(self, txn: WriteTxn, committed: bool) -> None:
        if self.telling:
            self.cache.ended(txn, committed)

    @contextmanager
    def others(self) -> Iterator[WriteTxn]:
        self.telling = False
        with self.index.write() as txn:
            yield txn
        self.telling = True

    def store(
        self, txn: WriteTxn, blob: bytes, first: int, count: int, slot: int, origin: Origin = Origin.EXACT
    ) -> Extent:
        keys = prefixes(blob)[first * PREFIX_BYTES : (first + count) * PREFIX_BYTES]
        extent = Extent(1, slot, first, CLASS, origin, keys)
        txn.put_extent(extent)
        txn.put_life(extent.place, Life.born(count, first, keys[:PREFIX_BYTES], CLASS, NOW))
        return extent

    def cut(self, txn: WriteTxn, extent: Extent, keep: int) -> None:
        life = txn.life(extent.place)
        assert life is not None
        if keep:
            life.cut(keep)
            txn.put_life(extent.place, life)
        else:
            txn.drop_extent(extent.place, life.first)

    def walk(self, blob: bytes, txn: IndexTxn | None = None) -> Walked:
        if txn is not None:
            return self.cache.walk(txn, blob, 0, len(blob) // KEY_BYTES)
        with self.index.read() as reading:
            record = reading.record

            def counted(prefix: bytes) -> bytes | None:
                self.asked += 1
                return record(prefix)

            reading.record = counted  # type: ignore[method-assign]
            return self.cache.walk(reading, blob, 0, len(blob) // KEY_BYTES)

    def found(self, blob: bytes, txn: IndexTxn | None = None) -> list[tuple[int, int]]:
        return [(int.from_bytes(hop.place[4:], "big"), count) for hop, count in self.walk(blob, txn).hops]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "index")
    yield place
    place.index.close()


def two_extents(place: Place, blob: bytes) -> tuple[Extent, Extent]:
    with place.index.write() as txn:
        made = place.store(txn, blob, 0, 4, 0), place.store(txn, blob, 4, 3, 10)
    assert place.found(blob) == [(0, 4), (10, 3)]
    return made


def test_a_second_walk_asks_the_index_nothing_though_this_process_wrote_meanwhile(place: Place) -> None:
    blob = chain(7)
    two_extents(place, blob)
    with place.index.write() as txn:
        place.store(txn, chain(2, salt=9), 0, 2, 30)
    place.asked = 0
    assert place.found(blob) == [(0, 4), (10, 3)]
    assert place.asked == 0
    assert place.found(chain(2, salt=9)) == [(30, 2)]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 3])
@pytest.mark.parametrize("which", [0, 1])
def test_a_walk_sees_a_cut(place: Place, which: int, keep: int, own: bool) -> None:
    blob = chain(7)
    cut = two_extents(place, blob)[which]
    with place.index.write() if own else place.others() as txn:
        place.cut(txn, cut, min(keep, cut.blocks - 1))
    left = min(keep, cut.blocks - 1)
    kept = [(cut.first_slot, left)] if left else []
    assert place.found(blob) == (kept if which == 0 else [(0, 4), *kept])
    assert place.found(blob) == (kept if which == 0 else [(0, 4), *kept])


@pytest.mark.parametrize("own", [True, False])
def test_a_walk_sees_that_blocks_moved(place: Place, own: bool) -> None:
    blob = chain(7)
    _, old = two_extents(place, blob)
    with place.index.write() if own else place.others() as txn:
        place.store(txn, blob, 4, 3, 40)
        txn.drop_life(old.place)
    assert place.found(blob) == [(0, 4), (40, 3)]


def test_a_walk_sees_what_others_wrote_between_two_writes_of_this_process(place: Place) -> None:
    blob = chain(7)
    first, _ = two_extents(place, blob)
    with place.others() as txn:
        place.cut(txn, first, 2)
    with place.index.write() as txn:
        place.store(txn, chain(1, salt=5), 0, 1, 50)
    assert place.found(blob) == [(0, 2)]


def test_a_write_that_fails_leaves_nothing_behind(place: Place) -> None:
    blob = chain(7)
    first, _ = two_extents(place, blob)

    def fail() -> None:
        with place.index.write() as txn:
            place.cut(txn, first, 2)
            assert place.found(blob, txn) == [(0, 2)]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert place.found(blob) == [(0, 4), (10, 3)]


def test_an_older_snapshot_shows_what_was_and_spoils_nothing(place: Place) -> None:
    blob = chain(7)
    first, _ = two_extents(place, blob)
    with place.index.read() as older:

        def cut() -> None:
            with place.index.write() as txn:
                place.cut(txn, first, 2)

        # One thread has one transaction.
        thread = threading.Thread(target=cut)
        thread.start()
        thread.join()
        assert place.found(blob, older) == [(0, 4), (10, 3)]
    assert place.found(blob) == [(0, 2)]


def test_a_prompt_that_leaves_an_extent_midway_has_only_its_head(place: Place) -> None:
    blob = chain(7)
    two_extents(place, blob)
    other = blob[: 2 * KEY_BYTES] + chain(5, salt=7)
    assert place.found(other) == [(0, 2)]
    assert place.found(blob[: 5 * KEY_BYTES]) == [(0, 4), (10, 1)]
    assert place.found(blob[: 3 * KEY_BYTES]) == [(0, 3)]


def test_the_first_approximate_block_is_named(place: Place) -> None:
    blob = chain(7)
    with place.index.write() as txn:
        place.store(txn, blob, 0, 4, 0)
        place.store(txn, blob, 4, 3, 10, Origin.APPROX)
    for _ in range(2):
        walked = place.walk(blob)
        assert (walked.end, walked.exact) == (7, 4)
    assert place.walk(blob[: 4 * KEY_BYTES]).exact == 4


def test_uses_survive_that_others_wrote(place: Place) -> None:
    blob = chain(7)
    first, _ = two_extents(place, blob)
    place.cache.use_walk(place.walk(blob).hops, CLASS, NOW + 5)
    with place.others() as txn:
        life = txn.life(first.place)
        assert life is not None
        life.use(CLASS, 2, NOW + 9)
        txn.put_life(first.place, life)
    with place.index.write() as txn:
        place.cache.flush(txn)
    assert place.cache.pending() == 0
    with place.index.read() as txn:
        life = txn.life(first.place)
    assert life is not None
    assert life.steps[CLASS] == [(2, NOW + 9), (4, NOW + 5)]


def test_of_two_extents_that_begin_with_one_block_the_later_is_found(place: Place) -> None:
    blob = chain(7)
    two_extents(place, blob)
    with place.index.write() as txn:
        place.store(txn, blob, 4, 2, 60)
    assert place.found(blob) == [(0, 4), (60, 2)]
