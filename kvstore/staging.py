"""Writing a commit's slots: the next ones are filled and sealed while the last ones are on their way to the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.errors import UsageError
from duokv.kvstore.reader import Rows
from duokv.kvstore.record import Chain, Row
from duokv.kvstore.segment import Piece, SegmentWriter

WRITE_BYTES = 4 << 20
"""Bytes of one write: large enough for the device, small enough to stay in cache between copy and write."""
_STAGES = 3
"""One is filled, one is written, and one waits, so that a write begins as soon as the last one ends."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Where a commit's bytes come from: `fill(block, rows)` copies the payloads of blocks `block`.. into rows' heads.

    sealed: told (place, first block, rows) of slots that are about to be written; none is published yet, and some may
    not be written after all.
    """

    fill: Callable[[int, Rows], None]
    chain: Chain
    sealed: Callable[[int, int, Rows], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """As much of a piece as is written at once. last: of its piece."""

    writer: SegmentWriter
    slot: int
    block: int
    count: int
    last: bool


def fill_rows(rows: Rows, sources: Sequence[Row] | Rows) -> None:
    """Copy payloads into the heads of as many rows."""
    if isinstance(sources, np.ndarray):
        rows[:, : sources.shape[1]] = sources
    else:
        for row, source in zip(rows, sources, strict=True):
            row[: source.nbytes] = source


class SlotsNotWritten(Exception):  # noqa: N818  says what happened
    """Writing a chunk failed, for `reason`; none after it was begun."""

    def __init__(self, chunk: Chunk, reason: OSError) -> None:
        super().__init__(str(reason))
        self.chunk = chunk
        self.reason = reason


Blocks = npt.NDArray[np.uint8] | Sequence[memoryview | bytes | npt.NDArray[np.uint8]]
"""`[n, payload_bytes]` (or wider) uint8, or one buffer of payload_bytes per block."""
Step = Callable[[Chunk, Rows], None]
_Outcome = tuple[Chunk, BaseException | None]


def plan_chunks(pieces: Iterable[Piece], *, slot_bytes: int) -> list[Chunk]:
    """Cut pieces into chunks to be written, the first of many a small one, so that writing begins soon."""
    most = _slots_per_write(slot_bytes)
    pieces = tuple(pieces)
    size = most if sum(piece.count for piece in pieces) <= most else max(1, most // 4)
    chunks: list[Chunk] = []
    for piece in pieces:
        at = 0
        while at < piece.count:
            count = min(size, piece.count - at)
            chunks.append(Chunk(piece.writer, piece.slot + at, piece.block + at, count, at + count == piece.count))
            at, size = at + count, most
    return chunks


def _slots_per_write(slot_bytes: int) -> int:
    return max(1, WRITE_BYTES // slot_bytes)


def write_chunks(chunks: Sequence[Chunk], pool: BufferPool, slot_bytes: int, *, fill: Step, write: Step) -> None:
    """Fill rows for each chunk on this thread and write them, in order and one at a time, on another.

    A few slots are written by this thread. When this returns or raises, no write is under way. SlotsNotWritten if
    `write` raised OSError.
    """
    slots = max((chunk.count for chunk in chunks), default=0)
    beside = sum(chunk.count for chunk in chunks) > _slots_per_write(slot_bytes)
    stages = _STAGES if beside else 1
    with pool.lend(slots * stages, slot_bytes) as staging:
        writing = _Writing(write) if beside else None
        try:
            for number, chunk in enumerate(chunks):
                first = number % stages * slots
                rows = staging.rows[first : first + chunk.count]
                if writing is None:
                    fill(chunk, rows)
                    _raise_for(_outcome(write, chunk, rows))
                else:
                    writing.wait(stages - 1)
                    fill(chunk, rows)
                    writing.begin(chunk, rows)
            if writing is not None:
                writing.wait(0)
        finally:
            if writing is not None:
                writing.end()


class _Writing:
    """A thread that writes one chunk at a time, and none after one that failed.

    It is a daemon: a device that hangs must not keep a process alive.
    """

    def __init__(self, write: Step) -> None:
        self._given: queue.SimpleQueue[tuple[Chunk, Rows] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._begun = 0
        self._over = False
        self._thread = threading.Thread(target=self._work, args=(write,), name="duokv-write", daemon=True)
        self._thread.start()

    def begin(self, chunk: Chunk, rows: Rows) -> None:
        self._begun += 1
        self._given.put((chunk, rows))

    def wait(self, left: int) -> None:
        """Wait until at most `left` are not written, and raise what writing one raised."""
        while self._begun > left:
            outcome = self._done.get()
            self._begun -= 1
            _raise_for(outcome)

    def end(self) -> None:
        """Wait for the write under way, whatever becomes of it, begin no other, and end the thread."""
        self._over = True
        self._given.put(None)
        self._thread.join()

    def _work(self, write: Step) -> None:
        while (given := self._given.get()) is not None:
            outcome = (given[0], None) if self._over else _outcome(write, *given)
            self._over = self._over or outcome[1] is not None
            self._done.put(outcome)
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


def payload_views(blocks: Blocks, payload_bytes: int, first_block: int) -> Sequence[Row] | Rows:
    """A view of each block's payload; UsageError for one that is too short. first_block: what to call the first one."""
    if isinstance(blocks, np.ndarray) and blocks.ndim == 2 and blocks.dtype == np.uint8:
        for block in blocks[:1]:
            _payload_view(block, payload_bytes, first_block)
        return blocks[:, :payload_bytes]
    return [_payload_view(block, payload_bytes, first_block + j) for j, block in enumerate(blocks)]


def _payload_view(block: memoryview | bytes | npt.NDArray[np.uint8], payload_bytes: int, number: int) -> Row:
    view = np.frombuffer(block, np.uint8) if not isinstance(block, np.ndarray) else block.reshape(-1).view(np.uint8)
    if view.nbytes < payload_bytes:
        raise UsageError(f"commit: block {number} has {view.nbytes} bytes; this geometry's blocks have {payload_bytes}")
    return view[:payload_bytes]
