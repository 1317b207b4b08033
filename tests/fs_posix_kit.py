"""What the tests of the file system's backend share: one in an empty folder, its files, and who holds them open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from duokv.connectors.fs_posix import PosixBackend
from duokv.kvstore.backend import ReadOp
from duokv.kvstore.buffers import PAGE, aligned


# Fixtures have a second name, since a test's argument would redefine an import of the same name.
@pytest.fixture(name="root")
def root_fixture(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(name="backend")
def backend_fixture(root: Path) -> Iterator[PosixBackend]:
    backend = PosixBackend(root)
    yield backend
    backend.close()


def put(backend: PosixBackend, name: str, fill: bytes = b"x", pages: int = 1) -> None:
    """Write a sealed file of `pages` pages."""
    writer = backend.create(name, pages * PAGE)
    writer.write(0, [memoryview(fill * (pages * PAGE))])
    writer.seal(pages * PAGE)


def get(backend: PosixBackend, name: str, pages: int = 1) -> int | bytes:
    """Read `pages` pages, or what there is of them; a negative errno as read_many reports it."""
    view = aligned(pages * PAGE)
    (got,) = backend.read_many([ReadOp(name, 0, (view,))], deadline_s=60)
    return bytes(view[:got]) if got >= 0 else got


def files_under(root: Path) -> set[str]:
    """Every file and folder under a folder."""
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def descriptors(of: str) -> list[str]:
    """What this process holds open whose path contains `of`."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(path.readlink()))
    return [target for target in found if of in target]
