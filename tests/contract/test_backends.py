"""Every backend of the project keeps the laws of the seam."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from backend_contract import BackendContract, MakeBackend
from duokv.connectors import posix_io
from duokv.connectors.fs_faulty import FaultyBackend
from duokv.connectors.fs_memory import MemoryBackend
from duokv.connectors.fs_posix import PosixBackend


class TestPosixPageCache(BackendContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        return lambda: PosixBackend(tmp_path / "store", direct="off")


class TestPosixDirect(BackendContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        return lambda: PosixBackend(tmp_path / "store", direct="auto")


class TestPosixWithoutFallocate(BackendContract):
    """A file system that neither preallocates nor punches, such as 3FS behind FUSE."""

    @pytest.fixture
    def make_backend(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeBackend:
        def refuse(fd: int, mode: int, offset: int, length: int) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(posix_io, "_fallocate", refuse)
        return lambda: PosixBackend(tmp_path / "store")


class TestMemory(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        backend = MemoryBackend()
        return lambda: backend


class TestMemoryAligned(BackendContract):
    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        backend = MemoryBackend(alignment=4096, can_punch=False)
        return lambda: backend


class TestFaultyWithoutFaults(BackendContract):
    @pytest.fixture
    def make_backend(self, tmp_path: Path) -> MakeBackend:
        return lambda: FaultyBackend(PosixBackend(tmp_path / "store"))
