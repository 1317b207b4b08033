"""Extents in memory: those this process met, with uses not yet written to the index, and the stamps that order uses.

A walk hops from extent to extent in memory as long as nobody else wrote to the index since they were read, and asks the
index for the rest.
"""

from __future__ import annotations

from duokv.kvstore.extent import EXTENT_HEAD, PLACE, PREFIX_BYTES, SEQUENCE_BITS, Cutoffs, Extent, Life, stamp_of
from duokv.kvstore.hop import Hop, Hops, Walked, agreeing, shared_way
from duokv.kvstore.index import IndexTxn, WriteTxn
from duokv.kvstore.keys import KEY_BYTES

_MOST_EXTENTS = 100_000
"""Kept; beyond it all but those with unwritten uses are forgotten."""
_MOST_USED = 100_000
"""Extents, counted once for each walk, whose uses may wait to be noted."""
CLOCK_BACK = (5_000 << SEQUENCE_BITS) - 1
"""5 s, in stamps. A wall clock that went back further is followed, so that stamps do not stay in the future."""


class Stamps:
    """Hands out rising stamps that also date a use. Not thread-safe."""

    def __init__(self) -> None:
        self._last = 0

    def next(self, now_s: float) -> int:
        """The stamp of a use at `now_s` seconds since the epoch."""
        stamp = stamp_of(now_s)
        if stamp <= self._last < stamp + CLOCK_BACK:
            stamp = self._last + 1
        self._last = stamp
        return stamp


class ExtentCache:
    """Extents by place, and which of them hold uses the index has not seen. Not thread-safe.

    The index stays the truth for how many blocks an extent has; uses merge by max in either direction, so that
    processes of one host can renew the same extent.
    """

    def __init__(self) -> None:
        self._hops: dict[bytes, Hop] = {}
        self._firsts: dict[bytes, Hop] = {}
        """By key prefix of the first block, for walks."""
        self._dirty: set[bytes] = set()
        self._epoch = 0
        """Grows when another process has written: what was read before may be otherwise now."""
        self._era = 0
        """Grows when an extent that is known here may be otherwise, for whatever reason."""
        self._snapshot = -1
        """The write transaction whose outcome this is."""
        self._asked: tuple[bytes, int, int, int | None] = (b"", 0, 0, None)
        """(key blob, first block, blocks, epoch) of the last walk."""
        self._walked = Walked(0, 0)
        """Its answer: a commit often follows its lookup."""
        self._used: dict[tuple[bytes, int, int], tuple[Hops, int]] = {}
        """(walk, stamp) by (place of its last extent, blocks of it, class): uses not yet noted in its extents' lives.

        Until they are, lives say less than is true, never more.
        """
        self._waiting = 0
        """Extents of the walks in `_used`, counted once for each."""

    def met(self, first: bytes) -> bool:
        """Whether an extent that begins with this key prefix was met; it may be gone since."""
        return first in self._firsts

    def walk(self, txn: IndexTxn, blob: bytes, block: int, blocks: int) -> Walked:
        """Follow a prompt's key blob from block `block` to the first one that no extent holds.

        Chained keys: equal last prefixes imply that all before are equal, so one compare usually settles a hop.
        """
        self._make_room()
        epoch = self._epoch_of(txn)
        asked = (blob, block, blocks, epoch)
        if asked == self._asked:
            return self._walked
        walked = Walked(block, block)
        self._follow(txn, blob, block * KEY_BYTES, blocks * KEY_BYTES, epoch, walked)
        if epoch is not None:
            self._asked, self._walked = asked, walked
        return walked

    def _follow(self, txn: IndexTxn, blob: bytes, at: int, end: int, epoch: int | None, walked: Walked) -> None:
        """Hop from extent to extent from byte `at` of a key blob on."""
        known = self._firsts.get
        hops = walked.hops
        # Of extents that overlap, those after a gap may be reached another way than from the beginning.
        linking = epoch is not None and at == 0
        stepped: list[Hop] = []
        goal: Hop | None = None
        tried: Hop | None = None
        while at < end:
            hop = known(blob[at : at + PREFIX_BYTES])
            after = end + 1
            if hop is not None and hop.epoch == epoch and hop.life.chain_pos * KEY_BYTES == at:
                count = hop.life.n
                after = at + count * KEY_BYTES
                if hop.goal is not tried and hop.era == self._era:
                    tried = hop.goal
                    way, at = shared_way(hop, blob, at, end)
                    if way:
                        if hops and linking:
                            hop.before = hops[-1]
                        stepped.append(hop)
                        hops += way
                        goal = way[-1][0]
                        continue
            if hop is None or after > end or blob[after - KEY_BYTES : after - PREFIX_BYTES] != hop.last:
                hop, count = self._read(txn, blob, at, end, epoch)
                if hop is None or not count:
                    break
                after = at + count * KEY_BYTES
            stepped.append(hop)
            if hops and linking:
                hop.before = hops[-1]
            hops.append((hop, count))
            at = after
            if count == hop.life.n:
                goal = hop
        walked.end = at // KEY_BYTES
        walked.exact = next((hop.life.chain_pos for hop, _ in hops if hop.approx), walked.end)
        if linking:
            for hop in stepped:
                hop.goal, hop.era = goal, self._era

    def _read(self, txn: IndexTxn, blob: bytes, at: int, end: int, epoch: int | None) -> tuple[Hop | None, int]:
        """The extent that starts with the block at byte `at`, as the index has it, and the blocks they share."""
        record = txn.record(blob[at : at + PREFIX_BYTES])
        if record is None:
            return None, 0
        place = record[: PLACE.size]
        raw = txn.life_raw(place)
        if raw is None:
            return None, 0
        hop = self.get(place, raw)
        if hop.life.chain_pos * KEY_BYTES != at:
            # Two keys that agree in what the index keeps of them; ways must not lead in circles.
            return None, 0
        n = hop.life.n
        hop.last = record[EXTENT_HEAD + (n - 1) * PREFIX_BYTES : EXTENT_HEAD + n * PREFIX_BYTES]
        hop.approx = record[EXTENT_HEAD - 2] != 0
        hop.epoch = -1 if epoch is None else epoch
        self._firsts[hop.life.first] = hop
        return hop, agreeing(record, blob[at:end], min(n, (end - at) // KEY_BYTES))

    def get(self, place: bytes, raw: bytes) -> Hop:
        """The extent at `place`, whose life in the index is `raw`, with this process's own uses."""
        hop = self._hops.get(place)
        if hop is not None and hop.raw == raw:
            return hop
        life = Life.decode(raw)
        if hop is not None and hop.life.first != life.first:
            # A transaction that failed had given the place to another one.
            self._forget(place)
            self._dirty.discard(place)
            hop = None
        if hop is None:
            hop = self._hops[place] = Hop(place, raw, life)
            return hop
        if place in self._dirty:
            life.merge(hop.life)
            life.cut(life.n)
        hop.raw, hop.life, hop.epoch = raw, life, -1
        self._era += 1
        return hop

    def note_stored(self, extent: Extent, place: bytes, life: Life, raw: bytes) -> None:
        """Note an extent that was just stored, with the life that the index has of it."""
        hop = Hop(place, raw, life)
        hop.last = extent.prefixes[-PREFIX_BYTES:]
        hop.approx = extent.origin != 0
        hop.epoch = self._epoch
        self._make_room()
        self._hops[place] = self._firsts[life.first] = hop

    def use(self, hop: Hop, class_id: int, upto: int, stamp: int) -> None:
        """Record a use of an extent."""
        hop.life.use(class_id, upto, stamp)
        self._dirty.add(hop.place)

    def use_walk(self, hops: Hops, class_id: int, stamp: int) -> None:
        """Record one use over the extents of a walk from a chain's beginning on, as many blocks of each as used."""
        if hops:
            last, count = hops[-1]
            use = (last.place, count, class_id)
            before = self._used.get(use)
            # The clock may have gone back.
            if before is None or before[1] < stamp:
                self._used[use] = (hops, stamp)
            if before is None:
                self._waiting += len(hops)
                if self._waiting > _MOST_USED:
                    self._note_uses()

    def _note_uses(self) -> None:
        """Note the uses of walks in the lives of their extents."""
        noted: dict[tuple[bytes, int], int] = {}
        newest_first = sorted(self._used.items(), key=lambda used: used[1][1], reverse=True)
        for (_, _, class_id), (hops, stamp) in newest_first:
            for hop, count in reversed(hops):
                if noted.get((hop.place, class_id), 0) >= count:
                    # Whoever used this used all before it.
                    break
                noted[hop.place, class_id] = count
                known = self._hops.get(hop.place)
                if known is None:
                    # Forgotten meanwhile: the index is read again before this is written.
                    known = self._hops[hop.place] = hop
                    hop.epoch = -1
                # Another process may have shortened it.
                known.life.use(class_id, min(count, known.life.n), stamp)
        self._dirty.update([place for place, _ in noted])
        self._used.clear()
        self._waiting = 0

    def pending(self) -> int:
        """Extents with uses not yet in the index."""
        self._note_uses()
        return len(self._dirty)

    def alive_lead(self, txn: IndexTxn, held: Hops, cutoffs: Cutoffs) -> Hops:
        """The leading part of a walk that is alive; `held` itself if all of it is.

        A use covers a prefix, so under sliding rules a parent is never older than its child and the last one speaks
        for all; not so for a fixed life, which counts from the store time, nor for a parent stored anew.
        """
        if not held:
            return held
        last, count = held[-1]
        if not cutoffs.any_fixed and last.life.alive(cutoffs) >= count and not txn.has_gaps():
            return held
        self._note_uses()
        for i, (hop, count) in enumerate(held):
            alive = hop.life.alive(cutoffs)
            if alive < count:
                return [*held[:i], (hop, alive)] if alive else held[:i]
        return held

    def flush(self, txn: WriteTxn) -> None:
        """Write the pending uses, whole chains together: a parent must never look older than its child."""
        written: list[tuple[Hop, bytes]] = []
        gone = []
        epoch = self._epoch_of(txn)
        self._note_uses()
        for place in self._dirty:
            hop = self._hops.get(place)
            if hop is None or hop.epoch != epoch:
                raw = txn.life_raw(place)
                if raw is None:
                    gone.append(place)
                    continue
                hop = self.get(place, raw)
            encoded = hop.life.encode()
            txn.put_raw_life(place, encoded)
            written.append((hop, encoded))

        def settle(committed: bool) -> None:
            if not committed:
                return
            for hop, encoded in written:
                hop.raw = encoded
                self._dirty.discard(hop.place)
            for place in gone:
                self._forget(place)
                self._dirty.discard(place)

        txn.endings.append(settle)

    def ended(self, txn: WriteTxn, committed: bool) -> None:
        """Take note of a write transaction of this process that has ended: an index watcher."""
        if not committed:
            # A walk inside it may have read what is not so.
            self._next_epoch()
            return
        if txn.changed_firsts or txn.changed_places:
            self._asked = (b"", 0, 0, None)
        known = [first for first in txn.changed_firsts if self._firsts.pop(first, None) is not None]
        for place in txn.changed_places:
            self._forget(place)
        if known or txn.changed_places:
            self._era += 1
        if txn.wrote and self._snapshot == txn.snapshot:
            self._snapshot += 1

    def _epoch_of(self, txn: IndexTxn) -> int | None:
        """The epoch of what a transaction sees; None if that is not what is here: it is older, or changed by itself."""
        if txn.snapshot > self._snapshot:
            self._snapshot = txn.snapshot
            self._next_epoch()
        same = txn.snapshot == self._snapshot and not txn.changed_places and not txn.changed_firsts
        return self._epoch if same else None

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._era += 1

    def _forget(self, place: bytes) -> None:
        hop = self._hops.pop(place, None)
        if hop is not None:
            # What is forgotten keeps nothing else in memory.
            hop.before = hop.goal = None
            if self._firsts.get(hop.life.first) is hop:
                del self._firsts[hop.life.first]

    def _make_room(self) -> None:
        """Forget extents if there are many. Not in the midst of a walk: its uses would go to what nobody writes."""
        if len(self._hops) < _MOST_EXTENTS or len(self._hops) < 2 * len(self._dirty):
            return
        self._note_uses()
        self._era += 1
        self._hops = {place: self._hops[place] for place in self._dirty if place in self._hops}
        for hop in self._hops.values():
            hop.before = hop.goal = None
        self._firsts = {}
        self._asked = (b"", 0, 0, None)
