"""LMCache's local disk backend and its native file system connector, for `peer_serve.py`."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import select
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from duokv.bench.peer_serve import About, Action, Given, Peer, Rows

_WAIT_S = 60.0
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys as the backend has them, and what is to be stored: its own memory objects, or views of rows."""

    keys: list[Any]
    sources: list[Any]


def open_peer(name: str, given: Given) -> Peer[Wanted]:
    """ "lmcache-disk" or "lmcache-fs-native"."""
    return _Disk(given) if name == "lmcache-disk" else _Native(given)


class _Disk:
    def __init__(self, given: Given) -> None:
        self._given = given
        self._torch = importlib.import_module("torch")
        self._utils = importlib.import_module("lmcache.utils")
        backends = "lmcache.v1.storage_backend"
        disk = importlib.import_module(f"{backends}.local_disk_backend")
        cpu = importlib.import_module(f"{backends}.local_cpu_backend")
        pool = importlib.import_module("lmcache.v1.memory_allocators.mixed_memory_allocator")
        settings = importlib.import_module("lmcache.v1.config").LMCacheEngineConfig.from_defaults(
            chunk_size=128,
            local_cpu=False,
            local_disk=str(given.folder),
            max_local_disk_size=(given.rounds + 1) * given.blocks * given.slot_bytes / (1 << 30),
            extra_config={"disk_io_threads": given.threads},
        )
        nbytes = 2 * given.blocks * given.slot_bytes + _SPARE_BYTES
        self._pool = pool.MixedMemoryAllocator(nbytes)
        self._pool.buffer.fill_(0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        host = cpu.LocalCPUBackend(settings, memory_allocator=self._pool, dst_device="cpu")
        self._disk = disk.LocalDiskBackend(settings, self._loop, host, dst_device="cpu")
        self._lent: list[Any] = []

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return _about(
            "none: files written in place, never flushed; its index is in memory and dies with it",
            f"{self._given.threads} I/O threads, page cache; into its own host memory, whose allocation counts",
        )

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Wanted:
        """See `Peer.prepare`."""
        for lent in self._lent:
            lent.ref_count_down()
        self._lent = []
        made = [
            self._utils.CacheEngineKey("bench", 1, 0, int.from_bytes(key, "big"), self._torch.uint8) for key in keys
        ]
        if action == "put":
            for row in rows:
                self._lent.append(self._staged(row[: self._given.payload_bytes]))
        return Wanted(made, self._lent)

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        # It calls back once a block, from its threads.
        done = threading.Semaphore(0)
        self._disk.batched_submit_put_task(handle.keys, handle.sources, on_complete_callback=lambda key: done.release())
        for _ in handle.keys:
            if not done.acquire(timeout=_WAIT_S):
                raise TimeoutError("LMCache stored less than asked")

    def read(self, handle: Wanted) -> Iterable[memoryview]:
        """See `Peer.read`."""
        got = [one for one in self._disk.batched_get_blocking(handle.keys) if one is not None]
        self._lent = got
        return [memoryview(one.byte_array) for one in got]

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        for place, key in enumerate(handle.keys):
            if not self._disk.contains(key):
                return place
        return len(handle.keys)

    def lookup_tokens(self, handle: Wanted) -> int:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Peer.close`."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _staged(self, payload: npt.NDArray[np.uint8]) -> Any:  # noqa: ANN401  # foreign, untyped
        shape = self._torch.Size([payload.nbytes])
        staged = self._pool.allocate(shape, self._torch.uint8)
        if staged is None:
            raise MemoryError("LMCache's host memory is too small")
        np.frombuffer(staged.byte_array, np.uint8)[:] = payload
        return staged


class _Native:
    def __init__(self, given: Given) -> None:
        # Its symbols need torch's libraries.
        importlib.import_module("torch")
        client = importlib.import_module("lmcache.lmcache_fs").LMCacheFSClient
        self._threads = given.threads
        self._client = client(str(given.folder), given.threads, "", True, 0)
        self._poll = select.poll()
        self._poll.register(self._client.event_fd(), select.POLLIN)

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return _about(
            "none: a new file for each block, renamed, never flushed",
            f"C++, {self._threads} I/O threads, O_DIRECT; whole rows, which O_DIRECT asks for",
        )

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Wanted:
        """See `Peer.prepare`."""
        del action
        return Wanted([f"bench@00000000@0@{key.hex()}" for key in keys], [memoryview(row) for row in rows])

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        self._wait(self._client.submit_batch_set(handle.keys, handle.sources))

    def read(self, handle: Wanted) -> Iterable[memoryview]:
        """See `Peer.read`."""
        got = self._wait(self._client.submit_batch_get(handle.keys, handle.sources))
        return [source for source, found in zip(handle.sources, got, strict=True) if found]

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        found = self._wait(self._client.submit_batch_exists(handle.keys))
        return next((place for place, one in enumerate(found) if not one), len(handle.keys))

    def lookup_tokens(self, handle: Wanted) -> int:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Peer.close`."""
        self._client.close()

    def _wait(self, job: int) -> list[Any]:
        while self._poll.poll(_WAIT_S * 1e3):
            for done, ok, error, found in self._client.drain_completions():
                if done == job:
                    if not ok:
                        raise OSError(f"LMCache's connector: {error}")
                    return list(found or ())
        raise TimeoutError("LMCache's connector did not answer")


def _about(durability: str, note: str) -> About:
    return {
        "version": f"lmcache {importlib.metadata.version('lmcache')}",
        "durable": False,
        "durability": durability,
        "integrity": "none by default",
        "note": note,
        "missing": {"tokens": "takes keys"},
    }
