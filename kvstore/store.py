"""KVStore: the two tiers behind one face. A request's walk is lookup, load, lease_window, commit, put_window."""

from __future__ import annotations

import errno
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import lmdb
import msgspec
import numpy as np
import numpy.typing as npt

from duokv.kvstore.backend import Backend
from duokv.kvstore.blockcache import BlockCache, CacheStats
from duokv.kvstore.blockstore import BlockStore
from duokv.kvstore.buffers import BufferPool, Lent, Pin
from duokv.kvstore.checkpoint import Checkpointer
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.events import ClockJumped, Degraded, EventBus, PrefixLookedUp, RequestServed
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.index import Index
from duokv.kvstore.keys import (
    BLOCK_TOKENS,
    KEY_BYTES,
    TOKEN_BYTES,
    BlockKeys,
    Media,
    Namespace,
    TokenIds,
    chain_blob,
    check_media,
    token_bytes,
)
from duokv.kvstore.loader import BlockLoader, Wanted
from duokv.kvstore.metrics import Counters, RequestIds
from duokv.kvstore.origin import Origin
from duokv.kvstore.reader import BlockReader, Rows
from duokv.kvstore.record import BlockCodec, Chain, Row
from duokv.kvstore.staging import Payload
from duokv.kvstore.swa import SwaArena, SwaStats, SwaWindow
from duokv.kvstore.walk import Found, MissReason

Blocks = npt.NDArray[np.uint8] | Sequence[memoryview | bytes | npt.NDArray[np.uint8]]
"""`[n, payload_bytes]` (or wider) uint8, or one buffer of payload_bytes per block."""
_JUMP_S = 60.0
_LONGEST_PIN_S = 1e9


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the index holds of a prompt. A value: it locks and pins nothing.

    tokens: leading tokens stored, a multiple of 128, less than the prompt's length so that a row is left to compute.
    keys: their block keys. miss_reason: why the next block is no hit, None when the hit is as long as it can be.
    exact_tokens: how many of the leading tokens are of exact origin. Loading them never gives approximate blocks, even
        if those have taken their place since.
    """

    tokens: int
    keys: BlockKeys
    miss_reason: MissReason | None
    traffic: str
    exact_tokens: int
    _found: Found = field(repr=False, default=Found((), 0, None))
    _ids: bytes | memoryview = field(repr=False, default=b"")
    _root: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit's outcome in blocks: written, present already, dropped (no room, or a failing backend)."""

    new: int
    present: int
    dropped: int
    _flush: Callable[[], None] = field(repr=False)

    def wait_durable(self) -> None:
        """Return once the new blocks survive power loss; OSError if the backend cannot promise it."""
        self._flush()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Sizes now (blocks, bytes) and counts since this process opened the store."""

    blocks: int
    extents: int
    segments: int
    physical_bytes: int
    index_bytes: int
    cache: CacheStats
    windows: SwaStats
    counts: dict[str, int]


class KVStore:
    """Block KV and SWA KV of one geometry. Thread-safe; not across fork. Build it with `open_store`.

    held: what to let go of at close, after the index.

    A miss is a value: lookups, loads and commits do not raise for what a backend does. UsageError marks misuse.
    """

    def __init__(
        self, *, backend: Backend, index: Index, geometry: CacheGeometry, config: StoreConfig, clock: Clock,
        events: EventBus, writer_id: str, held: ExitStack, close_index: Callable[[], None], pin: Pin | None = None,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.config = config
        self.events = events
        self.counters = Counters()
        events.subscribe(self.counters)
        self._backend = backend
        self._index = index
        self._clock = clock
        self._held = held
        self._close_index = close_index
        self._writer_id = writer_id
        self._codec = BlockCodec(geometry)
        self._pool = BufferPool(config.buffer_bytes, pin)
        self.blocks = BlockStore(
            index=index, backend=backend, geometry=geometry, config=config, clock=clock, emit=events.emit,
            writer_id=writer_id, pool=self._pool,
        )  # fmt: skip
        self._reader = BlockReader(
            backend, threads=config.read_threads, slot_bytes=geometry.slot_bytes, monotonic=Clock().monotonic
        )
        self.cache = BlockCache(capacity_bytes=config.cache_bytes, slot_bytes=geometry.slot_bytes)
        self._loader = BlockLoader(
            index=index, blocks=self.blocks, reader=self._reader, cache=self.cache, codec=self._codec, emit=events.emit
        )
        # A geometry without SWA state keeps no windows.
        self.windows = SwaArena(
            max(1, geometry.swa_bytes), capacity_bytes=config.swa_bytes if geometry.swa_bytes else 0,
            expiry_s=config.swa_expiry_s, monotonic=clock.monotonic, emit=events.emit,
        )  # fmt: skip
        self._checkpointer = Checkpointer(
            index=index, backend=backend, clock=clock, emit=events.emit, interval_s=config.checkpoint_interval_s
        )
        self._looked_up = RequestIds()
        self._reported = RequestIds()
        self._seen = (clock.wall(), clock.monotonic())
        self._closed = threading.Event()
        self._closing = threading.Lock()
        self._thread: threading.Thread | None = None
        if config.maintenance_interval_s > 0:
            self._thread = threading.Thread(target=self._maintain_often, name="duokv-maintain", daemon=True)
            self._thread.start()

    # -- Block KV ----------------------------------------------------------------------------------------------------

    def lookup(
        self, ns: Namespace, tokens: TokenIds, traffic: str | None = None, *, media: Sequence[Media] = (),
        require: Origin | None = None, request_id: str | None = None,
    ) -> PrefixHit:  # fmt: skip
        """Find the longest stored prefix of a prompt: index only, no I/O on the backend. Counts as a use of it.

        traffic: a class of the store's policy, None for its default. require=EXACT ends the hit at the first
        approximate block. A `request_id` seen before is counted as a retry: metrics add nothing for it.
        """
        self._check_open()
        ids = token_bytes(tokens)
        length = len(ids) // 4
        root = ns.root()
        blocks = max(0, length - 1) // BLOCK_TOKENS
        parts = check_media(media)
        blob = chain_blob(root, ids, min(1, blocks), parts)
        if blocks > 1 and self.blocks.may_begin(blob):
            blob = chain_blob(root, ids, blocks, parts)
        blocks = len(blob) // KEY_BYTES
        found = self.blocks.find(blob, blocks, traffic, exact_only=require is Origin.EXACT)
        hit = found.blocks * BLOCK_TOKENS
        name = traffic or self.blocks.default_class
        self.events.emit(PrefixLookedUp(name, hit, length - hit, found.reason, self._looked_up.seen(request_id)))
        keys = BlockKeys(blob[: found.blocks * KEY_BYTES])
        exact = found.exact * BLOCK_TOKENS
        return PrefixHit(hit, keys, found.reason, name, exact, found, ids, root)

    def load(self, hit: PrefixHit, out: Rows, *, first_block: int = 0, deadline_s: float | None = None) -> int:
        """Read blocks `first_block`.. of a hit into `out` and return how many leading rows hold verified blocks.

        out: `[n, slot_bytes]` uint8 rows lent by `buffers(n)` are read into directly; any other `[n, >= payload_bytes]`
        array costs one copy, since a read that outlives its deadline must never write into memory given back to others.
        n may be less than the hit. Late, missing or damaged blocks are a miss; damaged ones leave the index. Rows after
        the returned ones are undefined and, where lent, may be written to by late reads until they are released:
        release them rather than put blocks of your own there, which `commit` would refuse.
        """
        return max(self.load_iter(hit, out, first_block=first_block, deadline_s=deadline_s), default=0)

    def load_iter(
        self, hit: PrefixHit, out: Rows, *, first_block: int = 0, deadline_s: float | None = None
    ) -> Generator[int, None, None]:
        """Like `load`, yielding the number of leading verified rows each time it grows.

        `out` is being written to until the iterator ends or is closed. Close it (`contextlib.closing`) when you leave
        it early; a `for` over the call itself does.
        """
        self._check_open()
        blocks = min(len(hit.keys), first_block + len(out))
        rows = out.ndim == 2 and out.dtype == np.uint8 and out.flags.writeable
        if first_block < 0 or not rows or out.shape[1] < self.geometry.payload_bytes:
            raise UsageError(
                f"load: out is {out.dtype} of shape {out.shape} from block {first_block}; "
                f"give writable uint8 rows of {self.geometry.slot_bytes} bytes, as buffers(n) lends them"
            )
        found = hit._found
        exact = min(found.exact, blocks)
        chain = Chain(hit._root, hit.keys.blob, hit._ids)
        wanted = Wanted(chain, blocks, first_block, found.spans(blocks), exact)
        seconds = self.config.read_deadline_s if deadline_s is None else deadline_s
        own = out.shape[1] == self.geometry.slot_bytes and out.flags.c_contiguous
        return self._loader.stream(wanted, out, self._pool.owns(out) if own else None, seconds)

    def buffers(self, n: int) -> Lent:
        """Lend uint8 `[n, slot_bytes]` (`.rows`), page-aligned, touched, perhaps pinned. Release them after use."""
        return self._pool.lend(n, self.geometry.slot_bytes)

    def commit(
        self, ns: Namespace, tokens: TokenIds, blocks: Blocks, *, first_block: int = 0, traffic: str | None = None,
        origin: Origin = Origin.EXACT, media: Sequence[Media] = (),
    ) -> Commit:  # fmt: skip
        """Store blocks of a prompt: `blocks[j]` is block `first_block + j`. Blocks stored already are only renewed.

        All stored blocks before them are renewed as well. A block whose parent is neither stored nor given is dropped.
        The blocks are copied before this returns and can be looked up at once; they are durable after `wait_durable`.
        """
        self._check_open()
        ids = token_bytes(tokens)
        count = len(blocks)
        total = first_block + count
        if first_block < 0 or total * TOKEN_BYTES > len(ids):
            raise UsageError(
                f"commit: blocks [{first_block}, {total}) of a prompt of {len(ids) // 4} tokens; "
                f"it has {len(ids) // TOKEN_BYTES} whole blocks"
            )
        sources = _payloads(blocks, self.geometry.payload_bytes, first_block)
        if self._pool.spoiled([sources] if isinstance(sources, np.ndarray) else sources):
            raise UsageError("commit: a late read may write into these rows; release them and fill others")
        root = ns.root()
        blob = chain_blob(root, ids, total, check_media(media))
        payload_bytes = self.geometry.payload_bytes

        def fill(block: int, rows: Rows) -> None:
            wanted = sources[block - first_block : block - first_block + len(rows)]
            if isinstance(wanted, np.ndarray):
                rows[:, :payload_bytes] = wanted
            else:
                for row, source in zip(rows, wanted, strict=True):
                    row[:payload_bytes] = source

        given_up = self.blocks.space.given_up
        with self.cache.intake() as intake:
            payload = Payload(fill, Chain(root, blob, ids), functools.partial(intake.copy, blob))
            done = self.blocks.commit(blob, total, traffic, first=first_block, payload=payload, origin=origin)
            if done.new:
                intake.publish()
        return Commit(done.new, done.present, done.dropped, functools.partial(self._wait_durable, given_up))

    def _wait_durable(self, given_up: int) -> None:
        self.flush()
        if self.blocks.space.given_up != given_up:
            raise OSError(errno.EIO, "a segment could not be made durable since this commit; its blocks may be gone")

    def pin(self, keys: BlockKeys, *, ttl_s: float) -> int:
        """Hold a chain's stored leading blocks for `ttl_s` seconds against expiry and eviction; returns how many."""
        self._check_open()
        if not 0 <= ttl_s <= _LONGEST_PIN_S:
            raise UsageError(f"pin: ttl of {ttl_s} s; give 0 to {_LONGEST_PIN_S:.0f} seconds")
        return self.blocks.pin(keys.blob, len(keys), ttl_s)

    # -- SWA KV ------------------------------------------------------------------------------------------------------

    def put_window(self, key: bytes, window: SwaWindow) -> bool:
        """Keep the SWA state at a boundary in host memory under its block key; False if there is no room."""
        self._check_open()
        return self.windows.put(key, window)

    def lease_window(self, key: bytes, *, require: Origin | None = None) -> AbstractContextManager[SwaWindow | None]:
        """Borrow a window without a copy; None if it is gone. Its bytes stay as they are inside the `with` block."""
        self._check_open()
        return self.windows.lease(key, require=require)

    # -- operation ---------------------------------------------------------------------------------------------------

    def report(self, served: RequestServed, *, request_id: str | None = None) -> None:
        """Tell metrics how a request's tokens were come by; engines do. Retries as in `lookup`."""
        if self._reported.seen(request_id):
            served = msgspec.structs.replace(served, retry=True)
        self.events.emit(served)

    def maintain(self) -> None:
        """One pass of housekeeping: persist uses, delete what expired, checkpoint. The background thread calls it."""
        wall, monotonic = self._clock.wall(), self._clock.monotonic()
        jump = (wall - self._seen[0]) - (monotonic - self._seen[1])
        self._seen = (wall, monotonic)
        jumped = abs(jump) > _JUMP_S
        if jumped:
            self.events.emit(ClockJumped(jump))
        self.windows.expire()
        self.blocks.maintain(clock_jumped=jumped)
        self._checkpointer.maintain()

    def flush(self) -> None:
        """Make all commits so far survive power loss. OSError if that fails: that segment's blocks are given up."""
        self._check_open()
        self.blocks.flush()

    def stats(self) -> StoreStats:
        """Sizes and counts."""
        with self._index.read() as txn:
            physical, live = txn.totals()
            extents, segments = txn.count_extents(), len(txn.segments())
        return StoreStats(
            live, extents, segments, physical, self._index.file_bytes(), self.cache.stats(), self.windows.stats(),
            self.counters.snapshot(),
        )  # fmt: skip

    def close(self) -> None:
        """Persist uses, seal segments, checkpoint lives, release locks; idempotent. SWA windows are gone."""
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
        if self._thread is not None:
            self._thread.join()
        self._reader.close()
        with self._held as held:
            held.callback(self._close_index)
            try:
                clean = self.blocks.close()
                with self._index.write() as txn:
                    self._checkpointer.close(txn)
                    # Who is still named here has left something for the next open to put right.
                    if clean:
                        txn.drop_meta(b"writer:" + self._writer_id.encode())
            except (OSError, lmdb.Error) as error:
                self.events.emit(Degraded("close", f"not finished, the next open does it: {error}"))

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _maintain_often(self) -> None:
        while not self._closed.wait(self.config.maintenance_interval_s):
            try:
                self.maintain()
            except Exception as error:  # noqa: BLE001  housekeeping must outlive a bad disk
                self.events.emit(Degraded("maintenance", repr(error)))

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise StoreError("store: closed; open it again")


def _payloads(blocks: Blocks, payload_bytes: int, first_block: int) -> Sequence[Row] | Rows:
    """A view of each block's payload."""
    if isinstance(blocks, np.ndarray) and blocks.ndim == 2 and blocks.dtype == np.uint8:
        for block in blocks[:1]:
            _payload_view(block, payload_bytes, first_block)
        return blocks[:, :payload_bytes]
    return [_payload_view(block, payload_bytes, first_block + j) for j, block in enumerate(blocks)]


def _payload_view(block: memoryview | bytes | npt.NDArray[np.uint8], payload_bytes: int, number: int) -> Row:
    view = np.frombuffer(block, np.uint8) if not isinstance(block, np.ndarray) else block.reshape(-1).view(np.uint8)
    if view.nbytes < payload_bytes:
        raise UsageError(f"commit: block {number} has {view.nbytes} bytes; this geometry's blocks have {payload_bytes}")
    return view[:payload_bytes]
