"""Which processes of this host use a store, told from its lock files without making or changing one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class HostLocks:
    """The lock files of a store in a folder, looked at without making or changing one.

    The file backend keeps them in `locks/`: `open` while a store is being opened or operated on, `writer-<id>` while a
    writer lives. Without a folder nothing is known.
    """

    def __init__(self, folder: Path | None) -> None:
        self._locks = folder / "locks" if folder else None

    def alive(self, writer: str) -> bool | None:
        """Whether a writer's process lives."""
        return None if self._locks is None else _is_held(self._locks / f"writer-{writer}")

    def writers(self) -> list[str]:
        """All writers that live."""
        files = sorted(self._locks.glob("writer-*")) if self._locks else []
        return [file.name.removeprefix("writer-") for file in files if _is_held(file)]

    @contextmanager
    def keep_out(self) -> Iterator[bool]:
        """Keep engines from opening the store, if none has it open now: then True, and nobody writes meanwhile."""
        try:
            fd = _share(self._locks / "open") if self._locks else None
        except OSError:
            fd = None
        if fd is not None and self.writers():
            os.close(fd)
            fd = None
        try:
            yield fd is not None
        finally:
            if fd is not None:
                os.close(fd)


def _share(file: Path) -> int | None:
    """A descriptor that holds a lock file shared until closed, None while a process holds it."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _is_held(file: Path) -> bool:
    try:
        fd = _share(file)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    if fd is not None:
        os.close(fd)
    return fd is None
