"""A store seen from outside: what an operator asks while engines go on writing.

`inspect_store` registers nothing, repairs nothing and writes nothing, so it also works on a folder that cannot be
written. `operate_store` opens the index and the backend for changes and keeps engines from opening meanwhile; those
that run go on, since index transactions order everything. Neither may be used in a process that has the store open.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import lmdb
import msgspec

from duokv.kvstore.backend import Backend
from duokv.kvstore.blockstore import BlockStore
from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import StoreError
from duokv.kvstore.events import EventBus
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.hostlocks import HostLocks
from duokv.kvstore.index import Index, IndexTxn
from duokv.kvstore.indexfile import BootMark, check_index
from duokv.kvstore.opening import (
    BOOT_ID,
    MANIFEST,
    Manifest,
    geometry_of,
    index_place,
    local_folder,
    read_manifest,
    resolve_backend,
)
from duokv.kvstore.policy import Policy
from duokv.kvstore.policybook import PolicyBook
from duokv.kvstore.recovery import take_lock

_LOCK_WAIT_S = 10.0
_BROKEN = (lmdb.Error, struct.error, ValueError, msgspec.MsgspecError)


class StoreView:
    """An opened store; get it from `inspect_store` or `operate_store`. Not thread-safe."""

    def __init__(
        self, *, url: str, manifest: Manifest, geometry: CacheGeometry, backend: Backend, config: StoreConfig,
        clock: Clock, place: Path, writable: Index | None,
    ) -> None:  # fmt: skip
        self.url = url
        self.geometry = geometry
        self.backend = backend
        self.config = config
        self.clock = clock
        self.locks = HostLocks(local_folder(url))
        self.events = EventBus()
        self.manifest = manifest
        self._place = place
        self._writable = writable
        self._policies = PolicyBook()

    @property
    def writable(self) -> Index:
        """The index, for changes; StoreError on a store that is only inspected."""
        if self._writable is None:
            raise StoreError(f"{self.url}: opened for inspection only; open it with operate_store")
        return self._writable

    @contextmanager
    def index(self) -> Iterator[Index]:
        """The index for reading, as long as the block lasts. StoreError if what it holds cannot be read.

        Read without LMDB's lock file when no engine runs (none can start until the block ends), so that nothing is
        written. Where one runs and the lock file cannot be written, a change under the reader is an error.
        """
        if self._writable is not None:
            yield self._writable
            return
        check_index(self._place)
        with self.locks.keep_out() as quiet:
            locked = not quiet and os.access(self._place / "lock.mdb", os.W_OK)
            index = Index(self._place, map_bytes=self.config.index_map_bytes, readonly=True, lock=locked)
            before = index.version()
            try:
                yield index
                broken: Exception | None = None
            except _BROKEN as error:
                broken = error
            finally:
                after = index.version()
                index.close()
        if not locked and after != before:
            raise StoreError(
                f"{self.url}: the index changed while it was read without a lock; run it as a user who may write "
                f"{self._place / 'lock.mdb'}, or try again"
            )
        if broken is not None:
            raise StoreError(f"index {self._place}: damaged ({broken}); build it anew with kvctl rebuild") from broken

    @contextmanager
    def snapshot(self) -> Iterator[IndexTxn]:
        """One read transaction; keep it short, since the index cannot reuse pages meanwhile."""
        with self.index() as index, index.read() as txn:
            yield txn

    def blocks(self, index: Index) -> BlockStore:
        """The store's own bookkeeping over an index: lookups that use nothing, and with `writable` what changes it."""
        return BlockStore(
            index=index, backend=self.backend, geometry=self.geometry, config=self.config, clock=self.clock,
            emit=self.events.emit, writer_id="kvctl", pool=BufferPool(0),
        )  # fmt: skip

    def policy(self, txn: IndexTxn) -> Policy:
        """The policy as of a transaction; StoreError if it cannot be read."""
        return self._policies.current(txn)

    def doubtful(self, txn: IndexTxn) -> str | None:
        """Why the index cannot be trusted: it is not flushed to the device while engines run."""
        if txn.meta(b"format") is None:
            return "it was never finished"
        boot = (txn.meta(b"boot") or b"").decode()
        if txn.meta_names(b"writer:") and boot != boot_id():
            return "the machine went down under a running writer"
        return None


@contextmanager
def inspect_store(
    url: str, *, config: StoreConfig | None = None, clock: Clock | None = None, geometry: str | None = None
) -> Iterator[StoreView]:
    """Open a store to look at it. geometry: a preset it must be of. StoreError if there is none that can be read."""
    config = config or StoreConfig()
    with ExitStack() as stack:
        backend = resolve_backend(url, "auto", create=False)
        stack.callback(backend.close)
        manifest, actual, place = _identify(backend, url, config, geometry)
        yield StoreView(
            url=url, manifest=manifest, geometry=actual, backend=backend, config=config, clock=clock or Clock(),
            place=place, writable=None,
        )  # fmt: skip


@contextmanager
def operate_store(
    url: str, *, config: StoreConfig | None = None, clock: Clock | None = None, geometry: str | None = None
) -> Iterator[StoreView]:
    """Open a store to change it. StoreError also while it is being opened elsewhere, or if its index is in doubt."""
    config = config or StoreConfig()
    with inspect_store(url, config=config, geometry=geometry) as view, view.snapshot() as txn:
        doubt = view.doubtful(txn)
    if doubt is not None:
        raise StoreError(f"{url}: the index is in doubt, {doubt}; run kvctl rebuild, or open the store")
    with ExitStack() as stack:
        backend = resolve_backend(url, config.direct)
        stack.callback(backend.close)
        stack.callback(take_lock(backend, "open", wait_s=_LOCK_WAIT_S).release)
        manifest, actual, place = _identify(backend, url, config, geometry)
        check_index(place)
        mark = BootMark(place)
        mark.begin(boot_id())
        index = Index(place, map_bytes=config.index_map_bytes)
        stack.callback(mark.finish, index, alone=True)
        yield StoreView(
            url=url, manifest=manifest, geometry=actual, backend=backend, config=config, clock=clock or Clock(),
            place=place, writable=index,
        )  # fmt: skip


def boot_id() -> str:
    """What tells this start of the machine from others."""
    return BOOT_ID.read_text().strip()


def _identify(
    backend: Backend, url: str, config: StoreConfig, geometry: str | None
) -> tuple[Manifest, CacheGeometry, Path]:
    manifest = read_manifest(backend, url)
    if manifest is None:
        raise StoreError(f"{url}: no store here ({MANIFEST} is missing); check the path")
    wanted = None if geometry is None else CacheGeometry.preset(geometry)
    return manifest, geometry_of(manifest, wanted, url), index_place(url, config).folder
