"""Verified copies of blocks in host memory: a load of what was loaded or committed lately is a memcpy, not a read.

A copy is one of a slot, not of a key alone: it is known by its place (segment and slot) and the block key found there.
A published slot is written once, by one commit of one origin, and its place never names other bytes. So no copy ever
goes stale and none has to be invalidated: a block that was cut, quarantined, expired or replaced (EXACT over APPROX) is
not found again, since lookups ask the index, and what takes its place lies in another slot. A hit from before the cut
may be loaded from its copies, as it may from a slot that is not punched yet: they are the bytes it promised.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt

from duokv.kvstore.buffers import aligned
from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.extent import place_of
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.reader import Rows, copy_rows
from duokv.kvstore.spans import Span
from duokv.kvstore.walk import Runs, overlap

SMALL_SHARE = 0.4
"""Part of the rows on probation. With the paper's 0.1 a chat prompt leaves before its next turn comes, which costs up
to 11 points of hits on the public traces and gains none (`python -m duokv.bench.cache_policy`)."""
_GHOST_SHARE = 0.9
_NONE = -1

Filled = list[tuple[int, int]]
"""(row, place) of copies that are not published yet."""


class S3Fifo:
    """Which blocks have a row: S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache
    eviction", SOSP 2023). Knows ids and row numbers, no bytes. Not thread-safe.

    New blocks queue in a small FIFO; one that was not used by the time it comes up leaves, and only its id is
    remembered. One that was used moves to the main FIFO, as does one that returns while its id is remembered; there a
    use buys another round. So a long prompt that is seen once passes through the small queue and cannot empty the
    cache. Apart from the paper: one bit of use, since a counter up to 3 gained nothing, and `SMALL_SHARE`.

    A pinned row keeps its block.
    """

    def __init__(self, rows: int, *, small_share: float = SMALL_SHARE) -> None:
        self._small_rows = max(1, int(rows * small_share))
        self._ghosts = max(1, int(rows * _GHOST_SHARE))
        self._row: dict[int, int] = {}
        self._id = [_NONE] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        # Bytes for the queues, which go row by row; the view for uses, which come by the hundred.
        self._used = bytearray(rows)
        self._used_view = np.frombuffer(self._used, np.uint8)
        self._pins = np.zeros(rows, np.int32)

    def __len__(self) -> int:
        return len(self._row)

    def find(self, ids: Sequence[int]) -> npt.NDArray[np.intp]:
        """The row of each id, -1 for those that have none. Not a use."""
        return np.fromiter(map(self._row.get, ids, repeat(_NONE)), np.intp, len(ids))

    def use(self, rows: npt.NDArray[np.intp]) -> None:
        """Note that the blocks in these rows were wanted."""
        self._used_view[rows] = 1

    def pin(self, rows: npt.NDArray[np.intp]) -> None:
        """Keep the blocks in these rows, each named once, until `unpin`; pins add up."""
        self._pins[rows] += 1

    def unpin(self, rows: npt.NDArray[np.intp]) -> None:
        """Take one pin of each away."""
        self._pins[rows] -= 1

    def take(self, new: int) -> int | None:
        """A row to fill for block `new`, evicting another if it must; it belongs to nobody until `put` or `give_back`.

        None if the block has a row already, or if every row is pinned or being filled.
        """
        if new in self._row:
            return None
        return self._free.pop() if self._free else self._evict()

    def put(self, row: int, new: int) -> None:
        """Give block `new` a row from `take`, which is free if the block got one meanwhile."""
        if new in self._row:
            self._free.append(row)
            return
        self._row[new] = row
        self._id[row] = new
        self._used[row] = 0
        if new in self._ghost:
            del self._ghost[new]
            self._main.append(row)
        else:
            self._small.append(row)

    def give_back(self, row: int) -> None:
        """Free a row from `take` that was not filled."""
        self._free.append(row)

    def _evict(self) -> int | None:
        # Each row may come up on probation, used, and once more: whatever is left after that is pinned.
        for _ in range(3 * len(self._id)):
            probation = len(self._small) >= self._small_rows or not self._main
            queue = self._small if probation else self._main
            if not queue:
                return None
            row = queue.popleft()
            if self._used[row] or self._pins[row]:
                self._used[row] = 0
                self._main.append(row)
                continue
            old = self._id[row]
            del self._row[old]
            if probation:
                self._ghost[old] = None
                if len(self._ghost) > self._ghosts:
                    self._ghost.popitem(last=False)
            return row
        return None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A block cache at one moment: copies that can be lent, their bytes, and the bytes of its memory."""

    blocks: int
    used_bytes: int
    capacity_bytes: int


class BlockCache:
    """Copies of slots by place and key. Thread-safe; the lock is never held while a block is copied.

    A row that is lent is not overwritten until the loan ends, and one being filled is seen by nobody before. The memory
    is allocated and touched once, here, so that no copy pays for page faults. capacity_bytes: rounded down to whole
    slots; 0 keeps nothing.
    """

    def __init__(self, *, capacity_bytes: int, slot_bytes: int) -> None:
        if 0 < capacity_bytes < slot_bytes:
            raise UsageError(f"block cache of {capacity_bytes} bytes holds no block; give 0 or at least {slot_bytes}")
        self.rows = capacity_bytes // slot_bytes
        self._slot_bytes = slot_bytes
        try:
            memory = aligned(self.rows * slot_bytes)
        except OSError as error:
            raise StoreError(
                f"block cache of {capacity_bytes} bytes: refused ({error.strerror}); lower cache_bytes"
            ) from error
        self._slab: Rows = np.frombuffer(memory, np.uint8).reshape(self.rows, slot_bytes)
        self._keys = np.zeros((self.rows, KEY_BYTES), np.uint8)
        self._policy = S3Fifo(self.rows)
        self._lock = threading.Lock()

    def borrow(self, blob: bytes, spans: Sequence[Span]) -> Loan:
        """Lend what is held of the blocks of `spans`, which follow each other from block 0; a use of each.

        blob: their keys. Release the loan when they were copied.
        """
        places: list[int] = []
        if self.rows:
            for span in spans:
                first = place_of(span.segment, span.slot)
                places.extend(range(first, first + span.count))
        rows = np.empty(0, np.intp)
        if places:
            keys = np.frombuffer(blob, np.uint64, len(places) * KEY_BYTES // 8).reshape(len(places), -1)
            with self._lock:
                rows = self._policy.find(places)
                # A wrong index could name a slot for a block that is another one: that is for the reader to find out.
                rows[(self._keys.view(np.uint64)[rows] != keys).any(axis=1)] = _NONE
                held = rows[rows != _NONE]
                self._policy.use(held)
                self._policy.pin(held)
        return Loan(self, blob, places, rows)

    def add(self, keys: bytes, place: int, rows: Rows) -> None:
        """Copy the verified slots from `place` on in, but for those held already and those no row can be had for."""
        self._publish(self._fill(keys, place, rows))

    def intake(self) -> Intake:
        """Take copies in that are not to be seen yet."""
        return Intake(self)

    def stats(self) -> CacheStats:
        """Return the state of this moment."""
        blocks = len(self._policy)
        return CacheStats(blocks, blocks * self._slot_bytes, self.rows * self._slot_bytes)

    def _fill(self, keys: bytes, place: int, rows: Rows) -> Filled:
        """Copy slots from `place` on into rows that nobody sees, as far as they can be had."""
        with self._lock:
            taken = [(i, at) for i in range(len(rows)) if (at := self._policy.take(place + i)) is not None]
        names = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
        for i, at, count in _side_by_side(taken):
            self._slab[at : at + count] = rows[i : i + count]
            self._keys[at : at + count] = names[i : i + count]
        return [(at, place + i) for i, at in taken]

    def _publish(self, filled: Filled) -> None:
        with self._lock:
            for at, place in filled:
                self._policy.put(at, place)

    def _give_back(self, rows: Iterable[int]) -> None:
        with self._lock:
            for at in rows:
                self._policy.give_back(at)

    def _copy(self, rows: npt.NDArray[np.intp], out: Rows) -> None:
        if out.shape[1] == self._slot_bytes and out.flags.c_contiguous:
            # One call for scattered rows, as fast as for neighbours, which lets other threads run; "clip" is what makes
            # it write straight into `out`.
            np.take(self._slab, rows, axis=0, out=out, mode="clip")
            return
        for i, row in enumerate(rows.tolist()):
            copy_rows(self._slab[row : row + 1], out[i : i + 1])

    def _unpin(self, rows: npt.NDArray[np.intp]) -> None:
        with self._lock:
            self._policy.unpin(rows)


class Loan:
    """What one load borrows of the cache; a context manager that gives it back. `copy` is thread-safe.

    Blocks are counted from the first one that was asked for.
    """

    def __init__(self, cache: BlockCache, blob: bytes, places: Sequence[int], rows: npt.NDArray[np.intp]) -> None:
        self._cache = cache
        self._blob = blob
        self._places = places
        self._rows = rows
        self._held = rows != _NONE
        self._lent = rows[self._held]

    def held(self, blocks: int) -> int:
        """How many of the first `blocks` blocks are held."""
        return int(np.count_nonzero(self._held[:blocks]))

    def runs(self, *, until: int, max_rows: int) -> Runs:
        """The blocks before `until` that are held, in runs of at most `max_rows`."""
        return [
            (at, min(max_rows, first + count - at))
            for first, count in _runs(self._held[:until])
            for at in range(first, first + count, max_rows)
        ]

    def missing(self, spans: Sequence[Span]) -> list[Span]:
        """The parts of `spans` that are not held."""
        if not len(self._lent):
            return list(spans)
        if len(self._lent) == len(self._held):
            return []
        gaps = _runs(~self._held)
        return [
            Span(span.segment, span.slot + low - span.block, low, count)
            for span in spans
            for low, count in overlap(gaps, span.block, span.count)
        ]

    def copy(self, first: int, out: Rows) -> None:
        """Fill `out`, `[n, any width]`, with what fits of the blocks from `first` on, all of which are held."""
        self._cache._copy(self._rows[first : first + len(out)], out)

    def keep(self, block: int, rows: Rows) -> None:
        """Put blocks from consecutive slots that were read and verified into the cache; also once the loan is over."""
        if self._places and len(rows):
            keys = self._blob[block * KEY_BYTES : (block + len(rows)) * KEY_BYTES]
            self._cache.add(keys, self._places[block], rows)

    def release(self) -> None:
        """Give the rows back; idempotent."""
        lent, self._lent = self._lent, self._lent[:0]
        if len(lent):
            self._cache._unpin(lent)

    def __enter__(self) -> Loan:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Intake:
    """Copies of slots that are written and not published yet: until they are, their places may be written once more.

    A context manager that forgets what was not published. Not thread-safe.
    """

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._filled: Filled = []

    def copy(self, blob: bytes, place: int, block: int, rows: Rows) -> None:
        """Copy consecutive slots from `place` on: blocks `block`.. of the prompt whose keys are in `blob`."""
        keys = blob[block * KEY_BYTES : (block + len(rows)) * KEY_BYTES]
        self._filled += self._cache._fill(keys, place, rows)

    def publish(self) -> None:
        """Let loads have the copies, now that the index has their slots."""
        filled, self._filled = self._filled, []
        self._cache._publish(filled)

    def __enter__(self) -> Intake:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache._give_back(at for at, _ in self._filled)
        self._filled = []


def _side_by_side(taken: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs that count up together, as (i, at, count)."""
    joined: list[tuple[int, int, int]] = []
    for i, at in taken:
        if joined and (i, at) == (joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]):
            joined[-1] = (*joined[-1][:2], joined[-1][2] + 1)
        else:
            joined.append((i, at, 1))
    return joined


def _runs(flags: npt.NDArray[np.bool_]) -> Runs:
    """Where flags are set, as (first, count)."""
    edges: list[int] = (np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist()
    if flags[:1].any():
        edges.insert(0, 0)
    if flags[-1:].any():
        edges.append(len(flags))
    return [(low, high - low) for low, high in zip(edges[::2], edges[1::2], strict=True)]
