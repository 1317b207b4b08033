"""The block cache: which blocks it keeps, and that a copy is always the block it was asked for."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore import blockcache
from duokv.kvstore.blockcache import SMALL_SHARE, BlockCache, S3Fifo
from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.extent import place_of
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.reader import Rows
from duokv.kvstore.spans import Span

SLOT = 4096


def key_of(place: int, salt: int = 0) -> bytes:
    return place.to_bytes(8, "big") + bytes([salt]) * (KEY_BYTES - 8)


def row_of(place: int, salt: int = 0) -> Rows:
    """A slot whose bytes are those of no other place."""
    return np.resize(np.frombuffer(key_of(place, salt), np.uint8), SLOT)


def cache_of(rows: int) -> BlockCache:
    return BlockCache(capacity_bytes=rows * SLOT, slot_bytes=SLOT)


def spans_of(places: Sequence[int]) -> list[Span]:
    return [Span(place >> 32, place & 0xFFFFFFFF, block, 1) for block, place in enumerate(places)]


def blob_of(places: Sequence[int], salt: int = 0) -> bytes:
    return b"".join(key_of(place, salt) for place in places)


def held(cache: BlockCache, places: Sequence[int], salt: int = 0) -> list[int]:
    """Those of the places that are lent, whose bytes are checked."""
    with cache.borrow(blob_of(places, salt), spans_of(places)) as loan:
        found = []
        for first, count in loan.runs(until=len(places), max_rows=3):
            out = np.zeros((count, SLOT), np.uint8)
            loan.copy(first, out)
            for place, row in zip(places[first : first + count], out, strict=True):
                assert (row == row_of(place, salt)).all()
                found.append(place)
        gone = [place_of(span.segment, span.slot) for span in loan.missing(spans_of(places))]
        assert sorted(found + gone) == sorted(places)
        assert loan.held(len(places)) == len(found)
    return found


def fill(cache: BlockCache, places: Sequence[int], salt: int = 0) -> None:
    for place in places:
        cache.add(key_of(place, salt), place, row_of(place, salt)[None])


def drive(cache: BlockCache, places: Sequence[int]) -> None:
    """Fill in and use each, which in the end drives out all that is not lent."""
    for place in places:
        fill(cache, [place])
        held(cache, [place])


@pytest.mark.parametrize("width", [SLOT, SLOT - 100, SLOT + 100])
def test_copies_go_into_rows_of_any_layout(width: int) -> None:
    cache = cache_of(8)
    places = [1, 2, 5, 4]
    fill(cache, places)
    whole = np.zeros((4, SLOT + 200), np.uint8)
    with cache.borrow(blob_of(places), spans_of(places)) as loan:
        loan.copy(0, whole[:, :width])
    used = min(width, SLOT)
    assert (whole[:, :used] == np.stack([row_of(place) for place in places])[:, :used]).all()
    assert not whole[:, used:].any()


def test_neighbours_are_kept_at_once_whatever_rows_they_get() -> None:
    cache = cache_of(8)
    drive(cache, [30, 21, 22, 33, 24, 35, 26, 37])
    drive(cache, range(40, 47))
    places = list(range(1, 7))
    cache.add(blob_of(places), 1, np.stack([row_of(place) for place in places]))
    found = held(cache, places)
    assert found, "else this tests nothing"
    assert set(found) <= set(places)


# Which blocks stay


class Model:
    """S3-FIFO as plainly as can be: lists, oldest first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.small_rows = max(1, int(rows * SMALL_SHARE))
        self.ghosts = max(1, int(rows * 0.9))
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.used: set[int] = set()

    def want(self, block: int) -> None:
        if block in self.small + self.main:
            self.used.add(block)
            return
        if len(self.small) + len(self.main) == self.rows:
            self.evict()
        if block in self.ghost:
            self.ghost.remove(block)
            self.main.append(block)
        else:
            self.small.append(block)

    def evict(self) -> None:
        while True:
            probation = len(self.small) >= self.small_rows or not self.main
            block = (self.small if probation else self.main).pop(0)
            if block in self.used:
                self.used.remove(block)
                self.main.append(block)
                continue
            if probation:
                self.ghost = [*self.ghost, block][-self.ghosts :]
            return


def want(policy: S3Fifo, block: int) -> bool:
    rows = policy.find([block])
    if rows[0] >= 0:
        policy.use(rows)
        return True
    row = policy.take(block)
    assert row is not None
    policy.put(row, block)
    return False


@given(st.integers(1, 12), st.lists(st.integers(0, 20), max_size=200))
def test_the_policy_is_the_plain_one(rows: int, wanted: list[int]) -> None:
    policy, model = S3Fifo(rows), Model(rows)
    for block in wanted:
        assert want(policy, block) == (block in model.small + model.main)
        model.want(block)
        found = policy.find(range(21))
        assert {block for block in range(21) if found[block] >= 0} == set(model.small + model.main)
        rows_used = [row for row in found.tolist() if row >= 0]
        assert len(set(rows_used)) == len(rows_used) == len(policy) <= rows


@pytest.mark.parametrize("rows", [1, 2, 5, 10, 16])
def test_it_is_the_plain_one_for_long(rows: int) -> None:
    """Long enough for blocks to leave and return, remembered or not."""
    policy, model = S3Fifo(rows), Model(rows)
    rng = np.random.default_rng(rows)
    hits = 0
    for block in (2 * rows * rng.random(1_000) ** 2).astype(int).tolist():
        had = want(policy, block)
        assert had == (block in model.small + model.main)
        model.want(block)
        hits += had
    assert 100 < hits < 900


def test_what_is_seen_once_does_not_drive_out_what_is_used() -> None:
    policy = S3Fifo(100)
    for _ in range(3):
        for block in range(50):
            want(policy, block)
    for block in range(1_000, 3_000):
        want(policy, block)
    assert (policy.find(range(50)) >= 0).all()


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["want", "pin", "unpin"]), st.integers(0, 12))))
def test_a_pinned_row_keeps_its_block(rows: int, steps: list[tuple[str, int]]) -> None:
    policy = S3Fifo(rows)
    pinned: list[tuple[int, int]] = []
    for what, block in steps:
        row = int(policy.find([block])[0])
        if what == "pin" and row >= 0:
            policy.pin(np.array([row]))
            pinned.append((block, row))
        elif what == "unpin" and pinned:
            policy.unpin(np.array([pinned.pop()[1]]))
        elif what == "want" and row < 0:
            taken = policy.take(block)
            assert (taken is None) == (len({row for _, row in pinned}) == rows) or len(pinned) > 0
            if taken is not None:
                policy.put(taken, block)
        assert all(policy.find([block])[0] == row for block, row in pinned)


def test_with_every_row_pinned_nothing_enters_and_afterwards_it_does() -> None:
    policy = S3Fifo(4)
    for block in range(4):
        want(policy, block)
    rows = policy.find(range(4))
    policy.pin(rows)
    policy.pin(rows)
    policy.unpin(rows)
    assert policy.take(9) is None
    policy.unpin(rows)
    assert policy.take(9) is not None


# What copies are


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=8, unique=True)), max_size=30),
)
def test_a_copy_is_the_slot_it_was_asked_for(rows: int, steps: list[tuple[bool, list[int]]]) -> None:
    cache = cache_of(rows)
    known: set[int] = set()
    for is_new, places in steps:
        if is_new:
            fill(cache, places)
            known |= set(places)
        assert set(held(cache, places)) <= known
        stats = cache.stats()
        assert stats.blocks <= rows
        assert (stats.used_bytes, stats.capacity_bytes) == (stats.blocks * SLOT, rows * SLOT)
    assert len(held(cache, sorted(known))) == min(rows, len(known))


def test_another_key_in_that_place_is_not_lent_nor_another_place_of_that_key() -> None:
    """The key is the block's identity; the place also tells an exact copy from the approximate one it replaced."""
    cache = cache_of(4)
    old, new = place_of(1, 7), place_of(2, 7)
    cache.add(key_of(5), old, row_of(5)[None])
    for key, place in ((key_of(6), old), (key_of(5), new)):
        with cache.borrow(key, spans_of([place])) as loan:
            assert loan.held(1) == 0
    cache.add(key_of(5), new, row_of(6)[None])
    for place, content in ((old, 5), (new, 6)):
        out = np.zeros((1, SLOT), np.uint8)
        with cache.borrow(key_of(5), spans_of([place])) as loan:
            loan.copy(0, out)
        assert (out == row_of(content)).all()


def test_lent_rows_keep_their_bytes_whatever_enters() -> None:
    cache = cache_of(4)
    fill(cache, [1, 2, 3, 4])
    out = np.zeros((2, SLOT), np.uint8)
    with cache.borrow(blob_of([1, 2]), spans_of([1, 2])) as loan:
        drive(cache, range(10, 40))
        assert held(cache, [3, 4]) == []
        loan.copy(0, out)
    assert (out == np.stack([row_of(1), row_of(2)])).all()
    drive(cache, range(40, 80))
    assert held(cache, [1, 2]) == [], "a loan that is over holds nothing"


def test_a_loan_names_what_is_held_and_what_is_missing() -> None:
    cache = cache_of(16)
    fill(cache, [place_of(1, slot) for slot in (0, 1, 4)] + [place_of(2, slot) for slot in (5, 6, 7, 8)])
    spans = [Span(1, 0, 0, 6), Span(2, 5, 6, 4), Span(3, 0, 10, 2)]
    places = [place_of(span.segment, span.slot + i) for span in spans for i in range(span.count)]
    with cache.borrow(blob_of(places), spans) as loan:
        assert loan.runs(until=12, max_rows=3) == [(0, 2), (4, 1), (6, 3), (9, 1)]
        assert loan.runs(until=7, max_rows=3) == [(0, 2), (4, 1), (6, 1)]
        assert loan.missing(spans) == [Span(1, 2, 2, 2), Span(1, 5, 5, 1), Span(3, 0, 10, 2)]
        assert [loan.held(n) for n in (0, 1, 4, 5, 12)] == [0, 1, 2, 3, 7]


def test_what_is_not_published_is_not_lent_and_its_row_comes_back() -> None:
    """A commit's slots may be written a second time, by another commit, if their first one is not published."""
    cache = cache_of(4)
    places = [1, 2, 3, 4]
    for _ in range(3):
        with cache.intake() as intake:
            intake.copy(blob_of(places, salt=1), 1, 0, np.stack([row_of(place, salt=1) for place in places]))
            assert held(cache, places, salt=1) == []
    with cache.intake() as intake:
        intake.copy(blob_of(places), 1, 0, np.stack([row_of(place) for place in places]))
        intake.publish()
    assert held(cache, places) == places
    assert held(cache, places, salt=1) == []


def test_a_row_is_seen_by_nobody_while_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as the block that leaves it nor as the one that enters; and others may ask meanwhile."""
    cache = cache_of(1)
    slab = cache._slab
    seen = []

    class Watched:
        def __setitem__(self, at: int, row: Rows) -> None:
            seen.append(held(cache, [1]) + held(cache, [2]))
            slab[at] = row

    monkeypatch.setattr(cache, "_slab", Watched())
    fill(cache, [1])
    fill(cache, [2])
    monkeypatch.undo()
    assert seen == [[], []]
    assert held(cache, [2]) == [2]


def test_an_intake_larger_than_the_cache_keeps_its_head() -> None:
    cache = cache_of(3)
    places = list(range(1, 9))
    with cache.intake() as intake:
        intake.copy(blob_of(places), 1, 0, np.stack([row_of(place) for place in places]))
        assert cache.stats().blocks == 0
        intake.publish()
    assert held(cache, places) == [1, 2, 3]


def test_two_that_fill_the_same_slot_leave_one_copy() -> None:
    cache = cache_of(2)
    with cache.intake() as intake:
        intake.copy(blob_of([1]), 1, 0, row_of(1)[None])
        fill(cache, [1])
        intake.publish()
    assert cache.stats().blocks == 1
    fill(cache, [2])
    assert held(cache, [1, 2]) == [1, 2]


@pytest.mark.parametrize("threads", [4])
def test_threads_that_load_fill_and_evict_see_only_whole_blocks(threads: int) -> None:
    """Half of the rows are lent at any time, and every copy is that of its slot."""
    cache = cache_of(8)
    wrong: list[BaseException] = []
    ready = threading.Barrier(threads)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            ready.wait()
            for _ in range(150):
                places = [int(place) for place in rng.permutation(24)[:4]]
                held(cache, places)
                fill(cache, places)
                with cache.intake() as intake:
                    intake.copy(blob_of(range(24)), places[0], places[0], row_of(places[0])[None])
                    if places[1] % 2:
                        intake.publish()
        except BaseException as error:  # noqa: BLE001  told by the main thread
            wrong.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    drive(cache, range(100, 200))
    assert cache.stats().blocks == 8, "no row is lost"
    assert held(cache, list(range(24))) == [], "and none is lent for ever"


# Size


def test_no_capacity_keeps_nothing() -> None:
    cache = cache_of(0)
    fill(cache, [1, 2])
    with cache.intake() as intake:
        intake.copy(blob_of([1, 2]), 1, 0, np.zeros((2, SLOT), np.uint8))
        intake.publish()
    assert held(cache, [1, 2]) == []
    assert cache.stats() == blockcache.CacheStats(0, 0, 0)


def test_a_capacity_below_one_block_is_refused() -> None:
    with pytest.raises(UsageError, match=rf"^block cache of 4095 bytes [^\n]+ at least {SLOT}$"):
        BlockCache(capacity_bytes=SLOT - 1, slot_bytes=SLOT)
    assert BlockCache(capacity_bytes=3 * SLOT - 1, slot_bytes=SLOT).rows == 2


def test_memory_that_cannot_be_had_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> memoryview:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(blockcache, "aligned", refuse)
    with pytest.raises(StoreError, match=r"^block cache of 40960 bytes: refused \(Cannot [^\n]+; lower cache_bytes$"):
        cache_of(10)
