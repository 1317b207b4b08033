"""Writing a commit's slots: the next ones are filled and sealed while the last ones are on their way to the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.reader import Rows
from duokv.kvstore.record import BlockIdentity, Row
from duokv.kvstore.segment import SegmentWriter

STAGING_BLOCKS = 32
"""Slots written per system call: large enough for the device, small enough to stay in cache between copy and write."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Where a commit's bytes come from: `fill(block, row)` copies block `block`'s payload into the head of a slot.

    written: told (place, first block, rows) of slots that were written and not published yet.
    """

    fill: Callable[[int, Row], None]
    identity: Callable[[int], BlockIdentity]
    written: Callable[[int, int, Rows], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` consecutive slots of a segment from `slot` on, for blocks from `block` on. last: of its allocation."""

    writer: SegmentWriter
    slot: int
    block: int
    count: int
    last: bool


class SlotsNotWritten(Exception):  # noqa: N818  says what happened
    """Writing a chunk failed, for `reason`; none after it was begun."""

    def __init__(self, chunk: Chunk, reason: OSError) -> None:
        super().__init__(str(reason))
        self.chunk = chunk
        self.reason = reason


Step = Callable[[Chunk, Rows], None]
_Outcome = tuple[Chunk, BaseException | None]


def chunks_of(writer: SegmentWriter, slot: int, block: int, count: int) -> list[Chunk]:
    """Cut one allocation into chunks of `STAGING_BLOCKS` slots."""
    return [
        Chunk(writer, slot + at, block + at, min(STAGING_BLOCKS, count - at), at + STAGING_BLOCKS >= count)
        for at in range(0, count, STAGING_BLOCKS)
    ]


def write_chunks(chunks: Sequence[Chunk], pool: BufferPool, slot_bytes: int, *, fill: Step, write: Step) -> None:
    """Fill rows for each chunk on this thread and write them, in order and one at a time, on another.

    A few slots are written by this thread. When this returns or raises, no write is under way. SlotsNotWritten if
    `write` raised OSError.
    """
    beside = sum(chunk.count for chunk in chunks) > STAGING_BLOCKS
    with pool.lend(STAGING_BLOCKS * (1 + beside), slot_bytes) as staging:
        writing = _Writing(write) if beside else None
        try:
            for number, chunk in enumerate(chunks):
                first = number % 2 * STAGING_BLOCKS if beside else 0
                rows = staging.rows[first : first + chunk.count]
                fill(chunk, rows)
                if writing is None:
                    _raise_for(_outcome(write, chunk, rows))
                else:
                    writing.wait()
                    writing.begin(chunk, rows)
            if writing is not None:
                writing.wait()
        finally:
            if writing is not None:
                writing.end()


class _Writing:
    """A thread that writes one chunk at a time. It is a daemon: a device that hangs must not keep a process alive."""

    def __init__(self, write: Step) -> None:
        self._given: queue.SimpleQueue[tuple[Chunk, Rows] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._busy = False
        threading.Thread(target=self._work, args=(write,), name="duokv-write", daemon=True).start()

    def begin(self, chunk: Chunk, rows: Rows) -> None:
        self._busy = True
        self._given.put((chunk, rows))

    def wait(self) -> None:
        """Wait for the write under way, if any, and raise what it raised."""
        if self._busy:
            outcome = self._done.get()
            self._busy = False
            _raise_for(outcome)

    def end(self) -> None:
        """Wait for the write under way, whatever becomes of it, and let the thread go."""
        if self._busy:
            self._done.get()
        self._given.put(None)

    def _work(self, write: Step) -> None:
        while (given := self._given.get()) is not None:
            self._done.put(_outcome(write, *given))
            del given


def _outcome(write: Step, chunk: Chunk, rows: Rows) -> _Outcome:
    try:
        write(chunk, rows)
    except BaseException as error:  # noqa: BLE001  raised again by who waits for it
        return chunk, error
    return chunk, None


def _raise_for(outcome: _Outcome) -> None:
    chunk, error = outcome
    if isinstance(error, OSError):
        raise SlotsNotWritten(chunk, error) from error
    if error is not None:
        raise error
