"""What the cases share: a store that can be closed and opened again, on memory or on files, with a clock to set."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from store_kit import GEOMETRY, NS, Hands, config, open_test_store

from duokv.kvstore import BlockKeys, KVStore, Namespace, PrefixHit, StoreConfig, chain_keys, open_store
from duokv.kvstore.backend import Backend
from duokv.kvstore.keys import TokenIds


class World:
    """Opens stores of the small geometry, fills them with bytes that only one key has, and compares what comes back."""

    def __init__(self, folder: Path) -> None:
        self.hands = Hands()
        self.root = folder / "store"
        self._index = folder / "index"
        self._opened: list[KVStore] = []

    def on(self, backend: Backend, settings: StoreConfig | None = None) -> KVStore:
        """Open the store on a backend that keeps its files; the index outlives the store too."""
        store = open_test_store(backend, self._index, self.hands, settings)
        self._opened.append(store)
        return store

    def fresh(self, backend: Backend, settings: StoreConfig | None = None) -> KVStore:
        """The same with a new index."""
        self._index = self._index.with_name(f"index-{len(self._opened)}")
        return self.on(backend, settings)

    def on_files(self, settings: StoreConfig | None = None, backend: Backend | None = None) -> KVStore:
        """Open the store at `root`, an index beside its data."""
        store = open_store(
            f"file://{self.root}", geometry=GEOMETRY, config=settings or config(), clock=self.hands.clock,
            backend=backend,
        )  # fmt: skip
        self._opened.append(store)
        return store

    def segments(self) -> list[Path]:
        """The segment files under `root`."""
        return sorted((self.root / "seg").rglob("*.seg"))

    def content(self, keys: BlockKeys) -> npt.NDArray[np.uint8]:
        """The payloads of these keys and of no others: `[n, payload_bytes]`."""
        rows = [hashlib.shake_128(key).digest(GEOMETRY.payload_bytes) for key in keys]
        return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, GEOMETRY.payload_bytes)

    def put(self, store: KVStore, tokens: TokenIds, ns: Namespace = NS, traffic: str | None = None) -> int:
        """Commit all whole blocks of a prompt; returns how many were written."""
        return store.commit(ns, tokens, self.content(chain_keys(ns, tokens)), traffic=traffic).new

    def load(self, store: KVStore, hit: PrefixHit) -> int:
        """Load a hit; returns how many blocks came, each of them compared with its own key."""
        with store.buffers(len(hit.keys)) as lent:
            n = store.load(hit, lent.rows)
            assert (lent.rows[:n, : GEOMETRY.payload_bytes] == self.content(hit.keys[:n])).all()
        return n

    def get(self, store: KVStore, tokens: TokenIds, ns: Namespace = NS, traffic: str | None = None) -> int:
        """Look a prompt up and load it; returns blocks, and all that were promised must come."""
        hit = store.lookup(ns, tokens, traffic)
        assert self.load(store, hit) == len(hit.keys)
        return len(hit.keys)

    def kvctl(self, *arguments: str) -> tuple[int, str]:
        """Run the command on the store at `root`; returns its exit code and what it printed."""
        command = [sys.executable, "-m", "duokv.tools.kvctl", *arguments, "--store", str(self.root)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode in {0, 1}, done.stderr
        return done.returncode, done.stdout

    def close(self) -> None:
        """Close what is still open."""
        for store in self._opened:
            store.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()
