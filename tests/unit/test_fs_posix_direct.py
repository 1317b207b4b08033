"""O_DIRECT is used where it works, given up with a note where it is refused, and required only of who says so."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
from fs_posix_kit import (
    backend_fixture,  # noqa: F401
    descriptors,
    files_under,
    get,
    put,
    root_fixture,  # noqa: F401
)

from duokv.connectors.fs_posix import PosixBackend
from duokv.connectors.posix_io import aligned_runs
from duokv.kvstore.backend import ReadOp
from duokv.kvstore.buffers import PAGE, address, aligned
from duokv.kvstore.errors import StoreError, UsageError


@pytest.fixture(params=["at open", "at the first write"])
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT, as tmpfs and overlay can be: refused by open(2) or only by the I/O."""
    real_open, real_write = os.open, os.pwritev

    def refuse_open(path: str | Path, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if flags & os.O_DIRECT:
            os.close(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return fd

    def refuse_write(fd: int, views: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_write(fd, views, offset)

    if request.param == "at open":
        monkeypatch.setattr(os, "open", refuse_open)
    else:
        monkeypatch.setattr(os, "pwritev", refuse_write)


def test_direct_must_be_a_known_word_and_needs_a_folder_to_try(root: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'auto'"):
        PosixBackend(root, direct="autos")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="require"):
        PosixBackend(root, direct="require", create=False)


@pytest.mark.usefixtures("refused")
def test_refused_direct_io_falls_back_to_the_page_cache_with_one_note(root: Path) -> None:
    backend = PosixBackend(root, direct="auto")
    (note,) = [note for note in backend.notes if "O_DIRECT" in note]
    assert "EINVAL" in note
    assert str(root) in note
    assert backend.alignment == 1
    put(backend, "a", b"y")
    assert get(backend, "a") == b"y" * PAGE
    backend.close()
    assert files_under(root) == {"a", ".tmp", ".tmp/in-use"}


@pytest.mark.usefixtures("refused")
def test_required_direct_io_that_is_refused_stops_the_start(root: Path) -> None:
    with pytest.raises(StoreError, match=r"^O_DIRECT refused under .*: EINVAL; .*direct = \"auto\"$"):
        PosixBackend(root, direct="require")
    assert descriptors(of=str(root)) == []


@pytest.mark.usefixtures("refused")
def test_direct_io_that_nobody_asked_for_is_not_tried(root: Path) -> None:
    backend = PosixBackend(root, direct="off")
    assert not [note for note in backend.notes if "O_DIRECT" in note]
    backend.close()


def test_direct_io_is_used_where_it_works(backend: PosixBackend, root: Path) -> None:
    if backend.alignment == 1:
        pytest.skip(f"no O_DIRECT here: {backend.notes}")
    put(backend, "a")
    get(backend, "a")
    (fd,) = [
        int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists() and path.resolve() == root / "a"
    ]
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    view = aligned(2 * PAGE)
    misplaced = ReadOp("a", 0, (view[1 : PAGE + 1],))
    assert backend.read_many([misplaced], deadline_s=60)[0] in {-errno.EINVAL, PAGE}


def test_only_unaligned_parts_are_staged() -> None:
    memory, stage = aligned(6 * PAGE), aligned(2 * PAGE)
    memory[:] = bytes(range(256)) * (6 * PAGE // 256)
    parts = [memory[:PAGE], memory[PAGE : 2 * PAGE], memory[2 * PAGE : 2 * PAGE + 100], memory[2 * PAGE + 100 :]]
    written, places = b"", []
    for run in aligned_runs(parts, stage):
        written += b"".join(run)
        places.append([address(view) for view in run])
    assert written == bytes(memory)
    assert places == [[address(memory), address(memory) + PAGE], [address(stage)], [address(stage)]]
