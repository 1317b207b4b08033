"""The one seam for where Block KV bytes live: named files of one store.

Format, life and crash safety are written once above this seam, so a backend only moves bytes. Names are relative,
'/'-separated, and never escape the store's root: parts that are empty or begin with a dot, and the folder `locks/`, are
refused with UsageError (in `read_many` with an -errno). All calls are synchronous and thread-safe except where a law
says so. What is not said to survive power loss may be undone by it, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReadOp:
    """Read `sum(view.nbytes)` bytes of file `name` from byte `offset` into `views`, one after another.

    With `Backend.alignment` a > 1, offset, each view's address and each view's length are multiples of a.
    """

    name: str
    offset: int
    views: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes wanted."""
        return sum(view.nbytes for view in self.views)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file as the backend sees it: length, and physical bytes held (preallocation included, punched ranges not)."""

    name: str
    size: int
    allocated: int


class Lock(Protocol):
    """An exclusive lock that lasts until `release` or the end of the process that holds it, however that ends."""

    def release(self) -> None:
        """Give the lock back; idempotent."""


class Writer(Protocol):
    """The only writer of one file. Not thread-safe; its owner serialises calls."""

    def reserve(self, size: int) -> None:
        """Make sure bytes [0, size) have space on the device; OSError(ENOSPC) if not. Never shrinks. May do nothing.

        What is reserved and not written reads as zeros, or is past the end. Punched ranges are not taken anew.
        """

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write the parts one after another from `offset` (a multiple of `Backend.alignment`, as is their total).

        All or OSError: after an error the range's content is undefined. Parts are copied or written before return.
        Bytes are visible to `read_many` of this process and, on a POSIX backend, of others once this returns.
        """

    def sync(self) -> None:
        """Make everything written so far, and the file's name, survive power loss."""

    def seal(self, size: int) -> None:
        """Cut the file to `size`, close it, allow no more writes: OSError. Does not imply `sync`.

        Power loss may undo the cut itself, even of a file that was synced before: it is then as long as reserved.
        """

    def abort(self) -> None:
        """Close and remove the file; idempotent, never raises. After `seal` it does nothing."""


class Backend(Protocol):
    """Where files live."""

    @property
    def alignment(self) -> int:
        """What offsets, lengths and addresses of reads and writes must be multiples of (1: anything goes)."""

    @property
    def concurrency(self) -> int:
        """How many `read_many` calls at once keep the device busy."""

    @property
    def can_punch(self) -> bool:
        """Whether `punch` gives space back; False makes reclaim drop whole files and copy survivors."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What works less well than asked, each with its reason, for people (for example O_DIRECT refused: EINVAL)."""

    def create(self, name: str, size: int) -> Writer:
        """Create file `name` exclusively with `size` bytes reserved; FileExistsError if it is there already."""

    def resume(self, name: str) -> Writer:
        """Open an unsealed file whose writer is gone; FileNotFoundError if it is not there."""

    def read_many(self, ops: Sequence[ReadOp], *, deadline_s: float) -> list[int]:
        """Fill the caller's memory. Returns per op, in the order of `ops`, the bytes read or -errno.

        Fewer bytes than wanted mean the file's end (0 at or past it); the rest of the views is then undefined.
        Never raises for a failing file. An op not done after `deadline_s` seconds returns -ETIMEDOUT; a backend that
        returned never writes into the views afterwards. One that cannot promise to return in time may return late:
        the store calls it from threads of its own and gives such memory up.
        """

    def list(self, prefix: str) -> list[FileInfo]:
        """All files whose name starts with `prefix`, in order of name. Lock files are not listed."""

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there. Reads under way fail or finish."""

    def punch(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """Give the space of (offset, length) ranges back; they read as zeros. Returns bytes freed; OSError if refused.

        Only called when `can_punch`. A file that is gone counts as freed already (0).
        """

    def write_file(self, name: str, data: bytes) -> None:
        """Replace a small file as a whole, atomically and durably. Such files are listed and read as the others are."""

    def read_file(self, name: str) -> bytes | None:
        """A small file's content, or None when there is none."""

    def lock(self, name: str) -> Lock | None:
        """Take the exclusive lock `name`, or return None at once when another holds it."""

    def close(self) -> None:
        """Release descriptors and threads; idempotent. Files stay."""
