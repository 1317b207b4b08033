"""Memory that O_DIRECT can use: page-aligned, touched before use, recycled.

First touch of fresh memory is slower than the disk it is filled from, so regions are touched once, when they are
made, and handed out again and again.
"""

from __future__ import annotations

import errno
import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from duokv.kvstore.errors import UsageError

PAGE = 4096
"""Alignment that satisfies O_DIRECT on devices with logical blocks of 512 and of 4096 bytes."""


HUGE_PAGE = 2 << 20
"""Memory of at least so much begins at a multiple of it and is asked for in such pages: a direct read or write of a MiB
is then a few pieces for the device instead of hundreds, and up to twice as fast."""
_POPULATE_WRITE = 23  # linux/mman.h; Linux 5.14


def aligned(nbytes: int) -> memoryview:
    """Return `nbytes` of zeroed, writable, touched memory at a multiple of `PAGE`, of `HUGE_PAGE` if at least so large.

    UsageError for a negative size, OSError if the system refuses. A large one takes `HUGE_PAGE` more address space.

    The memory lives as long as the view or anything made from it. It is a private mapping: by open(2) a process must
    not fork while a direct read into it is in flight.
    """
    if nbytes < 0:
        raise UsageError(f"buffer of {nbytes} bytes: negative; ask for at least 0")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if nbytes < HUGE_PAGE:
        return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=flags | mmap.MAP_POPULATE))[:nbytes]
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags)
    start = -address(memoryview(memory)) % HUGE_PAGE
    view = memoryview(memory)[start : start + nbytes]
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(_POPULATE_WRITE, start, nbytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A kernel without one of them: what is touched is there all the same.
        np.frombuffer(view, np.uint8)[::PAGE] = 0
    return view


def address(view: memoryview) -> int:
    """Return where a contiguous view's first byte lies in memory; 0 for an empty one."""
    return _start(np.frombuffer(view, np.uint8)) if view.nbytes else 0


def _start(array: NDArray[np.uint8]) -> int:
    start: int = array.__array_interface__["data"][0]
    return start


def _size_class(nbytes: int) -> int:
    """Round up to one of eight sizes per doubling, so that regions fit later requests and waste at most an eighth."""
    pages = max(-(-nbytes // PAGE), 1)
    step = 1 << max((pages - 1).bit_length() - 4, 0)
    return -(-pages // step) * step * PAGE


PinMemory = Callable[[memoryview], Callable[[], None]]
"""Pins memory for a device and returns what undoes it, which is called before the memory goes."""


class _Region:
    """A piece of memory and the number of handles on it."""

    def __init__(self, nbytes: int, pin_memory: PinMemory | None) -> None:
        memory = aligned(nbytes)
        if pin_memory is not None:
            # Not at exit: the device may be gone by then.
            weakref.finalize(self, pin_memory(memory)).atexit = False
        self.bytes = np.frombuffer(memory, np.uint8)
        self.start = _start(self.bytes)
        self.holders = 0
        self.spoiled = False


class Lent:
    """One handle on lent memory. The region is recycled when every handle on it has been released.

    rows: uint8 `[n, row_bytes]`; its content is undefined at first. Not to be touched after the release.
    A handle dropped without release is safe: its memory is freed with the last array on it, and not recycled.
    """

    def __init__(self, pool: BufferPool, region: _Region, rows: NDArray[np.uint8]) -> None:
        self.rows = rows
        self._pool = pool
        self._region: _Region | None = region

    def retain(self) -> Lent:
        """Return a second handle, for a read that may end after this one's release (thread-safe)."""
        return self._pool._share(self)

    def spoil(self) -> None:
        """Note that a read nobody waits for may still write into the rows, until all handles are released."""
        if self._region is not None:
            self._region.spoiled = True

    def release(self) -> None:
        """Give this handle up; idempotent and thread-safe."""
        self._pool._take_back(self)

    def _is_spoiled(self) -> bool:
        region = self._region
        return region is not None and region.spoiled

    def __enter__(self) -> Lent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class BufferPool:
    """Lends page-aligned rows and keeps at most `cap_bytes` of idle memory for the next borrowers. Thread-safe.

    A request beyond the cap is served all the same, from memory that is not kept. pin_memory: applied to all of it.
    """

    def __init__(self, cap_bytes: int, pin_memory: PinMemory | None = None) -> None:
        if cap_bytes < 0:
            raise UsageError(f"buffer pool of {cap_bytes} bytes: negative; 0 keeps nothing")
        self._cap_bytes = cap_bytes
        self._pin_memory = pin_memory
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, _Region] = OrderedDict()
        self._idle_bytes = 0
        self._lent: weakref.WeakValueDictionary[int, Lent] = weakref.WeakValueDictionary()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for the next borrowers, at most the cap."""
        return self._idle_bytes

    def lend(self, n: int, row_bytes: int) -> Lent:
        """Lend uint8 rows `[n, row_bytes]`; row i is page-aligned when i * row_bytes is a multiple of `PAGE`."""
        if n < 0 or row_bytes <= 0:
            raise UsageError(f"buffer of {n} rows of {row_bytes} bytes: give n >= 0 and row_bytes > 0")
        wanted = _size_class(n * row_bytes)
        region = self._reuse(wanted) or _Region(wanted, self._pin_memory)
        lent = Lent(self, region, region.bytes[: n * row_bytes].reshape(n, row_bytes))
        with self._lock:
            region.holders = 1
            region.spoiled = False
            self._lent[region.start] = lent
        return lent

    def owns(self, array: NDArray[np.uint8]) -> Lent | None:
        """Return the handle that `array` (its rows, or a slice of them) was lent by, or None when it is not ours."""
        at = _start(array)
        with self._lock:
            for start, lent in self._lent.items():
                if start <= at < start + lent.rows.nbytes:
                    return lent
        return None

    def spoiled(self, arrays: Iterable[NDArray[np.uint8]]) -> bool:
        """Whether one of the arrays lies in lent memory that was spoiled."""
        with self._lock:
            lent = [(start, start + one.rows.nbytes) for start, one in self._lent.items() if one._is_spoiled()]
        return bool(lent) and any(start <= _start(array) < end for array in arrays for start, end in lent)

    def _reuse(self, wanted: int) -> _Region | None:
        """Take the smallest idle region of `wanted` to twice as many bytes."""
        with self._lock:
            fits = [region for region in self._idle.values() if wanted <= region.bytes.nbytes <= 2 * wanted]
            if not fits:
                return None
            region = min(fits, key=lambda region: region.bytes.nbytes)
            del self._idle[region.start]
            self._idle_bytes -= region.bytes.nbytes
            return region

    def _share(self, lent: Lent) -> Lent:
        with self._lock:
            region = lent._region
            if region is None:
                raise UsageError("buffer was released already; retain it before the release")
            region.holders += 1
            return Lent(self, region, lent.rows)

    def _take_back(self, lent: Lent) -> None:
        # Outlives the lock: what memory was pinned for may take its time to let go of it.
        gone: list[_Region] = []
        with self._lock:
            region, lent._region = lent._region, None
            if region is None:
                return
            if self._lent.get(region.start) is lent:
                del self._lent[region.start]
            region.holders -= 1
            if region.holders or region.bytes.nbytes > self._cap_bytes:
                return
            self._idle[region.start] = region
            self._idle_bytes += region.bytes.nbytes
            while self._idle_bytes > self._cap_bytes:
                gone.append(self._idle.popitem(last=False)[1])
                self._idle_bytes -= gone[-1].bytes.nbytes


class Stage:
    """Memory for one read, lent by `Stages`: uint8 `[n, row_bytes]`, page-aligned."""

    def __init__(self, rows: NDArray[np.uint8], home: list[Stage] | None) -> None:
        self.rows = rows
        self._home = home

    def release(self) -> None:
        """Give it back, once."""
        if self._home is not None:
            self._home.append(self)


class Stages:
    """Lends pieces of one slab, so that also small ones lie on huge pages. Thread-safe; the slab is made on first use.

    count: pieces, of `rows` rows of `row_bytes` each. What is asked for beyond it comes from memory that is not kept.
    """

    def __init__(self, count: int, rows: int, row_bytes: int) -> None:
        self._shape = count, rows, row_bytes
        self._lock = threading.Lock()
        self._idle: list[Stage] | None = None

    def lend(self, rows: int) -> Stage:
        """Lend a piece of at least so many rows."""
        count, most, row_bytes = self._shape
        with self._lock:
            if self._idle is None:
                slab = np.frombuffer(aligned(count * most * row_bytes), np.uint8)
                self._idle = []
                self._idle += [Stage(piece, self._idle) for piece in slab.reshape(self._shape)]
            if rows <= most and self._idle:
                return self._idle.pop()
        return Stage(np.frombuffer(aligned(rows * row_bytes), np.uint8).reshape(rows, row_bytes), None)
