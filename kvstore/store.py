"""KVStore: the two tiers behind one face. A request's walk is lookup, load, lease_window, commit, put_window."""

from __future__ import annotations

import errno
import functools
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext

import lmdb
import msgspec
import numpy as np

from duokv.kvstore.answers import Commit, PrefixHit, StoreStats
from duokv.kvstore.backend import Backend
from duokv.kvstore.blockcache import BlockCache
from duokv.kvstore.blockstore import BlockStore
from duokv.kvstore.buffers import BufferPool, Lent, PinMemory
from duokv.kvstore.checkpoint import Checkpointer
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.events import BlocksLoaded, ClockJumped, Degraded, EventBus, PrefixLookedUp, RequestServed
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
from duokv.kvstore.reader import LATE, BlockReader, Rows
from duokv.kvstore.record import BlockCodec, Chain, Row
from duokv.kvstore.staging import Blocks, Payload, fill_rows, payload_views
from duokv.kvstore.swa import SwaArena, SwaWindow
from duokv.kvstore.walk import Committed, Found
from duokv.kvstore.writebehind import Pending, WriteBehind, coming

_JUMP_S = 60.0
_LONGEST_PIN_S = 1e9


class KVStore:
    """Block KV and SWA KV of one geometry. Thread-safe; not across fork. Build it with `open_store`.

    held: what to let go of at close, after the index.

    A miss is a value: lookups, loads and commits do not raise for what a backend does. UsageError marks misuse.
    """

    def __init__(
        self, *, backend: Backend, index: Index, geometry: CacheGeometry, config: StoreConfig, clock: Clock,
        events: EventBus, writer_id: str, held: ExitStack, close_index: Callable[[], None],
        pin_memory: PinMemory | None = None,
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
        self._pool = BufferPool(config.buffer_bytes, pin_memory)
        self.blocks = BlockStore(
            index=index, backend=backend, geometry=geometry, config=config, clock=clock, emit=events.emit,
            writer_id=writer_id, pool=self._pool,
        )  # fmt: skip
        self._reader = BlockReader(
            backend, threads=config.read_threads, slot_bytes=geometry.slot_bytes, monotonic=Clock().monotonic
        )
        self._behind = WriteBehind(
            blocks=self.blocks, write=self._write_pending, emit=events.emit, pool=self._pool,
            slot_bytes=geometry.slot_bytes, capacity_bytes=config.write_behind_bytes,
            waits=config.write_behind_full == "wait",
        ) if config.write_behind_bytes else None  # fmt: skip
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
        # Asked first: what is missing here was stored before the index is asked.
        waiting: tuple[Pending, ...] = self._behind.pending if self._behind is not None else ()
        blob = chain_blob(root, ids, min(1, blocks), parts)
        if blocks > 1 and (coming(waiting, blob, 0, 1).end or self.blocks.may_begin(blob)):
            blob = chain_blob(root, ids, blocks, parts)
        blocks = len(blob) // KEY_BYTES
        exact_only = require is Origin.EXACT
        found = self.blocks.find(blob, blocks, traffic, exact_only=exact_only)
        there = coming(waiting, blob, found.blocks, blocks, exact_only=exact_only)
        end = there.end
        exact = there.exact if found.exact == found.blocks else found.exact
        reason = None if end == blocks else "approx" if there.approx else found.reason or "absent"
        if self._behind is not None and there.pending:
            self._behind.use(there.pending[-1], blob, end, traffic)
        hit = end * BLOCK_TOKENS
        name = traffic or self.blocks.default_class
        self.events.emit(PrefixLookedUp(name, hit, length - hit, reason, self._looked_up.seen(request_id)))
        keys = BlockKeys(blob[: end * KEY_BYTES])
        return PrefixHit(hit, keys, reason, name, exact * BLOCK_TOKENS, found, there.pending, ids, root)

    def load(self, hit: PrefixHit, out: Rows, *, first_block: int = 0, deadline_s: float | None = None) -> int:
        """Read blocks `first_block`.. of a hit into `out` and return how many leading rows hold verified blocks.

        out: `[n, slot_bytes]` uint8 rows lent by `buffers(n)` are read into directly; any other `[n, >= payload_bytes]`
        array costs one copy, since a read that outlives its deadline must never write into memory given back to others.
        n may be less than the hit. Blocks still on their way (`write_behind_bytes`) are waited for. Late, missing or
        damaged ones are a miss; damaged ones leave the index. Rows after the returned ones are undefined and, where
        lent, may be written to by late reads until they are released: release them rather than put blocks of your own
        there, which `commit` would refuse.
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
        seconds = self.config.read_deadline_s if deadline_s is None else deadline_s
        until = self._reader.after(seconds)
        own = out.shape[1] == self.geometry.slot_bytes and out.flags.c_contiguous
        lent = self._pool.owns(out) if own else None
        stored = min(hit._found.blocks, blocks)
        steps = self._stream(hit, hit._found, stored, first_block, out, lent, seconds)
        if stored == blocks:
            return steps
        return self._stream_all(hit, steps, blocks, first_block, out, None if lent is None else lent.retain(), until)

    def _stream(
        self, hit: PrefixHit, found: Found, blocks: int, first: int, out: Rows, lent: Lent | None, seconds: float
    ) -> Generator[int, None, None]:
        exact = min(hit.exact_tokens // BLOCK_TOKENS, blocks)
        chain = Chain(hit._root, hit.keys.blob, hit._ids)
        wanted = Wanted(chain, blocks, first, found.spans(min(blocks, found.lead(exact))), exact)
        return self._loader.stream(wanted, out, lent, seconds)

    def _stream_all(
        self, hit: PrefixHit, stored: Generator[int, None, None], blocks: int, first: int, out: Rows,
        held: Lent | None, until: float,
    ) -> Generator[int, None, None]:  # fmt: skip
        """Stream what is stored, then what was on its way when it was looked up, once that is stored too."""
        with held or nullcontext():
            lead = 0
            with closing(stored):
                for lead in stored:
                    yield lead
            if first + lead < min(hit._found.blocks, blocks):
                return
            if not all(pending.done.wait(self._reader.left(until)) for pending in hit._pending):
                self.events.emit(BlocksLoaded(0, blocks - first - lead, 0, LATE))
                return
            found = self.blocks.find(hit.keys.blob, len(hit.keys), None, use=False)
            rest = self._stream(hit, found, blocks, first + lead, out[lead:], held, self._reader.left(until))
            with closing(rest):
                for more in rest:
                    yield lead + more

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
        With `write_behind_bytes` nothing is written yet: blocks counted as new may come to be dropped, as
        `wait_durable` says.
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
        sources = payload_views(blocks, self.geometry.payload_bytes, first_block)
        if self._pool.spoiled([sources] if isinstance(sources, np.ndarray) else sources):
            raise UsageError("commit: a late read may write into these rows; release them and fill others")
        root = ns.root()
        chain = Chain(root, chain_blob(root, ids, total, check_media(media)), ids)
        if self._behind is not None:
            done, pending = self._behind.take(chain, first_block, total, traffic, origin, sources)
            wait = functools.partial(self._wait_written, self._behind, pending)
        else:
            wait = functools.partial(self._wait_durable, self.blocks.space.given_up)
            done = self._write(chain, first_block, total, traffic, origin, sources)
        return Commit(done.new, done.present, done.dropped, wait)

    def _write(
        self, chain: Chain, first: int, total: int, traffic: str | None, origin: Origin, sources: Sequence[Row] | Rows
    ) -> Committed:
        def fill(block: int, rows: Rows) -> None:
            fill_rows(rows, sources[block - first : block - first + len(rows)])

        with self.cache.intake() as intake:
            payload = Payload(fill, chain, functools.partial(intake.copy, chain.blob))
            done = self.blocks.commit(chain.blob, total, traffic, first=first, payload=payload, origin=origin)
            if done.new:
                intake.publish()
        return done

    def _write_pending(self, pending: Pending) -> Committed:
        assert pending.lent is not None
        rows = pending.lent.rows[:, : self.geometry.payload_bytes]
        return self._write(pending.chain, pending.first, pending.total, pending.traffic, pending.origin, rows)

    def _wait_written(self, behind: WriteBehind, pending: Pending) -> None:
        if pending in behind.pending:
            pending.done.wait()
        if not pending.is_whole:
            raise OSError(errno.EIO, "blocks of this commit were not stored: no room, or a failing backend")
        self._wait_durable(pending.given_up)

    def _wait_durable(self, given_up: int) -> None:
        self.flush()
        if self.blocks.space.given_up != given_up:
            raise OSError(errno.EIO, "a segment could not be made durable since this commit; its blocks may be gone")

    def pin(self, keys: BlockKeys, *, ttl_s: float) -> int:
        """Hold a chain's stored leading blocks for `ttl_s` seconds against expiry and eviction; returns how many."""
        self._check_open()
        if not 0 <= ttl_s <= _LONGEST_PIN_S:
            raise UsageError(f"pin: ttl of {ttl_s} s; give 0 to {_LONGEST_PIN_S:.0f} seconds")
        if self._behind is not None:
            self._behind.drain()
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
        if self._behind is not None:
            self._behind.drain()
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
        if self._behind is not None:
            self._behind.close()
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
