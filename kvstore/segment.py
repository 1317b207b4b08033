"""Segment files: slots one after another, and once sealed a footer that lists the extents (FORMAT.md).

The footer makes a segment self-describing: an index that is lost is rebuilt from footers, and from slot trailers where
a crash left a segment without one.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import xxhash

from duokv.kvstore.backend import Backend, FileInfo, ReadOp, Writer
from duokv.kvstore.buffers import aligned
from duokv.kvstore.extent import PREFIX_BYTES, Extent
from duokv.kvstore.geometry import PAGE_BYTES, CacheGeometry
from duokv.kvstore.index import SegmentInfo, segment_name
from duokv.kvstore.record import FORMAT

FOOTER_MAGIC = b"DKVSFOOT"
_TAIL = struct.Struct("<8sHHIII16s24s")
# magic, format, 0, geometry check, body bytes, used slots, checksum of the body, 0
_ENTRY = struct.Struct("<QI")
# stamp of the commit, record bytes
_ENTRY_WORST = _ENTRY.size + 20 + PREFIX_BYTES


def footer_reserve(slots: int) -> int:
    """Bytes to keep for the footer of a segment of `slots` slots, should every extent be one block long."""
    return _pages(slots * _ENTRY_WORST + _TAIL.size)


def encode_footer(entries: list[tuple[int, Extent]], used: int, geometry: CacheGeometry) -> bytes:
    """The footer's bytes, a multiple of 4 KiB: entries, padding, and the fixed tail in the last 64 bytes."""
    body = b"".join(_ENTRY.pack(stamp, len(raw)) + raw for stamp, raw in ((s, e.encode()) for s, e in entries))
    tail = _TAIL.pack(
        FOOTER_MAGIC, FORMAT, 0, _check(geometry), len(body), used, xxhash.xxh3_128_digest(body), bytes(24)
    )
    return body + bytes(_pages(len(body) + _TAIL.size) - len(body) - _TAIL.size) + tail


@dataclass(frozen=True, slots=True)
class Footer:
    """A sealed segment's table of contents: (commit stamp, extent) in order of slot, and the slots it has."""

    entries: tuple[tuple[int, Extent], ...]
    used: int


def read_footer(backend: Backend, file: FileInfo, geometry: CacheGeometry, *, deadline_s: float) -> Footer | str:
    """Read a segment's footer, or say why there is none to use."""
    if file.size < PAGE_BYTES or file.size % PAGE_BYTES:
        return "no footer"
    last = _read(backend, file.name, file.size - PAGE_BYTES, PAGE_BYTES, deadline_s)
    if last is None:
        return "unreadable"
    magic, version, _, check, body_bytes, used, checksum, _ = _TAIL.unpack(last[-_TAIL.size :])
    if magic != FOOTER_MAGIC:
        return "no footer"
    if version != FORMAT:
        return f"format {version}"
    if check != _check(geometry):
        return "another geometry"
    start = used * geometry.slot_bytes
    if start + _pages(body_bytes + _TAIL.size) != file.size:
        return "length differs from its footer"
    body = _read(backend, file.name, start, file.size - start, deadline_s)
    if body is None:
        return "unreadable"
    body = body[:body_bytes]
    if xxhash.xxh3_128_digest(body) != checksum:
        return "footer checksum"
    entries = []
    at = 0
    while at < body_bytes:
        stamp, length = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        entries.append((stamp, Extent.decode(body[at : at + length])))
        at += length
    return Footer(tuple(entries), used)


class SegmentWriter:
    """The active end of one segment. Not thread-safe: the block store's write lock covers it."""

    def __init__(self, backend: Backend, geometry: CacheGeometry, number: int, info: SegmentInfo) -> None:
        self.number = number
        self.name = info.name(number)
        self.info = info
        self.next_slot = 0
        self.unsynced = False
        self.doubtful = False
        """Whether a sync failed, after which another one that succeeds says nothing."""
        self.unpublished = 0
        """Bytes reserved that the index does not count yet."""
        self._geometry = geometry
        self._reserved = 0
        self._sealed: int | None = None
        self._entries: list[tuple[int, Extent]] = []
        self._settled = 0
        """Slots that are spoken for: published, or given back after all. A place is never used twice."""
        self._writer: Writer = backend.create(self.name, 0)

    @property
    def room(self) -> int:
        """Slots left."""
        return self.info.slots - self.next_slot

    @property
    def empty(self) -> bool:
        """Whether nothing was published."""
        return not self._entries

    @property
    def reserved_bytes(self) -> int:
        """Bytes of slots that have space on the device."""
        return self._reserved * self._geometry.slot_bytes

    def growth(self, slots: int) -> int:
        """Bytes that `slots` more slots need beyond what is reserved."""
        return max(0, min(self.next_slot + slots, self.info.slots) - self._reserved) * self._geometry.slot_bytes

    def reserve(self, slots: int, *, step: int) -> None:
        """Reserve space for `slots` more slots, in steps of `step`."""
        needed = self.next_slot + slots
        if needed <= self._reserved:
            return
        target = min(self.info.slots, max(needed, self._reserved + step))
        self._writer.reserve(target * self._geometry.slot_bytes)
        self.unpublished += (target - self._reserved) * self._geometry.slot_bytes
        self._reserved = target

    def take_unpublished(self) -> int:
        """Bytes to add to the index's count now."""
        grown, self.unpublished = self.unpublished, 0
        return grown

    def forget_unpublished(self) -> None:
        """Take slots back that were taken and then neither published nor given back; only before sealing."""
        self.next_slot = self._settled

    def take(self, slots: int) -> int:
        """Give out the next `slots` slots; returns the first."""
        first = self.next_slot
        self.next_slot += slots
        return first

    def write(self, slot: int, rows: memoryview) -> None:
        """Write whole slots from `slot` on; `rows` is a multiple of slot_bytes."""
        self.unsynced = True
        self._writer.write(slot * self._geometry.slot_bytes, [rows])

    def publish(self, extent: Extent, stamp: int) -> None:
        """Note an extent for the footer."""
        self._entries.append((stamp, extent))
        self.settle(extent.first_slot + extent.blocks)

    def settle(self, upto: int) -> None:
        """Note that the slots before `upto` are not to be taken again."""
        self._settled = max(self._settled, upto)

    def sync(self) -> None:
        """Make the slots written so far durable. OSError also after an earlier sync failed: this one proves nothing."""
        if self.doubtful:
            raise OSError(errno.EIO, f"{self.name}: an earlier sync failed")
        if self.unsynced:
            self._sync()

    def _sync(self) -> None:
        try:
            self._writer.sync()
        except OSError:
            self.doubtful = self.unsynced
            raise
        self.unsynced = False

    def seal(self, *, durable: bool) -> int:
        """Write the footer and close the file, if that was not done yet; returns the file's length."""
        if self._sealed is None:
            if durable:
                # A footer that is there says that the slots before it are.
                self.sync()
            sync = self._sync if durable else None
            self._sealed = seal_file(self._writer, self._entries, self.next_slot, self._geometry, sync=sync)
            self.unsynced = False
        return self._sealed

    def abort(self) -> None:
        """Remove the file."""
        self._writer.abort()


class Piece(msgspec.Struct, frozen=True):
    """Slots for a run of blocks: `count` of a segment from `slot` on, for blocks from `block` on."""

    writer: SegmentWriter
    slot: int
    block: int
    count: int


def seal_file(
    writer: Writer, entries: list[tuple[int, Extent]], used: int, geometry: CacheGeometry, *,
    sync: Callable[[], None] | None,
) -> int:  # fmt: skip
    """Finish a segment file: footer after its last slot, the preallocated rest cut off. Returns its length.

    sync: what makes the file durable, None if it need not be.
    """
    footer = encode_footer(entries, used, geometry)
    memory = aligned(len(footer))
    memory[:] = footer
    at = used * geometry.slot_bytes
    writer.write(at, [memory])
    if sync is not None:
        sync()
    writer.seal(at + len(footer))
    return at + len(footer)


def parse_name(name: str) -> tuple[str, int] | None:
    """(writer, number) of a segment file's name, or None when it is not one."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] != "seg" or not parts[2].endswith(".seg"):
        return None
    try:
        number = int(parts[2][:-4], 16)
    except ValueError:
        return None
    return (parts[1], number) if name == segment_name(parts[1], number) else None


def _read(backend: Backend, name: str, offset: int, length: int, deadline_s: float) -> bytes | None:
    memory = aligned(length)
    done = backend.read_many([ReadOp(name, offset, (memory,))], deadline_s=deadline_s)
    return bytes(memory) if done == [length] else None


def _check(geometry: CacheGeometry) -> int:
    return int.from_bytes(geometry.digest[:4], "little")


def _pages(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES
