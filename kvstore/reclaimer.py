"""Giving space back: cuts are made in the index first and on the backend after, never the other way round."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import lmdb
import msgspec

from duokv.kvstore.backend import Backend
from duokv.kvstore.clock import Clock
from duokv.kvstore.events import BlocksEvicted, Degraded, Event, SpaceFreed
from duokv.kvstore.extent import Life
from duokv.kvstore.index import Index, IndexTxn, SegmentInfo, WriteTxn
from duokv.kvstore.lives import ExtentCache
from duokv.kvstore.policy import Policy
from duokv.kvstore.reclaim import Cut, Reason, ReclaimPlan, VictimQueue
from duokv.kvstore.segment import parse_name
from duokv.kvstore.walk import Runs, extend_runs

_AT_ONCE = 256
"""Extents looked at in one transaction of expiry, some milliseconds."""
_ENTRIES_PER_EXTENT = 4
"""Entries of a queue beyond which it is built anew: those of extents that went by another way stay in it."""
_FEW_EXTENTS = 10_000
"""As if there were so many more."""
_QUEUE_KEPT_S = 60.0
"""How long a queue may miss extents that other processes stored; they expire them themselves meanwhile."""


class Freed(msgspec.Struct):
    """What a transaction leaves to be done on the backend: slot ranges to punch, by file name; segments without a live
    block, whose files go; and segments of ours that another process has given up."""

    ranges: dict[str, list[tuple[int, int]]] = {}
    files: dict[int, SegmentInfo] = {}
    lost: set[int] = set()

    def add(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Note slots to punch."""
        self.ranges.setdefault(name, []).extend(ranges)


class Reclaimer:
    """Decides what goes, lets go of it in the index, and frees its bytes.

    All but `build_queue` is called under the block store's write lock, that one by any thread.

    lose: gives up a segment of this process whose file is gone.
    """

    def __init__(
        self, *, index: Index, backend: Backend, slot_bytes: int, clock: Clock, emit: Callable[[Event], None],
        cache: ExtentCache, state_lock: threading.RLock, lose: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._index = index
        self._backend = backend
        self._slot = slot_bytes
        self._clock = clock
        self._emit = emit
        self._cache = cache
        self._state_lock = state_lock
        self._lose = lose
        self._dead: dict[int, SegmentInfo] = {}
        """Segments without a live block whose file could not be removed yet."""
        self._interrupted: list[Freed] = []
        self._queue: VictimQueue | None = None
        self._next_queue: VictimQueue | None = None
        """Extents stored while a queue of all is being built."""
        self._preparing = threading.Lock()
        self._queue_built = (0, 0.0)
        """Extents that others had stored when the queue was built, and when that was (monotonic seconds)."""
        self._stored = 0
        """Extents this process stored: what the index counts beyond them is of others."""

    def note_stored(self, place: int, life: Life) -> None:
        """Take a new extent of this process into account."""
        self._stored += 1
        for queue in (self._queue, self._next_queue):
            if queue is not None:
                queue.add(place, life)

    def build_queue(self, policy: Policy) -> None:
        """Order all extents by age and deadline, unless that is up to date. Lookups go on meanwhile."""
        with self._preparing:
            with ExitStack() as reading:
                with self._state_lock:
                    txn = reading.enter_context(self._index.read())
                    if not self._is_outdated(txn, policy):
                        return
                    built = (txn.stored() - self._stored, self._clock.monotonic())
                    self._next_queue = added = VictimQueue(policy)
                queue = VictimQueue.built(txn.lives(), policy)
            with self._state_lock:
                # A reset meanwhile is about extents that neither of the two has.
                if self._next_queue is added:
                    queue.join(added)
                    self._queue, self._queue_built = queue, built
                self._next_queue = None

    def reclaim(self, need: int, policy: Policy, *, before_stamp: int) -> None:
        """Delete expired blocks, then the least recently used until `need` blocks are free or none is left to go."""
        gone = 0
        while (expired := self.expire_some(policy)) is not None:
            gone += expired
        freed = Freed()
        with self._state_lock, self._index.write() as txn:
            self._cache.flush(txn)
            queue = self._victims(txn, policy)
            now_s = self._clock.wall()
            for _ in range(2):
                if gone < need:
                    plan = queue.plan_capacity(txn, need - gone, before_stamp=before_stamp, now_s=now_s)
                    self._apply(txn, plan, freed)
                    gone += plan.freed
                if gone >= need or not self._others_stored(txn):
                    break
                self.reset_queue()
                queue = self._victims(txn, policy)
        self.release(freed)

    def expire_some(self, policy: Policy) -> int | None:
        """Delete expired blocks, few at a time since lookups wait meanwhile; how many, None if none was due."""
        self.build_queue(policy)
        freed = Freed()
        with self._state_lock:
            now_s = self._clock.wall()
            if self._queue is not None and not self._queue.expired(now_s):
                return None
            with self._index.write() as txn:
                self._cache.flush(txn)
                if policy.any_fixed:
                    # A parent was stored before its child.
                    txn.note_gaps()
                plan = self._victims(txn, policy).plan_expired(txn, now_s, most=_AT_ONCE)
                self._apply(txn, plan, freed)
        self.release(freed)
        return plan.freed

    def reset_queue(self) -> None:
        """Forget what was known of deadlines and ages (the policy or the index changed underneath)."""
        self._queue = self._next_queue = None

    def _victims(self, txn: WriteTxn, policy: Policy) -> VictimQueue:
        # What a plan took from the queue is still there if its transaction fails.
        txn.endings.append(lambda committed: None if committed else self.reset_queue())
        if self._queue is None or self._is_outdated(txn, policy):
            self._queue = VictimQueue.built(txn.lives(), policy)
            self._queue_built = (txn.stored() - self._stored, self._clock.monotonic())
        return self._queue

    def _is_outdated(self, txn: IndexTxn, policy: Policy) -> bool:
        if self._queue is None or self._queue.policy.version != policy.version:
            return True
        if len(self._queue) > _ENTRIES_PER_EXTENT * (txn.count_extents() + _FEW_EXTENTS):
            return True
        return self._others_stored(txn) and self._clock.monotonic() - self._queue_built[1] > _QUEUE_KEPT_S

    def _others_stored(self, txn: IndexTxn) -> bool:
        """Whether other processes stored extents since the queue was built, which does not know them then."""
        return txn.stored() - self._stored != self._queue_built[0]

    def apply(self, plan: ReclaimPlan) -> None:
        """Carry out a plan made elsewhere (operators, quarantine)."""
        freed = Freed()
        with self._state_lock, self._index.write() as txn:
            self._cache.flush(txn)
            txn.note_gaps()
            self._apply(txn, plan, freed)
        self.release(freed)

    def _apply(self, txn: WriteTxn, plan: ReclaimPlan, freed: Freed) -> None:
        by_reason: dict[Reason, int] = defaultdict(int)
        dead: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for cut in plan.cuts:
            gone = self._cut(txn, cut)
            if not gone:
                continue
            by_reason[cut.reason] += gone
            dead[cut.place >> 32].append(((cut.place & 0xFFFFFFFF) + cut.keep, gone))
        for segment, ranges in dead.items():
            self.unlive(txn, segment, ranges, freed)
        for reason, blocks in by_reason.items():
            self._emit(BlocksEvicted(blocks, reason))

    def _cut(self, txn: WriteTxn, cut: Cut) -> int:
        """Shorten one extent in the index; returns the blocks cut, that are still to be counted as dead."""
        head = txn.life_head(cut.place)
        if head is None or head[0] <= cut.keep:
            return 0
        blocks, first = head
        if cut.keep == 0:
            txn.drop_extent(cut.place, first)
        elif (life := txn.life(cut.place)) is not None:
            life.cut(cut.keep)
            txn.put_life(cut.place, life)
        return blocks - cut.keep

    def count_dead(self, txn: WriteTxn, segment: int, count: int) -> None:
        """Count slots of a segment that is about to go as dead."""
        info = txn.segment(segment)
        if info is not None:
            info.live -= count
            txn.put_segment(segment, info)

    def drop_if_empty(self, segment: int) -> None:
        """Remove a sealed segment nothing points into any more."""
        with self._index.write() as txn:
            info = txn.segment(segment)
            if info is None or info.live > 0 or not info.sealed:
                return
        self.remove(segment, info)

    def unlive(self, txn: WriteTxn, segment: int, ranges: Sequence[tuple[int, int]], freed: Freed) -> None:
        """Count slots of a segment as dead and note what the backend can give back for them."""
        info = txn.segment(segment)
        if info is None:
            return
        count = sum(length for _, length in ranges)
        info.live -= count
        name = info.name(segment)
        if info.live <= 0 and info.sealed:
            info.allocated += sum(length for _, length in freed.ranges.pop(name, [])) * self._slot
            freed.files[segment] = info
        elif self._backend.can_punch:
            info.allocated -= count * self._slot
            freed.add(name, ranges)
        txn.put_segment(segment, info)

    def release(self, freed: Freed) -> None:
        """Give space back on the backend; after the index has let go of it, never before."""
        try:
            self._release(freed)
        except BaseException:
            # Interrupted: nothing but this knows what is left to give back.
            self._interrupted.append(freed)
            raise

    def _release(self, freed: Freed) -> None:
        while freed.ranges:
            name, ranges = next(iter(freed.ranges.items()))
            length = sum(n for _, n in ranges) * self._slot
            try:
                given = self._backend.punch(name, [(slot * self._slot, n * self._slot) for slot, n in joined(ranges)])
                self._emit(SpaceFreed(name, given))
                if not given:
                    self._lose_if_gone(name)
                if given < length:
                    # Power loss had taken slots that were thought to be there, and their space with them.
                    self._take_back(name, length - given, sealed_only=True)
            except OSError as error:
                self._emit(Degraded(name, f"punch failed, space stays in use until the file goes: {error}"))
                self._take_back(name, length)
            del freed.ranges[name]
        while freed.files:
            number, info = next(iter(freed.files.items()))
            self.remove(number, info)
            del freed.files[number]
        while freed.lost:
            self._lose(next(iter(freed.lost)))
            freed.lost.pop()

    def _lose_if_gone(self, name: str) -> None:
        parsed = parse_name(name)
        if parsed and not self._backend.list(name):
            self._lose(parsed[1])

    def _take_back(self, name: str, length: int, *, sealed_only: bool = False) -> None:
        """Count space as allocated again that was not given back. What a file being written gave cannot be told."""
        parsed = parse_name(name)
        with self._index.write() as txn:
            info = txn.segment(parsed[1]) if parsed else None
            if parsed and info is not None and (info.sealed or not sealed_only):
                info.allocated += length
                txn.put_segment(parsed[1], info)

    def remove(self, number: int, info: SegmentInfo) -> None:
        """Remove a file without a live block; it counts as used until it is gone."""
        name = info.name(number)
        try:
            self._backend.remove(name)
            with self._index.write() as txn:
                txn.drop_segment(number)
        except (OSError, lmdb.Error) as error:
            self._dead[number] = info
            self._emit(Degraded(name, f"file could not be removed, housekeeping tries again: {error}"))
            return
        self._emit(SpaceFreed(name, info.allocated))

    def remove_waiting(self) -> bool:
        """Try again what could not be removed, and what was interrupted; returns whether all is gone."""
        interrupted, self._interrupted = self._interrupted, []
        for freed in interrupted:
            self.release(freed)
        waiting, self._dead = self._dead, {}
        for number, info in waiting.items():
            self.remove(number, info)
        return not self._dead


def joined(ranges: Iterable[tuple[int, int]]) -> Runs:
    """The same (first, count) ranges in order, those that touch as one."""
    merged: Runs = []
    for first, count in sorted(ranges):
        extend_runs(merged, first, count)
    return merged
