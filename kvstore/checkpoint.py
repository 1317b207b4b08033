"""The checkpoint of lives beside the segments: from it a rebuild knows last uses and what was cut."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from duokv.kvstore.backend import Backend
from duokv.kvstore.clock import Clock
from duokv.kvstore.events import Degraded, Event
from duokv.kvstore.extent import EXTENT_HEAD, PLACE, PREFIX_BYTES, Extent, Life
from duokv.kvstore.index import Index, IndexTxn, WriteTxn

LIVES_FILE = "lives.ckpt"
_WRITTEN = b"checkpoint"
_WRITTEN_AT = struct.Struct("<dQ")
# wall seconds when one was begun, the index's version that it speaks for; 0 until it is written


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All lives at a moment by place, rising; of each segment the slots published by then, and whether it was sealed.

    next_segment: the number of the segment after the last one.
    """

    next_segment: int = 0
    used: dict[int, int] = field(default_factory=dict)
    lives: dict[int, Life] = field(default_factory=dict)
    sealed: frozenset[int] = frozenset()
    _places: tuple[int, ...] = ()
    _firsts: dict[bytes, Life] = field(default_factory=dict)
    _lasts: dict[bytes, Life] = field(default_factory=dict)

    @classmethod
    def decode(cls, raw: bytes) -> Checkpoint:
        """Read one; ValueError, struct.error or MsgspecError if it is none."""
        following, used, rows, sealed = msgspec.msgpack.decode(raw, type=_Checkpoint)
        lives = {place: Life.decode(life) for place, life, _ in sorted(rows)}
        firsts = {life.first: life for life in lives.values()}
        lasts = {last: lives[place] for place, _, last in rows}
        return cls(following, used, lives, frozenset(sealed), tuple(lives), firsts, lasts)

    def seen(self, segment: int) -> int:
        """How many slots of a segment it speaks for: what lies in them and is not listed was dropped by then."""
        return self.used.get(segment, 0 if segment >= self.next_segment else 1 << 32)

    def overlapping(self, place: int, end: int) -> Iterator[tuple[int, Life]]:
        """(place, life) of the extents that have a slot in [place, end)."""
        at = max(0, bisect_right(self._places, place) - 1)
        while at < len(self._places) and (listed := self._places[at]) < end:
            life = self.lives[listed]
            if listed + life.n > place:
                yield listed, life
            at += 1

    def sharing(self, part: Extent) -> Iterator[tuple[Life, int]]:
        """(life, the block of `part` where it begins, maybe negative) of extents that had blocks of `part` elsewhere.

        Keys are chained: who has an extent's last block has all of it, and who has its first one at least that.
        """
        # Without a checkpoint a rebuild would look for nothing at every block.
        for block in range(part.blocks if self.lives else 0):
            prefix = part.prefixes[block * PREFIX_BYTES : (block + 1) * PREFIX_BYTES]
            whole, begun = self._lasts.get(prefix), self._firsts.get(prefix)
            if whole is not None and whole.chain_pos + whole.n == part.chain_pos + block + 1:
                yield whole, block + 1 - whole.n
            if begun is not None and begun.chain_pos == part.chain_pos + block:
                one = begun.rest(0, prefix)
                one.cut(1)
                yield one, block


_Checkpoint = tuple[int, dict[int, int], list[tuple[int, bytes, bytes]], list[int]]


def write_lives(backend: Backend, txn: IndexTxn) -> None:
    """Write all lives as a transaction sees them. OSError."""
    segments = txn.segments()
    used = {number: info.used for number, info in segments}
    sealed = [number for number, info in segments if info.sealed]
    rows = [(place, raw, _last_prefix(txn, place, raw)) for place, raw in txn.raw_lives()]
    whole: _Checkpoint = (txn.peek_segment(), used, rows, sealed)
    backend.write_file(LIVES_FILE, msgspec.msgpack.encode(whole))


def _last_prefix(txn: IndexTxn, place: int, life: bytes) -> bytes:
    """Key prefix of the last block of an extent with this encoded life; empty where no entry leads to it."""
    n, first = Life.head(life)
    record = txn.record(first) or b""
    at = EXTENT_HEAD + (n - 1) * PREFIX_BYTES
    return record[at : at + PREFIX_BYTES] if record.startswith(place.to_bytes(PLACE.size, "big")) else b""


def read_lives(backend: Backend) -> Checkpoint | None:
    """The last checkpoint, or None without a usable one."""
    raw = backend.read_file(LIVES_FILE)
    if raw is None:
        return None
    try:
        return Checkpoint.decode(raw)
    except (msgspec.MsgspecError, struct.error, ValueError):
        return None


class Checkpointer:
    """Writes the checkpoint now and then: uses since the last one are what power loss costs. Not thread-safe.

    interval_s: seconds between two, whichever process writes them; 0 leaves it to close.
    """

    def __init__(
        self, *, index: Index, backend: Backend, clock: Clock, emit: Callable[[Event], None], interval_s: float
    ) -> None:
        self._index = index
        self._backend = backend
        self._clock = clock
        self._emit = emit
        self._interval_s = interval_s

    def maintain(self) -> None:
        """Write one if it is time and the index has changed since the last."""
        if self._interval_s <= 0:
            return
        with self._index.read() as txn:
            if not self._is_due(txn):
                return
        with self._index.write() as txn:
            # Another process may have taken it on meanwhile.
            if not self._is_due(txn):
                return
            begun = self._note(txn, self._clock.wall(), 0)
        with self._index.read() as txn:
            written, version = self._write(txn), txn.snapshot
        if written:
            with self._index.write() as txn:
                noted = txn.meta(_WRITTEN) or begun
                if noted == begun and txn.snapshot == version:
                    self._note(txn, _WRITTEN_AT.unpack(begun)[0], version + 1)
                elif noted != begun:
                    # This one, which is older, may have come over another's.
                    self._note(txn, _WRITTEN_AT.unpack(noted)[0], 0)

    def close(self, txn: WriteTxn) -> None:
        """Write the last one of this process, as `txn` sees it."""
        self._note(txn, self._clock.wall(), txn.snapshot + 1 if self._write(txn) else 0)

    def _is_due(self, txn: IndexTxn) -> bool:
        raw = txn.meta(_WRITTEN)
        if raw is None:
            return True
        at_s, version = _WRITTEN_AT.unpack(raw)
        # A clock that went back must not put it off.
        return txn.snapshot != version and not 0 <= self._clock.wall() - at_s < self._interval_s

    def _note(self, txn: WriteTxn, at_s: float, version: int) -> bytes:
        noted = _WRITTEN_AT.pack(at_s, version)
        txn.put_meta(_WRITTEN, noted)
        return noted

    def _write(self, txn: IndexTxn) -> bool:
        try:
            write_lives(self._backend, txn)
        except OSError as error:
            self._emit(Degraded(LIVES_FILE, f"not written, after power loss last uses would be older: {error}"))
            return False
        return True
