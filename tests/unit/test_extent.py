"""Lives are staircases over an extent's blocks; here they are held against one dictionary entry a block."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore.extent import Cutoffs, Extent, Life, place_of, raise_steps, stamp_of, stamp_s
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import BORN_CLASS, PIN_CLASS, ClassRule, Policy

FIRST = b"f" * 16
SLIDING, FIXED, UNBOUNDED = 1, 2, 3
POLICY = Policy(
    {"sliding": ClassRule(50.0), "fixed": ClassRule(80.0, "fixed"), "unbounded": ClassRule(None)},
    "sliding",
    {"sliding": SLIDING, "fixed": FIXED, "unbounded": UNBOUNDED},
)
END = 200

CLASSES = st.sampled_from([SLIDING, FIXED, UNBOUNDED, PIN_CLASS, BORN_CLASS])
TIMES = st.integers(1, END)
STAMPS = st.builds(lambda t, sequence: stamp_of(t) + sequence, TIMES, st.integers(0, 2))


class Blocks:
    """The same, block by block: class -> the stamp of every block, 0 for none."""

    def __init__(self, n: int, class_id: int, stamp: int) -> None:
        self.n = n
        self.stamps: dict[int, list[int]] = defaultdict(lambda: [0] * self.n)
        self.use(class_id, n, stamp)
        self.use(BORN_CLASS, n, stamp)

    def use(self, class_id: int, upto: int, stamp: int) -> None:
        stamps = self.stamps[class_id]
        stamps[:upto] = [max(old, stamp) for old in stamps[:upto]]

    def raise_to(self, other: Blocks, offset: int, *, born: bool) -> None:
        """Take what is later of another's uses, whose first block is block `offset` of this one."""
        for class_id, stamps in other.stamps.items():
            for at, stamp in enumerate(stamps, offset):
                if 0 <= at < self.n and (born or class_id != BORN_CLASS):
                    self.stamps[class_id][at] = max(self.stamps[class_id][at], stamp)

    def part(self, start: int, end: int) -> None:
        self.n = end - start
        for class_id, stamps in list(self.stamps.items()):
            self.stamps[class_id] = stamps[start:end]

    def deadline(self, block: int) -> float:
        ends = [0.0]
        for class_id, stamps in self.stamps.items():
            if class_id == BORN_CLASS or not stamps[block]:
                continue
            if class_id == PIN_CLASS:
                ends.append(stamp_s(stamps[block]))
                continue
            rule = POLICY.rule_of(class_id)
            start = stamps[block] if rule.mode == "sliding" else self.stamps[BORN_CLASS][block]
            ends.append(math.inf if rule.ttl_s is None else stamp_s(start) + rule.ttl_s)
        return max(ends)

    def last_use(self, block: int) -> int:
        return max(stamps[block] for class_id, stamps in self.stamps.items() if class_id < PIN_CLASS)


@st.composite
def lives(draw: st.DrawFn) -> tuple[Life, Blocks]:
    """A life and its model after some uses."""
    n, class_id, stamp = draw(st.integers(1, 8)), draw(st.sampled_from([SLIDING, FIXED, UNBOUNDED])), draw(STAMPS)
    life, blocks = Life.born(n, 3, FIRST, class_id, stamp), Blocks(n, class_id, stamp)
    for used_by, upto, at in draw(st.lists(st.tuples(CLASSES, st.integers(1, n), STAMPS), max_size=8)):
        life.use(used_by, upto, at)
        blocks.use(used_by, upto, at)
    return life, blocks


def agree(life: Life, blocks: Blocks) -> None:
    """Everything a life can be asked has the model's answer."""
    assert life.n == blocks.n
    for class_id, steps in life.steps.items():
        assert [step[0] for step in steps] == sorted({step[0] for step in steps}), "steps rise"
        assert [step[1] for step in steps] == sorted((step[1] for step in steps), reverse=True), "stamps fall"
        assert steps[-1][0] <= life.n
        assert class_id in blocks.stamps
    for block in range(life.n):
        deadline, keeper = life.deadline(block, POLICY)
        assert (math.inf if deadline is None else deadline) == blocks.deadline(block)
        assert keeper is not None or not any(blocks.stamps[c][block] for c in blocks.stamps if c != BORN_CLASS)
        assert life.last_use(block) == blocks.last_use(block)
    for now_s in range(1, END + 100, 13):
        dead = [block for block in range(life.n) if blocks.deadline(block) < now_s]
        assert life.alive(Cutoffs(POLICY, now_s)) == min(dead, default=life.n)
        unpinned = [at for at, stamp in enumerate(blocks.stamps[PIN_CLASS]) if stamp < stamp_of(now_s)]
        assert life.pinned(now_s) == min(unpinned, default=life.n)
    assert len({blocks.last_use(block) for block in range(life.tail_start(), life.n)}) == 1


@given(lives())
def test_uses_add_up(made: tuple[Life, Blocks]) -> None:
    agree(*made)


@given(lives(), st.data())
def test_a_cut_keeps_the_head(made: tuple[Life, Blocks], data: st.DataObject) -> None:
    life, blocks = made
    keep = data.draw(st.integers(1, life.n))
    life.cut(keep)
    blocks.part(0, keep)
    agree(life, blocks)
    life.cut(0)
    assert (life.n, life.steps) == (0, {})


@given(lives(), st.data())
def test_the_rest_is_a_life_of_its_own(made: tuple[Life, Blocks], data: st.DataObject) -> None:
    life, blocks = made
    start = data.draw(st.integers(0, life.n - 1))
    before = life.encode()
    rest = life.rest(start, b"r" * 16)
    blocks.part(start, blocks.n)
    agree(rest, blocks)
    assert (rest.first, rest.chain_pos) == (b"r" * 16, 3 + start)
    assert life.encode() == before


@given(lives(), lives())
def test_a_merge_takes_the_later_use_of_each_block(one: tuple[Life, Blocks], other: tuple[Life, Blocks]) -> None:
    """Two processes renew one extent, and one of them may know it longer than it is by now."""
    life, blocks = one
    keep = min(life.n, other[0].n)
    for part in (one, other):
        part[0].cut(keep)
        part[1].part(0, keep)
    life.merge(other[0])
    blocks.raise_to(other[1], 0, born=True)
    agree(life, blocks)


@given(lives(), lives(), st.integers(-6, 6))
def test_what_replaces_blocks_inherits_their_uses(
    new: tuple[Life, Blocks], old: tuple[Life, Blocks], offset: int
) -> None:
    """An exact block lives at least as long as the approximate one it replaced, wherever their extents begin.

    A use covers a prefix, so blocks before the old ones were used no earlier: they are raised as well.
    """
    life, blocks = new
    life.inherit(old[0], offset)
    ahead = Blocks(max(1, offset), SLIDING, 0)
    for class_id, stamps in old[1].stamps.items():
        ahead.stamps[class_id] = [stamps[0]] * max(1, offset)
    if offset > 0:
        blocks.raise_to(ahead, 0, born=False)
    blocks.raise_to(old[1], offset, born=False)
    agree(life, blocks)


@given(lives())
def test_a_life_survives_its_encoding(made: tuple[Life, Blocks]) -> None:
    life, blocks = made
    again = Life.decode(life.encode())
    assert (again.n, again.chain_pos, again.first, again.steps) == (life.n, 3, FIRST, life.steps)
    agree(again, blocks)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1))
def test_the_order_of_uses_does_not_matter(uses: list[tuple[int, int]]) -> None:
    def stairs(order: list[tuple[int, int]]) -> list[int]:
        steps: list[tuple[int, int]] | None = None
        for upto, stamp in order:
            steps = raise_steps(steps, upto, stamp)
        return [next((stamp for upto, stamp in steps or [] if block < upto), 0) for block in range(9)]

    assert stairs(uses) == stairs(uses[::-1]) == stairs(sorted(uses))


def test_a_sequence_number_orders_uses_of_one_instant() -> None:
    life = Life.born(4, 0, FIRST, SLIDING, stamp_of(10.0))
    life.use(SLIDING, 2, stamp_of(10.0) + 1)
    assert life.last_use(0) > life.last_use(2)
    assert life.tail_start() == 2
    assert stamp_s(life.last_use(0)) == 10.0


@pytest.mark.parametrize(
    ("uses", "deadlines"),
    [
        ([], [(60.0, SLIDING)] * 3),
        ([(SLIDING, 2, 40)], [(90.0, SLIDING)] * 2 + [(60.0, SLIDING)]),
        ([(FIXED, 2, 40)], [(90.0, FIXED)] * 2 + [(60.0, SLIDING)]),
        ([(UNBOUNDED, 1, 20), (PIN_CLASS, 2, 300)], [(None, UNBOUNDED), (300.0, PIN_CLASS), (60.0, SLIDING)]),
        ([(PIN_CLASS, 2, 30)], [(60.0, SLIDING)] * 3),
    ],
    ids=["stored", "sliding", "fixed counts from the store", "unbounded and a pin", "a pin shorter than the life"],
)
def test_the_latest_deadline_counts_and_names_its_class(
    uses: list[tuple[int, int, int]], deadlines: list[tuple[float | None, int]]
) -> None:
    life = Life.born(3, 0, FIRST, SLIDING, stamp_of(10))
    for class_id, upto, at in uses:
        life.use(class_id, upto, stamp_of(at))
    assert [life.deadline(block, POLICY) for block in range(3)] == deadlines


@pytest.mark.parametrize("blocks", [1, 3])
def test_an_extent_survives_its_encoding(blocks: int) -> None:
    extent = Extent(7, 9, 4, 2, Origin.APPROX, bytes(range(16 * blocks)))
    again = Extent.decode(extent.encode())
    for name in Extent.__slots__:
        assert getattr(again, name) == getattr(extent, name)
    assert (again.blocks, again.place) == (blocks, place_of(7, 9))
    for raw in (b"", extent.encode()[:-1], extent.encode() + b"x"):
        with pytest.raises(ValueError, match="extent record"):
            Extent.decode(raw)
