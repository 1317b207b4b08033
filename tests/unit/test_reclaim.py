"""What goes next: plans over an index, against a block-by-block choice by the rule itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore.extent import Life, place_of, stamp_of
from duokv.kvstore.index import Index, IndexTxn, SegmentInfo, WriteTxn
from duokv.kvstore.lives import CLOCK_BACK
from duokv.kvstore.policy import PIN_CLASS, ClassRule, Policy
from duokv.kvstore.reclaim import Cut, VictimQueue, plan_compaction

POLICY = Policy({"short": ClassRule(10.0), "long": ClassRule(100.0)}, "short", {"short": 1, "long": 2})
SHORT, LONG = 1, 2
SLOT = 4096


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    index = Index(tmp_path_factory.mktemp("reclaim"), map_bytes=1 << 24)
    yield index
    index.close()


def life(n: int, *uses: tuple[int, int, float], chain_pos: int = 0) -> Life:
    """A life of n blocks and uses of (class, up to, seconds), the first of which stored it."""
    made = Life.born(n, chain_pos, b"f" * 16, uses[0][0], stamp_of(uses[0][2]))
    for class_id, upto, at in uses[1:]:
        made.use(class_id, upto, stamp_of(at))
    return made


def fill(txn: WriteTxn, lives: Mapping[int, Life]) -> VictimQueue:
    txn.clear()
    for place, made in lives.items():
        txn.put_life(place, made)
    return VictimQueue.built(txn.lives(), POLICY)


def oracle(lives: Mapping[int, Life], need: int, before_stamp: int, now_s: float) -> dict[int, int]:
    """Blocks kept of each extent: the leaf used longest ago goes first, one block at a time."""
    kept = {place: made.n for place, made in lives.items()}
    for _ in range(need):
        leaves = [
            (lives[place].last_use(n - 1), place)
            for place, n in kept.items()
            if n > lives[place].pinned(now_s) and not 0 <= lives[place].last_use(n - 1) - before_stamp < CLOCK_BACK
        ]
        if leaves:
            kept[min(leaves)[1]] -= 1
    return kept


def apply(txn: WriteTxn, cuts: tuple[Cut, ...], kept: dict[int, int]) -> None:
    for cut in cuts:
        made = txn.life(cut.place)
        assert made is not None
        assert made.n == cut.blocks == kept[cut.place]
        made.cut(cut.keep)
        kept[cut.place] = cut.keep
        if cut.keep:
            txn.put_life(cut.place, made)
        else:
            txn.drop_extent(cut.place, made.first)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[int, Life], list[tuple[int, int, int, float]]]:
    """Extents by place, and uses that come after the queue was built; no two uses at one time."""
    times = iter(draw(st.permutations(range(1, 60))))
    uses = st.tuples(st.sampled_from([SHORT, LONG]), st.integers(1, 6))
    lives = {}
    for number in range(draw(st.integers(1, 5))):
        n = draw(st.integers(1, 6))
        made = life(n, (SHORT, n, next(times)), chain_pos=number)
        for class_id, upto in draw(st.lists(uses, max_size=4)):
            made.use(class_id, min(n, upto), stamp_of(next(times)))
        if draw(st.booleans()):
            made.use(PIN_CLASS, draw(st.integers(1, n)), stamp_of(draw(st.sampled_from([50, 150]))))
        lives[place_of(1, 10 * number)] = made
    later = [
        (draw(st.sampled_from(sorted(lives))), class_id, upto, float(next(times)))
        for class_id, upto in draw(st.lists(uses, max_size=4))
    ]
    return lives, later


@given(world=worlds(), needs=st.lists(st.integers(0, 12), min_size=1, max_size=3), spared=st.integers(1, 70))
def test_the_least_recently_used_leaves_go_first(
    index: Index, world: tuple[dict[int, Life], list[tuple[int, int, int, float]]], needs: list[int], spared: int
) -> None:
    """Over several plans from one queue, with uses the queue has not seen; pins and what is in use stay.

    A use long after the plan's own time is from before the clock was set back, and spares nothing.
    """
    lives, later = world
    kept = {place: made.n for place, made in lives.items()}
    with index.write() as txn:
        queue = fill(txn, lives)
        for place, class_id, upto, at in later:
            lives[place].use(class_id, min(lives[place].n, upto), stamp_of(at))
            txn.put_life(place, lives[place])
        for asked, need in enumerate(needs, 1):
            plan = queue.plan_capacity(txn, need, before_stamp=stamp_of(spared), now_s=100.0)
            assert plan.freed == sum(cut.freed for cut in plan.cuts) <= need
            apply(txn, plan.cuts, kept)
            assert kept == oracle(lives, sum(needs[:asked]), stamp_of(spared), 100.0)


@given(world=worlds(), now_s=st.integers(1, 200))
def test_what_is_past_its_life_goes_and_nothing_else(
    index: Index, world: tuple[dict[int, Life], list[tuple[int, int, int, float]]], now_s: int
) -> None:
    lives, later = world
    kept = {place: made.n for place, made in lives.items()}
    with index.write() as txn:
        queue = fill(txn, lives)
        for place, class_id, upto, at in later:
            lives[place].use(class_id, min(lives[place].n, upto), stamp_of(at))
            txn.put_life(place, lives[place])
        for now in (now_s, now_s + 50):
            apply(txn, queue.plan_expired(txn, now).cuts, kept)
            for place, made in lives.items():
                dead = [
                    block for block in range(made.n) if (made.deadline(block, POLICY)[0] or float(now_s + 50)) < now
                ]
                assert kept[place] == min(dead, default=made.n)


def test_among_equals_the_deepest_goes_first(index: Index) -> None:
    lives = {place_of(1, 0): life(4, (SHORT, 4, 5)), place_of(1, 4): life(2, (SHORT, 2, 5), chain_pos=4)}
    with index.write() as txn:
        plan = fill(txn, lives).plan_capacity(txn, 3, before_stamp=stamp_of(9), now_s=9)
    assert plan.cuts == (Cut(place_of(1, 4), 2, 0, "capacity"), Cut(place_of(1, 0), 4, 3, "capacity"))


def test_new_extents_are_seen_and_vanished_ones_forgotten(index: Index) -> None:
    with index.write() as txn:
        queue = fill(txn, {place_of(1, 0): life(2, (SHORT, 2, 5))})
        txn.clear()
        newer = life(2, (SHORT, 2, 6))
        txn.put_life(place_of(2, 0), newer)
        queue.add(place_of(2, 0), newer)
        assert queue.plan_expired(txn, 50).cuts == (Cut(place_of(2, 0), 2, 0, "expired"),)
        assert queue.plan_capacity(txn, 9, before_stamp=stamp_of(9), now_s=9).freed == 2


@pytest.mark.parametrize("fraction", [0.0, 0.0004, 0.0006, 0.001])
@pytest.mark.parametrize("class_id", [SHORT, PIN_CLASS])
def test_a_deadline_within_a_rounding_of_now_does_not_come_up_for_ever(
    index: Index, monkeypatch: pytest.MonkeyPatch, class_id: int, fraction: float
) -> None:
    """Stamps count milliseconds, clocks do not: just past the deadline, a block can still be within its life."""
    at = 1_790_000_000.5
    made = life(2, (SHORT, 2, at), (class_id, 1, at + 10))
    end = made.deadline(0, POLICY)[0] or 0.0
    looked, real = [], IndexTxn.life

    def counted(txn: IndexTxn, place: int) -> Life | None:
        looked.append(place)
        assert len(looked) < 10, "the plan turns in a circle"
        return real(txn, place)

    monkeypatch.setattr(IndexTxn, "life", counted)
    with index.write() as txn:
        queue = fill(txn, {place_of(1, 0): made})
        for now in (end + fraction, end + 1):
            plan = queue.plan_expired(txn, now)
            for cut in plan.cuts:
                made.cut(cut.keep)
                txn.put_life(cut.place, made)
        assert made.n == 0


def segment(live: int, used: int = 10, *, sealed: bool = True) -> SegmentInfo:
    return SegmentInfo("w", 1, 10, used, live, used * SLOT, sealed, 0.0)


def test_compaction_empties_the_emptiest_segments_until_it_suffices() -> None:
    segments = [(1, segment(5)), (2, segment(1)), (3, segment(10)), (4, segment(0, sealed=False)), (5, segment(3))]
    for need, chosen in ((0, ()), (1, (2,)), (9, (2,)), (10, (2, 5)), (16, (2, 5)), (17, (2, 5, 1)), (99, (2, 5, 1))):
        assert plan_compaction(segments, need_bytes=need * SLOT, slot_bytes=SLOT) == chosen
    assert plan_compaction([(1, segment(9))], need_bytes=1, slot_bytes=SLOT) == (1,)
    assert plan_compaction([(1, segment(0, used=0))], need_bytes=1, slot_bytes=SLOT) == (1,)
