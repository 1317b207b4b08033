"""The checkpoint of lives beside the segments: from it a rebuild knows last uses and what was cut."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from duokv.kvstore.backend import Backend
from duokv.kvstore.clock import Clock
from duokv.kvstore.events import Degraded, Event
from duokv.kvstore.extent import Life
from duokv.kvstore.index import Index, IndexTxn, WriteTxn

LIVES_FILE = "lives.ckpt"
_WRITTEN = b"checkpoint"
_WRITTEN_AT = struct.Struct("<dQ")
# wall seconds, the index's version with this record; 0 if the checkpoint could not be written


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All lives at a moment by place, the slots published by then in each segment, and the next segment's number."""

    next_segment: int = 0
    used: dict[int, int] = field(default_factory=dict)
    lives: dict[int, Life] = field(default_factory=dict)

    def seen(self, segment: int) -> int:
        """How many slots of a segment it speaks for: what lies in them and is not listed was dropped by then."""
        return self.used.get(segment, 0 if segment >= self.next_segment else 1 << 32)


_Checkpoint = tuple[int, dict[int, int], list[tuple[int, bytes]]]


def write_lives(backend: Backend, txn: IndexTxn) -> None:
    """Write all lives as a transaction sees them. OSError."""
    used = {number: info.used for number, info in txn.segments()}
    backend.write_file(LIVES_FILE, msgspec.msgpack.encode((txn.peek_segment(), used, list(txn.raw_lives()))))


def read_lives(backend: Backend) -> Checkpoint | None:
    """The last checkpoint, or None without a usable one."""
    raw = backend.read_file(LIVES_FILE)
    if raw is None:
        return None
    try:
        following, used, rows = msgspec.msgpack.decode(raw, type=_Checkpoint)
        return Checkpoint(following, used, {place: Life.decode(life) for place, life in rows})
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
            self._note(txn, txn.snapshot + 1)
        with self._index.read() as txn:
            written = self._write(txn)
        if not written:
            with self._index.write() as txn:
                self._note(txn, 0)

    def close(self, txn: WriteTxn) -> None:
        """Write the last one of this process, as `txn` sees it."""
        self._note(txn, txn.snapshot + 1 if self._write(txn) else 0)

    def _is_due(self, txn: IndexTxn) -> bool:
        raw = txn.meta(_WRITTEN)
        if raw is None:
            return True
        at_s, version = _WRITTEN_AT.unpack(raw)
        # A clock that went back must not put it off.
        return txn.snapshot != version and not 0 <= self._clock.wall() - at_s < self._interval_s

    def _note(self, txn: WriteTxn, version: int) -> None:
        txn.put_meta(_WRITTEN, _WRITTEN_AT.pack(self._clock.wall(), version))

    def _write(self, txn: IndexTxn) -> bool:
        try:
            write_lives(self._backend, txn)
        except OSError as error:
            self._emit(Degraded(LIVES_FILE, f"not written, after power loss last uses would be older: {error}"))
            return False
        return True
