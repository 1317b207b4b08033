"""Commits that were taken over: a thread of their own writes them in order, and lookups find them meanwhile."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from duokv.kvstore.blockstore import BlockStore
from duokv.kvstore.buffers import BufferPool, Lent
from duokv.kvstore.errors import StoreError
from duokv.kvstore.events import BlocksStored, Degraded, Event, StoreFailed
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.origin import Origin
from duokv.kvstore.reader import Rows
from duokv.kvstore.record import Chain, Row
from duokv.kvstore.staging import fill_rows
from duokv.kvstore.walk import Committed


@dataclass(eq=False, slots=True)
class Pending:
    """A commit of blocks [first, total) of a chain that was taken over.

    lent: their payloads, a row each, until they are written. given_up: how many segments had been given up before.
    needs: commits that bring what this one was told is present. uses: of lookups that found its blocks, to be noted
    once they are stored: blocks by (key blob, traffic class). is_whole: whether all is stored, once `done` is set.
    """

    number: int
    chain: Chain
    first: int
    total: int
    traffic: str | None
    origin: Origin
    lent: Lent | None
    given_up: int
    needs: tuple[Pending, ...] = ()
    outcome: Committed | None = None
    is_whole: bool = False
    uses: dict[tuple[bytes, str | None], int] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def has(self, block: int, key: bytes) -> bool:
        """Whether it brings this block of a chain."""
        return self.first <= block < self.total and self.chain.blob.startswith(key, block * KEY_BYTES)

    def shared(self, blob: bytes, block: int, blocks: int) -> int:
        """The block after the last one that this has of a prompt's first `blocks`, of which it has `block`."""
        mine = self.chain.blob

        def differs(at: int) -> bool:
            key = slice(at * KEY_BYTES, (at + 1) * KEY_BYTES)
            return mine[key] != blob[key]

        # Chained keys: all before an equal one are equal.
        return bisect_left(range(min(self.total, blocks)), True, lo=block, key=differs)


@dataclass(frozen=True, slots=True)
class Coming:
    """Blocks of a prompt up to `end` that commits under way bring; the first ones up to `exact` are exact.

    approx: whether the one after them is on its way too, but approximate.
    """

    end: int
    exact: int
    pending: tuple[Pending, ...] = ()
    approx: bool = False


class WriteBehind:
    """A queue of bounded size and the thread that empties it. Thread-safe.

    write: stores one commit; what it raises is that commit's loss and an event. capacity_bytes: of rows that wait.
    waits: whether a commit waits for room, or is refused without. An empty queue takes anything, so that none is too
    large.
    """

    def __init__(
        self, *, blocks: BlockStore, write: Callable[[Pending], Committed], emit: Callable[[Event], None],
        pool: BufferPool, slot_bytes: int, capacity_bytes: int, waits: bool,
    ) -> None:  # fmt: skip
        self._blocks = blocks
        self._write = write
        self._emit = emit
        self._pool = pool
        self._slot_bytes = slot_bytes
        self._capacity_bytes = capacity_bytes
        self._waits = waits
        self._pid = os.getpid()
        # Taken by itself: an interrupt inside a condition's own `with`, which is Python, would leave it taken for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._door = threading.Lock()
        """Held by whoever waits for room, so that small commits do not go before a large one for ever."""
        self._room: dict[int, int] = {}
        """Bytes taken, by the number of the commit."""
        self._numbers = count()
        self._queue: deque[Pending] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(
        self, chain: Chain, first: int, total: int, traffic: str | None, origin: Origin, sources: Sequence[Row] | Rows
    ) -> tuple[Committed, Pending]:
        """Copy blocks [first, total) of a chain from the first absent one on, and take them over to be stored.

        Returns what is to become of them. StoreError once closed.
        """
        given_up, waiting, exact_only = self._blocks.space.given_up, self.pending, origin is Origin.EXACT
        found = self._blocks.find(chain.blob, total, traffic, use=False)
        there = coming(
            waiting, chain.blob, found.exact if exact_only else found.blocks, total, exact_only=exact_only
        )  # fmt: skip
        start = max(first, there.end)
        number = next(self._numbers)
        try:
            room = self._reserve(number, (total - start) * self._slot_bytes)
            # Without room what is stored is renewed all the same.
            written = start if room else total
            if start > first or not room:
                name = traffic or self._blocks.default_class
                self._emit(BlocksStored(name, 0, start - first, written - start, 0))
            lent = self._pool.lend(total - written, self._slot_bytes)
            fill_rows(lent.rows, sources[written - first :])
            taken = Pending(number, chain, written, total, traffic, origin, lent, given_up, there.pending)
            self._hand_over(taken)
        except BaseException:
            with self._lock:
                if all(one.number != number for one in self._queue):
                    self._room.pop(number, None)
                # What was interrupted may be waking the others.
                self._changed.notify_all()
            raise
        if not room:
            return Committed(0, start - first, total - start), taken
        if coming(waiting, chain.blob, found.blocks, total).end < first:
            # Their parent outlived its life, or is nowhere: only writing them tells what becomes of them.
            taken.done.wait()
            return taken.outcome or Committed(0, 0, total - first), taken
        return Committed(total - start, start - first, 0), taken

    def use(self, pending: Pending, blob: bytes, blocks: int, traffic: str | None) -> None:
        """Note a use of a prompt's first blocks, the last of which this commit brings."""
        with self._lock:
            if not pending.done.is_set():
                pending.uses[blob, traffic] = max(blocks, pending.uses.get((blob, traffic), 0))
                return
        self._blocks.find(blob, blocks, traffic)

    @property
    def pending(self) -> tuple[Pending, ...]:
        """What is not stored yet, in order. One that is missing here was stored before. StoreError after a fork."""
        if os.getpid() != self._pid:
            # The thread is not here, and the lock may be held by nobody.
            raise StoreError("store: opened before fork; open it again in the child process")
        with self._lock:
            return tuple(self._queue)

    def drain(self) -> None:
        """Wait until all that was taken over before is done."""
        for pending in self.pending:
            pending.done.wait()

    def close(self) -> None:
        """Finish what was taken over, and end the thread."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _reserve(self, number: int, nbytes: int) -> bool:
        """Take room, waiting for it if that is the policy; False if there is none."""
        if not nbytes:
            return True
        if not self._waits:
            with self._lock:
                return self._reserve_now(number, nbytes)
        with self._door, self._lock:
            self._changed.wait_for(lambda: self._reserve_now(number, nbytes))
            return True

    def _reserve_now(self, number: int, nbytes: int) -> bool:
        taken = sum(self._room.values())
        if taken and taken + nbytes > self._capacity_bytes:
            return False
        self._room[number] = nbytes
        return True

    def _hand_over(self, pending: Pending) -> None:
        with self._lock:
            if self._closed:
                raise StoreError("store: closed; open it again")
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="duokv-commit", daemon=True)
                thread.start()
                self._thread = thread
            self._queue.append(pending)
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                # One whose start was interrupted is not the thread.
                if self._thread is not threading.current_thread():
                    return
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                pending = self._queue[0]
            try:
                pending.outcome = self._write(pending)
            except Exception as error:  # noqa: BLE001  the thread must outlive whatever is wrong with one commit
                self._emit(StoreFailed("commit", repr(error)))
            self._settle(pending)
            del pending

    def _settle(self, pending: Pending) -> None:
        """Note uses of what was written, and let go of it."""
        with self._lock:
            noted, pending.uses = pending.uses, {}
        self._note(noted)
        with self._lock:
            whole = pending.outcome is not None and not pending.outcome.dropped
            pending.is_whole = whole and all(need.is_whole for need in pending.needs)
            # Only now: until it can be found in the index, it is found here.
            self._queue.popleft()
            pending.done.set()
            # Whoever holds on to the commit does not hold on to its memory.
            lent, pending.lent, pending.needs = pending.lent, None, ()
            self._room.pop(pending.number, None)
            self._changed.notify_all()
        if lent is not None:
            lent.release()
        self._note(pending.uses)

    def _note(self, uses: dict[tuple[bytes, str | None], int]) -> None:
        for (blob, traffic), blocks in uses.items():
            try:
                self._blocks.find(blob, blocks, traffic)
            except Exception as error:  # noqa: BLE001  an operator may have removed the class, or worse, meanwhile
                self._emit(Degraded("uses", f"one was not noted: {error}"))


def coming(pending: Sequence[Pending], blob: bytes, block: int, blocks: int, *, exact_only: bool = False) -> Coming:
    """How far commits under way extend a prompt's first `block` blocks, which are stored. exact_only: by exact ones."""
    if not pending:
        return Coming(block, block)
    end = exact = block
    brought: list[Pending] = []
    left = [one for one in pending if one.origin is Origin.EXACT or not exact_only]
    while end < blocks:
        key = blob[end * KEY_BYTES : (end + 1) * KEY_BYTES]
        bringing = [one for one in left if one.has(end, key)]
        if not bringing:
            break
        # An exact one first: it takes an approximate one's place.
        best = max(bringing, key=lambda one: (one.origin is Origin.EXACT, one.total))
        reach = best.shared(blob, end, blocks)
        exact = reach if best.origin is Origin.EXACT and exact == end else exact
        end = reach
        brought.append(best)
    key = blob[end * KEY_BYTES : (end + 1) * KEY_BYTES]
    approx = exact_only and end < blocks and any(one.has(end, key) for one in pending)
    return Coming(end, exact, tuple(brought), approx)
