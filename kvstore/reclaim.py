"""What to delete next: expired blocks first, then the least recently used over all classes, leaves before parents.

A plan is a value; applying it is the block store's work. One policy for the product and the harness.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from duokv.kvstore.extent import Cutoffs, Life
from duokv.kvstore.index import IndexTxn, SegmentInfo
from duokv.kvstore.lives import CLOCK_BACK
from duokv.kvstore.policy import Policy

Reason = Literal["expired", "capacity", "operator", "corrupt"]


class Cut(msgspec.Struct, frozen=True):
    """Shorten the extent at `place` from `blocks` to its first `keep`."""

    place: int
    blocks: int
    keep: int
    reason: Reason

    @property
    def freed(self) -> int:
        """Blocks that go."""
        return self.blocks - self.keep


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """Cuts in the order they are to be made."""

    cuts: tuple[Cut, ...]

    @property
    def freed(self) -> int:
        """Blocks that go."""
        return sum([cut.freed for cut in self.cuts])


@dataclass(slots=True)
class VictimQueue:
    """Lazy heaps with one entry per extent in each. Not thread-safe.

    Keys in the heaps are lower bounds of the truth (uses only raise stamps and deadlines), so an entry that comes up
    is checked against the index and put back with its present key if that is later.
    """

    policy: Policy
    _oldest: list[tuple[int, int, int]] = field(default_factory=list)
    _deadlines: list[tuple[float, int, int]] = field(default_factory=list)

    @classmethod
    def built(cls, lives: Iterable[tuple[int, Life]], policy: Policy) -> VictimQueue:
        """A queue over all lives of an index."""
        queue = cls(policy)
        for place, life in lives:
            queue._oldest.append(_age(place, life))
            deadline = life.deadline(life.n - 1, policy)[0]
            if deadline is not None:
                queue._deadlines.append((deadline, -(life.chain_pos + life.n), place))
        heapq.heapify(queue._oldest)
        heapq.heapify(queue._deadlines)
        return queue

    def add(self, place: int, life: Life) -> None:
        """Note a new extent."""
        heapq.heappush(self._oldest, _age(place, life))
        self._add_deadline(place, life)

    def join(self, other: VictimQueue) -> None:
        """Take in the entries of another queue, of the same policy."""
        self._oldest += other._oldest
        self._deadlines += other._deadlines
        heapq.heapify(self._oldest)
        heapq.heapify(self._deadlines)

    def _add_deadline(self, place: int, life: Life, least_s: float = 0.0) -> None:
        deadline = life.deadline(life.n - 1, self.policy)[0]
        if deadline is not None:
            heapq.heappush(self._deadlines, (max(deadline, least_s), -(life.chain_pos + life.n), place))

    def __len__(self) -> int:
        return len(self._oldest) + len(self._deadlines)

    def expired(self, now_s: float) -> bool:
        """Whether a deadline may have passed."""
        return bool(self._deadlines) and self._deadlines[0][0] < now_s

    def plan_expired(self, txn: IndexTxn, now_s: float, *, most: int | None = None) -> ReclaimPlan:
        """Cut every extent to its blocks still within their life, or look at `most` extents whose deadline came."""
        cuts: list[Cut] = []
        cutoffs = Cutoffs(self.policy, now_s)
        looked_at = 0
        while self.expired(now_s) and looked_at != most:
            _, _, place = heapq.heappop(self._deadlines)
            looked_at += 1
            life = txn.life(place)
            if life is None:
                continue
            keep = life.alive(cutoffs)
            if keep < life.n:
                cuts.append(Cut(place, life.n, keep, "expired"))
            if keep:
                life.cut(keep)
                # A deadline just past can still round to within the life, and would come up again and again.
                self._add_deadline(place, life, now_s)
        return ReclaimPlan(tuple(cuts))

    def plan_capacity(
        self, txn: IndexTxn, need: int, *, before_stamp: int, now_s: float, reason: Reason = "capacity"
    ) -> ReclaimPlan:
        """Free `need` blocks from the least recently used on, none used at `before_stamp` or later, none pinned.

        Uses far later than `before_stamp` are from before the wall clock was set back; they spare nothing.
        """
        cuts: list[Cut] = []
        lives: dict[int, Life] = {}
        held = []
        while need > 0 and self._oldest:
            entry = heapq.heappop(self._oldest)
            place = entry[2]
            life = lives.get(place) or txn.life(place)
            if life is None or life.n == 0:
                continue
            age = _age(place, life)
            if age > entry:
                heapq.heappush(self._oldest, age)
                continue
            if before_stamp <= age[0] < before_stamp + CLOCK_BACK:
                held.append(entry)
                continue
            keep = max(life.n - need, life.tail_start(), life.pinned(now_s))
            if keep == life.n:
                held.append(entry)
                continue
            cuts.append(Cut(place, life.n, keep, reason))
            need -= life.n - keep
            life.cut(keep)
            lives[place] = life
            if keep:
                heapq.heappush(self._oldest, _age(place, life))
        for entry in held:
            heapq.heappush(self._oldest, entry)
        return ReclaimPlan(tuple(cuts))


def plan_compaction(
    segments: Sequence[tuple[int, SegmentInfo]], *, need_bytes: int, slot_bytes: int
) -> tuple[int, ...]:
    """Choose sealed segments to copy the survivors out of, the emptiest first, until `need_bytes` would come free.

    For backends that cannot punch. A segment more than nine tenths alive is not worth its copying.
    """
    chosen: list[int] = []
    sealed = sorted((info.live / max(1, info.used), number, info) for number, info in segments if info.sealed)
    for share, number, info in sealed:
        if need_bytes <= 0 or share > 0.9:
            break
        chosen.append(number)
        need_bytes -= info.allocated - info.live * slot_bytes
    return tuple(chosen)


def _age(place: int, life: Life) -> tuple[int, int, int]:
    return (life.last_use(life.n - 1), -(life.chain_pos + life.n), place)
