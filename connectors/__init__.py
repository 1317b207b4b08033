"""Where Block KV lives: one file per place, each imported only when its URL asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from duokv.kvstore.backend import Backend
from duokv.kvstore.errors import UsageError, nearest

if TYPE_CHECKING:
    from duokv.connectors.fs_posix import Direct

_SCHEMES = ("file", "memory")
_PLANNED = ("hf3fs", "s3", "gs", "abfs", "oss", "webdav", "sftp")

__all__ = ["open_backend"]


def open_backend(
    url: str, *, direct: Direct = "auto", create: bool = True, clock: Callable[[], float] = time.monotonic
) -> Backend:
    """Open the backend that `url` names.

    file:///absolute/path, or a plain path: a folder of a POSIX file system (see `PosixBackend` for `direct`, `create`).
    memory://anything: fresh and empty memory of this process, whatever the name.
    clock: monotonic seconds, for read deadlines.

    UsageError for a URL that cannot be meant, StoreError when the place cannot be used.
    """
    if "://" not in url:
        return _open_folder(Path(url).absolute(), direct, create, clock)
    scheme = url.partition("://")[0]
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise UsageError(f"store {url!r} is not a folder of this machine; write file:///absolute/path")
        return _open_folder(Path(unquote(parts.path)), direct, create, clock)
    if scheme == "memory":
        from duokv.connectors.fs_memory import MemoryBackend

        return MemoryBackend(clock=clock)
    if scheme in _PLANNED:
        raise UsageError(f"store {url!r}: {scheme}:// is not included yet; use file:// on a mount of it")
    raise UsageError(f"store {url!r}: unknown scheme {scheme!r}; {nearest(scheme, (*_SCHEMES, *_PLANNED))}")


def _open_folder(root: Path, direct: Direct, create: bool, clock: Callable[[], float]) -> Backend:
    from duokv.connectors.fs_posix import PosixBackend

    return PosixBackend(root, direct=direct, create=create, clock=clock)
