"""One step of a walk: an extent as a process knows it, and the way from one to another."""

from __future__ import annotations

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
    # Who has an extent's first block has all blocks before it.
    low, high = 0, len(way) - 1
    while low < high:
        middle = (low + high + 1) // 2
        life = way[middle][0].life
        start = life.chain_pos * KEY_BYTES
        if start < end and blob[start : start + PREFIX_BYTES] == life.first:
            low = middle
        else:
            high = middle - 1
    return way[:low], way[low][0].life.chain_pos * KEY_BYTES if low else at


def agreeing(record: bytes, blob: bytes, count: int) -> int:
    """How many of an extent's first `count` blocks a prompt shares; the first and all before a shared one are."""
    low, high = min(1, count), count
    while low < high:
        middle = (low + high + 1) // 2
        mine = EXTENT_HEAD + (middle - 1) * PREFIX_BYTES
        theirs = (middle - 1) * KEY_BYTES
        if record[mine : mine + PREFIX_BYTES] == blob[theirs : theirs + PREFIX_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
