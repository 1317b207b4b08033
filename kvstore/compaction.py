"""Giving space back where the backend cannot punch holes: copy a segment's survivors elsewhere, then drop its file."""

from __future__ import annotations

import threading
from collections.abc import Callable

from duokv.kvstore.backend import Backend, ReadOp
from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.clock import Clock
from duokv.kvstore.damage import Damage, note_damage
from duokv.kvstore.events import BlockQuarantined, BlocksEvicted, Event
from duokv.kvstore.extent import PREFIX_BYTES, Extent
from duokv.kvstore.index import Index, SegmentInfo
from duokv.kvstore.lives import ExtentCache
from duokv.kvstore.reader import Rows
from duokv.kvstore.reclaim import plan_compaction
from duokv.kvstore.reclaimer import Freed
from duokv.kvstore.record import BlockCodec, Trailer
from duokv.kvstore.segment import Piece
from duokv.kvstore.space import Space

_CHUNK = 32
_READ_S = 60.0


class Compactor:
    """Runs under the block store's write lock. Lookups go on meanwhile; a load of moved blocks looks them up again."""

    def __init__(
        self, *, index: Index, backend: Backend, codec: BlockCodec, clock: Clock, emit: Callable[[Event], None],
        pool: BufferPool, space: Space, cache: ExtentCache, state_lock: threading.RLock,
    ) -> None:  # fmt: skip
        self._index = index
        self._backend = backend
        self._codec = codec
        self._clock = clock
        self._emit = emit
        self._pool = pool
        self._space = space
        self._cache = cache
        self._state_lock = state_lock

    def run(self, need_bytes: int) -> None:
        """Free about `need_bytes` by emptying the emptiest sealed segments. OSError if copies cannot be written."""
        with self._index.read() as txn:
            segments = txn.segments()
        known = dict(segments)
        for number in plan_compaction(segments, need_bytes=need_bytes, slot_bytes=self._codec.slot_bytes):
            self._empty(number, known[number])

    def _empty(self, number: int, info: SegmentInfo) -> None:
        with self._index.read() as txn:
            lives = [(place, life, txn.extent(life.first)) for place, life in txn.lives(number)]
        with self._pool.lend(_CHUNK, self._codec.slot_bytes) as staging:
            for place, life, extent in lives:
                name = info.name(number)
                if extent is None or extent.place != place or not self._move(name, extent, life.n, staging.rows):
                    return
        # What was moved may have been promised to be durable.
        if self._space.sync(self._space.writers()) is None:
            self._space.reclaimer.drop_if_empty(number)
        self._space.seal_full()

    def _move(self, name: str, extent: Extent, blocks: int, rows: Rows) -> bool:
        """Copy an extent's first `blocks` blocks; what does not verify ends it. False if it cannot be read now."""
        copies: list[tuple[Piece, int]] = []
        done, reason = 0, None
        for piece in self._space.allocate(extent.class_id, [(0, blocks)]):
            if reason is None:
                copied, reason = self._copy(name, extent, done, piece, rows)
                copies.append((piece, copied))
                done += copied
        if reason != "unreadable":
            self._publish(name, extent, copies, reason)
        self._space.forget_unpublished()
        return reason != "unreadable"

    def _copy(self, name: str, extent: Extent, done: int, piece: Piece, rows: Rows) -> tuple[int, str | None]:
        slot_bytes = self._codec.slot_bytes
        for at in range(0, piece.count, _CHUNK):
            chunk = rows[: min(_CHUNK, piece.count - at)]
            offset = (extent.first_slot + done + at) * slot_bytes
            got = self._backend.read_many([ReadOp(name, offset, (chunk.reshape(-1).data,))], deadline_s=_READ_S)
            if got != [chunk.nbytes]:
                return at, "unreadable"
            good = 0
            reason = None
            for row in chunk:
                trailer = self._codec.decode(row)
                wanted = extent.prefixes[(done + at + good) * PREFIX_BYTES :][:PREFIX_BYTES]
                if not isinstance(trailer, Trailer):
                    reason = trailer
                elif not trailer.identity.key.startswith(wanted):
                    reason = "another block"
                if reason is not None:
                    break
                good += 1
            if good:
                piece.writer.write(piece.slot + at, chunk[:good].reshape(-1).data)
            if reason is not None:
                return at + good, reason
        return piece.count, None

    def _publish(self, name: str, extent: Extent, copies: list[tuple[Piece, int]], reason: str | None) -> None:
        """Point the index at the copies, of all or none; `reason`: why what follows them is lost, None if all is there.

        The old place keeps nothing of the extent.
        """
        with self._state_lock, self._index.write() as txn:
            self._cache.flush(txn)
            life = txn.life(extent.place)
            if life is None:
                return
            txn.drop_life(extent.place)
            self._space.reclaimer.count_dead(txn, extent.segment, life.n)
            done = 0
            for piece, copied in copies:
                count = min(copied, life.n - done)
                if count <= 0:
                    break
                prefixes = extent.prefixes[done * PREFIX_BYTES : (done + count) * PREFIX_BYTES]
                moved = Extent(
                    piece.writer.number, piece.slot, extent.chain_pos + done, extent.class_id, extent.origin, prefixes
                )
                copy = life.rest(done, prefixes[:PREFIX_BYTES])
                copy.cut(count)
                self._space.publish(txn, piece.writer, moved, copy, copy.last_use(0), Freed())
                done += count
            if reason is None or done >= life.n:
                return
            slot = extent.first_slot + done
            key = extent.prefixes[done * PREFIX_BYTES : (done + 1) * PREFIX_BYTES]
            note_damage(txn, Damage(key.hex(), extent.segment, slot, reason, self._clock.wall()))
            txn.note_gaps()
        self._emit(BlockQuarantined(key, name, slot, reason))
        self._emit(BlocksEvicted(life.n - done, "corrupt"))
