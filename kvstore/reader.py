"""Reads blocks into the caller's rows and verifies each one, within a deadline.

A backend call cannot be taken back, so reads run on threads of the reader's own: when the deadline passes the caller
goes on, and the memory of a read still under way is held until that read ends. Rows that the store did not lend are
never read into: each read goes to a stage of its own, is verified and copied out there, and what comes too late is
not copied. Blocks that are in memory already are copied by the caller itself meanwhile, so that they depend on no
thread that a backend may hold up; idle threads help.
"""

from __future__ import annotations

import errno
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from duokv.kvstore.backend import Backend, ReadOp
from duokv.kvstore.buffers import Lent, Stage, Stages
from duokv.kvstore.spans import Span

Rows = npt.NDArray[np.uint8]
"""`[n, slot_bytes]` uint8."""
MAX_READ_BYTES = 1 << 20
"""Bytes of one read: larger ones gain nothing on a local disk, and of the last ones little is left to verify."""
_CHECKERS = 2
"""Threads that verify at a time, beside those that read: more contend for the interpreter's lock, and are slower
together. More do only when as many reads wait as there are threads to read, since each that waits may hold a stage."""
_LONGEST_WAIT_S = 1e9
"""Longer deadlines are cut to it: the system's waits overflow."""
LATE = "deadline"
Check = Callable[[int, Rows], list[str | None]]
"""`check(i, rows)`: per row, why it is not block i, i + 1, ... of the plan, or None where it is. On any thread."""
_RAISED = "raised"
_ERRNOS = frozenset(errno.errorcode.values())


def is_unreadable(reason: str) -> bool:
    """Whether the backend gave no bytes for a block, which says nothing about the block itself."""
    return reason in _ERRNOS or reason.startswith(_RAISED)


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks to copy from memory: `copy(first, rows)` fills rows with the blocks from `first` on, on any thread.

    runs: (first block, blocks), rising; each is one copy.
    """

    runs: Sequence[tuple[int, int]]
    copy: Callable[[int, Rows], None]


def copy_rows(rows: Rows, out: Rows) -> None:
    """Copy rows into as many of another width and layout: what fits of each."""
    width = min(rows.shape[1], out.shape[1])
    out[:, :width] = rows[:, :width]


class _Job:
    """One load: its reads and copies, what came of each block, and the memory it must keep while a read is under way.

    done: first block of a read or copy, and why each of its blocks failed or None. lent: None if the rows' memory is
    not the store's.
    """

    def __init__(self, rows: Rows, check: Check, lent: Lent | None, reads: int, copies: Copies | None) -> None:
        self.rows = rows
        self.check = check
        self.direct = lent is not None
        self.done: queue.SimpleQueue[tuple[int, list[str | None]]] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.cancelled = False
        # Only a read may outlive its caller.
        self._memory = lent.retain() if lent is not None and reads else None
        self._left = reads
        self._lock = threading.Lock()
        self._copies = copies
        self._runs = deque(copies.runs if copies else ())
        self._inside = 0
        self._over = False
        self._left_alone = threading.Condition(self._lock)
        if not reads or not self.direct:
            self.ended.set()

    def finished_one(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last and self._memory is not None:
            self._memory.release()
            self.ended.set()

    def copy_one(self) -> bool:
        """Make the next copy; False if none is left."""
        with self._lock:
            if not self._runs or self._copies is None:
                return False
            first, count = self._runs.popleft()
            self._inside += 1
        try:
            self._copies.copy(first, self.rows[first : first + count])
            self.done.put((first, [None] * count))
        finally:
            self.leave()
        return True

    def copy_out(self, first: int, stage: Rows) -> bool:
        """Copy rows that were read elsewhere; False if nobody waits for them any more."""
        if not self.enter():
            return False
        try:
            copy_rows(stage, self.rows[first : first + len(stage)])
        finally:
            self.leave()
        return True

    def enter(self) -> bool:
        """Keep the rows from the caller until `leave`, for no longer than a copy takes; False if it has them back."""
        with self._lock:
            if self._over:
                return False
            self._inside += 1
        return True

    def leave(self) -> None:
        with self._left_alone:
            self._inside -= 1
            self._left_alone.notify_all()

    def help_copying(self) -> None:
        """Copy as long as there is something to copy."""
        while self.copy_one():
            pass

    def end_copies(self) -> None:
        """Begin none any more, and wait for those under way: a copy from memory does not hang."""
        with self._left_alone:
            self._over = True
            self._runs.clear()
            self._left_alone.wait_for(lambda: self._inside == 0)


class _Read:
    """A read that ended: what it got, and the stage it holds if its rows are not the store's."""

    __slots__ = ("got", "job", "rows", "span", "stage")

    def __init__(self, job: _Job, span: Span, stage: Stage | None, got: int, rows: Rows) -> None:
        self.job = job
        self.span = span
        self.stage = stage
        self.got = got
        self.rows = rows

    def release(self) -> None:
        if self.stage is not None:
            self.stage.release()


class BlockReader:
    """A few daemon threads that read, and others that verify. Thread-safe."""

    def __init__(self, backend: Backend, *, threads: int, slot_bytes: int, monotonic: Callable[[], float]) -> None:
        self.threads = max(1, min(threads, backend.concurrency))
        """How many read at a time; as many copy, one of them the caller's."""
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._monotonic = monotonic
        # Each thread reads into one, as many wait to be verified, some are.
        self._stages = Stages(2 * self.threads + _CHECKERS, max(1, MAX_READ_BYTES // slot_bytes), slot_bytes)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._unchecked: deque[_Read] = deque()
        self._checking = 0
        """Threads verifying now."""
        self._read_one: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Wakes a thread that verifies; False ends it."""
        self._abandoned: list[_Job] = []
        """Jobs nobody waits for any more whose reads may still write into their rows."""
        self._closed = False

    def after(self, seconds: float) -> float:
        """When `seconds` from now have passed, on the clock of `fetch`: real time, whatever clock the store has."""
        return self._monotonic() + min(seconds, _LONGEST_WAIT_S)

    def left(self, until: float) -> float:
        """Seconds left until then, at least 0."""
        return max(0.0, until - self._monotonic())

    def fetch(
        self,
        reads: Sequence[Span],
        rows: Rows,
        *,
        name_of: Callable[[int], str],
        check: Check,
        lent: Lent | None,
        until: float,
        copies: Copies | None = None,
    ) -> Generator[tuple[int, str | None], None, None]:
        """Yield (leading verified blocks, why the next one failed or None) whenever the lead grows, and at the end.

        `rows[i]` receives block i of the plan, which `reads` and `copies` cover together. lent: owns the rows' memory,
        which is read into; None: the rows, `[n, any width]`, are another's, and get what of a slot fits. until: see
        `after`. When this ends no copy is under way any more; a read into lent rows may be.
        """
        runs = copies.runs if copies else ()
        if not reads and not runs:
            return
        if not self._undisturbed(rows, until):
            yield 0, LATE
            return
        job = _Job(rows, check, lent, len(reads), copies)
        self._hand_out(job, reads, len(runs), name_of, until)
        blocks = sum(span.count for span in reads) + sum(count for _, count in runs)
        outcome: list[str | None] = ["pending"] * blocks
        lead = 0
        try:
            for _ in range(len(reads) + len(runs)):
                try:
                    first, reasons = self._next(job, until)
                except queue.Empty:
                    yield lead, LATE
                    return
                outcome[first : first + len(reasons)] = reasons
                grown = lead
                while grown < blocks and outcome[grown] is None:
                    grown += 1
                if grown > lead:
                    lead = grown
                    yield lead, None
                if lead < blocks and outcome[lead] not in (None, "pending"):
                    break
            if lead < blocks:
                yield lead, outcome[lead]
        finally:
            job.cancelled = True
            job.end_copies()
            if not job.ended.is_set():
                if lent is not None:
                    lent.spoil()
                with self._lock:
                    self._abandoned.append(job)

    def _hand_out(
        self, job: _Job, reads: Sequence[Span], runs: int, name_of: Callable[[int], str], until: float
    ) -> None:
        """Give a job to the threads: its reads, then what those without one may help to copy."""
        helpers = min(self.threads, runs) - 1 if self._queue.empty() else 0
        if reads or helpers > 0:
            self._start()
        with self._lock:
            if not self._closed:
                for span in reads:
                    self._queue.put(partial(self._serve, job, span, name_of(span.segment), until))
                for _ in range(helpers):
                    self._queue.put(job.help_copying)
                return
        for span in reads:
            self._end(job, span, [LATE] * span.count)

    def _next(self, job: _Job, until: float) -> tuple[int, list[str | None]]:
        """What came of one more read or copy, copying rather than waiting; queue.Empty when it is too late."""
        if job.done.empty() and until > self._monotonic() and job.copy_one():
            return job.done.get_nowait()
        return job.done.get(timeout=self.left(until))

    def _undisturbed(self, rows: Rows, until: float) -> bool:
        """Wait for late reads of earlier jobs into the same memory: they would overwrite what was verified since."""
        with self._lock:
            self._abandoned = [job for job in self._abandoned if not job.ended.is_set()]
            before = [job for job in self._abandoned if np.may_share_memory(job.rows, rows)]
        return all(job.ended.wait(self.left(until)) for job in before)

    def close(self) -> None:
        """Let threads end once they have nothing left to do; one stuck in a backend call is left behind."""
        with self._lock:
            self._closed = True
            for _ in self._started:
                self._queue.put(None)
                self._read_one.put(False)

    def _start(self) -> None:
        wanted = self.threads + _CHECKERS
        if len(self._started) < wanted:
            with self._lock:
                while len(self._started) < wanted and not self._closed:
                    work, name = self._work, "duokv-read"
                    if len(self._started) >= self.threads:
                        work, name = self._check_often, "duokv-check"
                    thread = threading.Thread(target=work, name=name, daemon=True)
                    thread.start()
                    self._started.append(thread)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task
        # Whoever verifies may have ended before this one read its last.
        self._check_all(behind=True)

    def _serve(self, job: _Job, span: Span, name: str, until: float) -> None:
        if job.cancelled:
            self._end(job, span, [LATE] * span.count)
            return
        try:
            read = self._read(job, span, name, until)
        except Exception as error:  # noqa: BLE001  a backend's fault is that read's miss, never the thread's end
            self._end(job, span, [f"{_RAISED} {error!r}"] * span.count)
            return
        if read.got < 0:
            read.release()
            reason = LATE if read.got == -errno.ETIMEDOUT else errno.errorcode.get(-read.got, "EIO")
            self._end(job, span, [reason] * span.count)
            return
        with self._lock:
            self._unchecked.append(read)
            behind = len(self._unchecked) >= self.threads
        if behind or self._queue.empty():
            self._check_all(behind=behind)
        else:
            self._read_one.put(True)

    def _check_often(self) -> None:
        while self._read_one.get():
            self._check_all()

    def _check_all(self, *, behind: bool = False) -> None:
        """Verify what has been read, whoever read it, until nothing is left; or leave it to the others that do."""
        with self._lock:
            if self._checking >= _CHECKERS and not behind:
                return
            self._checking += 1
        while True:
            with self._lock:
                if not self._unchecked:
                    self._checking -= 1
                    return
                read = self._unchecked.popleft()
            try:
                reasons = self._check(read)
            except Exception as error:  # noqa: BLE001  a check that fails is its blocks' miss, never the thread's end
                reasons = [f"{_RAISED} {error!r}"] * read.span.count
            read.release()
            self._end(read.job, read.span, reasons)

    def _check(self, read: _Read) -> list[str | None]:
        job, span = read.job, read.span
        if job.cancelled:
            return [LATE] * span.count
        whole = min(read.got // self._slot_bytes, span.count)
        rows = read.rows[:whole]
        # What is verified may be kept: no one else may write to lent rows until it was.
        if job.direct and not job.enter():
            return [LATE] * span.count
        try:
            reasons = job.check(span.block, rows) if whole else []
        finally:
            if job.direct:
                job.leave()
        reasons = reasons + ["short read"] * (span.count - whole)
        if not job.direct:
            good = next((i for i, reason in enumerate(reasons) if reason is not None), span.count)
            if not job.copy_out(span.block, rows[:good]):
                return [LATE] * span.count
        return reasons

    def _end(self, job: _Job, span: Span, reasons: list[str | None]) -> None:
        # In this order: who has seen all of a job's reads may use its memory at once.
        job.finished_one()
        job.done.put((span.block, reasons))

    def _read(self, job: _Job, span: Span, name: str, until: float) -> _Read:
        if job.direct:
            stage, rows = None, job.rows[span.block : span.block + span.count]
        else:
            stage = self._stages.lend(span.count)
            rows = stage.rows[: span.count]
        op = ReadOp(name, span.slot * self._slot_bytes, (rows.reshape(-1).data,))
        try:
            got = self._backend.read_many([op], deadline_s=self.left(until))[0]
        except BaseException:
            if stage is not None:
                stage.release()
            raise
        return _Read(job, span, stage, got, rows)
