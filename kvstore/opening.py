"""Opening a store: backend, manifest, index, recovery, writer's lock, in that order; undone if a later one fails."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from duokv.kvstore.backend import Backend
from duokv.kvstore.buffers import PinMemory
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import StoreError, UsageError, nearest
from duokv.kvstore.events import Degraded, EventBus, log_warning
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.index import Index
from duokv.kvstore.indexfile import BootMark
from duokv.kvstore.policybook import PolicyBook, encode_policy
from duokv.kvstore.record import FORMAT
from duokv.kvstore.recovery import POLICY_FILE, Recovery, take_lock
from duokv.kvstore.store import KVStore

MANIFEST = "duokv.json"
_LOCK_WAIT_S = 30.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Manifest(msgspec.Struct, frozen=True):
    """What a store is, written once when it is made."""

    format: int
    geometry: str
    digest: str
    payload_bytes: int
    swa_bytes: int
    created_s: float


def open_store(
    url: str, *, geometry: CacheGeometry | str | None = None, config: StoreConfig | None = None,
    clock: Clock | None = None, backend: Backend | None = None, create: bool = True, boot_id: str | None = None,
    pin_memory: PinMemory | None = None,
) -> KVStore:  # fmt: skip
    """Open the store at `url`, making it if there is none and `create` says so.

    url: "file:///path" (or a path), "memory://", or a scheme a backend package registers. geometry: a preset's name or
    a value; None takes the store's own. config: see StoreConfig; its policy only seeds a new store. pin_memory: gets
    what is about to be lent, `duokv.kernels.transfer.pin_memory` pins it for a GPU. clock, backend and boot_id are for
    tests and composition. StoreError or UsageError, each one line, if it cannot be opened as asked.
    """
    config = config or StoreConfig()
    clock = clock or Clock()
    wanted = CacheGeometry.preset(geometry) if isinstance(geometry, str) else geometry
    with ExitStack() as undo:
        backend = backend or resolve_backend(url, config.direct)
        undo.callback(backend.close)
        opening = take_lock(backend, "open", wait_s=_LOCK_WAIT_S)
        undo.callback(opening.release)
        manifest = read_manifest(backend, url) or _new_manifest(backend, url, wanted, clock, create=create)
        actual = geometry_of(manifest, wanted, url)
        place = index_place(url, config)
        undo.callback(place.discard)
        events = EventBus()
        events.subscribe(log_warning)
        boot = boot_id if boot_id is not None else BOOT_ID.read_text().strip()
        index = _open_index(place, config, boot, events)
        undo.callback(index.close)
        Recovery(
            index=index, backend=backend, geometry=actual, boot_id=boot, emit=events.emit, now_s=clock.wall()
        ).run()
        writer_id = config.writer_id or secrets.token_hex(4)
        lock = backend.lock(f"writer-{writer_id}")
        if lock is None:
            raise StoreError(f"{url}: writer {writer_id!r} is another running process; choose another writer_id")
        undo.callback(lock.release)
        with index.write() as txn:
            txn.put_meta(b"writer:" + writer_id.encode(), b"")
            if txn.meta(b"policy") is None and not txn.segments():
                PolicyBook.put(txn, config.seed_policy)
                backend.write_file(POLICY_FILE, encode_policy(config.seed_policy))
        held = ExitStack()
        for let_go in (place.discard, backend.close, lock.release):
            held.callback(let_go)
        store = KVStore(
            backend=backend, index=index, geometry=actual, config=config, clock=clock, events=events,
            writer_id=writer_id, held=held, close_index=partial(_close_index, BootMark(place.folder), index, backend),
            pin_memory=pin_memory,
        )  # fmt: skip
        opening.release()
        undo.pop_all()
    for note in backend.notes:
        store.events.emit(Degraded(url, note))
    return store


def _close_index(mark: BootMark, index: Index, backend: Backend) -> None:
    opening = None
    with suppress(OSError):
        opening = backend.lock("open")
    try:
        mark.finish(index, alone=opening is not None)
    finally:
        if opening is not None:
            opening.release()


def _open_index(place: IndexPlace, config: StoreConfig, boot: str, events: EventBus) -> Index:
    """Open the index, without what a crash of the machine may have left of it."""
    path = place.folder
    try:
        mark = BootMark(path)
        doubt = mark.doubt(boot)
        if doubt is not None:
            events.emit(Degraded("index", f"built anew: {doubt}"))
            mark.discard()
        mark.begin(boot)
    except OSError as error:
        raise StoreError(f"index {path}: {error.strerror}; make it writable, or set index_path elsewhere") from error
    return Index(path, map_bytes=config.index_map_bytes, lasting=place.lasting)


def resolve_backend(url: str, direct: str, *, create: bool = True) -> Backend:
    """Make the backend a URL's scheme names, from the installed packages that register one."""
    scheme = urlsplit(url).scheme if "://" in url else "file"
    found = {point.name: point for point in entry_points(group="duokv.backends")}
    if scheme not in found:
        raise UsageError(f"{url}: no backend for scheme {scheme!r}; {nearest(scheme, found)}")
    make: Callable[..., Backend] = found[scheme].load()
    return make(url, direct=direct, create=create)


def read_manifest(backend: Backend, url: str) -> Manifest | None:
    """The store's manifest, None if there is none; StoreError if it cannot be one of ours or is of another format."""
    raw = backend.read_file(MANIFEST)
    if raw is None:
        return None
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{url}: {MANIFEST} is not a store's manifest ({error}); name another directory") from error
    if manifest.format != FORMAT:
        raise StoreError(
            f"{url}: store of format {manifest.format}, this version reads {FORMAT}; use the version it says"
        )
    return manifest


def geometry_of(manifest: Manifest, wanted: CacheGeometry | None, url: str) -> CacheGeometry:
    """The store's geometry; StoreError if another one was asked for."""
    if wanted is None:
        try:
            wanted = CacheGeometry.preset(manifest.geometry)
        except UsageError:
            wanted = CacheGeometry.opaque(
                manifest.geometry, payload_bytes=manifest.payload_bytes, swa_bytes=manifest.swa_bytes
            )
    if wanted.digest.hex() != manifest.digest:
        raise StoreError(
            f"{url}: store of geometry {manifest.geometry!r} ({manifest.payload_bytes:,} B blocks), asked for "
            f"{wanted.name!r} ({wanted.payload_bytes:,} B); open it as {manifest.geometry!r} or name another directory"
        )
    return wanted


def local_folder(url: str) -> Path | None:
    """The folder that a path or a file:// URL names; None for other schemes."""
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


@dataclass(frozen=True, slots=True)
class IndexPlace:
    """Where the index of a store lives. lasting: longer than the store is open."""

    folder: Path
    lasting: bool = True

    def discard(self) -> None:
        """Remove an index that does not last, after it was closed."""
        if not self.lasting:
            shutil.rmtree(self.folder, ignore_errors=True)


def index_place(url: str, config: StoreConfig) -> IndexPlace:
    """Where the index of a store lives; makes a folder for one that does not last."""
    if config.index_path is not None:
        return IndexPlace(Path(config.index_path))
    folder = local_folder(url)
    if folder is not None:
        return IndexPlace(folder / "index")
    if urlsplit(url).scheme == "memory":
        return IndexPlace(Path(tempfile.mkdtemp(prefix="duokv-index-")), lasting=False)
    raise UsageError(f"{url}: the index needs a local disk; set index_path to a directory of this host")


def _new_manifest(backend: Backend, url: str, wanted: CacheGeometry | None, clock: Clock, *, create: bool) -> Manifest:
    if not create:
        raise StoreError(
            f"{url}: no store here ({MANIFEST} is missing); check the path, or commit something to make one"
        )
    if wanted is None:
        raise UsageError(f"{url}: a new store needs a geometry; for example geometry='deepseek-v4.1-flash'")
    if backend.list("seg/"):
        raise StoreError(f"{url}: segment files but no {MANIFEST}; restore it, or name an empty directory")
    manifest = Manifest(FORMAT, wanted.name, wanted.digest.hex(), wanted.payload_bytes, wanted.swa_bytes, clock.wall())
    backend.write_file(MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2))
    return manifest
