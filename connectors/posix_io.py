"""System calls on files, each taken to its end: probing, whole reads and writes, cached descriptors."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from duokv.kvstore.buffers import PAGE, address, aligned

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def errno_name(error: OSError) -> str:
    """Return the symbol of an error, such as EINVAL."""
    return errno.errorcode.get(error.errno or 0, str(error))


def allocate(fd: int, start: int, end: int) -> bool:
    """Make bytes [start, end) take space; False when the file system cannot, OSError when the device is full.

    fallocate(2) itself, because posix_fallocate(3) imitates it by writing where it is missing.
    """
    try:
        _fallocate(fd, 0, start, end - start)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give the space of a range back; it reads as zeros and the file keeps its size."""
    _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    while _LIBC.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive power loss, where the file system has such a call."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Support:
    """What a file system can do; for each refusal the errno's name."""

    direct_refused: str | None
    allocate_refused: str | None
    punch_refused: str | None


def probe(folder: Path, *, direct: bool) -> Support:
    """Try on a file of its own what the file system under `folder` can do; a full device counts as able."""
    path = folder / secrets.token_hex(8)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, 2 * PAGE)
        punch = _refusal(lambda: punch_hole(fd, 0, PAGE))
        reserve = _refusal(lambda: _fallocate(fd, 0, 0, PAGE))
        return Support(_refusal(lambda: _try_direct(path)) if direct else None, reserve, punch)
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)


def _refusal(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    except OSError as error:
        return None if error.errno in _FULL else errno_name(error)
    return None


def _try_direct(path: Path) -> None:
    page = aligned(PAGE)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    try:
        os.preadv(fd, [page], PAGE)
        os.pwritev(fd, [page], PAGE)
    finally:
        os.close(fd)


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of `views` after their first `done` bytes."""
    for i, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[i + 1 :]]
        done -= view.nbytes
    return []


def _flat(views: Sequence[memoryview]) -> list[memoryview]:
    return [view.cast("B") for view in views if view.nbytes]


def read_full(fd: int, views: Sequence[memoryview], offset: int, *, alignment: int, late: Callable[[], bool]) -> int:
    """Fill `views` from `offset` on; return the bytes read, short only at the file's end.

    TimeoutError when `late()` before the next system call.
    """
    done, left = 0, _flat(views)
    while left:
        if late():
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        got = os.preadv(fd, left[:_IOV_MAX], offset + done)
        done += got
        # A file's odd end shows as an odd count; asking on from there would be refused under O_DIRECT.
        if not got or got % alignment:
            break
        left = _rest(left, got)
    return done


def write_full(fd: int, parts: Sequence[memoryview], offset: int) -> None:
    """Write all of `parts` from `offset` on."""
    left = _flat(parts)
    while left:
        done = os.pwritev(fd, left[:_IOV_MAX], offset)
        if not done:
            raise OSError(errno.EIO, "write made no progress")
        offset += done
        left = _rest(left, done)


def aligned_runs(parts: Sequence[memoryview], stage: memoryview) -> Iterator[list[memoryview]]:
    """Yield the bytes of `parts` in order as runs that O_DIRECT accepts (the last one only if the total is aligned).

    Aligned parts are passed on; what is not goes through `stage`, so each run must be written before the next is asked.
    """
    run: list[memoryview] = []
    fill = 0
    for part in _flat(parts):
        if not fill and part.nbytes % PAGE == 0 and address(part) % PAGE == 0:
            run.append(part)
            continue
        if run:
            yield run
            run = []
        left = part
        while left:
            n = min(left.nbytes, stage.nbytes - fill)
            stage[fill : fill + n] = left[:n]
            fill, left = fill + n, left[n:]
            if fill == stage.nbytes:
                yield [stage]
                fill = 0
    if run or fill:
        yield run or [stage[:fill]]


class _OpenFile:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self.retired = False


class ReadFds:
    """Descriptors of files being read, by name; the least recently used beyond `cap` are closed. Thread-safe.

    One in use is closed by its last user, so no read meets a descriptor that means another file by now.
    """

    def __init__(self, open_fd: Callable[[str], int], cap: int) -> None:
        self._open_fd = open_fd
        self._cap = cap
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _OpenFile] | None = OrderedDict()

    @contextmanager
    def borrow(self, name: str) -> Iterator[int]:
        """Lend a descriptor of the file that has the name now; OSError when there is none."""
        file = self._acquire(name)
        while not os.fstat(file.fd).st_nlink:  # removed or replaced, perhaps by another process
            self._release(file)
            self._retire(name, file)
            file = self._acquire(name)
        try:
            yield file.fd
        finally:
            self._release(file)

    def forget(self, name: str) -> None:
        """Close the file's descriptor, so that a removed file's space is given back."""
        self._retire(name, None)

    def close(self) -> None:
        """Close all; those in use by their last user. Later borrowers get EBADF."""
        with self._lock:
            files, self._files = self._files, None
            for file in (files or {}).values():
                self._retire_locked(file)

    def _acquire(self, name: str) -> _OpenFile:
        with self._lock:
            file = self._table().get(name)
            if file:
                self._table().move_to_end(name)
                file.users += 1
                return file
        fd = self._open_fd(name)
        with self._lock:
            if self._files is None:
                os.close(fd)
            table = self._table()
            if name in table:
                self._retire_locked(table.pop(name))
            file = table[name] = _OpenFile(fd)
            while len(table) > self._cap:
                self._retire_locked(table.popitem(last=False)[1])
            return file

    def _table(self) -> OrderedDict[str, _OpenFile]:
        if self._files is None:
            raise OSError(errno.EBADF, "backend is closed")
        return self._files

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if file.retired and not file.users:
                os.close(file.fd)

    def _retire(self, name: str, only: _OpenFile | None) -> None:
        with self._lock:
            file = self._files.get(name) if self._files else None
            if self._files and file and only in {None, file}:
                del self._files[name]
                self._retire_locked(file)

    def _retire_locked(self, file: _OpenFile) -> None:
        file.retired = True
        if not file.users:
            os.close(file.fd)
