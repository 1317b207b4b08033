"""Commits that were taken over: a thread of their own writes them in order, and lookups find them meanwhile."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from duokv.kvstore.blockstore import BlockStore
from duokv.kvstore.buffers import BufferPool, Lent
from duokv.kvstore.errors import StoreError
from duokv.kvstore.events import BlocksStored, Event, StoreFailed
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.origin import Origin
from duokv.kvstore.reader import Rows
from duokv.kvstore.record import Chain, Row
from duokv.kvstore.staging import fill_rows
from duokv.kvstore.walk import Committed

Use = tuple[bytes, int, str | None]
"""(key blob, blocks, traffic class)."""


@dataclass(eq=False, slots=True)
class Pending:
    """A commit of blocks [first, total) of a chain. lent: their payloads, a row each.

    given_up: how many segments had been given up when its writing began. uses: of lookups that found its blocks, to be
    noted once they are stored.
    """

    chain: Chain
    first: int
    total: int
    traffic: str | None
    origin: Origin
    lent: Lent
    given_up: int = 0
    outcome: Committed | None = None
    uses: list[Use] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is stored; once it is done."""
        return self.outcome is not None and not self.outcome.dropped

    def shared(self, blob: bytes, block: int, blocks: int) -> int:
        """The block after the last one from `block` on that this has of a prompt's first `blocks`; `block` if none."""
        mine, end = self.chain.blob, min(self.total, blocks)

        def differs(at: int) -> bool:
            key = slice(at * KEY_BYTES, (at + 1) * KEY_BYTES)
            return mine[key] != blob[key]

        # Chained keys: all before an equal one are equal.
        return bisect_left(range(end), True, lo=block, key=differs) if self.first <= block < end else block


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
        self._changed = threading.Condition()
        self._bytes = 0
        self._queue: deque[Pending] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(
        self, chain: Chain, first: int, total: int, traffic: str | None, origin: Origin, sources: Sequence[Row] | Rows
    ) -> tuple[Committed, Pending | None]:
        """Copy blocks [first, total) of a chain from the first absent one on, and take them over to be stored.

        Returns what is to become of them; no commit if there is no room. StoreError once closed.
        """
        waiting, exact_only = self.pending, origin is Origin.EXACT
        found = self._blocks.find(chain.blob, total, traffic, use=False)
        there = found.exact if exact_only else found.blocks
        start = max(first, coming(waiting, chain.blob, there, total, exact_only=exact_only).end)
        nbytes = (total - start) * self._slot_bytes
        room = self._reserve(nbytes)
        if start > first or not room:
            name = traffic or self._blocks.default_class
            self._emit(BlocksStored(name, 0, start - first, 0 if room else total - start, 0))
        if not room:
            return Committed(0, start - first, total - start), None
        try:
            lent = self._pool.lend(total - start, self._slot_bytes)
            fill_rows(lent.rows, sources[start - first :])
            pending = Pending(chain, start, total, traffic, origin, lent)
            self._hand_over(pending)
        except BaseException:
            self._give_back(nbytes)
            raise
        if coming(waiting, chain.blob, found.blocks, total).end < first:
            # Their parent outlived its life, or is nowhere: only writing them tells what becomes of them.
            pending.done.wait()
            return pending.outcome or Committed(0, 0, total - first), pending
        return Committed(total - start, start - first, 0), pending

    def use(self, pending: Pending, blob: bytes, blocks: int, traffic: str | None) -> None:
        """Note a use of a prompt's first blocks, the last of which this commit brings."""
        with self._changed:
            if not pending.done.is_set():
                pending.uses.append((blob, blocks, traffic))
                return
        self._blocks.find(blob, blocks, traffic)

    @property
    def pending(self) -> tuple[Pending, ...]:
        """What is not stored yet, in order. One that is missing here was stored before."""
        with self._changed:
            return tuple(self._queue)

    def drain(self) -> None:
        """Wait until all that was taken over before is done."""
        for pending in self.pending:
            pending.done.wait()

    def close(self) -> None:
        """Finish what was taken over, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _reserve(self, nbytes: int) -> bool:
        with self._changed:
            while self._bytes and self._bytes + nbytes > self._capacity_bytes:
                if not self._waits:
                    return False
                self._changed.wait()
            self._bytes += nbytes
            return True

    def _give_back(self, nbytes: int) -> None:
        with self._changed:
            self._bytes -= nbytes
            self._changed.notify_all()

    def _hand_over(self, pending: Pending) -> None:
        with self._changed:
            if self._closed:
                raise StoreError("store: closed; open it again")
            self._queue.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="duokv-commit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                pending = self._queue[0]
            try:
                pending.outcome = self._write(pending)
            except Exception as error:  # noqa: BLE001  the thread must outlive whatever is wrong with one commit
                self._emit(StoreFailed("commit", repr(error)))
            while uses := self._end_unless_used(pending):
                for use in uses:
                    self._blocks.find(*use)
            nbytes = pending.lent.rows.nbytes
            pending.lent.release()
            self._give_back(nbytes)
            del pending

    def _end_unless_used(self, pending: Pending) -> list[Use]:
        with self._changed:
            uses, pending.uses = pending.uses, []
            if not uses:
                # Only now: until it can be found in the index, it is found here.
                self._queue.popleft()
                pending.done.set()
            return uses


def coming(pending: Sequence[Pending], blob: bytes, block: int, blocks: int, *, exact_only: bool = False) -> Coming:
    """How far commits under way extend a prompt's first `block` blocks, which are stored. exact_only: by exact ones."""
    if not pending:
        return Coming(block, block)
    end = exact = block
    brought: list[Pending] = []
    left = [one for one in pending if one.origin is Origin.EXACT or not exact_only]
    while left:
        # An exact one first: it takes an approximate one's place.
        steps = [(one.shared(blob, end, blocks), one.origin is Origin.EXACT, one) for one in left]
        steps = [step for step in steps if step[0] > end]
        if not steps:
            break
        reach, is_exact, one = max(steps, key=lambda step: (step[1], step[0]))
        exact = reach if is_exact and exact == end else exact
        end = reach
        brought.append(one)
        left.remove(one)
    approx = exact_only and any(one.shared(blob, end, blocks) > end for one in pending)
    return Coming(end, exact, tuple(brought), approx)
