"""Block KV: the walk of a prompt through the index, and the commit of what is new.

find: index only. fetch: verified bytes. commit: walk again, make room, write, publish. Data goes to the backend before
the index points at it; a crash between leaves garbage that the next open sweeps, never a wrong or dangling hit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import lmdb

from duokv.kvstore.backend import Backend
from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.events import BlocksEvicted, BlocksStored, Event, StoreFailed
from duokv.kvstore.extent import PREFIX_BYTES, SEQUENCE_BITS, Cutoffs, Extent, Life, stamp_of
from duokv.kvstore.damage import Damage, note_damage
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.index import Hop, Index, IndexTxn
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.lives import LifeCache, Stamps
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import BORN_CLASS, PIN_CLASS, Policy
from duokv.kvstore.policybook import PolicyBook
from duokv.kvstore.reader import Span
from duokv.kvstore.reclaim import Cut, Reason, ReclaimPlan
from duokv.kvstore.record import BlockCodec, BlockIdentity, Row
from duokv.kvstore.space import Allocation, Freed, Space

MissReason = Literal["absent", "expired", "approx", "index"]
STAGING_BLOCKS = 32
"""Slots written per system call: large enough for the device, small enough to stay in cache between copy and write."""


@dataclass(frozen=True, slots=True)
class Found:
    """The leading blocks of a prompt that are stored and alive, and why the next one is not."""

    spans: tuple[Span, ...]
    blocks: int
    reason: MissReason | None


@dataclass(frozen=True, slots=True)
class Payload:
    """Where a commit's bytes come from: `fill(block, row)` copies block `block`'s payload into the head of a slot."""

    fill: Callable[[int, Row], None]
    identity: Callable[[int], BlockIdentity]


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a commit's blocks."""

    new: int
    present: int
    dropped: int


@dataclass(slots=True)
class _Walk:
    """A prompt against the index: hops with their first block, runs of blocks to write, approximate blocks to replace."""

    hops: list[tuple[int, Hop, Life]]
    runs: list[tuple[int, int]]
    replace: list[tuple[Hop, int, int]]
    present: int


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
        self._state = threading.RLock()
        self._write = threading.RLock()
        self._cache = LifeCache()
        self._stamps = Stamps()
        self._flushed = 0
        self.policies = PolicyBook()
        self.space = Space(
            index=index, backend=backend, geometry=geometry, config=config, clock=clock, emit=emit,
            writer_id=writer_id, cache=self._cache, state=self._state,
        )  # fmt: skip

    # -- lookup ------------------------------------------------------------------------------------------------------

    def find(self, blob: bytes, blocks: int, traffic: str | None, *, exact_only: bool = False, use: bool = True) -> Found:
        """Walk a prompt's key blob: which leading blocks are stored and alive. Counts as their use unless `use=False`."""
        spans: list[Span] = []
        uses: list[tuple[Hop, Life, int]] = []
        reason: MissReason | None = None
        block = 0
        with self._index.read() as txn, self._state:
            now_s = self._clock.wall()
            policy = self.policies.current(txn)
            class_id = policy.class_id(traffic)
            cutoffs = Cutoffs(policy, now_s)
            while block < blocks and reason is None:
                hop = txn.hop(blob, block, blocks)
                if hop is None:
                    reason = "absent"
                    break
                if exact_only and hop.approx:
                    reason = "approx"
                    break
                life = self._cache.get(hop.place, hop.life)
                alive = min(hop.count, life.alive(cutoffs))
                if alive < hop.count:
                    reason = "expired"
                if alive:
                    place = hop.place
                    segment, slot = int.from_bytes(place[:4], "big"), int.from_bytes(place[4:], "big")
                    spans.append(Span(segment, slot, block, alive))
                    uses.append((hop, life, alive))
                    block += alive
            if use and uses:
                stamp = self._stamps.next(now_s)
                for hop, life, alive in uses:
                    self._cache.use(hop.place, life, class_id, alive, stamp)
        return Found(tuple(spans), block, reason)

    # -- commit ------------------------------------------------------------------------------------------------------

    def commit(
        self, blob: bytes, blocks: int, traffic: str | None, *, first: int, payload: Payload | None, origin: Origin
    ) -> Committed:
        """Renew what is stored of a prompt's first `blocks` blocks and store what is absent from block `first` on.

        A block whose parent is absent and not part of this commit is dropped: nothing could ever reach it. `payload`
        None keeps the metadata only. Never raises for a full or failing backend: what could not be stored is dropped.
        """
        with self._write:
            seen = self._index.version()
            with self._index.read() as txn, self._state:
                policy = self.policies.current(txn)
                class_id = policy.class_id(traffic)
                stamp = self._stamps.next(self._clock.wall())
                walk = self._walk(txn, blob, blocks, first, origin)
                self._renew(walk, policy, class_id, stamp)
            wanted = sum(count for _, count in walk.runs)
            lost = blocks - first - walk.present - wanted
            stored = 0
            try:
                if wanted:
                    stored = self._store(walk, blob, class_id, policy, stamp, payload, origin, seen)
                elif self._cache.pending() and self._due(stamp):
                    self.flush_uses()
            except (OSError, lmdb.Error) as error:
                self._emit(StoreFailed("commit", str(error)))
        done = Committed(stored, walk.present, wanted - stored + lost)
        slot_bytes = self._codec.slot_bytes
        self._emit(BlocksStored(policy.name_of(class_id), stored, walk.present, done.dropped, stored * slot_bytes))
        return done

    def _walk(self, txn: IndexTxn, blob: bytes, blocks: int, first: int, origin: Origin) -> _Walk:
        walk = _Walk([], [], [], 0)
        reachable = True
        block = 0
        while block < blocks:
            hop = txn.hop(blob, block, blocks)
            if hop is None:
                reachable = reachable and block >= first
                if reachable:
                    _extend(walk.runs, block, 1)
                block += 1
                continue
            walk.hops.append((block, hop, self._cache.get(hop.place, hop.life)))
            low = max(first, block)
            covered = max(0, block + hop.count - low)
            if covered and hop.approx and origin is Origin.EXACT and reachable:
                walk.replace.append((hop, low - block, hop.count))
                _extend(walk.runs, low, covered)
            else:
                walk.present += covered
            block += hop.count
        return walk

    def _renew(self, walk: _Walk, policy: Policy, class_id: int, stamp: int) -> None:
        cutoffs = Cutoffs(policy, self._clock.wall())
        for _, hop, life in walk.hops:
            if life.alive(cutoffs) < hop.count:
                self._cache.use(hop.place, life, BORN_CLASS, hop.count, stamp)
            self._cache.use(hop.place, life, class_id, hop.count, stamp)

    def _store(
        self, walk: _Walk, blob: bytes, class_id: int, policy: Policy, stamp: int, payload: Payload | None,
        origin: Origin, seen: int,
    ) -> int:  # fmt: skip
        wanted = sum(count for _, count in walk.runs)
        ours = self._index.writes
        granted = self.space.make_room(wanted, class_id, policy, stamp)
        pieces = self._pieces(_first(walk.runs, granted), class_id)
        if payload is not None and not self._write_pieces(pieces, payload, origin, class_id):
            return 0
        if self._config.fsync == "always":
            for piece, _ in pieces:
                piece.writer.sync()
        freed = Freed()
        stored = 0
        with self._state, self._index.write() as txn:
            self._cache.flush(txn)
            # Another process may have stored the same blocks while ours were being written.
            raced = self._index.version() - seen != self._index.writes - ours
            self._replace(txn, walk, granted, freed)
            for piece, block in pieces:
                stored += self._publish(txn, piece, block, blob, class_id, origin, stamp, raced, freed)
        self.space.release(freed)
        return stored

    def _pieces(self, runs: list[tuple[int, int]], class_id: int) -> list[tuple[Allocation, int]]:
        """Slots for runs of blocks: (allocation, first block), neither crossing a segment nor a gap in the prompt."""
        pieces = []
        for start, count in runs:
            block = start
            for allocation in self.space.allocate(class_id, count):
                pieces.append((allocation, block))
                block += allocation.count
        return pieces

    def _write_pieces(self, pieces: list[tuple[Allocation, int]], payload: Payload, origin: Origin, class_id: int) -> bool:
        stored_at = int(self._clock.wall())
        with self._pool.lend(STAGING_BLOCKS, self._codec.slot_bytes) as staging:
            for piece, block in pieces:
                for at in range(0, piece.count, STAGING_BLOCKS):
                    rows = staging.rows[: min(STAGING_BLOCKS, piece.count - at)]
                    for i, row in enumerate(rows):
                        payload.fill(block + at + i, row)
                        self._codec.seal(row, payload.identity(block + at + i), origin, class_id, stored_at)
                    try:
                        piece.writer.write(piece.slot + at, memoryview(rows.reshape(-1)))
                    except OSError as error:
                        self._emit(StoreFailed(piece.writer.name, str(error)))
                        for writer in {piece.writer.number: piece.writer for piece, _ in pieces}.values():
                            self.space.abandon(writer)
                        return False
        return True

    def _replace(self, txn: IndexTxn, walk: _Walk, granted: int, freed: Freed) -> None:
        """Take approximate blocks out of the index where exact ones were written; the rest of their extent stays."""
        left = granted
        taken = {start + i for start, count in walk.runs for i in range(count) if (left := left - 1) >= 0}
        first_of = {hop.place: block for block, hop, _ in walk.hops}
        for hop, low, high in walk.replace:
            block = first_of[hop.place]
            while high > low and block + high - 1 not in taken:
                high -= 1
            raw = txn.life_raw(hop.place)
            if raw is None or high <= low:
                continue
            life, extent = Life.decode(raw), Extent.decode(hop.record)
            segment, slot = extent.segment, extent.first_slot
            if high < life.n:
                prefixes = extent.prefixes[high * PREFIX_BYTES :]
                rest = Extent(segment, slot + high, extent.chain_pos + high, extent.class_id, extent.origin, prefixes)
                txn.put_extent(rest)
                txn.put_life(rest.place, life.rest(high, prefixes[:PREFIX_BYTES]))
            gone = min(high, life.n) - low
            if low:
                life.cut(low)
                txn.put_life(extent.place, life)
            else:
                txn.drop_extent(life, extent.place)
            self.space.unlive(txn, segment, [(slot + low, gone)], freed)
            self._emit(BlocksEvicted(gone, "replaced"))
            self.space.reset_queue()

    def _publish(
        self, txn: IndexTxn, piece: Allocation, block: int, blob: bytes, class_id: int, origin: Origin, stamp: int,
        raced: bool, freed: Freed,
    ) -> int:  # fmt: skip
        runs = [(0, piece.count)]
        if raced:
            runs = []
            for i in range(piece.count):
                if txn.hop(blob, block + i, block + i + 1) is None:
                    _extend(runs, i, 1)
        stored = 0
        for start, count in runs:
            at = (block + start) * KEY_BYTES
            keys = blob[at : at + count * KEY_BYTES]
            prefixes = b"".join([keys[i : i + PREFIX_BYTES] for i in range(0, len(keys), KEY_BYTES)])
            extent = Extent(piece.writer.number, piece.slot + start, block + start, class_id, origin, prefixes)
            life = Life.born(count, block + start, prefixes[:PREFIX_BYTES], class_id, stamp)
            self.space.publish(txn, piece.writer, extent, life, stamp)
            stored += count
        return stored

    # -- lives and housekeeping --------------------------------------------------------------------------------------

    def _due(self, stamp: int) -> bool:
        return stamp - self._flushed >= round(self._config.use_flush_s * 1000) << SEQUENCE_BITS

    @property
    def default_class(self) -> str:
        """The class of callers that name none."""
        return self.policies.latest.default

    def flush_uses(self) -> None:
        """Write pending uses to the index."""
        with self._state, self._index.write() as txn:
            self._cache.flush(txn)
        self._flushed = stamp_of(self._clock.wall())

    def pin(self, blob: bytes, blocks: int, ttl_s: float) -> int:
        """Keep the stored leading blocks for `ttl_s` seconds whatever their class; returns how many are held."""
        with self._write:
            with self._index.read() as txn, self._state:
                policy = self.policies.current(txn)
                walk = self._walk(txn, blob, blocks, blocks, Origin.APPROX)
                cutoffs = Cutoffs(policy, self._clock.wall())
                until = stamp_of(self._clock.wall() + ttl_s)
                held = 0
                for block, hop, life in walk.hops:
                    alive = min(hop.count, life.alive(cutoffs))
                    if block != held or not alive:
                        break
                    self._cache.use(hop.place, life, PIN_CLASS, alive, until)
                    held += alive
                    if alive < hop.count:
                        break
            self.flush_uses()
        return held

    def maintain(self, *, clock_jumped: bool) -> None:
        """Persist uses, delete what is past its life (not in a pass in which the clock jumped)."""
        with self._write:
            self.flush_uses()
            if not clock_jumped:
                with self._index.read() as txn:
                    policy = self.policies.current(txn)
                self.space.expire(policy)

    def take_out(self, place: int, keep: int, reason: Reason) -> None:
        """Shorten an extent to `keep` blocks, because of what was found on the backend or what an operator asked."""
        with self._write:
            with self._index.read() as txn:
                life = txn.life(place)
            if life is not None and life.n > keep:
                cut = Cut(place, life.n, keep, reason)
                self.space.apply(ReclaimPlan((cut,), cut.freed))

    def quarantine(self, place: int, keep: int, key: bytes, reason: str) -> None:
        """Take a block that did not verify out of the index, and note it for `kvctl verify`."""
        self.take_out(place, keep, "corrupt")
        with self._index.write() as txn:
            note_damage(txn, Damage(key.hex(), place >> 32, (place & 0xFFFFFFFF) + keep, reason, self._clock.wall()))

    def lose_segment(self, number: int) -> None:
        """Forget a segment whose file is gone."""
        with self._write:
            self.space.lose(number)

    def flush(self) -> None:
        """Make everything committed so far durable."""
        with self._write:
            self.flush_uses()
            self.space.flush()

    def close(self) -> None:
        """Persist uses and seal the active segments."""
        with self._write:
            self.flush_uses()
            self.space.close()
            self._index.sync()


def _extend(runs: list[tuple[int, int]], first: int, count: int) -> None:
    """Add (first, count) to runs, joined to the last one where they touch."""
    if runs and runs[-1][0] + runs[-1][1] == first:
        runs[-1] = (runs[-1][0], runs[-1][1] + count)
    else:
        runs.append((first, count))


def _first(runs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The leading `count` blocks of runs: parents before leaves."""
    kept = []
    for first, length in runs:
        if count <= 0:
            break
        kept.append((first, min(length, count)))
        count -= length
    return kept
