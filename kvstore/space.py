"""Space on the backend: which segment takes the next blocks, and how much is in use.

Everything here runs under the block store's write lock; the index is the truth for what is live and allocated, since
other processes cut extents too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import lmdb

from duokv.kvstore.backend import Backend
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.events import BlocksEvicted, Degraded, Event, StoreFailed
from duokv.kvstore.extent import PLACE, PREFIX_BYTES, Extent, Life
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.index import Index, SegmentInfo, WriteTxn
from duokv.kvstore.lives import ExtentCache
from duokv.kvstore.policy import Policy
from duokv.kvstore.reclaimer import Freed, Reclaimer
from duokv.kvstore.segment import Piece, SegmentWriter, footer_reserve
from duokv.kvstore.walk import Runs

_LIVE_SHARE = 0.85
"""Part of the slots that may be live without punch: below it the emptiest segments have few survivors to copy."""


class Space:
    """Allocates slots and seals what is full. Not thread-safe; `state_lock` guards what it shares with lookups."""

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
        cache: ExtentCache,
        state_lock: threading.RLock,
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
        self._state_lock = state_lock
        self._active: dict[int, SegmentWriter] = {}
        self._full: list[SegmentWriter] = []
        """Segments without room left whose last slots may not be published yet."""
        self._unsealed: list[SegmentWriter] = []
        """Segments whose sealing failed."""
        self._unsynced: dict[int, tuple[str, int]] = {}
        """Segments sealed without a sync, as `fsync="none"` has it: name and length."""
        self.given_up = 0
        """Segments that could not be made durable so far."""
        self.reclaimer = Reclaimer(
            index=index, backend=backend, slot_bytes=self._slot, clock=clock, emit=emit, cache=cache,
            state_lock=state_lock, lose=self.lose,
        )  # fmt: skip
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
            self.reclaimer.reclaim(evict, policy, before_stamp=stamp)
        while slots and (short := self._short(slots, class_id)) > 0:
            slots = max(0, slots - short)
        return slots

    def _short(self, slots: int, class_id: int) -> int:
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
        pending = sum(writer.unpublished for writer in self.writers())
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

    def allocate(self, class_id: int, runs: Runs) -> list[Piece]:
        """Take slots for runs of blocks of a class, opening segments as needed: none crosses a segment or a gap.

        OSError when the backend has no space.
        """
        taken = []
        for first, blocks in runs:
            block, end = first, first + blocks
            while block < end:
                active = self._active.get(class_id)
                if active is not None and active.room == 0:
                    self._full.append(self._active.pop(class_id))
                    active = None
                if active is None:
                    active = self._open(class_id)
                count = min(end - block, active.room)
                active.reserve(count, step=self._step_within(active, count))
                taken.append(Piece(active, active.take(count), block, count))
                block += count
        return taken

    def _step_within(self, active: SegmentWriter, count: int) -> int:
        """Preallocate ahead only while there is plenty of room: near the limit slack would evict blocks."""
        if self._config.capacity is None:
            return self._step
        with self._index.read() as txn:
            allocated, _ = txn.totals()
        pending = sum(writer.unpublished for writer in self.writers())
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
        self, txn: WriteTxn, writer: SegmentWriter, extent: Extent, life: Life, stamp: int, freed: Freed
    ) -> bool:
        """Make written slots visible: data is on the backend before this transaction commits.

        False if another process has given the segment up, since its file is gone.
        """
        info = self._counted(txn, writer)
        if info is None or info.sealed:
            freed.lost.add(writer.number)
            return False
        place, raw = PLACE.pack(extent.segment, extent.first_slot), life.encode()
        self.displace(txn, extent, freed)
        txn.put_extent(extent)
        txn.put_raw_life(place, raw)
        info.used = max(info.used, extent.first_slot + extent.blocks)
        info.live += extent.blocks
        txn.put_segment(writer.number, info)

        def settle(committed: bool) -> None:
            if committed:
                writer.publish(extent, stamp)
                self._cache.note_stored(extent, place, life, raw)
                self.reclaimer.note_stored(extent.place, life)

        txn.endings.append(settle)
        return True

    def displace(self, txn: WriteTxn, extent: Extent, freed: Freed) -> None:
        """Let go of an extent that nothing reaches any more and whose first block's entry another is about to take."""
        old = txn.extent(extent.prefixes[:PREFIX_BYTES])
        life = None if old is None or old.place == extent.place else txn.life(old.place)
        if old is not None and life is not None:
            txn.note_gaps()
            txn.drop_life(old.place)
            self.reclaimer.unlive(txn, old.segment, [(old.first_slot, life.n)], freed)

    def discard(self, txn: WriteTxn, writer: SegmentWriter, slot: int, count: int, freed: Freed) -> None:
        """Give back slots that were written for nothing; they are not taken again, as copies of them may be about."""
        if count:
            txn.endings.append(lambda committed: writer.settle(slot + count) if committed else None)
        info = self._counted(txn, writer) if count and self._backend.can_punch else None
        if info is not None:
            info.allocated -= count * self._slot
            txn.put_segment(writer.number, info)
            freed.add(writer.name, [(slot, count)])

    def _counted(self, txn: WriteTxn, writer: SegmentWriter) -> SegmentInfo | None:
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
                self._give_up(writer.number)
        except BaseException:
            # Interrupted: nothing but this knows of it.
            self._unsealed.append(writer)
            raise

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
        if self._config.fsync == "none":
            self._unsynced[writer.number] = (writer.name, length)
        if info.live == 0:
            self.reclaimer.remove(writer.number, info)

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
        for writer in self.writers():
            writer.forget_unpublished()

    def flush(self) -> None:
        """Make every written slot durable. The index is not: after power loss it is built anew from the slots.

        OSError if that fails; the segment is then given up, as nothing later could tell what of it is durable.
        """
        failed = self.sync(self.writers()) or self._sync_sealed()
        self._seal_again()
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
                self._give_up(writer.number)
        return failed

    def _sync_sealed(self) -> OSError | None:
        """Make durable what was sealed without."""
        failed: OSError | None = None
        for number, (name, length) in self._unsynced.items():
            try:
                writer = self._backend.resume(name)
                writer.sync()
                writer.seal(length)
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = error
                self._give_up(number)
        self._unsynced.clear()
        return failed

    def _give_up(self, number: int) -> None:
        """Forget a segment that could not be made durable: nothing later could tell what of it is."""
        self.given_up += 1
        self.lose(number)

    def _seal_again(self) -> None:
        waiting, self._unsealed = self._unsealed, []
        try:
            while waiting:
                self._try_seal(waiting.pop())
        finally:
            self._unsealed += waiting

    def close(self) -> bool:
        """Seal all active segments; returns False if the next open has to finish something."""
        self.seal_full()
        self._seal_again()
        while self._active:
            self._try_seal(self._active.popitem()[1])
        self._sync_sealed()
        return self.reclaimer.remove_waiting() and not self._unsealed

    def writers(self) -> list[SegmentWriter]:
        """Those of segments that are not sealed."""
        return [*self._active.values(), *self._full, *self._unsealed]

    def lose(self, number: int) -> None:
        """Forget a segment with all its extents, and remove what there is of its file."""
        ours = [writer for writer in self.writers() if writer.number == number]
        with self._state_lock, self._index.write() as txn:
            self._cache.flush(txn)
            txn.note_gaps()
            blocks = 0
            for place, life in list(txn.lives(number)):
                txn.drop_extent(place, life.first)
                blocks += life.n
            info = self._counted(txn, ours[0]) if ours else txn.segment(number)
            if info is not None:
                info.live, info.sealed = 0, True
                txn.put_segment(number, info)
        for writer in ours:
            self._let_go(writer)
            writer.abort()
        if info is not None:
            self.reclaimer.remove(number, info)
        if blocks:
            self._emit(BlocksEvicted(blocks, "lost"))

    def _let_go(self, writer: SegmentWriter) -> None:
        self._active = {class_id: active for class_id, active in self._active.items() if active is not writer}
        self._full = [full for full in self._full if full is not writer]
        self._unsealed = [unsealed for unsealed in self._unsealed if unsealed is not writer]
