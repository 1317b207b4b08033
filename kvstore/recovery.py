"""What opening a store may have to mend: writers that died, files nobody knows, an index that is gone or doubtful.

The index is disposable. After a crash of a process it is whole and only leftovers are swept; after a crash of the
machine, or when it is missing, it is built anew from segment footers and, for segments without one, slot trailers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from duokv.kvstore.backend import Backend, FileInfo, Lock, ReadOp
from duokv.kvstore.buffers import aligned
from duokv.kvstore.checkpoint import Checkpoint, read_lives
from duokv.kvstore.errors import StoreError
from duokv.kvstore.events import Degraded, Event
from duokv.kvstore.extent import PREFIX_BYTES, Extent, Life, stamp_of
from duokv.kvstore.geometry import PAGE_BYTES, TRAILER_BYTES, CacheGeometry
from duokv.kvstore.index import INDEX_FORMAT, Index, SegmentInfo, WriteTxn
from duokv.kvstore.origin import Origin
from duokv.kvstore.overlap import part_overlaps, place_extent
from duokv.kvstore.policybook import PolicyBook, decode_policy
from duokv.kvstore.record import BlockCodec, Trailer
from duokv.kvstore.segment import parse_name, read_footer, seal_file
from duokv.kvstore.walk import Runs, extend_runs

POLICY_FILE = "policy.json"
_READ_S = 60.0
_PROBES = 64
"""Trailers asked for at once."""
_WRITER = b"writer:"


@dataclass(slots=True)
class Recovered:
    """What a recovery did."""

    rebuilt: bool = False
    segments: int = 0
    extents: int = 0
    blocks: int = 0
    swept: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lives_known: bool = True


class Recovery:
    """Mends one store while the caller holds its open lock.

    give_up: whether a rebuild does without what cannot be read now; else it is a StoreError, with nothing changed.
    """

    def __init__(
        self, *, index: Index, backend: Backend, geometry: CacheGeometry, boot_id: str, emit: Callable[[Event], None],
        now_s: float, give_up: bool = False,
    ) -> None:  # fmt: skip
        self._index = index
        self._give_up = give_up
        self._backend = backend
        self._geometry = geometry
        self._codec = BlockCodec(geometry)
        self._boot = boot_id.encode()
        self._emit = emit
        self._now_s = now_s
        memory = aligned(_PROBES * PAGE_BYTES)
        self._pages = [memory[at : at + PAGE_BYTES] for at in range(0, len(memory), PAGE_BYTES)]

    def run(self) -> Recovered:
        """Make the index and the files agree; cheap when the last shutdown was clean."""
        done = Recovered()
        with self._index.read() as txn:
            version = txn.meta(b"format")
            boot = txn.meta(b"boot")
            writers = txn.meta_names(_WRITER)
        if version is not None and int.from_bytes(version, "little") != INDEX_FORMAT:
            raise StoreError(
                f"index {self._index.path}: format {int.from_bytes(version, 'little')}, this version reads "
                f"{INDEX_FORMAT}; delete the index to rebuild it"
            )
        dead = [name for name in writers if self._is_dead(name)]
        if version is None or (boot != self._boot and writers):
            self._rebuild(done)
            dead = [name for name in writers if self._is_dead(name)] if version is not None else []
        # Once a boot also after a clean close: power loss may have brought back a removed file or a punched slot.
        crashed = bool(dead) or done.rebuilt or boot != self._boot
        self._sweep(done, crashed=crashed, unsynced=boot in (None, self._boot))
        with self._index.write() as txn:
            txn.put_meta(b"format", INDEX_FORMAT.to_bytes(2, "little"))
            txn.put_meta(b"boot", self._boot)
            for name in dead:
                txn.drop_meta(_WRITER + name.encode())
        return done

    def _is_dead(self, writer: str) -> bool:
        lock = self._backend.lock(f"writer-{writer}")
        if lock is not None:
            lock.release()
        return lock is not None

    # -- leftovers ---------------------------------------------------------------------------------------------------

    def _sweep(self, done: Recovered, *, crashed: bool, unsynced: bool) -> None:
        with self._index.read() as txn:
            known = dict(txn.segments())
        unsealed = {info.writer for info in known.values() if not info.sealed}
        if not crashed and not any(self._is_dead(writer) for writer in unsealed):
            return
        files = {file.name: file for file in self._backend.list("seg/")}
        alive: dict[str, bool] = {}
        for number, info in known.items():
            file = files.pop(info.name(number), None)
            if alive.setdefault(info.writer, not self._is_dead(info.writer)):
                continue
            if file is None:
                self._forget(number)
                done.swept.append(info.name(number))
            elif not info.sealed:
                self._finish(number, info)
            else:
                if unsynced:
                    self._sync(file)
                self._repunch(number, info, file)
        for name in files:
            parsed = parse_name(name)
            if parsed and not alive.setdefault(parsed[0], not self._is_dead(parsed[0])):
                self._backend.remove(name)
                done.swept.append(name)

    def _forget(self, number: int) -> None:
        with self._index.write() as txn:
            for place, life in list(txn.lives(number)):
                txn.note_gaps()
                txn.drop_extent(place, life.first)
            txn.drop_segment(number)

    def _finish(self, number: int, info: SegmentInfo) -> None:
        """Seal a dead writer's segment with what the index knows of it."""
        name = info.name(number)
        with self._index.read() as txn:
            lives = list(txn.lives(number))
            entries = [
                (life.last_use(0), extent)
                for place, life in lives
                if (extent := txn.extent(life.first)) is not None and extent.place == place
            ]
        if not lives:
            self._backend.remove(name)
            self._forget(number)
            return
        try:
            writer = self._backend.resume(name)
            writer.sync()
            seal_file(writer, entries, info.used, self._geometry, sync=writer.sync)
        except OSError as error:
            self._emit(Degraded(name, f"left unsealed: {error}"))
            return
        with self._index.write() as txn:
            info.sealed = True
            txn.put_segment(number, info)
        for file in self._backend.list(name):
            self._repunch(number, info, file)

    def _sync(self, file: FileInfo) -> None:
        """Make a sealed segment durable: its writer may have died, in this boot, with that to be done."""
        try:
            writer = self._backend.resume(file.name)
            writer.sync()
            writer.seal(file.size)
        except OSError as error:
            self._emit(Degraded(file.name, f"may not be durable: {error}"))

    def _repunch(self, number: int, info: SegmentInfo, file: FileInfo) -> None:
        """Give back slots that died just before a crash, and count what the file really holds."""
        slot = self._geometry.slot_bytes
        with self._index.read() as txn:
            live = sorted((place & 0xFFFFFFFF, life.n) for place, life in txn.lives(number))
        if not live:
            self._backend.remove(file.name)
            self._forget(number)
            return
        if self._backend.can_punch and file.allocated > sum(n for _, n in live) * slot + (file.size - info.used * slot):
            dead = _gaps(live, info.used)
            if dead:
                self._backend.punch(file.name, [(at * slot, n * slot) for at, n in dead])
                file = next(iter(self._backend.list(file.name)), file)
        with self._index.write() as txn:
            # Asked again: other processes cut extents meanwhile.
            if (now := txn.segment(number)) is not None:
                now.allocated, now.live = file.allocated, sum([life.n for _, life in txn.lives(number)])
                txn.put_segment(number, now)

    # -- rebuild -----------------------------------------------------------------------------------------------------

    def _rebuild(self, done: Recovered) -> None:
        done.rebuilt = True
        checkpoint = read_lives(self._backend)
        done.lives_known = checkpoint is not None
        raw_policy = self._backend.read_file(POLICY_FILE)
        policy = None if raw_policy is None else decode_policy(raw_policy, where=POLICY_FILE)
        highest = 0
        with self._index.write() as txn:
            registered = [name for name in txn.meta_names(_WRITER) if not self._is_dead(name)]
            txn.clear()
            for name in registered:
                txn.put_meta(_WRITER + name.encode(), b"")
            for file in self._backend.list("seg/"):
                parsed = parse_name(file.name)
                if parsed is None:
                    continue
                highest = max(highest, parsed[1])
                self._read_segment(txn, file, parsed[0], parsed[1], checkpoint or Checkpoint(), done)
            part_overlaps(txn)
            if done.segments:
                txn.note_gaps()
            for number, info in txn.segments():
                info.live = sum(life.n for _, life in txn.lives(number))
                txn.put_segment(number, info)
                done.blocks += info.live
            done.extents = txn.count_extents()
            # Never a number that the checkpoint knows: it would take the new segment's extents for dropped ones.
            following = max(highest + 1, checkpoint.next_segment if checkpoint else 1)
            txn.put_meta(b"next_segment", following.to_bytes(4, "little"))
            if policy is not None:
                PolicyBook.put(txn, policy)
        if done.segments:
            how = "" if done.lives_known else "; last uses were lost and set to now"
            self._emit(Degraded("index", f"rebuilt from {done.segments} segments, {done.blocks} blocks{how}"))

    def _read_segment(
        self, txn: WriteTxn, file: FileInfo, writer: str, number: int, checkpoint: Checkpoint, done: Recovered
    ) -> None:
        footer = read_footer(self._backend, file, self._geometry, deadline_s=_READ_S)
        if isinstance(footer, str):
            entries = list(self._scan(file, number))
            sealed, used = False, max((e.first_slot + e.blocks for _, e in entries), default=0)
            if not entries:
                done.unreadable.append(f"{file.name}: {footer}, and no whole slot")
                return
        else:
            entries = [(stamp, extent) for stamp, extent in footer.entries if extent.segment == number]
            sealed, used = True, footer.used
        parts = [part for entry in entries for part in self._parts(*entry, checkpoint)]
        # A scan has seen each slot that it names.
        whole = [True] * len(parts)
        if sealed:
            whole = self._have_trailers(file, [(extent, life.n - 1) for extent, life in parts])
        for (extent, life), is_whole in zip(parts, whole, strict=True):
            # A cut takes a tail; of approximate ones any blocks may have been replaced.
            sure = not sealed or (is_whole and extent.origin is Origin.EXACT)
            for first, count in [(0, life.n)] if sure else self._present(file, extent, life.n):
                part = extent.rest(first)
                left = life.rest(first, part.prefixes[:PREFIX_BYTES])
                left.cut(count)
                place_extent(txn, part, left)
        class_id = entries[0][1].class_id if entries else 0
        txn.put_segment(number, SegmentInfo(writer, class_id, used, used, 0, file.allocated, sealed, 0.0))
        done.segments += 1

    def _parts(self, stamp: int, extent: Extent, checkpoint: Checkpoint) -> Iterator[tuple[Extent, Life]]:
        """What is left of an extent as it was found: the parts the checkpoint lists, and all that is younger.

        What is listed may be more than what was found: it may have been cut since, or lie around a slot that is lost.
        """
        seen = checkpoint.seen(extent.segment) - extent.first_slot
        place, end = extent.place, extent.place + max(0, min(seen, extent.blocks))
        for listed, life in checkpoint.overlapping(place, end):
            first = max(listed, place)
            part = extent.rest(first - place)
            left = life.rest(first - listed, part.prefixes[:PREFIX_BYTES])
            left.cut(min(end, listed + life.n) - first)
            if left.chain_pos == part.chain_pos and (listed < place or life.first == left.first):
                yield part, left
        if seen < extent.blocks:
            part = extent.rest(max(0, seen))
            life = Life.born(part.blocks, part.chain_pos, part.prefixes[:PREFIX_BYTES], part.class_id, stamp)
            life.use(part.class_id, life.n, stamp_of(self._now_s))
            for old, start in checkpoint.sharing(part):
                life.inherit(old, start)
            yield part, life

    def _present(self, file: FileInfo, extent: Extent, blocks: int) -> Runs:
        """The runs of an extent's first `blocks` blocks whose slots still hold their trailers."""
        runs: Runs = []
        for block, has in enumerate(self._have_trailers(file, [(extent, block) for block in range(blocks)])):
            if has:
                extend_runs(runs, block, 1)
        return runs

    def _have_trailers(self, file: FileInfo, blocks: Sequence[tuple[Extent, int]]) -> list[bool]:
        """Whether the slots of these blocks, each of an extent of the file, hold their trailers."""
        slot = self._geometry.slot_bytes
        have = []
        for at in range(0, len(blocks), _PROBES):
            some = blocks[at : at + _PROBES]
            ops = [
                ReadOp(file.name, (extent.first_slot + block + 1) * slot - PAGE_BYTES, (page,))
                for (extent, block), page in zip(some, self._pages, strict=False)
            ]
            for (extent, block), page, got in zip(
                some, self._pages, self._backend.read_many(ops, deadline_s=_READ_S), strict=False
            ):
                prefix = extent.prefixes[block * PREFIX_BYTES : (block + 1) * PREFIX_BYTES]
                # One that cannot be read is taken for one that does: a miss as long as that is so.
                have.append(got < 0 or self._codec.claims(bytes(page[:got][-TRAILER_BYTES:]), prefix))
        return have

    def _scan(self, file: FileInfo, number: int) -> Iterator[tuple[int, Extent]]:
        """Read a segment slot by slot: consecutive blocks of one chain, stored alike at one time, make an extent."""
        slot_bytes = self._geometry.slot_bytes
        memory = aligned(slot_bytes)
        row = np.frombuffer(memory, np.uint8)
        run: list[Trailer] = []
        first = 0
        for slot in range(file.size // slot_bytes):
            got = self._backend.read_many([ReadOp(file.name, slot * slot_bytes, (memory,))], deadline_s=_READ_S)
            if got[0] < 0 and not self._give_up:
                what = f"{file.name}: slot {slot} cannot be read while the index is built anew"
                raise StoreError(f"{what}; open the store when the device answers, or use kvctl rebuild --force")
            trailer = self._codec.decode(row) if got == [slot_bytes] else "unreadable"
            follows = isinstance(trailer, Trailer) and run and _follows(run[-1], trailer)
            if run and not follows:
                yield self._extent(number, first, run)
                run = []
            if isinstance(trailer, Trailer):
                if not run:
                    first = slot
                run.append(trailer)
        if run:
            yield self._extent(number, first, run)

    def _extent(self, number: int, first: int, run: list[Trailer]) -> tuple[int, Extent]:
        head = run[0]
        prefixes = b"".join(trailer.identity.key[:PREFIX_BYTES] for trailer in run)
        extent = Extent(number, first, head.identity.chain_pos, head.class_id, Origin(head.origin), prefixes)
        return stamp_of(head.stored_at_s), extent


def _follows(before: Trailer, after: Trailer) -> bool:
    return (
        after.identity.parent == before.identity.key
        and (after.origin, after.class_id, after.stored_at_s) == (before.origin, before.class_id, before.stored_at_s)
    )  # fmt: skip


def _gaps(live: Sequence[tuple[int, int]], used: int) -> list[tuple[int, int]]:
    gaps, at = [], 0
    for first, count in live:
        if first > at:
            gaps.append((at, first - at))
        at = max(at, first + count)
    if at < used:
        gaps.append((at, used - at))
    return gaps


def take_lock(backend: Backend, name: str, *, wait_s: float) -> Lock:
    """Take a lock that others hold briefly; StoreError after `wait_s` seconds."""
    until = time.monotonic() + wait_s
    while (lock := backend.lock(name)) is None:
        if time.monotonic() > until:
            raise StoreError(
                f"store: lock {name!r} is held by another process for over {wait_s:.0f} s; see what holds it"
            )
        time.sleep(0.02)
    return lock
