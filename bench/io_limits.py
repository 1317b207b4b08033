"""What the machine can do at best: reads and writes past the page cache with nothing around them, copies in memory.

Everything is allocated, touched and opened outside the timed part, which is what `perf_counter` surrounds here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from duokv.kvstore.errors import UsageError

PAGE = 4096
CHUNK_BYTES = 4 << 20
"""Bytes of one system call at most: more gain nothing on any disk tried."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""Flat uint8; for reads and writes page-aligned."""
Timed: TypeAlias = tuple[float, float]
"""Start and end, seconds of `perf_counter`, which processes of one machine share."""


def ratios_to_limit(seconds: Sequence[float], limit_s: Sequence[float]) -> tuple[float, ...]:
    """Per pair the rate as a share of the limit's, whose seconds were measured before and after (one more)."""
    around = zip(limit_s, limit_s[1:], seconds, strict=False)
    return tuple(mean((before, after)) / own for before, after, own in around)


class Crew:
    """`threads` threads that share work; work that is one piece is done by the caller. Close it."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="duokv-limit") if threads > 1 else None

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Do all of it; what a piece raises is raised here."""
        if self._pool is None or len(work) == 1:
            for piece in work:
                piece()
        else:
            for done in [self._pool.submit(piece) for piece in work]:
                done.result()

    def shares(self, nbytes: int, most: int = CHUNK_BYTES) -> list[tuple[int, int]]:
        """Cut `nbytes` into (start, length) of whole pages: one for each thread, or more of at most `most` bytes."""
        even = -(-nbytes // (self.threads * PAGE)) * PAGE
        step = min(even, most)
        return [(at, min(step, nbytes - at)) for at in range(0, nbytes, step)]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class RawFile:
    """A file opened with O_DIRECT, allocated and written in full, so that reads meet data and not holes. Close it."""

    def __init__(self, path: Path, nbytes: int, content: Bytes) -> None:
        self._path = path
        self._fd = _create(path, nbytes)
        for at in range(0, nbytes, content.nbytes):
            _write(self._fd, content[: nbytes - at], at)
        os.fdatasync(self._fd)

    def read(self, pieces: Sequence[tuple[int, Bytes]], crew: Crew) -> Timed:
        """Fill each piece's memory from its offset, one piece after another, each by the whole crew."""
        work = [
            [partial(_read, self._fd, into[at : at + n], offset + at) for at, n in crew.shares(into.nbytes)]
            for offset, into in pieces
        ]
        started = time.perf_counter()
        for piece in work:
            crew.run(piece)
        return started, time.perf_counter()

    def close(self) -> None:
        """Close and remove it."""
        os.close(self._fd)
        self._path.unlink()


def write_durably(path: Path, content: Bytes, times: int, crew: Crew) -> Timed:
    """Write `content` `times` times one after another to a file allocated just before, each time with one fdatasync."""
    nbytes = content.nbytes
    fd = _create(path, times * nbytes)
    try:
        work = [
            [partial(_write, fd, content[at : at + n], turn * nbytes + at) for at, n in crew.shares(nbytes)]
            for turn in range(times)
        ]
        started = time.perf_counter()
        for piece in work:
            crew.run(piece)
            os.fdatasync(fd)
        return started, time.perf_counter()
    finally:
        os.close(fd)
        path.unlink()


def copy(pieces: Sequence[tuple[Bytes, Bytes]], crew: Crew) -> Timed:
    """Copy each (from, to), one pair after another, each by the whole crew."""
    work = [
        [
            partial(np.copyto, to[at : at + n], source[at : at + n])
            for at, n in crew.shares(source.nbytes, source.nbytes)
        ]
        for source, to in pieces
    ]
    started = time.perf_counter()
    for piece in work:
        crew.run(piece)
    return started, time.perf_counter()


def forget_pages(folder: Path) -> None:
    """Take the segments under `folder` out of the page cache; what is not on the device yet stays in it."""
    for path in folder.rglob("*.seg"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def physical_bytes(folder: Path) -> int:
    """What the files under `folder` take on the device."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def check_disk(folder: Path, needed_bytes: int) -> None:
    """UsageError unless `folder` is on a device with room, in a file system that takes O_DIRECT."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; make it, or name another one with --folder")
    if file_system(folder) in ("tmpfs", "ramfs"):
        raise UsageError(f"{folder} is in memory, not on a device; name a folder on a disk with --folder")
    status = os.statvfs(folder)
    if (free := status.f_bavail * status.f_frsize) < needed_bytes:
        raise UsageError(
            f"{folder}: {needed_bytes >> 20:,} MiB needed, {free >> 20:,} free; make room, or name another --folder"
        )
    path = folder / f".duokv-direct-{os.getpid()}"
    try:
        os.close(_create(path, PAGE))
    except OSError as error:
        raise UsageError(f"{folder}: O_DIRECT refused ({error.strerror}); name another one with --folder") from error
    finally:
        path.unlink(missing_ok=True)


def file_system(folder: Path) -> str:
    """The type of the file system that holds `folder`, "?" if it cannot be told."""
    at = folder.resolve()
    best, found = -1, "?"
    for line in Path("/proc/mounts").read_text().splitlines():
        mount, kind = line.split(" ")[1:3]
        point = Path(mount.encode().decode("unicode_escape"))
        if at.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), kind
    return found


def _create(path: Path, nbytes: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _read(fd: int, into: Bytes, offset: int) -> None:
    done = 0
    while done < into.nbytes:
        got = os.preadv(fd, [into[done:].data], offset + done)
        if not got:
            raise OSError(f"the reference file ends at byte {offset + done}")
        done += got


def _write(fd: int, content: Bytes, offset: int) -> None:
    done = 0
    while done < content.nbytes:
        done += os.pwritev(fd, [content[done:].data], offset + done)
