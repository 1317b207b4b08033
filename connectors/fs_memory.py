"""A store's files in this process's memory, with the crashes a disk can suffer."""

from __future__ import annotations

import builtins
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from duokv.connectors.memory_file import MemoryFile
from duokv.connectors.names import check_name, check_prefix
from duokv.kvstore.backend import FileInfo, Lock, ReadOp, Writer
from duokv.kvstore.buffers import address
from duokv.kvstore.errors import UsageError


class MemoryBackend:
    """Files as bytes, gone with the object. Thread-safe; `close` keeps them, so that a store can be opened again.

    alignment: refuse reads and writes as O_DIRECT would (EINVAL) unless they are multiples of it.
    can_punch: whether to offer `punch`.
    metadata_only: keep lengths and allocation of created files but no bytes of them; they read as zeros. `write_file`
        keeps its bytes.
    clock: monotonic seconds, for read deadlines.
    """

    concurrency = 1
    """Copies under one lock; more threads gain nothing."""
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        alignment: int = 1,
        can_punch: bool = True,
        metadata_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.alignment = alignment
        self.can_punch = can_punch
        self._metadata_only = metadata_only
        self._clock = clock
        self._mutex = threading.RLock()
        self._locks: set[str] = set()
        self._files: dict[str, MemoryFile] = {}
        self._durable: dict[str, MemoryFile] = {}
        self._renamings: list[_Renaming] = []

    def create(self, name: str, size: int) -> Writer:
        """See `Backend.create`."""
        with self._mutex:
            if check_name(name) in self._files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
            file = MemoryFile(None if self._metadata_only else bytearray())
            file.grow(size)
            self._rename(name, file)
            return _MemoryWriter(self, name, file)

    def resume(self, name: str) -> Writer:
        """See `Backend.resume`."""
        with self._mutex:
            file = self._files.get(check_name(name))
            if file is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            return _MemoryWriter(self, name, file)

    def read_many(self, ops: Sequence[ReadOp], *, deadline_s: float) -> builtins.list[int]:
        """See `Backend.read_many`."""
        deadline = self._clock() + deadline_s
        return [-errno.ETIMEDOUT if self._clock() >= deadline else self._read(op) for op in ops]

    def list(self, prefix: str) -> builtins.list[FileInfo]:
        """See `Backend.list`."""
        check_prefix(prefix)
        with self._mutex:
            names = sorted(name for name in self._files if name.startswith(prefix))
            return [FileInfo(name, self._files[name].size, self._files[name].allocated) for name in names]

    def remove(self, name: str) -> None:
        """See `Backend.remove`."""
        with self._mutex:
            if check_name(name) in self._files:
                self._rename(name, None)

    def punch(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """See `Backend.punch`. Only whole pages give space back."""
        if not self.can_punch:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
        with self._mutex:
            file = self._files.get(check_name(name))
            return sum(file.punch(offset, length) for offset, length in ranges) if file else 0

    def write_file(self, name: str, data: bytes) -> None:
        """See `Backend.write_file`."""
        with self._mutex:
            file = MemoryFile(bytearray())
            file.write(0, data)
            self._rename(check_name(name), file)
            self._make_durable(name, file)

    def read_file(self, name: str) -> bytes | None:
        """See `Backend.read_file`."""
        with self._mutex:
            file = self._files.get(check_name(name))
            if file is None:
                return None
            data = bytearray(file.size)
            file.read_into(memoryview(data), 0)
            return bytes(data)

    def lock(self, name: str) -> Lock | None:
        """See `Backend.lock`."""
        with self._mutex:
            if check_name(name) in self._locks:
                return None
            self._locks.add(name)
            return _MemoryLock(self, name)

    def close(self) -> None:
        """See `Backend.close`."""

    def crash_clone(self, unsynced: float, rng: random.Random) -> MemoryBackend:
        """Return these files as power loss at this moment might leave them. This backend goes on unharmed.

        What was synced is there. Of the rest each page of each write, each punch of a page, each change of a length and
        each name that was created or removed survives with probability `unsynced`, independently of the others; so 1.0
        is what a crash of the process alone leaves. No lock is held in the clone.
        """
        if self._metadata_only:
            raise UsageError("a metadata_only backend has no bytes to lose; make one that keeps them")
        with self._mutex:
            names = dict(self._durable)
            for renaming in self._renamings:
                if rng.random() < unsynced:
                    if renaming.file is None:
                        names.pop(renaming.name, None)
                    else:
                        names[renaming.name] = renaming.file
            clone = MemoryBackend(alignment=self.alignment, can_punch=self.can_punch, clock=self._clock)
            clone._files = {name: names[name].after_crash(unsynced, rng) for name in sorted(names)}
            clone._durable = dict(clone._files)
            return clone

    def _read(self, op: ReadOp) -> int:
        if op.offset < 0 or not _fits(op.offset, op.views, self.alignment):
            return -errno.EINVAL
        with self._mutex:
            file = self._files.get(op.name)
            if file is None:
                return -errno.ENOENT
            done = 0
            for view in op.views:
                done += file.read_into(view.cast("B"), op.offset + done)
            return done

    def _rename(self, name: str, file: MemoryFile | None) -> None:
        if file is None:
            del self._files[name]
        else:
            self._files[name] = file
        if not self._metadata_only:
            self._renamings.append(_Renaming(name, file))

    def _make_durable(self, name: str, file: MemoryFile) -> None:
        """Settle a file and its name; flushing the name's folders settles removals in them too."""
        file.settle()
        if self._metadata_only or self._files.get(name) is not file:
            return
        unsettled: list[_Renaming] = []
        for renaming in self._renamings:
            if renaming.name == name or (renaming.file is None and renaming.in_folder_of(name)):
                self._durable.pop(renaming.name, None)
                unsettled = [earlier for earlier in unsettled if earlier.name != renaming.name]
            else:
                unsettled.append(renaming)
        self._renamings = unsettled
        self._durable[name] = file


class _MemoryWriter:
    def __init__(self, backend: MemoryBackend, name: str, file: MemoryFile) -> None:
        self._backend = backend
        self._name = name
        self._live: MemoryFile | None = file

    def reserve(self, size: int) -> None:
        with self._backend._mutex:
            self._file().grow(size)

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        total = sum(part.nbytes for part in parts)
        if offset < 0 or offset % self._backend.alignment or total % self._backend.alignment:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), self._name)
        with self._backend._mutex:
            file = self._file()
            if file.data is None:
                file.extend(offset, total)
            else:
                file.write(offset, b"".join(parts))

    def sync(self) -> None:
        with self._backend._mutex:
            self._backend._make_durable(self._name, self._file())

    def seal(self, size: int) -> None:
        with self._backend._mutex:
            self._file().resize(size)
            self._live = None

    def abort(self) -> None:
        with self._backend._mutex:
            file, self._live = self._live, None
            if file is not None and self._backend._files.get(self._name) is file:
                self._backend.remove(self._name)

    def _file(self) -> MemoryFile:
        if self._live is None:
            raise OSError(errno.EBADF, "writer was sealed or aborted", self._name)
        return self._live


class _MemoryLock:
    def __init__(self, backend: MemoryBackend, name: str) -> None:
        self._backend = backend
        self._name: str | None = name

    def release(self) -> None:
        with self._backend._mutex:
            name, self._name = self._name, None
            if name is not None:
                self._backend._locks.discard(name)


@dataclass(frozen=True, slots=True, eq=False)
class _Renaming:
    """A name that came to mean `file`, or nothing, and is not durable yet."""

    name: str
    file: MemoryFile | None

    def in_folder_of(self, name: str) -> bool:
        """Whether making `name` durable flushes the folder of this one."""
        folder, slash, _ = self.name.rpartition("/")
        return name.startswith(folder + slash)


def _fits(offset: int, views: Sequence[memoryview], alignment: int) -> bool:
    """Whether O_DIRECT with this alignment would accept the read."""
    return alignment == 1 or not any(
        n % alignment for n in (offset, *(n for view in views for n in (view.nbytes, address(view))))
    )
