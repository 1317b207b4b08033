"""The index: LMDB tables that say where each block is and how long it lives. Disposable; segments rebuild it.

Tables (FORMAT.md): `extents` by the first block's 16-byte key prefix, `lives` by place, `segments` by number, `meta`.
Values are copied out inside the transaction. One Index per process; transactions may be used by any one thread at a
time; never across fork.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeAlias

import lmdb
import msgspec

from duokv.kvstore.errors import StoreError
from duokv.kvstore.extent import PLACE, PREFIX_BYTES, Extent, Life
from duokv.kvstore.keys import KEY_BYTES

INDEX_FORMAT = 1
_PLACE_BYTES = PLACE.size
_TOTALS = struct.Struct("<QQQ")
# physical bytes allocated, live blocks, extents ever stored


class SegmentInfo(msgspec.Struct, array_like=True):
    """What the index knows of a segment file. Slots and bytes; `used` slots are published, `live` still referenced."""

    writer: str
    class_id: int
    slots: int
    used: int
    live: int
    allocated: int
    sealed: bool
    created_s: float

    def name(self, number: int) -> str:
        """The file's name below the store's root."""
        return segment_name(self.writer, number)


def segment_name(writer: str, number: int) -> str:
    """The file of segment `number` of one writer."""
    return f"seg/{writer}/{number:08x}.seg"


class IndexTxn:
    """One LMDB transaction over all tables: a snapshot, ended by leaving its `with` block."""

    changed_places: Sequence[bytes] = ()
    """8-byte places whose lives this transaction changed in a way the extent cache does not know."""
    changed_firsts: Sequence[bytes] = ()
    """First blocks whose entry this transaction set."""

    def __init__(self, index: Index, txn: lmdb.Transaction) -> None:
        self._txn = txn
        # Opened without buffers=True, so values are bytes: copies that outlive the transaction.
        self._get: Callable[[bytes, None, object], bytes | None] = txn.get  # type: ignore[assignment]
        self._extents, self._lives, self._segments, self._meta = index.tables
        self.snapshot: int = txn.id()
        """The write transaction, of any process, whose outcome this one sees."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._txn.abort()

    def record(self, prefix: bytes) -> bytes | None:
        """The raw record of the extent whose first block has this key prefix."""
        return self._get(prefix, None, self._extents)

    def absent_run(self, blob: bytes, block: int, blocks: int) -> int:
        """How many blocks from `block` on start no extent."""
        get, extents = self._get, self._extents
        for at in range(block * KEY_BYTES, blocks * KEY_BYTES, KEY_BYTES):
            if get(blob[at : at + PREFIX_BYTES], None, extents) is not None:
                return at // KEY_BYTES - block
        return blocks - block

    def extent(self, prefix: bytes) -> Extent | None:
        """The extent whose first block has this key prefix."""
        raw = self._get(prefix, None, self._extents)
        return None if raw is None else Extent.decode(raw)

    def extents(self) -> Iterator[Extent]:
        """All extents, in order of key prefix."""
        with self._txn.cursor(db=self._extents) as cursor:
            for raw in cursor.iternext(keys=False, values=True):
                yield Extent.decode(bytes(raw))

    def stored(self) -> int:
        """Extents ever stored, by any process: tells whether another one stored some since."""
        return self._totals()[2]

    def has_gaps(self) -> bool:
        """Whether a stored block may be without its parent, so that nothing reaches it."""
        return self.meta(b"gaps") is not None

    def life(self, place: int) -> Life | None:
        """The life of the extent at `place`."""
        raw = self._get(place.to_bytes(_PLACE_BYTES, "big"), None, self._lives)
        return None if raw is None else Life.decode(raw)

    def life_head(self, place: int) -> tuple[int, bytes] | None:
        """(blocks, key prefix of the first one) of the extent at `place`: its life without uses, at half the cost."""
        raw = self._get(place.to_bytes(_PLACE_BYTES, "big"), None, self._lives)
        return None if raw is None else Life.head(raw)

    def life_raw(self, place: bytes) -> bytes | None:
        """A life's bytes, by the 8-byte place."""
        return self._get(place, None, self._lives)

    def lives(self, segment: int | None = None) -> Iterator[tuple[int, Life]]:
        """All lives, or those of one segment, in order of place."""
        return ((place, Life.decode(raw)) for place, raw in self.raw_lives(segment))

    def raw_lives(self, segment: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The same, encoded."""
        with self._txn.cursor(db=self._lives) as cursor:
            if segment is None or cursor.set_range(PLACE.pack(segment, 0)):
                for key, raw in cursor.iternext():
                    place = int.from_bytes(key, "big")
                    if segment is not None and place >> 32 != segment:
                        return
                    yield place, bytes(raw)

    def segment(self, number: int) -> SegmentInfo | None:
        """A segment's record. Within a write transaction the same object each time."""
        raw = self._get(number.to_bytes(4, "big"), None, self._segments)
        return None if raw is None else msgspec.msgpack.decode(raw, type=SegmentInfo)

    def segments(self) -> list[tuple[int, SegmentInfo]]:
        """All segments in order of number."""
        with self._txn.cursor(db=self._segments) as cursor:
            return [(int.from_bytes(key, "big"), msgspec.msgpack.decode(raw, type=SegmentInfo)) for key, raw in cursor]

    def totals(self) -> tuple[int, int]:
        """(physical bytes allocated, live blocks) over all segments."""
        return self._totals()[:2]

    def _totals(self) -> tuple[int, int, int]:
        raw = self.meta(b"totals")
        return (0, 0, 0) if raw is None else _TOTALS.unpack(raw)

    def peek_segment(self) -> int:
        """The segment number to be handed out next."""
        return int.from_bytes(self.meta(b"next_segment") or b"\x01", "little")

    def meta(self, name: bytes) -> bytes | None:
        """A store-wide value."""
        return self._get(name, None, self._meta)

    def meta_names(self, prefix: bytes) -> list[str]:
        """What follows `prefix` in the names of store-wide values."""
        with self._txn.cursor(db=self._meta) as cursor:
            cursor.set_range(prefix)
            names = map(bytes, cursor.iternext(keys=True, values=False))
            return [name[len(prefix) :].decode() for name in itertools.takewhile(lambda n: n.startswith(prefix), names)]

    def count_extents(self) -> int:
        """Number of extents."""
        return int(self._txn.stat(self._extents)["entries"])


class WriteTxn(IndexTxn):
    """The only write transaction of all processes; its `with` block commits it unless an exception leaves it."""

    def __init__(self, index: Index, txn: lmdb.Transaction, watchers: Sequence[Watcher]) -> None:
        super().__init__(index, txn)
        self.snapshot -= 1
        self._version = index.version
        self._watchers = watchers
        self.endings: list[Callable[[bool], None]] = []
        """Called when the transaction has ended, with whether it was committed: memory must not run ahead of it."""
        self.wrote = False
        """Whether anything was put. Deletes do not count: the extent cache then only reads the index again."""
        self.changed_places: list[bytes] = []
        self.changed_firsts: list[bytes] = []
        self._infos: dict[int, SegmentInfo] = {}
        self._before: dict[int, tuple[int, int]] = {}
        self._put_infos: dict[int, SegmentInfo] = {}
        self._stored = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        committed = False
        try:
            if kind is None:
                try:
                    with self._txn:
                        self.settle()
                    committed = True
                except BaseException as failure:
                    # An interrupt may come as the commit returns.
                    committed = not isinstance(failure, lmdb.Error) and self._version() > self.snapshot
                    raise
            else:
                self._txn.abort()
        finally:
            for watcher in self._watchers:
                watcher(self, committed)
            for ending in self.endings:
                ending(committed)

    def put_extent(self, extent: Extent) -> None:
        """Store an extent under its first block."""
        first = extent.prefixes[:PREFIX_BYTES]
        self._put(first, extent.encode(), self._extents)
        self.changed_firsts.append(first)
        self._stored += 1

    def stored(self) -> int:  # noqa: D102
        return super().stored() + self._stored

    def note_gaps(self) -> None:
        """Note that an extent went before what follows it in its chain. For ever, as later commits only fill gaps."""
        if not self.has_gaps():
            self.put_meta(b"gaps", b"\x01")

    def drop_extent(self, place: int, first: bytes) -> None:
        """Remove an extent with its life; the entry of its first block (a key prefix) only if it still leads here."""
        record = self._get(first, None, self._extents)
        if record is not None and record[:_PLACE_BYTES] == place.to_bytes(_PLACE_BYTES, "big"):
            self._txn.delete(first, db=self._extents)
        self.drop_life(place)

    def drop_life(self, place: int) -> None:
        """Remove a life whose extent's entry is about to lead elsewhere."""
        key = place.to_bytes(_PLACE_BYTES, "big")
        self._txn.delete(key, db=self._lives)
        self.changed_places.append(key)

    def put_life(self, place: int, life: Life) -> None:
        """Store a life."""
        key = place.to_bytes(_PLACE_BYTES, "big")
        self._put(key, life.encode(), self._lives)
        self.changed_places.append(key)

    def put_raw_life(self, place: bytes, raw: bytes) -> None:
        """Store an encoded life by the 8-byte place. Not in `changed_places`: for the extent cache, which knows it."""
        self._put(place, raw, self._lives)

    def segment(self, number: int) -> SegmentInfo | None:  # noqa: D102
        info = self._infos.get(number)
        if info is None:
            info = super().segment(number)
            if info is not None:
                self._infos[number] = info
                self._before[number] = (info.allocated, info.live)
        return info

    def put_segment(self, number: int, info: SegmentInfo) -> None:
        """Store a segment's record, when the transaction ends; the totals follow it."""
        if number not in self._before:
            old = self.segment(number)
            self._before[number] = (old.allocated, old.live) if old else (0, 0)
        self._infos[number] = self._put_infos[number] = info

    def drop_segment(self, number: int) -> None:
        """Forget a segment; the totals follow it."""
        self.settle()
        old = self.segment(number)
        if old is not None:
            allocated, live = self._before.pop(number)
            del self._infos[number]
            self._txn.delete(number.to_bytes(4, "big"), db=self._segments)
            self._add_totals(-allocated, -live)

    def segments(self) -> list[tuple[int, SegmentInfo]]:  # noqa: D102
        self.settle()
        return super().segments()

    def totals(self) -> tuple[int, int]:  # noqa: D102
        self.settle()
        return super().totals()

    def _add_totals(self, allocated: int, live: int, stored: int = 0) -> None:
        if allocated or live or stored:
            old = self._totals()
            self.put_meta(b"totals", _TOTALS.pack(old[0] + allocated, old[1] + live, old[2] + stored))

    def settle(self) -> None:
        """Write what was gathered: a transaction that stores or cuts many extents writes each segment's record once."""
        allocated = live = 0
        for number, info in self._put_infos.items():
            before = self._before[number]
            self._before[number] = (info.allocated, info.live)
            allocated, live = allocated + info.allocated - before[0], live + info.live - before[1]
            self._put(number.to_bytes(4, "big"), msgspec.msgpack.encode(info), self._segments)
        self._put_infos.clear()
        self._add_totals(allocated, live, self._stored)
        self._stored = 0

    def next_segment(self) -> int:
        """Hand out a segment number that was never used before in this store's index."""
        number = self.peek_segment()
        self.put_meta(b"next_segment", (number + 1).to_bytes(4, "little"))
        return number

    def put_meta(self, name: bytes, value: bytes) -> None:
        """Set a store-wide value."""
        self._put(name, value, self._meta)

    def drop_meta(self, name: bytes) -> None:
        """Remove a store-wide value."""
        self._txn.delete(name, db=self._meta)

    def clear(self) -> None:
        """Empty every table (a rebuild starts so)."""
        for table in (self._extents, self._lives, self._segments, self._meta):
            self._txn.drop(table, delete=False)
        self._infos.clear()
        self._before.clear()
        self._put_infos.clear()
        self._stored = 0

    def _put(self, key: bytes, value: bytes, table: lmdb._Database) -> None:
        self._txn.put(key, value, db=table)
        self.wrote = True


Watcher: TypeAlias = Callable[[WriteTxn, bool], None]
"""Told of each write transaction of this process that has ended, before its `endings`, and whether it was committed."""


class Index:
    """Opens and closes the LMDB environment, begins transactions. lasting: whether it is anybody's once closed."""

    def __init__(
        self, path: Path, *, map_bytes: int, readonly: bool = False, lock: bool = True, lasting: bool = True
    ) -> None:
        self.path = path
        self._pid = os.getpid()
        self._watchers: list[Watcher] = []
        try:
            if not readonly:
                path.mkdir(parents=True, exist_ok=True)
            # sync=False: power loss voids the index, which is then rebuilt from segments; only a close syncs it. Data
            # never waits for it. writemap saves a copy of each page, but a stray write of the process could reach the
            # map, and a full disk kills the process: only for an index that is nobody's once it is closed.
            opened = partial(
                lmdb.open, str(path), map_size=map_bytes, max_dbs=4, max_readers=1024, readonly=readonly, sync=False,
                readahead=False, create=not readonly, lock=lock,
            )  # fmt: skip
            try:
                self._env = opened(writemap=not lasting)
            except lmdb.Error:
                if lasting:
                    raise
                # A file as long as the map is not allowed everywhere.
                self._env = opened(writemap=False)
            self._env.reader_check()
            names = (b"extents", b"lives", b"segments", b"meta")
            self.tables = tuple(self._env.open_db(name, create=not readonly) for name in names)
        except (lmdb.Error, OSError) as error:
            raise StoreError(
                f"index {path}: {error}; check the directory's permissions and disk, or delete it to rebuild it"
            ) from error

    def read(self) -> IndexTxn:
        """A snapshot of the index."""
        self._same_process()
        return IndexTxn(self, self._env.begin())

    def write(self) -> WriteTxn:
        """The only write transaction of all processes."""
        self._same_process()
        return WriteTxn(self, self._env.begin(write=True), self._watchers)

    def watch(self, watcher: Watcher) -> None:
        """Have a watcher told of write transactions from now on. Once, when the index is opened."""
        self._watchers.append(watcher)

    def version(self) -> int:
        """Number of the last committed write transaction, of any process."""
        return int(self._env.info()["last_txnid"])

    def file_bytes(self) -> int:
        """Bytes of the index file in use."""
        info, stat = self._env.info(), self._env.stat()
        return (int(info["last_pgno"]) + 1) * int(stat["psize"])

    def sync(self) -> None:
        """Flush the index to the device."""
        self._env.sync(True)

    def close(self) -> None:
        """Close the environment; idempotent."""
        self._env.close()

    def _same_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError("index: opened before fork; open the store again in the child process")
