"""Any backend, with faults on chosen operations and a log of all of them."""

from __future__ import annotations

import builtins
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from duokv.kvstore.backend import Backend, FileInfo, Lock, ReadOp, Writer

Kind = Literal[
    "create",
    "resume",
    "reserve",
    "write",
    "sync",
    "seal",
    "abort",
    "read",
    "list",
    "remove",
    "punch",
    "write_file",
    "read_file",
    "lock",
]
"""What an operation does; each `ReadOp` is a "read" of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Base of the faults: hits the `nth` operation of `kind` (None: of any kind) from its injection on, counted from 1.

    lasting: hit all later ones too.
    """

    kind: Kind | None
    nth: int = 1
    lasting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(Fault):
    """The operation fails with `errno`; an `abort` only leaves its file.

    torn_bytes: how many bytes of a write reach the file first; a multiple of the backend's alignment.
    """

    errno: int = errno.EIO
    torn_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(Fault):
    """The operation takes `seconds` longer; a read that would miss its deadline ends there with -ETIMEDOUT."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(Fault):
    """The operation waits for `until`, whatever its deadline, and is then done: a read fills its memory late."""

    until: threading.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(Fault):
    """Bit `bit` of what a read returns, or a write stores, is flipped; counted from the operation's first byte."""

    kind: Literal["read", "write"] = "read"
    bit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shorten(Fault):
    """A read returns at most `nbytes`."""

    kind: Literal["read"] = "read"
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Misdirect(Fault):
    """A read returns the bytes of another place: file `name` (None: the same) at `offset`."""

    kind: Literal["read"] = "read"
    name: str | None = None
    offset: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the log.

    offset, nbytes: the range of a read or write; of a punch the first offset and the bytes of all its ranges. Of
        create, reserve and seal `nbytes` is the size asked for, of write_file the data's length; else both are 0.
    """

    kind: Kind
    name: str
    offset: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        place = f" {self.offset}+{self.nbytes}" if self.kind in {"read", "write", "punch"} else ""
        size = f" {self.nbytes}" if self.kind in {"create", "reserve", "seal", "write_file"} else ""
        return f"{self.kind} {self.name}{place}{size}"


class FaultyBackend:
    """`inner` with `faults`. Thread-safe where `inner` is.

    sleep, clock: for `Delay`; both seconds, monotonic.
    `log` holds the operations in the order they began, also those that failed; `fired` counts the faults that hit.
    """

    def __init__(
        self,
        inner: Backend,
        faults: Iterable[Fault] = (),
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner = inner
        self.log: builtins.list[Operation] = []
        self.fired = 0
        self._sleep = sleep
        self._clock = clock
        self._mutex = threading.Lock()
        self._armed: builtins.list[_Armed] = []
        self.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Add faults; each counts the operations from now on."""
        with self._mutex:
            self._armed += [_Armed(fault) for fault in faults]

    def heal(self) -> None:
        """Take all faults away; what stalls goes on."""
        with self._mutex:
            for armed in self._armed:
                if isinstance(armed.fault, Stall):
                    armed.fault.until.set()
            self._armed.clear()

    def log_text(self) -> str:
        """Return the log, one operation a line, for tests to pin: `write seg/a 0+8192`."""
        return "\n".join(map(str, self.log))

    @property
    def alignment(self) -> int:
        """See `Backend.alignment`."""
        return self.inner.alignment

    @property
    def concurrency(self) -> int:
        """See `Backend.concurrency`."""
        return self.inner.concurrency

    @property
    def can_punch(self) -> bool:
        """See `Backend.can_punch`."""
        return self.inner.can_punch

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Backend.notes`."""
        return self.inner.notes

    def create(self, name: str, size: int) -> Writer:
        """See `Backend.create`."""
        self._meet(Operation("create", name, 0, size))
        return _FaultyWriter(self, name, self.inner.create(name, size))

    def resume(self, name: str) -> Writer:
        """See `Backend.resume`."""
        self._meet(Operation("resume", name))
        return _FaultyWriter(self, name, self.inner.resume(name))

    def read_many(self, ops: Sequence[ReadOp], *, deadline_s: float) -> builtins.list[int]:
        """See `Backend.read_many`. Each operation is passed on by itself."""
        deadline = self._clock() + deadline_s
        return [self._read(op, deadline) for op in ops]

    def list(self, prefix: str) -> builtins.list[FileInfo]:
        """See `Backend.list`."""
        self._meet(Operation("list", prefix))
        return self.inner.list(prefix)

    def remove(self, name: str) -> None:
        """See `Backend.remove`."""
        self._meet(Operation("remove", name))
        self.inner.remove(name)

    def punch(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """See `Backend.punch`."""
        first = ranges[0][0] if ranges else 0
        self._meet(Operation("punch", name, first, sum(length for _, length in ranges)))
        return self.inner.punch(name, ranges)

    def write_file(self, name: str, data: bytes) -> None:
        """See `Backend.write_file`."""
        self._meet(Operation("write_file", name, 0, len(data)))
        self.inner.write_file(name, data)

    def read_file(self, name: str) -> bytes | None:
        """See `Backend.read_file`."""
        self._meet(Operation("read_file", name))
        return self.inner.read_file(name)

    def lock(self, name: str) -> Lock | None:
        """See `Backend.lock`."""
        self._meet(Operation("lock", name))
        return self.inner.lock(name)

    def close(self) -> None:
        """See `Backend.close`. Neither logged nor failed."""
        self.inner.close()

    def _begin(self, operation: Operation) -> builtins.list[Fault]:
        """Log an operation and return the faults that hit it."""
        with self._mutex:
            self.log.append(operation)
            hits = [armed.fault for armed in self._armed if armed.hits(operation.kind)]
            self.fired += len(hits)
            return hits

    def _meet(self, operation: Operation) -> builtins.list[Fault]:
        """Begin an operation that is no read: wait and fail as told, and return what else hits it."""
        hits = self._begin(operation)
        for fault in hits:
            if isinstance(fault, Delay):
                self._sleep(fault.seconds)
            elif isinstance(fault, Stall):
                fault.until.wait()
            elif isinstance(fault, Fail) and not (operation.kind == "write" and fault.torn_bytes):
                raise OSError(fault.errno, "injected fault", operation.name)
        return hits

    def _read(self, op: ReadOp, deadline: float) -> int:
        hits = self._begin(Operation("read", op.name, op.offset, op.nbytes))
        wanted, late = op, False
        for fault in hits:
            match fault:
                case Fail():
                    return -fault.errno
                case Delay():
                    left = deadline - self._clock()
                    self._sleep(max(0.0, min(fault.seconds, left)))
                    if fault.seconds >= left:
                        return -errno.ETIMEDOUT
                case Stall():
                    fault.until.wait()
                    late = True
                case Misdirect():
                    wanted = ReadOp(fault.name or op.name, fault.offset, op.views)
                case _:
                    pass
        (got,) = self.inner.read_many([wanted], deadline_s=float("inf") if late else deadline - self._clock())
        for fault in hits:
            if isinstance(fault, Corrupt) and got > 0:
                _flip([view.cast("B") for view in op.views], fault.bit % (8 * got))
            elif isinstance(fault, Shorten):
                got = min(got, fault.nbytes)
        return got


class _FaultyWriter:
    def __init__(self, backend: FaultyBackend, name: str, inner: Writer) -> None:
        self._backend = backend
        self._name = name
        self._inner = inner

    def reserve(self, size: int) -> None:
        self._backend._meet(Operation("reserve", self._name, 0, size))
        self._inner.reserve(size)

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        total = sum(part.nbytes for part in parts)
        for fault in self._backend._meet(Operation("write", self._name, offset, total)):
            if isinstance(fault, Corrupt) and total:
                parts = [memoryview(bytearray(b"".join(parts)))]
                _flip(parts, fault.bit % (8 * total))
            elif isinstance(fault, Fail):
                self._inner.write(offset, [memoryview(b"".join(parts))[: fault.torn_bytes]])
                raise OSError(fault.errno, "injected fault", self._name)
        self._inner.write(offset, parts)

    def sync(self) -> None:
        self._backend._meet(Operation("sync", self._name))
        self._inner.sync()

    def seal(self, size: int) -> None:
        self._backend._meet(Operation("seal", self._name, 0, size))
        self._inner.seal(size)

    def abort(self) -> None:
        try:
            self._backend._meet(Operation("abort", self._name))
        except OSError:
            return
        self._inner.abort()


class _Armed:
    """A fault and the operations it has seen."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self._seen = 0

    def hits(self, kind: Kind) -> bool:
        if self.fault.kind not in {None, kind}:
            return False
        self._seen += 1
        return self._seen == self.fault.nth or (self.fault.lasting and self._seen > self.fault.nth)


def _flip(views: Sequence[memoryview], bit: int) -> None:
    byte, bit = divmod(bit, 8)
    for view in views:
        if byte < view.nbytes:
            view[byte] ^= 1 << bit
            return
        byte -= view.nbytes


def fail_each(
    make: Callable[[], Backend],
    kind: Kind | None,
    *,
    error: int = errno.EIO,
    lasting: bool = False,
    limit: int = 10_000,
) -> Iterator[FaultyBackend]:
    """Yield a backend around a new `make()` whose first, then second, ... operation of `kind` (None: any) fails.

    Ends after the first round that the fault did not reach: the loop's body has then succeeded once. `lasting` fails
    all later operations too, as a device that is gone. AssertionError after `limit` rounds.
    """
    for nth in range(1, limit + 1):
        backend = FaultyBackend(make(), [Fail(kind=kind, nth=nth, errno=error, lasting=lasting)])
        yield backend
        if not backend.fired:
            return
    raise AssertionError(f"operation {limit} of kind {kind or 'any'} still fails; does the loop's body ever end?")
