"""Space on the backend: which segment takes the next blocks, how much is in use, and giving it back.

Everything here runs under the block store's write lock; the index is the truth for what is live and allocated, since
other processes cut extents too.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import lmdb

from duokv.kvstore.backend import Backend
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.events import BlocksEvicted, Degraded, Event, SpaceFreed, StoreFailed
from duokv.kvstore.extent import Extent, Life
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.index import Index, IndexTxn, SegmentInfo
from duokv.kvstore.lives import LifeCache
from duokv.kvstore.policy import Policy
from duokv.kvstore.reclaim import Cut, Reason, ReclaimPlan, VictimQueue
from duokv.kvstore.segment import SegmentWriter, footer_reserve, parse_name

_LIVE_SHARE = 0.85
"""Part of the slots that may be live without punch: below it the emptiest segments have few survivors to copy."""

_QUEUE_KEPT_S = 60.0
"""How long a queue may miss extents that other processes stored; they expire them themselves meanwhile."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """`count` consecutive slots from `slot` on in the segment of `writer`."""

    writer: SegmentWriter
    slot: int
    count: int


@dataclass(slots=True)
class Freed:
    """What a transaction leaves to be done on the backend: slot ranges to punch, by file name; segments without a live
    block, whose files go; and segments of ours that another process has given up."""

    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    files: dict[int, SegmentInfo] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)


class Space:
    """Allocates slots and reclaims them. Not thread-safe; `state` guards the life cache it shares with lookups."""

    def __init__(
        self,
        *,
        index: Index,
        backend: Backend,
        geometry: CacheGeometry,
        config: StoreConfig,
        clock: Clock,
        emit: Callable[[Event], None],
        writer_id: str,
        cache: LifeCache,
        state: threading.RLock,
    ) -> None:
        self._index = index
        self._backend = backend
        self._slot = geometry.slot_bytes
        self._geometry = geometry
        self._config = config
        self._clock = clock
        self._emit = emit
        self._writer_id = writer_id
        self._cache = cache
        self._state = state
        self._active: dict[int, SegmentWriter] = {}
        self._full: list[SegmentWriter] = []
        """Segments without room left whose last slots may not be published yet."""
        self._unsealed: list[SegmentWriter] = []
        """Segments whose sealing failed."""
        self._dead: dict[int, SegmentInfo] = {}
        """Segments without a live block whose file could not be removed yet."""
        self._queue: VictimQueue | None = None
        self._queue_built = (0, 0.0)
        """Extents that others had stored when the queue was built, and when that was (monotonic seconds)."""
        self._published = 0
        self.segment_slots = max(1, config.effective_segment_bytes // self._slot)
        self._step = max(1, config.preallocate_bytes // self._slot)

    # -- room ------------------------------------------------------------------------------------------------------

    def make_room(self, slots: int, class_id: int, policy: Policy, stamp: int) -> int:
        """Reclaim until `slots` new slots fit, sparing what was used at `stamp`; returns how many fit."""
        config = self._config
        if config.capacity is None and config.capacity_blocks is None:
            return slots
        evict = self._to_evict(slots, class_id)
        if evict > 0:
            self.reclaim(evict, policy, before_stamp=stamp)
        while slots and (short := self.short(slots, class_id)) > 0:
            slots = max(0, slots - short)
        return slots

    def short(self, slots: int, class_id: int) -> int:
        """Slots lacking for `slots` more, by whichever limit binds."""
        return max(self._short_of_blocks(slots), self._short_of_bytes(slots, class_id))

    def _short_of_blocks(self, slots: int) -> int:
        if self._config.capacity_blocks is None:
            return 0
        with self._index.read() as txn:
            return txn.totals()[1] + slots - self._config.capacity_blocks

    def _short_of_bytes(self, slots: int, class_id: int) -> int:
        if self._config.capacity is None:
            return 0
        with self._index.read() as txn:
            allocated, _ = txn.totals()
        pending = sum(writer.unpublished for writer in self._writers())
        over = allocated + pending + self._growth(slots, class_id) - self._usable(self._config.capacity)
        return -(-over // self._slot)

    def _to_evict(self, slots: int, class_id: int) -> int:
        """Blocks to take out of the index. With punch each gives its slot back; without, files must empty out, and
        enough dead slots to make copying survivors worth it are wanted."""
        by_blocks, by_bytes = self._short_of_blocks(slots), self._short_of_bytes(slots, class_id)
        if by_bytes > 0 and not self._backend.can_punch and self._config.capacity is not None:
            with self._index.read() as txn:
                live = txn.totals()[1]
            whole = self.segment_slots * self._slot + footer_reserve(self.segment_slots)
            holds = self._usable(self._config.capacity) // whole * self.segment_slots
            by_bytes = live + slots - int(holds * _LIVE_SHARE)
        return max(by_blocks, by_bytes)

    def _usable(self, capacity: int) -> int:
        """Without punch one segment is kept back, to copy survivors into."""
        return capacity if self._backend.can_punch else capacity - self.segment_slots * self._slot

    def _growth(self, slots: int, class_id: int) -> int:
        active = self._active.get(class_id)
        grown = 0
        if active is not None:
            inside = min(slots, active.room)
            grown = active.growth(inside)
            slots -= inside
        segments = -(-slots // self.segment_slots)
        return grown + slots * self._slot + segments * footer_reserve(self.segment_slots)

    def allocate(self, class_id: int, slots: int) -> list[Allocation]:
        """Take `slots` slots for a class, opening segments as needed. OSError when the backend has no space."""
        taken = []
        while slots:
            active = self._active.get(class_id)
            if active is not None and active.room == 0:
                self._full.append(self._active.pop(class_id))
                active = None
            if active is None:
                active = self._open(class_id)
            count = min(slots, active.room)
            active.reserve(count, step=self._step_within(active, count))
            taken.append(Allocation(active, active.take(count), count))
            slots -= count
        return taken

    def _step_within(self, active: SegmentWriter, count: int) -> int:
        """Preallocate ahead only while there is plenty of room: near the limit slack would evict blocks."""
        if self._config.capacity is None:
            return self._step
        with self._index.read() as txn:
            allocated, _ = txn.totals()
        pending = sum(writer.unpublished for writer in self._writers())
        ahead = allocated + pending + active.growth(count) + self._step * self._slot
        return self._step if ahead < self._usable(self._config.capacity) * 7 // 8 else 1

    def _open(self, class_id: int) -> SegmentWriter:
        reserve = footer_reserve(self.segment_slots)
        info = SegmentInfo(self._writer_id, class_id, self.segment_slots, 0, 0, reserve, False, self._clock.wall())
        with self._index.write() as txn:
            number = txn.next_segment()
            txn.put_segment(number, info)
        try:
            writer = SegmentWriter(self._backend, self._geometry, number, info)
        except OSError:
            with self._index.write() as txn:
                txn.drop_segment(number)
            raise
        self._active[class_id] = writer
        return writer

    # -- publishing and sealing --------------------------------------------------------------------------------------

    def publish(
        self, txn: IndexTxn, writer: SegmentWriter, extent: Extent, life: Life, stamp: int, freed: Freed
    ) -> bool:
        """Make written slots visible: data is on the backend before this transaction commits.

        False if another process has given the segment up, since its file is gone.
        """
        info = self._counted(txn, writer)
        if info is None or info.sealed:
            freed.lost.add(writer.number)
            return False
        txn.put_extent(extent)
        txn.put_life(extent.place, life)
        info.used = max(info.used, extent.first_slot + extent.blocks)
        info.live += extent.blocks
        txn.put_segment(writer.number, info)

        def settle(committed: bool) -> None:
            if committed:
                writer.publish(extent, stamp)
                self._published += 1
                if self._queue is not None:
                    self._queue.add(extent.place, life)

        txn.endings.append(settle)
        return True

    def discard(self, txn: IndexTxn, writer: SegmentWriter, slot: int, count: int, freed: Freed) -> None:
        """Give back slots that were written for nothing."""
        info = self._counted(txn, writer) if count and self._backend.can_punch else None
        if info is not None:
            info.allocated -= count * self._slot
            txn.put_segment(writer.number, info)
            freed.ranges[writer.name].append((slot, count))

    def _counted(self, txn: IndexTxn, writer: SegmentWriter) -> SegmentInfo | None:
        """A segment's record, to be put back, with all that is reserved."""
        info = txn.segment(writer.number)
        if info is not None and writer.unpublished:
            grown = writer.take_unpublished()
            info.allocated += grown

            def settle(committed: bool) -> None:
                if not committed:
                    writer.unpublished += grown

            txn.endings.append(settle)
        return info

    def seal_full(self) -> None:
        """Seal segments that have no room left, now that their slots are published."""
        while self._full:
            self._try_seal(self._full.pop())

    def _try_seal(self, writer: SegmentWriter) -> None:
        try:
            self._seal(writer)
        except (OSError, lmdb.Error) as error:
            self._emit(Degraded(writer.name, f"could not be sealed, a later flush tries again: {error}"))
            self._unsealed.append(writer)
            if writer.doubtful:
                self.lose(writer.number)

    def _seal(self, writer: SegmentWriter) -> None:
        """Finish a segment: footer, durable unless fsync is off, then marked in the index."""
        slack = writer.reserved_bytes - writer.next_slot * self._slot + footer_reserve(self.segment_slots)
        length = writer.seal(durable=self._config.fsync != "none")
        with self._index.write() as txn:
            info = self._counted(txn, writer)
            if info is None:
                return
            info.sealed = True
            info.allocated += length - writer.next_slot * self._slot - slack
            txn.put_segment(writer.number, info)
        if info.live == 0:
            self._remove(writer.number, info)

    def abandon(self, writer: SegmentWriter) -> None:
        """Give up a segment after a failed write: what was published stays, what was not is cut off."""
        writer.forget_unpublished()
        if writer.empty:
            self.lose(writer.number)
            return
        self._let_go(writer)
        self._try_seal(writer)

    def forget_unpublished(self) -> None:
        """Take slots back that a commit was given and did not publish."""
        for writer in self._writers():
            writer.forget_unpublished()

    def flush(self) -> None:
        """Make every written slot durable, then the index that points at them.

        OSError if that fails; the segment is then given up, as nothing later could tell what of it is durable.
        """
        failed = self.sync(self._writers())
        self._seal_again()
        self._index.sync()
        if failed is not None:
            raise failed

    def sync(self, writers: Iterable[SegmentWriter]) -> OSError | None:
        """Make slots written so far durable; segments of which that cannot be said are given up."""
        failed: OSError | None = None
        for writer in writers:
            try:
                writer.sync()
            except OSError as error:
                failed = error
                self._emit(StoreFailed(writer.name, f"given up, its blocks cannot be made durable: {error}"))
                self.lose(writer.number)
        return failed

    def _seal_again(self) -> None:
        waiting, self._unsealed = self._unsealed, []
        for writer in waiting:
            self._try_seal(writer)

    def close(self) -> bool:
        """Seal all active segments; returns False if the next open has to finish something."""
        self.seal_full()
        self._seal_again()
        while self._active:
            self._try_seal(self._active.popitem()[1])
        self._remove_again()
        return not self._unsealed and not self._dead

    def _writers(self) -> list[SegmentWriter]:
        return [*self._active.values(), *self._full, *self._unsealed]

    # -- reclaim -----------------------------------------------------------------------------------------------------

    def reclaim(self, need: int, policy: Policy, *, before_stamp: int) -> int:
        """Delete expired blocks, then the least recently used until `need` blocks are free; returns blocks freed."""
        with self._state, self._index.write() as txn:
            self._cache.flush(txn)
            queue = self._victims(txn, policy)
            now_s = self._clock.wall()
            freed = Freed()
            plan = queue.plan_expired(txn, now_s)
            self._apply(txn, plan, freed)
            gone = plan.freed
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
        return gone

    def expire(self, policy: Policy) -> int:
        """Delete expired blocks only; returns how many."""
        self._remove_again()
        return self.reclaim(0, policy, before_stamp=0)

    def reset_queue(self) -> None:
        """Forget what was known of deadlines and ages (the policy or the index changed underneath)."""
        self._queue = None

    def _victims(self, txn: IndexTxn, policy: Policy) -> VictimQueue:
        now_s = self._clock.monotonic()
        old = self._others_stored(txn) and now_s - self._queue_built[1] > _QUEUE_KEPT_S
        if self._queue is None or self._queue.policy.version != policy.version or old:
            self._queue = VictimQueue.built(txn.lives(), policy)
            self._queue_built = (txn.stored() - self._published, now_s)
        return self._queue

    def _others_stored(self, txn: IndexTxn) -> bool:
        """Whether other processes stored extents since the queue was built, which does not know them then."""
        return txn.stored() - self._published != self._queue_built[0]

    def apply(self, plan: ReclaimPlan) -> None:
        """Carry out a plan made elsewhere (operators, quarantine)."""
        freed = Freed()
        with self._state, self._index.write() as txn:
            self._cache.flush(txn)
            self._apply(txn, plan, freed)
        self.release(freed)

    def _apply(self, txn: IndexTxn, plan: ReclaimPlan, freed: Freed) -> None:
        by_reason: dict[Reason, int] = defaultdict(int)
        for cut in plan.cuts:
            done = self.cut(txn, cut, freed)
            by_reason[cut.reason] += done
        for reason, blocks in by_reason.items():
            if blocks:
                self._emit(BlocksEvicted(blocks, reason))

    def cut(self, txn: IndexTxn, cut: Cut, freed: Freed) -> int:
        """Shorten one extent in the index; what to do on the backend is added to `freed`. Returns blocks cut."""
        life = txn.life(cut.place)
        if life is None or life.n <= cut.keep:
            return 0
        gone = life.n - cut.keep
        segment, slot = cut.place >> 32, cut.place & 0xFFFFFFFF
        life.cut(cut.keep)
        if cut.keep:
            txn.put_life(cut.place, life)
        else:
            txn.drop_extent(life, cut.place)
        self.unlive(txn, segment, [(slot + cut.keep, gone)], freed)
        return gone

    def count_dead(self, txn: IndexTxn, segment: int, count: int) -> None:
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
        self._remove(segment, info)

    def unlive(self, txn: IndexTxn, segment: int, ranges: Sequence[tuple[int, int]], freed: Freed) -> None:
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
            freed.ranges[name].extend(ranges)
        txn.put_segment(segment, info)

    def lose(self, number: int) -> None:
        """Forget a segment whose file is gone, with all its extents."""
        ours = [writer for writer in self._writers() if writer.number == number]
        with self._state, self._index.write() as txn:
            self._cache.flush(txn)
            blocks = 0
            for place, life in list(txn.lives(number)):
                txn.drop_extent(life, place)
                blocks += life.n
            info = self._counted(txn, ours[0]) if ours else txn.segment(number)
            if info is not None:
                info.live, info.sealed = 0, True
                txn.put_segment(number, info)
        for writer in ours:
            self._let_go(writer)
            writer.abort()
        if info is not None:
            self._remove(number, info)
        if blocks:
            self._emit(BlocksEvicted(blocks, "lost"))

    def _let_go(self, writer: SegmentWriter) -> None:
        self._active = {class_id: active for class_id, active in self._active.items() if active is not writer}
        self._full = [full for full in self._full if full is not writer]
        self._unsealed = [unsealed for unsealed in self._unsealed if unsealed is not writer]

    def release(self, freed: Freed) -> None:
        """Give space back on the backend; after the index has let go of it, never before."""
        for name, ranges in freed.ranges.items():
            length = sum(n for _, n in ranges) * self._slot
            try:
                given = self._backend.punch(name, [(slot * self._slot, n * self._slot) for slot, n in join(ranges)])
                self._emit(SpaceFreed(name, given))
                if not given:
                    self._lose_if_gone(name)
                if given < length:
                    # Power loss had taken slots that were thought to be there, and their space with them.
                    self._take_back(name, length - given, sealed_only=True)
            except OSError as error:
                self._emit(Degraded(name, f"punch failed, space stays in use until the file goes: {error}"))
                self._take_back(name, length)
        for number, info in freed.files.items():
            self._remove(number, info)
        for number in freed.lost:
            self.lose(number)

    def _lose_if_gone(self, name: str) -> None:
        parsed = parse_name(name)
        if parsed and not self._backend.list(name):
            self.lose(parsed[1])

    def _take_back(self, name: str, length: int, *, sealed_only: bool = False) -> None:
        """Count space as allocated again that was not given back. What a file being written gave cannot be told."""
        parsed = parse_name(name)
        with self._index.write() as txn:
            info = txn.segment(parsed[1]) if parsed else None
            if parsed and info is not None and (info.sealed or not sealed_only):
                info.allocated += length
                txn.put_segment(parsed[1], info)

    def _remove(self, number: int, info: SegmentInfo) -> None:
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

    def _remove_again(self) -> None:
        waiting, self._dead = self._dead, {}
        for number, info in waiting.items():
            self._remove(number, info)


def join(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge (first, count) ranges that touch."""
    merged: list[tuple[int, int]] = []
    for first, count in sorted(ranges):
        if merged and merged[-1][0] + merged[-1][1] == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + count)
        else:
            merged.append((first, count))
    return merged
