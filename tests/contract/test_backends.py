"""Every backend of the project keeps the laws of the seam."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_contract import BackendContract, MakeBackend
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
