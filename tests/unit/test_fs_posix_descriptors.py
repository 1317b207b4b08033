"""Descriptors of files that are read: kept open within a bound, in use to their end, and none of what was removed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fs_posix_kit import (
    backend_fixture,  # noqa: F401
    descriptors,
    get,
    put,
    root_fixture,  # noqa: F401
)

from duokv.connectors.fs_posix import PosixBackend
from duokv.connectors.posix_io import ReadFds
from duokv.kvstore.buffers import PAGE


def test_open_descriptors_are_bounded(backend: PosixBackend, root: Path) -> None:
    names = [f"f{i}" for i in range(200)]
    for name in names:
        (root / name).write_bytes(b"x" * PAGE)
    assert all(get(backend, name) == b"x" * PAGE for name in names)
    assert 100 < len(descriptors(of=f"{root}/f")) <= 128
    backend.close()
    assert descriptors(of=str(root)) == []
    assert get(backend, "f0") == -errno.EBADF


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_removed_file_is_not_kept_open(backend: PosixBackend, root: Path, by_hand: bool) -> None:
    put(backend, "a")
    assert get(backend, "a") == b"x" * PAGE
    if by_hand:
        (root / "a").unlink()
    else:
        backend.remove("a")
        assert descriptors(of=f"{root}/a") == []
    assert get(backend, "a") == -errno.ENOENT
    assert descriptors(of=f"{root}/a") == []


def open_counting(folder: Path, opened: list[str]) -> Callable[[str], int]:
    def open_fd(name: str) -> int:
        opened.append(name)
        return os.open(folder / name, os.O_RDONLY)

    return open_fd


def test_a_descriptor_in_use_outlives_eviction_removal_and_close(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    opened: list[str] = []
    fds = ReadFds(open_counting(tmp_path, opened), cap=1)
    with fds.borrow("a") as a:
        with fds.borrow("b") as b, fds.borrow("b") as same:
            assert b == same
            assert os.pread(a, 1, 0) == b"a"
            fds.forget("b")
            (tmp_path / "b").unlink()
            assert os.pread(b, 1, 0) == b"b"
        with pytest.raises(FileNotFoundError), fds.borrow("b"):
            pass
        with fds.borrow("c") as c:
            fds.close()
            assert os.pread(c, 1, 0) == b"c"
    assert opened == ["a", "b", "b", "c"]
    assert descriptors(of=str(tmp_path)) == []
    with pytest.raises(OSError, match="closed"), fds.borrow("a"):
        pass


def test_a_file_removed_while_it_is_being_opened_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")

    def open_then_lose(name: str) -> int:
        fd = os.open(tmp_path / name, os.O_RDONLY)
        (tmp_path / name).unlink()
        fds.forget(name)
        return fd

    fds = ReadFds(open_then_lose, cap=8)
    with pytest.raises(FileNotFoundError), fds.borrow("a"):
        pass
    assert descriptors(of=str(tmp_path)) == []


def test_the_least_recently_used_descriptor_goes_first(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    opened: list[str] = []
    fds = ReadFds(open_counting(tmp_path, opened), cap=2)
    for name in ("a", "b", "a", "c", "a", "b"):
        with fds.borrow(name):
            pass
    assert opened == ["a", "b", "c", "b"]
    fds.close()


def test_a_dropped_writer_keeps_its_file_and_no_descriptor(backend: PosixBackend, root: Path) -> None:
    backend.create("a", PAGE)
    assert descriptors(of=f"{root}/a") == []
    assert [info.name for info in backend.list("")] == ["a"]
