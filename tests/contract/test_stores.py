"""Whole stores on every backend of ours."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from store_contract import OpenPlace, StoreContract

from duokv.connectors.fs_memory import MemoryBackend
from duokv.connectors.fs_posix import PosixBackend


class TestOnMemory(StoreContract):
    @pytest.fixture
    def open_place(self) -> OpenPlace:
        return defaultdict[str, MemoryBackend](MemoryBackend).__getitem__


class TestOnMemoryWithoutPunch(StoreContract):
    @pytest.fixture
    def open_place(self) -> OpenPlace:
        return defaultdict[str, MemoryBackend](lambda: MemoryBackend(can_punch=False)).__getitem__


class TestOnPosix(StoreContract):
    @pytest.fixture
    def open_place(self, tmp_path: Path) -> OpenPlace:
        return lambda name: PosixBackend(tmp_path / name)
