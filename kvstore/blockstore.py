"""Block KV: the walk of a prompt through the index, and the commit of what is new.

find: index only; bytes are read by loader.py. commit: walk again, make room, write, publish. Data goes to the backend
before the index points at it; a crash between leaves garbage that the next open sweeps, never a wrong or dangling hit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import lmdb

from duokv.kvstore.backend import Backend
from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.clock import Clock
from duokv.kvstore.compaction import Compactor
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.damage import Damage, note_damage
from duokv.kvstore.events import BlocksEvicted, BlocksStored, Degraded, Event, StoreFailed
from duokv.kvstore.extent import PREFIX_BYTES, SEQUENCE_BITS, Cutoffs, Extent, Life, place_of, prefixes_of, stamp_of
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.index import Index, IndexTxn, WriteTxn
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.lives import ExtentCache, Stamps
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import BORN_CLASS, PIN_CLASS, Policy
from duokv.kvstore.policybook import PolicyBook
from duokv.kvstore.reader import Rows
from duokv.kvstore.reclaim import Cut, Reason, ReclaimPlan
from duokv.kvstore.reclaimer import Freed
from duokv.kvstore.record import BlockCodec
from duokv.kvstore.segment import Piece, SegmentWriter
from duokv.kvstore.space import Space
from duokv.kvstore.staging import Chunk, Payload, SlotsNotWritten, plan_chunks, write_chunks
from duokv.kvstore.walk import (
    Committed,
    CommitWalk,
    Found,
    MissReason,
    head_of,
    overlap,
    walk_for_commit,
)


class BlockStore:
    """Thread-safe: lookups run in parallel with one commit at a time."""

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
        pool: BufferPool,
    ) -> None:
        self._index = index
        self._codec = BlockCodec(geometry)
        self._config = config
        self._clock = clock
        self._emit = emit
        self._pool = pool
        # Taken in this order, and LMDB's write transaction after both.
        self._write_lock = threading.RLock()
        """One commit or pass of housekeeping at a time; all of `space`."""
        self._state_lock = threading.RLock()
        """Extent cache, stamps and policies, which lookups use too."""
        self._cache = ExtentCache()
        index.watch(self._cache.ended)
        self._stamps = Stamps()
        self._flushed = 0
        self._use_flush = round(config.use_flush_s * 1000) << SEQUENCE_BITS
        self.policies = PolicyBook()
        self.space = Space(
            index=index, backend=backend, geometry=geometry, config=config, clock=clock, emit=emit,
            writer_id=writer_id, cache=self._cache, state_lock=self._state_lock,
        )  # fmt: skip
        self._compactor = None if backend.can_punch or config.capacity is None else Compactor(
            index=index, backend=backend, codec=self._codec, clock=clock, emit=emit, pool=pool, space=self.space,
            cache=self._cache, state_lock=self._state_lock,
        )  # fmt: skip

    # -- lookup ------------------------------------------------------------------------------------------------------

    def may_begin(self, key: bytes) -> bool:
        """Whether a prompt with this first key may have a stored block: if not, the others need no hashing."""
        try:
            with self._state_lock:
                if self._cache.met(key[:PREFIX_BYTES]):
                    return True
                with self._index.read() as txn:
                    return txn.record(key[:PREFIX_BYTES]) is not None
        except lmdb.Error:
            return True

    def find(
        self, blob: bytes, blocks: int, traffic: str | None, *, exact_only: bool = False, use: bool = True
    ) -> Found:
        """Walk a prompt's key blob: which leading blocks are stored and alive. A use of them unless `use=False`."""
        try:
            return self._find(blob, blocks, traffic, exact_only=exact_only, use=use)
        except lmdb.Error as error:
            self._emit(Degraded("index", f"lookup failed: {error}"))
            return Found((), 0, "index")

    def _find(self, blob: bytes, blocks: int, traffic: str | None, *, exact_only: bool, use: bool) -> Found:
        with self._state_lock, self._index.read() as txn:
            now_s = self._clock.wall()
            policy = self.policies.current(txn)
            class_id = policy.class_id(traffic)
            walked = self._cache.walk(txn, blob, 0, blocks)
            held, found, exact = walked.hops, walked.end, walked.exact
            reason: MissReason | None = None if found == blocks else "absent"
            if exact_only and exact < found:
                held, found, reason = head_of(held, exact), exact, "approx"
            alive = self._cache.alive_lead(txn, held, Cutoffs(policy, now_s))
            if alive is not held:
                held, reason = alive, "expired"
                found = sum([count for _, count in held])
            if use and held:
                self._cache.use_walk(held, class_id, self._stamps.next(now_s))
        return Found(tuple(held), found, reason, min(exact, found))

    # -- commit ------------------------------------------------------------------------------------------------------

    def commit(
        self, blob: bytes, blocks: int, traffic: str | None, *, first: int, payload: Payload | None, origin: Origin
    ) -> Committed:
        """Renew what is stored of a prompt's first `blocks` blocks and store what is absent from block `first` on.

        A block whose parent is absent and not part of this commit is dropped: nothing could ever reach it. `payload`
        None keeps the metadata only. Never raises for a full or failing backend: what could not be stored is dropped.
        """
        stored = present = 0
        with self._write_lock:
            try:
                with self._state_lock, self._index.read() as txn:
                    policy = self.policies.current(txn)
                    class_id = policy.class_id(traffic)
                    stamp = self._stamps.next(self._clock.wall())
                    walk = walk_for_commit(txn, self._cache, blob, blocks, first, origin)
                    if walk.hops:
                        self._renew(txn, walk, policy, class_id, stamp)
                present = walk.present
                if walk.runs:
                    stored, present = self._store(walk, class_id, policy, stamp, payload)
                elif self._due(stamp):
                    self.flush_uses()
            except (OSError, lmdb.Error) as error:
                self.space.forget_unpublished()
                self._emit(StoreFailed("commit", str(error)))
            except BaseException:
                self.space.forget_unpublished()
                raise
        done = Committed(stored, present, blocks - first - present - stored)
        name = traffic or self.default_class
        self._emit(BlocksStored(name, stored, present, done.dropped, stored * self._codec.slot_bytes))
        return done

    def _renew(self, txn: IndexTxn, walk: CommitWalk, policy: Policy, class_id: int, stamp: int) -> None:
        held = walk.hops
        cutoffs = Cutoffs(policy, self._clock.wall())
        if self._cache.alive_lead(txn, held, cutoffs) is not held:
            for hop, count in held:
                if hop.life.alive(cutoffs) < count:
                    self._cache.use(hop, BORN_CLASS, count, stamp)
        self._cache.use_walk(held, class_id, stamp)

    def _store(
        self, walk: CommitWalk, class_id: int, policy: Policy, stamp: int, payload: Payload | None
    ) -> tuple[int, int]:
        """Write what a walk found absent; returns (blocks stored, blocks of the commit that were there already)."""
        wanted = sum([count for _, count in walk.runs])
        granted = self.space.make_room(wanted, class_id, policy, stamp)
        if granted < wanted and self._compactor is not None:
            self._compactor.run((wanted - granted) * self._codec.slot_bytes)
            granted = self.space.make_room(wanted, class_id, policy, stamp)
        pieces = self.space.allocate(class_id, walk.runs if granted == wanted else head_of(walk.runs, granted))
        if payload is not None and not self._write_pieces(pieces, payload, walk.origin, class_id):
            return 0, walk.present
        freed = Freed()
        with self._state_lock, self._index.write() as txn:
            # Lives that pass on to exact blocks must hold all uses.
            if walk.replace or self._due(stamp):
                self._cache.flush(txn)
                self._flushed = stamp
            if txn.snapshot != walk.snapshot:
                # Another process may have stored the same blocks while ours were being written.
                walk = walk.repeated(txn, self._cache)
            carried = self._replace(txn, walk, pieces, freed) if walk.replace else []
            stored = sum([self._publish(txn, walk, piece, class_id, stamp, carried, freed) for piece in pieces])
        try:
            if carried:
                # What was replaced may have been promised to be durable: its space goes only once its successors
                # are, or are given up since they cannot be.
                self.space.sync(_writers_of(pieces))
            self.space.reclaimer.release(freed)
            self.space.seal_full()
        except lmdb.Error as error:
            self._emit(Degraded("index", f"space of replaced blocks and full segments not settled: {error}"))
        return stored, walk.present

    def _write_pieces(self, pieces: list[Piece], payload: Payload, origin: Origin, class_id: int) -> bool:
        stored_at = int(self._clock.wall())

        def fill(chunk: Chunk, rows: Rows) -> None:
            block = chunk.block
            trailers = self._codec.expected_trailers(payload.chain, block, len(rows))
            self._codec.write_trailers(rows, trailers, origin, class_id, stored_at)
            payload.fill(block, rows)
            for row in rows:
                self._codec.write_checksum(row)
            payload.sealed(place_of(chunk.writer.number, chunk.slot), block, rows)

        def write(chunk: Chunk, rows: Rows) -> None:
            chunk.writer.write(chunk.slot, rows.reshape(-1).data)
            if chunk.last and self._config.fsync == "always":
                chunk.writer.sync()

        chunks = plan_chunks(pieces, slot_bytes=self._codec.slot_bytes)
        try:
            write_chunks(chunks, self._pool, self._codec.slot_bytes, fill=fill, write=write)
        except SlotsNotWritten as failure:
            self._emit(StoreFailed(failure.chunk.writer.name, str(failure.reason)))
            for writer in _writers_of(pieces):
                self.space.abandon(writer)
            return False
        return True

    def _replace(self, txn: WriteTxn, walk: CommitWalk, pieces: list[Piece], freed: Freed) -> list[tuple[int, Life]]:
        """Take approximate blocks out of the index where exact ones were written; the rest of their extent stays.

        Returns (first block, life) of what went: the exact blocks live on as long as those would have.
        """
        carried: list[tuple[int, Life]] = []
        taken = {piece.block + i for piece in pieces for i in range(piece.count)}
        for hop, block, count, low in walk.replace:
            extent = txn.extent(hop.life.first)
            life = None if extent is None else txn.life(extent.place)
            if extent is None or life is None or extent.place != int.from_bytes(hop.place, "big"):
                continue
            high = min(count, life.n)
            while high > low and block + high - 1 not in taken:
                high -= 1
            if high <= low:
                continue
            segment, slot = extent.segment, extent.first_slot
            if high < life.n:
                rest = extent.rest(high)
                self.space.displace(txn, rest, freed)
                txn.put_extent(rest)
                txn.put_life(rest.place, life.rest(high, rest.prefixes[:PREFIX_BYTES]))
            gone = high - low
            old = life.rest(low, b"")
            old.cut(gone)
            carried.append((block + low, old))
            if low:
                life.cut(low)
                txn.put_life(extent.place, life)
            else:
                txn.drop_extent(extent.place, life.first)
            self.space.reclaimer.unlive(txn, segment, [(slot + low, gone)], freed)
            self._emit(BlocksEvicted(gone, "replaced"))
            self.space.reclaimer.reset_queue()
        return carried

    def _publish(
        self, txn: WriteTxn, walk: CommitWalk, piece: Piece, class_id: int, stamp: int,
        carried: list[tuple[int, Life]], freed: Freed,
    ) -> int:  # fmt: skip
        """Make the blocks of written slots visible that are still wanted; returns how many."""
        stored = 0
        unused = (piece.slot, piece.count)
        for start, count in overlap(walk.runs, piece.block, piece.count):
            keys = walk.blob[start * KEY_BYTES : (start + count) * KEY_BYTES]
            prefixes = prefixes_of(keys)
            slot = piece.slot + start - piece.block
            extent = Extent(piece.writer.number, slot, start, class_id, walk.origin, prefixes)
            life = Life.born(count, start, prefixes[:PREFIX_BYTES], class_id, stamp)
            for old_start, old in carried:
                life.inherit(old, old_start - start)
            if self.space.publish(txn, piece.writer, extent, life, stamp, freed):
                stored += count
            self.space.discard(txn, piece.writer, unused[0], slot - unused[0], freed)
            unused = (slot + count, unused[0] + unused[1] - slot - count)
        self.space.discard(txn, piece.writer, *unused, freed)
        return stored

    # -- lives and housekeeping --------------------------------------------------------------------------------------

    def _due(self, stamp: int) -> bool:
        return stamp - self._flushed >= self._use_flush

    @property
    def default_class(self) -> str:
        """The class of callers that name none."""
        return self.policies.latest.default

    def flush_uses(self) -> None:
        """Write pending uses to the index."""
        with self._state_lock, self._index.write() as txn:
            self._cache.flush(txn)
        self._flushed = stamp_of(self._clock.wall())

    def pin(self, blob: bytes, blocks: int, ttl_s: float) -> int:
        """Keep the stored leading blocks for `ttl_s` seconds whatever their class; returns how many are held."""
        with self._write_lock:
            with self._state_lock, self._index.read() as txn:
                policy = self.policies.current(txn)
                cutoffs = Cutoffs(policy, self._clock.wall())
                until = stamp_of(self._clock.wall() + ttl_s)
                held = 0
                hops = self._cache.walk(txn, blob, 0, blocks).hops
                for hop, count in self._cache.alive_lead(txn, hops, cutoffs):
                    self._cache.use(hop, PIN_CLASS, count, until)
                    held += count
            self.flush_uses()
        return held

    def maintain(self, *, clock_jumped: bool) -> None:
        """Persist uses, delete what is past its life (not in a pass in which the clock jumped)."""
        with self._write_lock:
            self.flush_uses()
            self.space.reclaimer.remove_waiting()
        more = not clock_jumped
        while more:
            # Anew for each piece: what a longer life saves meanwhile must not go.
            with self._state_lock, self._index.read() as txn:
                policy = self.policies.current(txn)
            self.space.reclaimer.build_queue(policy)
            # Between two pieces commits have their turn.
            with self._write_lock:
                more = self.space.reclaimer.expire_some(policy) is not None

    @contextmanager
    def writing(self, wait_s: float) -> Iterator[bool]:
        """Keep commits and housekeeping out meanwhile; False if they took longer than `wait_s` seconds to let us in."""
        granted = self._write_lock.acquire(timeout=wait_s)
        try:
            yield granted
        finally:
            if granted:
                self._write_lock.release()

    def take_out(self, place: int, keep: int, reason: Reason) -> None:
        """Shorten an extent to `keep` blocks."""
        with self._write_lock:
            with self._index.read() as txn:
                life = txn.life(place)
            if life is not None and life.n > keep:
                cut = Cut(place, life.n, keep, reason)
                self.space.reclaimer.apply(ReclaimPlan((cut,)))

    def quarantine(self, place: int, keep: int, key: bytes, reason: str) -> None:
        """Take a block that did not verify out of the index, and note it for `kvctl verify`."""
        try:
            self.take_out(place, keep, "corrupt")
            found = Damage(key.hex(), place >> 32, (place & 0xFFFFFFFF) + keep, reason, self._clock.wall())
            with self._index.write() as txn:
                note_damage(txn, found)
        except lmdb.Error as error:
            self._emit(Degraded("index", f"block {key.hex()[:16]} is damaged ({reason}) and stays: {error}"))

    def lose_segment(self, number: int) -> None:
        """Forget a segment whose file is gone."""
        try:
            with self._write_lock:
                self.space.lose(number)
        except lmdb.Error as error:
            self._emit(Degraded("index", f"segment {number} is gone and stays: {error}"))

    def flush(self) -> None:
        """Make everything committed so far durable; OSError if that fails, and that segment is given up."""
        with self._write_lock:
            self.space.flush()
            try:
                self.flush_uses()
            except lmdb.Error as error:
                self._emit(Degraded("index", f"uses not written, they wait in memory: {error}"))

    def close(self) -> bool:
        """Persist uses and seal the active segments; returns whether nothing was left for the next open to do."""
        with self._write_lock:
            self.flush_uses()
            clean = self.space.close()
            self._index.sync()
            return clean


def _writers_of(pieces: list[Piece]) -> Iterable[SegmentWriter]:
    return {piece.writer.number: piece.writer for piece in pieces}.values()
