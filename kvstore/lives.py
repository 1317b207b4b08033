"""Lives in memory: decoded lives with uses not yet written to the index, and the stamps that order uses."""

from __future__ import annotations

from duokv.kvstore.extent import SEQUENCE_BITS, Life, stamp_of
from duokv.kvstore.index import IndexTxn

_KEPT = 100_000
CLOCK_BACK = (5_000 << SEQUENCE_BITS) - 1
"""A wall clock that went back further than this is followed, so that stamps do not stay in the future."""


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


class LifeCache:
    """Decoded lives by place, and which of them hold uses the index has not seen. Not thread-safe.

    The index stays the truth for how many blocks an extent has; uses merge by max in either direction, so that
    processes of one host can renew the same extent.
    """

    def __init__(self) -> None:
        self._lives: dict[bytes, tuple[bytes, Life]] = {}
        self._dirty: set[bytes] = set()

    def get(self, place: bytes, raw: bytes) -> Life:
        """The life at `place`, whose record in the index is `raw`, with this process's own uses."""
        cached = self._lives.get(place)
        if cached is not None and cached[0] == raw:
            return cached[1]
        life = Life.decode(raw)
        if cached is not None and place in self._dirty:
            life.merge(cached[1])
            life.cut(life.n)
        elif len(self._lives) >= _KEPT:
            self._shrink()
        self._lives[place] = (raw, life)
        return life

    def use(self, place: bytes, life: Life, class_id: int, upto: int, stamp: int) -> None:
        """Record a use on a life that `get` returned."""
        life.use(class_id, upto, stamp)
        self._dirty.add(place)

    def use_whole(self, hops: list[tuple[bytes, Life, int]], class_id: int, stamp: int) -> None:
        """Record one use over the extents of a walk: (place, life, blocks used) each, `stamp` newer than any before."""
        for _, life, count in hops:
            steps = life.steps.get(class_id)
            if steps is not None and steps[-1][0] <= count and steps[0][1] < stamp:
                life.steps[class_id] = [(count, stamp)]
            else:
                life.use(class_id, count, stamp)
        self._dirty.update([place for place, _, _ in hops])

    def pending(self) -> int:
        """Lives with uses not yet in the index."""
        return len(self._dirty)

    def flush(self, txn: IndexTxn) -> None:
        """Write the pending uses, whole chains together: a parent must never look older than its child."""
        written: dict[bytes, tuple[bytes, Life]] = {}
        gone = []
        for place in self._dirty:
            raw = txn.life_raw(place)
            if raw is None:
                gone.append(place)
                continue
            life = self.get(place, raw)
            encoded = life.encode()
            txn.put_life_raw(place, encoded)
            written[place] = (encoded, life)

        def settle(committed: bool) -> None:
            if committed:
                self._lives.update(written)
                for place in gone:
                    self._lives.pop(place, None)
                self._dirty.difference_update(written, gone)

        txn.endings.append(settle)

    def _shrink(self) -> None:
        self._lives = {place: self._lives[place] for place in self._dirty}
