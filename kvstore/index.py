"""The index: LMDB tables that say where each block is and how long it lives. Disposable; segments rebuild it.

Tables (FORMAT.md): `extents` by the first block's 16-byte key prefix, `lives` by place, `segments` by number, `meta`.
Values are copied out inside the transaction. One Index per process; transactions may be used by any one thread at a
time; never across fork.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, cast

import lmdb
import msgspec

from duokv.kvstore.errors import StoreError
from duokv.kvstore.extent import EXTENT_HEAD, PLACE, PREFIX_BYTES, Extent, Life
from duokv.kvstore.keys import KEY_BYTES

INDEX_FORMAT = 0
_PLACE_BYTES = PLACE.size


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


Hop: TypeAlias = tuple[int, bytes, bytes, bytes, int]
"""One step of a walk: (first block, 8-byte place, raw extent record, raw life, blocks of the prompt found in it)."""


def is_approx(record: bytes) -> bool:
    """Whether an extent's blocks are the result of a bounded replay somewhere before them."""
    return record[EXTENT_HEAD - 2] != 0


class IndexTxn:
    """One LMDB transaction over all tables."""

    def __init__(self, index: Index, txn: lmdb.Transaction) -> None:
        self._txn = txn
        # Opened without buffers=True, so values are bytes: copies that outlive the transaction.
        self._get = cast("Callable[[bytes, None, object], bytes | None]", txn.get)
        self._extents, self._lives, self._segments, self._meta = index.tables
        self.endings: list[Callable[[bool], None]] = []
        """Called when a write transaction has ended, with whether it was committed: memory must not run ahead of it."""

    def walk(self, blob: bytes, block: int, blocks: int) -> list[Hop]:
        """Follow a prompt's key blob from block `block` to the first one that no extent holds.

        Chained keys: equal last prefixes imply that all before are equal, so one compare usually settles a hop.
        """
        get, extents, lives = self._get, self._extents, self._lives
        hops = []
        while block < blocks:
            at = block * KEY_BYTES
            record = get(blob[at : at + PREFIX_BYTES], None, extents)
            if record is None:
                break
            place = record[:_PLACE_BYTES]
            life = get(place, None, lives)
            if life is None:
                break
            count = int.from_bytes(life[:4], "little")
            count = min(count, blocks - block)
            mine = EXTENT_HEAD + count * PREFIX_BYTES
            theirs = at + count * KEY_BYTES
            if record[mine - PREFIX_BYTES : mine] != blob[theirs - KEY_BYTES : theirs - KEY_BYTES + PREFIX_BYTES]:
                count = _agreeing(record, blob, block, count)
            if not count:
                break
            hops.append((block, place, record, life, count))
            block += count
        return hops

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

    def put_extent(self, extent: Extent) -> None:
        """Store an extent under its first block."""
        self._txn.put(extent.prefixes[:PREFIX_BYTES], extent.encode(), db=self._extents)
        self.put_meta(b"stored", (self.stored() + 1).to_bytes(8, "little"))

    def stored(self) -> int:
        """Extents ever stored, by any process: tells whether another one stored some since."""
        return int.from_bytes(self.meta(b"stored") or b"", "little")

    def drop_extent(self, life: Life, place: int) -> None:
        """Remove an extent with its life; the first block's entry only if it still leads here."""
        key = PLACE.pack(place >> 32, place & 0xFFFFFFFF)
        raw = self._get(life.first, None, self._extents)
        if raw is not None and raw[:_PLACE_BYTES] == key:
            self._txn.delete(life.first, db=self._extents)
        self._txn.delete(key, db=self._lives)

    def drop_life(self, place: int) -> None:
        """Remove a life whose extent's entry is about to lead elsewhere."""
        self._txn.delete(PLACE.pack(place >> 32, place & 0xFFFFFFFF), db=self._lives)

    def life(self, place: int) -> Life | None:
        """The life of the extent at `place`."""
        raw = self._get(PLACE.pack(place >> 32, place & 0xFFFFFFFF), None, self._lives)
        return None if raw is None else Life.decode(raw)

    def life_raw(self, place: bytes) -> bytes | None:
        """A life's bytes, by the 8-byte place."""
        return self._get(place, None, self._lives)

    def put_life(self, place: int, life: Life) -> None:
        """Store a life."""
        self.put_life_raw(PLACE.pack(place >> 32, place & 0xFFFFFFFF), life.encode())

    def put_life_raw(self, place: bytes, raw: bytes) -> None:
        """Store a life already encoded, by the 8-byte place."""
        self._txn.put(place, raw, db=self._lives)

    def lives(self, segment: int | None = None) -> Iterator[tuple[int, Life]]:
        """All lives, or those of one segment, in order of place."""
        with self._txn.cursor(db=self._lives) as cursor:
            found = cursor.first() if segment is None else cursor.set_range(PLACE.pack(segment, 0))
            while found:
                key = cursor.key()
                number, slot = PLACE.unpack(key)
                if segment is not None and number != segment:
                    return
                yield number << 32 | slot, Life.decode(bytes(cursor.value()))
                found = cursor.next()

    def extents(self) -> Iterator[Extent]:
        """All extents, in order of key prefix."""
        with self._txn.cursor(db=self._extents) as cursor:
            for raw in cursor.iternext(keys=False, values=True):
                yield Extent.decode(bytes(raw))

    def segment(self, number: int) -> SegmentInfo | None:
        """A segment's record."""
        raw = self._get(number.to_bytes(4, "big"), None, self._segments)
        return None if raw is None else msgspec.msgpack.decode(raw, type=SegmentInfo)

    def put_segment(self, number: int, info: SegmentInfo) -> None:
        """Store a segment's record; the totals follow it."""
        key = number.to_bytes(4, "big")
        old = self.segment(number)
        self._txn.put(key, msgspec.msgpack.encode(info), db=self._segments)
        self._add_totals(info.allocated - (old.allocated if old else 0), info.live - (old.live if old else 0))

    def drop_segment(self, number: int) -> None:
        """Forget a segment; the totals follow it."""
        old = self.segment(number)
        if old is not None:
            self._txn.delete(number.to_bytes(4, "big"), db=self._segments)
            self._add_totals(-old.allocated, -old.live)

    def segments(self) -> list[tuple[int, SegmentInfo]]:
        """All segments in order of number."""
        with self._txn.cursor(db=self._segments) as cursor:
            return [(int.from_bytes(key, "big"), msgspec.msgpack.decode(raw, type=SegmentInfo)) for key, raw in cursor]

    def totals(self) -> tuple[int, int]:
        """(physical bytes allocated, live blocks) over all segments."""
        raw = self.meta(b"totals") or bytes(16)
        return int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")

    def _add_totals(self, allocated: int, live: int) -> None:
        if allocated or live:
            old_allocated, old_live = self.totals()
            self.put_meta(
                b"totals", (old_allocated + allocated).to_bytes(8, "little") + (old_live + live).to_bytes(8, "little")
            )

    def peek_segment(self) -> int:
        """The segment number to be handed out next."""
        return int.from_bytes(self.meta(b"next_segment") or b"\x01", "little")

    def next_segment(self) -> int:
        """Hand out a segment number that was never used before in this store's index."""
        number = self.peek_segment()
        self.put_meta(b"next_segment", (number + 1).to_bytes(4, "little"))
        return number

    def meta(self, name: bytes) -> bytes | None:
        """A store-wide value."""
        return self._get(name, None, self._meta)

    def meta_names(self, prefix: bytes) -> list[str]:
        """What follows `prefix` in the names of store-wide values."""
        with self._txn.cursor(db=self._meta) as cursor:
            cursor.set_range(prefix)
            names = map(bytes, cursor.iternext(keys=True, values=False))
            return [name[len(prefix) :].decode() for name in itertools.takewhile(lambda n: n.startswith(prefix), names)]

    def put_meta(self, name: bytes, value: bytes) -> None:
        """Set a store-wide value."""
        self._txn.put(name, value, db=self._meta)

    def drop_meta(self, name: bytes) -> None:
        """Remove a store-wide value."""
        self._txn.delete(name, db=self._meta)

    def count_extents(self) -> int:
        """Number of extents."""
        return int(self._txn.stat(self._extents)["entries"])

    def clear(self) -> None:
        """Empty every table (a rebuild starts so)."""
        for table in (self._extents, self._lives, self._segments, self._meta):
            self._txn.drop(table, delete=False)


class Index:
    """Opens and closes the LMDB environment and begins transactions."""

    def __init__(self, path: Path, *, map_bytes: int, readonly: bool = False, lock: bool = True) -> None:
        self.path = path
        self._pid = os.getpid()
        try:
            if not readonly:
                path.mkdir(parents=True, exist_ok=True)
            # sync=False: the index may lose its last second to power loss and is rebuilt from segments then; data never
            # waits for it. writemap=False: a stray write of the process cannot reach the map.
            self._env = lmdb.open(
                str(path), map_size=map_bytes, max_dbs=4, max_readers=1024, readonly=readonly, sync=False,
                writemap=False, readahead=False, create=not readonly, lock=lock,
            )  # fmt: skip
            self._env.reader_check()
            names = (b"extents", b"lives", b"segments", b"meta")
            self.tables = tuple(self._env.open_db(name, create=not readonly) for name in names)
        except (lmdb.Error, OSError) as error:
            raise StoreError(
                f"index {path}: {error}; check the directory's permissions and disk, or delete it to rebuild it"
            ) from error

    @contextmanager
    def read(self) -> Iterator[IndexTxn]:
        """A snapshot of the index."""
        self._same_process()
        with self._env.begin() as txn:
            yield IndexTxn(self, txn)

    @contextmanager
    def write(self) -> Iterator[IndexTxn]:
        """The only write transaction of all processes; commits unless an exception leaves the block."""
        self._same_process()
        endings: list[Callable[[bool], None]] = []
        committed = False
        try:
            with self._env.begin(write=True) as raw:
                txn = IndexTxn(self, raw)
                endings = txn.endings
                yield txn
            committed = True
        finally:
            for ending in endings:
                ending(committed)

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


def _agreeing(record: bytes, blob: bytes, block: int, count: int) -> int:
    """How many of an extent's first `count` blocks a prompt shares; the first and all before a shared one are."""
    low, high = min(1, count), count - 1
    while low < high:
        middle = (low + high + 1) // 2
        mine = EXTENT_HEAD + (middle - 1) * PREFIX_BYTES
        theirs = (block + middle - 1) * KEY_BYTES
        if record[mine : mine + PREFIX_BYTES] == blob[theirs : theirs + PREFIX_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
