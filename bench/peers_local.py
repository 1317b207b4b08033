"""The peers that need no environment of their own: DuoKV, LMDB with blocks as values, plain files."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from duokv.bench.filler import NAMESPACE, TRAFFIC
from duokv.bench.peer_serve import About, Action, Bench, Given, Peer, Rows
from duokv.kvstore import CacheGeometry, KVStore, StoreConfig, chain_keys, open_store
from duokv.kvstore.errors import StoreError
from duokv.kvstore.keys import BLOCK_TOKENS

_VOCABULARY = 1 << 17
_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys and rows."""

    keys: Sequence[bytes]
    rows: Rows


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt whose blocks are the keys', its own keys, and rows."""

    tokens: npt.NDArray[np.int32]
    blob: bytes
    rows: Rows


class DuoKV:
    """The store as it is: cold reads past its block cache, warm ones from it; every block verified when it comes in."""

    def __init__(self, given: Given, geometry: CacheGeometry) -> None:
        self._given = given
        self._geometry = geometry
        self._cached = False
        self._store = self._open()

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return {
            "version": f"duokv {version('duokv')}",
            "durable": True,
            "durability": "waited for",
            "integrity": "xxh3_128 of every block, its key, parent and tokens, checked when it is read",
            "note": f"{self._given.threads} reading threads, O_DIRECT; reads look up first, hashing included; "
            "warm from its own cache",
            "missing": {},
        }

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Prompt:
        """See `Peer.prepare`."""
        if action in ("cold", "warm") and self._cached != (action == "warm"):
            self._store.close()
            self._cached = action == "warm"
            self._store = self._open()
        rng = np.random.default_rng(np.frombuffer(keys[0], np.uint32))
        tokens = rng.integers(0, _VOCABULARY, self._given.blocks * BLOCK_TOKENS, dtype=np.int32)
        # One more: of a prompt's tokens the last is always left to compute.
        tokens = np.append(tokens[: len(keys) * BLOCK_TOKENS], np.int32(0))
        return Prompt(tokens, chain_keys(NAMESPACE, tokens).blob, rows)

    def put(self, handle: Prompt) -> None:
        """See `Peer.put`."""
        commit = self._store.commit(NAMESPACE, handle.tokens, handle.rows, traffic=TRAFFIC)
        commit.wait_durable()
        if commit.new != len(handle.rows):
            raise StoreError(f"the store took {commit.new} blocks of {len(handle.rows)}")

    def read(self, handle: Prompt) -> Iterable[Rows]:
        """See `Peer.read`."""
        hit = self._store.lookup(NAMESPACE, handle.tokens, TRAFFIC)
        return list(handle.rows[: self._store.load(hit, handle.rows, deadline_s=_DEADLINE_S)])

    def lookup(self, handle: Prompt) -> int:
        """See `Peer.lookup`."""
        return self._store.blocks.find(handle.blob, len(handle.rows), TRAFFIC).blocks

    def lookup_tokens(self, handle: Prompt) -> int:
        """See `Peer.lookup_tokens`."""
        return self._store.lookup(NAMESPACE, handle.tokens, TRAFFIC).tokens // BLOCK_TOKENS

    def close(self) -> None:
        """See `Peer.close`."""
        self._store.close()

    def _open(self) -> KVStore:
        kept = (self._given.rounds + 1) * self._given.blocks * self._given.slot_bytes
        config = StoreConfig(swa_bytes=0, read_threads=self._given.threads, cache_bytes=kept if self._cached else 0)
        return open_store((self._given.folder / "store").as_uri(), geometry=self._geometry, config=config)


class Lmdb:
    """A block is a value; a batch is a transaction."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._map_bytes = 2 * (given.rounds + 1) * given.blocks * given.slot_bytes + (64 << 20)
        self._env = self._open()

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return {
            "version": f"lmdb {'.'.join(map(str, lmdb.version()))}",
            "durable": True,
            "durability": "each transaction flushed",
            "integrity": "none",
            "note": "one thread, page cache, copied from the map into the caller's rows",
            "missing": {"tokens": "takes keys"},
        }

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Wanted:
        """See `Peer.prepare`."""
        if action == "cold":
            # What is mapped stays in the page cache.
            self._env.close()
            self._env = self._open()
        return Wanted(keys, rows)

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        nbytes = self._given.payload_bytes
        with self._env.begin(write=True) as txn:
            for key, row in zip(handle.keys, handle.rows, strict=True):
                txn.put(key, row[:nbytes].data)

    def read(self, handle: Wanted) -> Iterable[Rows]:
        """See `Peer.read`."""
        nbytes, got = self._given.payload_bytes, []
        with self._env.begin(buffers=True) as txn:
            for key, row in zip(handle.keys, handle.rows, strict=True):
                value = txn.get(key)
                if value is not None and len(value) == nbytes:
                    row[:nbytes] = np.frombuffer(value, np.uint8)
                    got.append(row)
        return got

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        with self._env.begin(buffers=True) as txn:
            for place, key in enumerate(handle.keys):
                if txn.get(key) is None:
                    return place
        return len(handle.keys)

    def lookup_tokens(self, handle: Wanted) -> int:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Peer.close`."""
        self._env.close()

    def _open(self) -> lmdb.Environment:
        return lmdb.open(str(self._given.folder / "lmdb"), map_size=self._map_bytes, readahead=True)


class Files:
    """A file for each block, named by its key, by a pool of threads. fsync: flush each file, and the folder once."""

    def __init__(self, given: Given, *, fsync: bool) -> None:
        self._given = given
        self._fsync = fsync
        self._pool = ThreadPoolExecutor(given.threads, thread_name_prefix="duokv-files")

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return {
            "version": f"Python {platform.python_version()}",
            "durable": self._fsync,
            "durability": "each file flushed, the folder once" if self._fsync else "none: written, never flushed",
            "integrity": "none: only a short read is noticed",
            "note": f"{self._given.threads} threads, page cache; a new file for each block, renamed",
            "missing": {"tokens": "takes keys"},
        }

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Wanted:
        """See `Peer.prepare`."""
        del action
        return Wanted(keys, rows)

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        list(self._pool.map(self._put_one, handle.keys, handle.rows))
        if self._fsync:
            fd = os.open(self._given.folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def read(self, handle: Wanted) -> Iterable[Rows]:
        """See `Peer.read`."""
        read = self._pool.map(self._read_one, handle.keys, handle.rows)
        return [row for row, whole in zip(handle.rows, read, strict=True) if whole]

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        for place, key in enumerate(handle.keys):
            if not self._path(key).exists():
                return place
        return len(handle.keys)

    def lookup_tokens(self, handle: Wanted) -> int:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Peer.close`."""
        self._pool.shutdown()

    def _put_one(self, key: bytes, row: npt.NDArray[np.uint8]) -> None:
        path = self._path(key)
        new = path.with_suffix(".new")
        with new.open("wb", buffering=0) as file:
            file.write(row[: self._given.payload_bytes].data)
            if self._fsync:
                os.fdatasync(file.fileno())
        new.replace(path)

    def _read_one(self, key: bytes, row: npt.NDArray[np.uint8]) -> bool:
        nbytes = self._given.payload_bytes
        with self._path(key).open("rb", buffering=0) as file:
            return file.readinto(row[:nbytes].data) == nbytes

    def _path(self, key: bytes) -> Path:
        return self._given.folder / key.hex()


def local_worker(name: str, given: Given, geometry: CacheGeometry, content: Path) -> Bench[Prompt] | Bench[Wanted]:
    """One of them by its name, opened; content is what `Bench` takes. KeyError for another name."""
    if name == "duokv":
        return Bench(lambda given: DuoKV(given, geometry), given, content)
    stores: dict[str, Callable[[Given], Peer[Wanted]]] = {
        "lmdb": Lmdb,
        "files": lambda given: Files(given, fsync=False),
        "files+fsync": lambda given: Files(given, fsync=True),
    }
    return Bench(stores[name], given, content)
