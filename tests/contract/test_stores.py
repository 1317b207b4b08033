"""Whole stores on every backend of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_contract import NewBackend, StoreContract, fresh

from duokv.connectors.fs_memory import MemoryBackend
from duokv.connectors.fs_posix import PosixBackend


class TestOnMemory(StoreContract):
    @pytest.fixture
    def new_backend(self) -> NewBackend:
        return MemoryBackend


class TestOnMemoryWithoutPunch(StoreContract):
    @pytest.fixture
    def new_backend(self) -> NewBackend:
        return lambda: MemoryBackend(can_punch=False)


class TestOnPosix(StoreContract):
    @pytest.fixture
    def new_backend(self, tmp_path: Path) -> NewBackend:
        return fresh(PosixBackend, tmp_path)
