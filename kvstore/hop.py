"""One step of a walk: an extent as a process knows it, and the way from one to another."""

from __future__ import annotations

from bisect import bisect_left
from typing import TypeAlias

import msgspec

from duokv.kvstore.extent import EXTENT_HEAD, PREFIX_BYTES, Life
from duokv.kvstore.keys import KEY_BYTES


class Hop:
    """An extent as this process knows it. `raw` is its life in the index, `life` the same with this process's own uses.

    place: 8 bytes. last: key prefix of its last block. approx: whether its blocks are the result of a bounded replay
    somewhere before them. epoch: of the cache, when the index was last seen to be as is said here; -1 for never.
    before: the one before it in its chain, and how many blocks of that. goal: where a walk that came by here ended, for
    the next one to go there at once; both as of era `era` of the cache.
    """

    __slots__ = ("approx", "before", "epoch", "era", "goal", "last", "life", "place", "raw")

    def __init__(self, place: bytes, raw: bytes, life: Life) -> None:
        self.place = place
        self.raw = raw
        self.life = life
        self.last = b""
        self.approx = False
        self.epoch = -1
        self.before: tuple[Hop, int] | None = None
        self.goal: Hop | None = None
        self.era = -1

    def stop(self) -> int:
        """The byte of a prompt's key blob after its last block's."""
        return (self.life.chain_pos + self.life.n) * KEY_BYTES


Hops: TypeAlias = list[tuple[Hop, int]]
"""Extents along a prompt, each with how many of its leading blocks the prompt has."""


class Walked(msgspec.Struct, eq=False):
    """The extents that hold a prompt's blocks from some block on without a gap; `end` is the block after them.

    Not to be changed: who asks the same next gets this object.

    exact: the first block of an approximate extent, `end` if there is none.
    """

    end: int
    exact: int
    hops: Hops = []


def shared_way(hop: Hop, blob: bytes, at: int, end: int) -> tuple[Hops, int]:
    """The extents from a hop at byte `at` of a key blob on that a prompt shares with its goal; the byte after them."""
    goal = hop.goal
    way: Hops = []
    if goal is None or goal is hop:
        return way, at
    step: tuple[Hop, int] | None = (goal, goal.life.n)
    while step is not None and step[0] is not hop:
        way.append(step)
        step = step[0].before
    if step is None:
        return [], at
    way.append(step)
    way.reverse()
    stop = goal.stop()
    if stop <= end and blob[stop - KEY_BYTES : stop - PREFIX_BYTES] == goal.last:
        return way, stop

    def apart(step: tuple[Hop, int]) -> bool:
        start = step[0].life.chain_pos * KEY_BYTES
        return start >= end or blob[start : start + PREFIX_BYTES] != step[0].life.first

    # Who has an extent's first block has all blocks before it; the first extent is shared.
    last = bisect_left(way, True, lo=1, key=apart) - 1
    return way[:last], way[last][0].life.chain_pos * KEY_BYTES if last else at


def agreeing(record: bytes, blob: bytes, count: int) -> int:
    """How many of an extent's first `count` blocks a prompt shares; the first and all before a shared one are."""

    def differs(block: int) -> bool:
        mine, theirs = EXTENT_HEAD + block * PREFIX_BYTES, block * KEY_BYTES
        return record[mine : mine + PREFIX_BYTES] != blob[theirs : theirs + PREFIX_BYTES]

    return bisect_left(range(count), True, lo=min(1, count), key=differs)
