"""One file in memory, and what of it power loss may take."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from duokv.kvstore.buffers import PAGE


@dataclass(frozen=True, slots=True)
class _Write:
    offset: int
    data: bytes

    def pieces(self) -> Iterator[_Write]:
        for start, end in _by_page(self.offset, self.offset + len(self.data)):
            yield _Write(start, self.data[start - self.offset : end - self.offset])

    def apply(self, file: MemoryFile) -> None:
        file.write(self.offset, self.data)


@dataclass(frozen=True, slots=True)
class _Punch:
    offset: int
    end: int

    def pieces(self) -> Iterator[_Punch]:
        for start, end in _by_page(self.offset, self.end):
            yield _Punch(start, end)

    def apply(self, file: MemoryFile) -> None:
        file.punch(self.offset, self.end - self.offset)


@dataclass(frozen=True, slots=True)
class _Resize:
    size: int

    def pieces(self) -> Iterator[_Resize]:
        yield self

    def apply(self, file: MemoryFile) -> None:
        file.resize(self.size)


class MemoryFile:
    """Bytes, holes, and what of both is not settled: power loss may take it. Not thread-safe.

    data: the bytes, or None to keep only lengths and allocation and read zeros; then there is nothing to lose either.
    """

    def __init__(self, data: bytearray | None) -> None:
        self.data = data
        self.size = 0
        self._holes = _PageSet()
        self._settled_size = 0
        self._settled_pages: dict[int, bytes | None] = {}  # durable content of pages changed since; None: a hole
        self._changes: list[_Write | _Punch | _Resize] = []

    @property
    def allocated(self) -> int:
        """Bytes of the pages that are not holes."""
        return (_pages(self.size) - self._holes.count) * PAGE

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill a flat view from `offset`; return the bytes copied, short at the end."""
        n = max(0, min(view.nbytes, self.size - offset))
        if self.data is None:
            view[:n] = bytes(n)
        else:
            view[:n] = memoryview(self.data)[offset : offset + n]
        return n

    def write(self, offset: int, data: bytes) -> None:
        """Put `data` at `offset`; only for a file that keeps bytes."""
        assert self.data is not None
        self._note(offset, offset + len(data), _Write(offset, data))
        self.extend(offset, len(data))
        self.data[offset : offset + len(data)] = data

    def extend(self, offset: int, nbytes: int) -> None:
        """Account for a write: its pages take space, a gap before it does not."""
        end = offset + nbytes
        if end > self.size:
            old = self.size
            self._set_size(end)
            self._holes.add(_pages(old), offset // PAGE)
        if nbytes:
            self._holes.discard(offset // PAGE, _pages(end))

    def grow(self, size: int) -> None:
        """Make the file at least `size` bytes long, of pages that take space."""
        if size > self.size:
            self.resize(size)

    def resize(self, size: int) -> None:
        """Make the file `size` bytes long."""
        self._note(size, max(size, self.size), _Resize(size))
        self._set_size(size)

    def punch(self, offset: int, length: int) -> int:
        """Zero a range and give the pages wholly in it back; return their bytes."""
        end = min(offset + length, self.size)
        if end <= offset:
            return 0
        self._note(offset, end, _Punch(offset, end))
        if self.data is not None:
            self.data[offset:end] = bytes(end - offset)
        before = self._holes.count
        self._holes.add(_pages(offset), _pages(end) if end == self.size else end // PAGE)
        return (self._holes.count - before) * PAGE

    def settle(self) -> None:
        """Everything so far survives power loss."""
        self._settled_size = self.size
        self._settled_pages.clear()
        self._changes.clear()

    def after_crash(self, unsynced: float, rng: random.Random) -> MemoryFile:
        """Return the settled file with each unsettled change, page by page, surviving with probability `unsynced`."""
        file = self._settled_image()
        for change in self._changes:
            for piece in change.pieces():
                if rng.random() < unsynced:
                    piece.apply(file)
        file.settle()
        return file

    def _settled_image(self) -> MemoryFile:
        assert self.data is not None
        file = MemoryFile(self.data[: self._settled_size])
        file._set_size(self._settled_size)
        file._holes = self._holes.copy()
        file._holes.discard(_pages(self._settled_size), _pages(self.size))
        for page, content in self._settled_pages.items():
            start, end = page * PAGE, min((page + 1) * PAGE, self._settled_size)
            assert file.data is not None
            file.data[start:end] = bytes(end - start) if content is None else content[: end - start]
            if content is None:
                file._holes.add(page, page + 1)
            else:
                file._holes.discard(page, page + 1)
        return file

    def _note(self, start: int, end: int, change: _Write | _Punch | _Resize) -> None:
        """Keep a change that is about to happen to [start, end), and the durable content it hides."""
        if self.data is None:
            return
        for page in range(start // PAGE, _pages(min(end, self._settled_size))):
            if page not in self._settled_pages:
                hole = page in self._holes
                self._settled_pages[page] = None if hole else bytes(self.data[page * PAGE : (page + 1) * PAGE])
        self._changes.append(change)

    def _set_size(self, size: int) -> None:
        if self.data is not None:
            del self.data[size:]
            self.data.extend(bytes(size - len(self.data)))
        self._holes.discard(_pages(size), _pages(self.size))
        self.size = size


class _PageSet:
    """A set of page numbers, kept as disjoint, ordered runs."""

    def __init__(self) -> None:
        self.count = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, page: int) -> bool:
        i = bisect_right(self._starts, page) - 1
        return i >= 0 and page < self._ends[i]

    def copy(self) -> _PageSet:
        other = _PageSet()
        other.count, other._starts, other._ends = self.count, self._starts.copy(), self._ends.copy()
        return other

    def add(self, start: int, end: int) -> None:
        if start < end:
            self._replace(start, end, inside=True)

    def discard(self, start: int, end: int) -> None:
        if start < end:
            self._replace(start, end, inside=False)

    def _replace(self, start: int, end: int, *, inside: bool) -> None:
        """Make [start, end) all in the set or all out of it."""
        i = bisect_left(self._ends, start)  # the runs i..j overlap or touch [start, end)
        j = bisect_right(self._starts, end)
        low = min([start, *self._starts[i:j]])
        high = max([end, *self._ends[i:j]])
        self.count -= sum(self._ends[i:j]) - sum(self._starts[i:j])
        runs = [(low, high)] if inside else [(low, start), (end, high)]
        runs = [(a, b) for a, b in runs if a < b]
        self.count += sum(b - a for a, b in runs)
        self._starts[i:j] = [a for a, _ in runs]
        self._ends[i:j] = [b for _, b in runs]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE)


def _by_page(start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = min(end, (start // PAGE + 1) * PAGE)
        yield start, stop
        start = stop
