"""The index file from outside: whether it may be trusted at all, asked before anything maps it.

A read past the end of a mapped file kills the process, so what a crash of the machine may have torn is never mapped.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from duokv.kvstore.errors import StoreError
from duokv.kvstore.index import Index

DATA = "data.mdb"
_CLEAN = "clean"
_META_BYTES = 152
_NO_PAGE = (1 << 64) - 1


class BootMark:
    """A file beside the index that says under which boot of the machine it may hold pages not yet on the device.

    All calls but `finish` are made under the store's open lock.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._file = place / "boot"

    def doubt(self, boot_id: str) -> str | None:
        """Why the index file must be built anew, None if it may be opened or is not there."""
        if not (self._place / DATA).exists():
            return None
        try:
            mark = self._file.read_text()
        except OSError:
            mark = ""
        if mark not in (boot_id, _CLEAN):
            return "the machine went down while it was in use"
        try:
            check_index(self._place)
        except StoreError as error:
            return str(error)
        return None

    def discard(self) -> None:
        """Remove the index file."""
        for name in (DATA, "lock.mdb"):
            with suppress(FileNotFoundError):
                (self._place / name).unlink()

    def begin(self, boot_id: str) -> None:
        """Before the index is opened for changes."""
        self._place.mkdir(parents=True, exist_ok=True)
        self._write(boot_id)

    def finish(self, index: Index, *, alone: bool) -> None:
        """Flush and close an index; if no other process has the store open, it is clean then.

        alone: whether the store's open lock is held, so that no other process begins to write meanwhile.
        """
        try:
            with index.read() as txn:
                last = alone and not txn.meta_names(b"writer:")
            index.sync()
        finally:
            index.close()
        if last:
            self._write(_CLEAN)

    def _write(self, text: str) -> None:
        # Several processes may write it at once.
        new = self._file.with_suffix(f".{secrets.token_hex(4)}")
        with new.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._file)


def check_index(place: Path) -> None:
    """StoreError unless an index file is there and holds the roots of its trees: a read past its end kills the process.

    Layout of LMDB's two meta pages (mdb.c of lmdb 0.9): page size at byte 40, the roots of the free list and of the
    tables at 80 and 128, transaction at 144. Pages never written may lie past the end, so its last page says nothing.
    """
    file = place / "data.mdb"
    try:
        with file.open("rb") as data:
            first = data.read(_META_BYTES)
            page = int.from_bytes(first[40:44], "little")
            data.seek(page)
            metas = (first, data.read(_META_BYTES))
            size = data.seek(0, os.SEEK_END)
    except FileNotFoundError:
        raise StoreError(f"index {place}: not there; build it with kvctl rebuild") from None
    except OSError as error:
        raise StoreError(f"index {place}: {error.strerror}; make {file.name} readable for this user") from error
    newest = max(metas, key=lambda meta: int.from_bytes(meta[144:], "little"))
    roots = (int.from_bytes(newest[at : at + 8], "little") for at in (80, 128))
    if any(len(meta) < _META_BYTES for meta in metas) or any(
        size < (root + 1) * page for root in roots if root != _NO_PAGE
    ):
        raise StoreError(f"index {place}: {file.name} is cut short; build it anew with kvctl rebuild")
