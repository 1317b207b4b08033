"""A store's files in a folder of a POSIX file system, past the page cache where O_DIRECT works."""

from __future__ import annotations

import builtins
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from duokv.connectors.names import LOCKS, check_name, check_prefix
from duokv.connectors.posix_io import (
    ReadFds,
    Support,
    aligned_runs,
    allocate,
    errno_name,
    probe,
    punch_hole,
    read_full,
    sync_folder,
    write_full,
)
from duokv.kvstore.backend import FileInfo, Lock, ReadOp, Writer
from duokv.kvstore.buffers import PAGE, BufferPool
from duokv.kvstore.errors import StoreError, UsageError, nearest

Direct = Literal["auto", "require", "off"]

_TMP = ".tmp"
_IN_USE = "in-use"
_OPEN_FILES = 128
_STAGE_BYTES = 4 << 20
_STAGES_KEPT_BYTES = 4 * _STAGE_BYTES
_MODE = 0o666  # less the umask


class PosixBackend:
    """Files under `root`.

    direct: "auto" uses O_DIRECT when a probe at open works, else the page cache, and says so in `notes`; "require"
        raises StoreError instead; "off" always goes through the page cache.
    create: make the folder when it is missing. False opens what is there for reading only, through the page cache:
        nothing is written, and what would write raises OSError(EROFS).
    clock: monotonic seconds, for read deadlines.

    StoreError when the folder cannot be used. A system call under way when a read's deadline passes is waited for.
    Locks are flock(2) locks: a child forked without exec holds them too, until `release` or its own end.
    """

    concurrency = 8
    """Four preadv at once reach a local disk's ceiling; as many threads again verify meanwhile what they have read."""

    def __init__(
        self,
        root: Path,
        *,
        direct: Direct = "auto",
        create: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if direct not in get_args(Direct):
            raise UsageError(f"direct = {direct!r} is not a way to read; {nearest(direct, get_args(Direct))}")
        if direct == "require" and not create:
            raise UsageError('direct = "require" needs a folder that may be written to try it on; use "auto"')
        self._root = root
        self._clock = clock
        self._writable = create
        self._in_use: int | None = None
        self._fds = ReadFds(self._open_read, _OPEN_FILES)
        self._stages = BufferPool(_STAGES_KEPT_BYTES)
        try:
            support = self._prepare(direct != "off") if create else _inspect(root)
        except OSError as error:
            self.close()
            raise StoreError(
                f"folder {root} cannot hold a store: {errno_name(error)} on {error.filename or root}; "
                f"make it readable{' and writable' if create else ''} for this user, or give another one"
            ) from error
        self._direct = create and direct != "off" and not support.direct_refused
        self._allocates = not support.allocate_refused
        self.can_punch = not support.punch_refused
        self.alignment = PAGE if self._direct else 1
        self.notes = tuple(_notes(root, support)) if create else ()
        if direct == "require" and not self._direct:
            self.close()
            raise StoreError(
                f"O_DIRECT refused under {root}: {support.direct_refused}; "
                'move the store to a file system that has it, or set direct = "auto"'
            )

    def create(self, name: str, size: int) -> Writer:
        """See `Backend.create`."""
        path = self._path_to_change(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct_flag, _MODE)
        writer = _PosixWriter(self, name, fd, reserved=0)
        try:
            writer.reserve(size)
        except OSError:
            writer.abort()
            raise
        return writer

    def resume(self, name: str) -> Writer:
        """See `Backend.resume`."""
        fd = os.open(self._path_to_change(name), os.O_WRONLY | os.O_CLOEXEC | self._direct_flag)
        return _PosixWriter(self, name, fd, reserved=os.fstat(fd).st_size)

    def read_many(self, ops: Sequence[ReadOp], *, deadline_s: float) -> builtins.list[int]:
        """See `Backend.read_many`."""
        deadline = self._clock() + deadline_s

        def late() -> bool:
            return self._clock() >= deadline

        return [self._read(op, late) for op in ops]

    def list(self, prefix: str) -> builtins.list[FileInfo]:
        """See `Backend.list`. Files that the store did not make are listed too."""
        folder, slash, _ = check_prefix(prefix).rpartition("/")
        return sorted(_walk(self._root / folder, folder + slash, prefix), key=lambda info: info.name)

    def remove(self, name: str) -> None:
        """See `Backend.remove`."""
        self._path_to_change(name).unlink(missing_ok=True)
        self._fds.forget(name)

    def punch(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """See `Backend.punch`. Only whole blocks of the file system give space back."""
        try:
            fd = os.open(self._path_to_change(name), os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            before = os.fstat(fd).st_blocks
            for offset, length in ranges:
                punch_hole(fd, offset, length)
            return max(0, before - os.fstat(fd).st_blocks) * 512
        finally:
            os.close(fd)

    def write_file(self, name: str, data: bytes) -> None:
        """See `Backend.write_file`."""
        path = self._path_to_change(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._root / _TMP / secrets.token_hex(8)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
            try:
                write_full(fd, [memoryview(data)], 0)
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._fds.forget(name)
        self._sync_names(path)

    def read_file(self, name: str) -> bytes | None:
        """See `Backend.read_file`."""
        try:
            return (self._root / check_name(name)).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def lock(self, name: str) -> Lock | None:
        """See `Backend.lock`."""
        self._path_to_change(name)
        path = self._root / LOCKS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                return None
            raise
        return _FileLock(fd)

    def close(self) -> None:
        """See `Backend.close`. Writers keep working until sealed."""
        self._fds.close()
        fd, self._in_use = self._in_use, None
        if fd is not None:
            os.close(fd)

    def _prepare(self, direct: bool) -> Support:
        """Make the folders and find out what works in them; OSError when the folder is of no use."""
        _make_folder(self._root)
        temporary = self._root / _TMP
        temporary.mkdir(exist_ok=True)
        self._in_use = _enter(temporary)
        _inspect(self._root)
        return probe(temporary, direct=direct)

    def _read(self, op: ReadOp, late: Callable[[], bool]) -> int:
        if late():
            return -errno.ETIMEDOUT
        try:
            with self._fds.borrow(op.name) as fd:
                return read_full(fd, op.views, op.offset, alignment=self.alignment, late=late)
        except UsageError:
            return -errno.EINVAL
        except OSError as error:
            return -(error.errno or errno.EIO)

    @property
    def _direct_flag(self) -> int:
        return os.O_DIRECT if self._direct else 0

    def _open_read(self, name: str) -> int:
        return os.open(self._root / check_name(name), os.O_RDONLY | os.O_CLOEXEC | self._direct_flag)

    def _path_to_change(self, name: str) -> Path:
        check_name(name)
        if not self._writable:
            raise OSError(errno.EROFS, "store is open for reading only", name)
        return self._root / name

    def _sync_names(self, path: Path) -> None:
        """Make the file's name survive power loss, with those of its folders, whoever made them."""
        for folder in path.parents:
            sync_folder(folder)
            if folder == self._root:
                return


class _PosixWriter:
    def __init__(self, backend: PosixBackend, name: str, fd: int, *, reserved: int) -> None:
        self._backend = backend
        self._name = name
        self._path = backend._root / name
        self._fd: int | None = fd
        self._reserved = reserved
        self._name_synced = False

    def reserve(self, size: int) -> None:
        fd = self._live()
        # From the old end only: allocating anew what has been punched would take its space back.
        if size > self._reserved and self._backend._allocates and allocate(fd, self._reserved, size):
            self._reserved = size

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        fd = self._live()
        if not self._backend._direct:
            write_full(fd, parts, offset)
            return
        with self._backend._stages.lend(1, _STAGE_BYTES) as lent:
            for run in aligned_runs(parts, lent.rows.data.cast("B")):
                write_full(fd, run, offset)
                offset += sum(view.nbytes for view in run)

    def sync(self) -> None:
        fd = self._live()
        if self._backend._allocates:
            os.fdatasync(fd)
        else:
            # Without preallocation each write moves the file's end, which 3FS flushes on fsync alone
            # (`fdatasync_update_length=false`).
            os.fsync(fd)
        if not self._name_synced:
            self._backend._sync_names(self._path)
            self._name_synced = True

    def seal(self, size: int) -> None:
        fd = self._live()
        os.ftruncate(fd, size)
        self._fd = None
        os.close(fd)

    def abort(self) -> None:
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with suppress(OSError):
            os.close(fd)
        with suppress(OSError):
            self._backend.remove(self._name)

    def __del__(self) -> None:
        # A writer that was dropped leaves its file for `resume`, not its descriptor.
        if self._fd is not None:
            os.close(self._fd)

    def _live(self) -> int:
        if self._fd is None:
            raise OSError(errno.EBADF, "writer was sealed or aborted", self._name)
        return self._fd


class _FileLock:
    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def release(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            # Unlocking first frees it even where a forked child still has the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _make_folder(root: Path) -> None:
    """Make the store's folder so that it survives power loss."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def _inspect(root: Path) -> Support:
    """Raise OSError when the folder cannot be listed; what it can do stays untried."""
    os.scandir(root).close()
    return Support("not tried", "not tried", "not tried")


def _enter(temporary: Path) -> int:
    """Return a descriptor that marks the store as in use; who finds it unused first removes crashed writers' files."""
    fd = os.open(temporary / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in temporary.iterdir():
                if path.name != _IN_USE:
                    path.unlink(missing_ok=True)
        fcntl.flock(fd, fcntl.LOCK_SH)
    except OSError:
        os.close(fd)
        raise
    return fd


def _notes(root: Path, support: Support) -> Iterator[str]:
    if support.direct_refused:
        yield f"O_DIRECT refused under {root}: {support.direct_refused}; reads and writes go through the page cache"
    if support.allocate_refused:
        yield f"fallocate refused under {root}: {support.allocate_refused}; space is not reserved ahead"
    if support.punch_refused:
        yield f"punching holes refused under {root}: {support.punch_refused}; space comes back with whole files only"


def _walk(folder: Path, base: str, prefix: str) -> Iterator[FileInfo]:
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            name = base + entry.name
            if not name.startswith(prefix) or entry.name.startswith(".") or name == LOCKS:
                continue
            if entry.is_dir():
                yield from _walk(folder / entry.name, name + "/", prefix)
                continue
            with suppress(FileNotFoundError):
                status = entry.stat()
                yield FileInfo(name, status.st_size, status.st_blocks * 512)
