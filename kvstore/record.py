"""One slot: payload, zero padding, and a 640-byte trailer that says what the payload is and whether it is whole.

The checksum covers everything before it, padding included, so one hash over one contiguous row decides.
Offsets are in FORMAT.md.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from duokv.kvstore.geometry import TRAILER_BYTES, CacheGeometry
from duokv.kvstore.keys import KEY_BYTES, TOKEN_BYTES
from duokv.kvstore.origin import Origin

MAGIC = b"DKVB"
FORMAT = 0
NAMESPACE_BYTES = 24
CHECKSUM_BYTES = 16

_HEAD = struct.Struct("<4sBBHIIII")
# magic, format, origin, class that stored it, payload bytes, stored at (s), chain position, geometry check
_WORD = np.dtype("<u4")
_KIND, _STORED = 1, 3
# The words of the head that the writer decides, so that a reader cannot expect them: format, origin, class; the time.
_ALL = 0xFFFFFFFF
_KNOWN = np.frombuffer(_HEAD.pack(b"\xff" * 4, 0xFF, 0, 0, _ALL, 0, _ALL, _ALL), _WORD)
# the bits that it does
_IDENTITY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{NAMESPACE_BYTES}s")
_KEY_AT = _HEAD.size
_TOKENS_AT = _KEY_AT + _IDENTITY.size
_CHAIN_AT = _KEY_AT - 8
assert _TOKENS_AT + TOKEN_BYTES + CHECKSUM_BYTES == TRAILER_BYTES

Row = npt.NDArray[np.uint8]
"""One slot in memory: `[slot_bytes]` uint8."""
_Slots = npt.NDArray[np.uint8]
"""`[n, slot_bytes]` uint8, one after another in memory."""
Trailers = npt.NDArray[np.uint8]
"""`[n, 624]` uint8: trailers to expect, without their checksum; origin, class and time are zero."""


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """What a stored block must claim to be. `namespace` is the chain's root key; `ids` are 512 bytes of u32 LE."""

    key: bytes
    parent: bytes
    namespace: bytes
    ids: bytes
    chain_pos: int

    def packed(self) -> bytes:
        """The bytes of the trailer that a reader compares."""
        return self.key + self.parent + self.namespace[:NAMESPACE_BYTES] + self.ids


@dataclass(frozen=True, slots=True)
class Chain:
    """What a prompt's blocks must claim to be. root: its namespace's key; blob: block keys; ids: tokens, u32 LE."""

    root: bytes
    blob: bytes
    ids: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Trailer:
    """A decoded trailer."""

    identity: BlockIdentity
    origin: Origin
    class_id: int
    stored_at_s: int


class BlockCodec:
    """Writes and verifies slots of one geometry. Stateless, thread-safe."""

    def __init__(self, geometry: CacheGeometry) -> None:
        self.slot_bytes = geometry.slot_bytes
        self.payload_bytes = geometry.payload_bytes
        self._trailer_at = geometry.slot_bytes - TRAILER_BYTES
        self._checksum_at = geometry.slot_bytes - CHECKSUM_BYTES
        self._check = int.from_bytes(geometry.digest[:4], "little")

    def expected_trailers(self, chain: Chain, first: int, count: int) -> Trailers:
        """What the trailers of `count` blocks of a prompt say, from block `first` on."""
        end = first + count
        out = np.empty((count, TRAILER_BYTES - CHECKSUM_BYTES), np.uint8)
        out[:, :_KEY_AT] = np.frombuffer(self._head(0), np.uint8)
        out[:, _CHAIN_AT : _CHAIN_AT + 4] = np.arange(first, end, dtype=_WORD).view(np.uint8).reshape(count, 4)
        parent = chain.blob[(first - 1) * KEY_BYTES : first * KEY_BYTES] if first else chain.root
        keys = np.frombuffer(parent + chain.blob[first * KEY_BYTES : end * KEY_BYTES], np.uint8).reshape(-1, KEY_BYTES)
        out[:, _KEY_AT : _KEY_AT + KEY_BYTES] = keys[1:]
        out[:, _KEY_AT + KEY_BYTES : _KEY_AT + 2 * KEY_BYTES] = keys[:-1]
        out[:, _KEY_AT + 2 * KEY_BYTES : _TOKENS_AT] = np.frombuffer(chain.root, np.uint8, NAMESPACE_BYTES)
        ids = np.frombuffer(chain.ids, np.uint8, count * TOKEN_BYTES, first * TOKEN_BYTES)
        out[:, _TOKENS_AT:] = ids.reshape(count, TOKEN_BYTES)
        return out

    def write_trailers(self, rows: _Slots, trailers: Trailers, origin: Origin, class_id: int, stored_at_s: int) -> None:
        """Write all of these slots but payload and checksum; `write_checksum` comes after it."""
        rows[:, self.payload_bytes : self._trailer_at] = 0
        rows[:, self._trailer_at : self._checksum_at] = trailers
        head = self._heads(rows)
        head[:, _KIND] = FORMAT | origin << 8 | class_id << 16
        head[:, _STORED] = stored_at_s & 0xFFFFFFFF

    def write_checksum(self, row: Row) -> None:
        """Write the checksum of a slot that has its trailer and its payload."""
        row[self._checksum_at :] = np.frombuffer(self._checksum(row), np.uint8)

    def seal(self, row: Row, identity: BlockIdentity, origin: Origin, class_id: int, stored_at_s: int) -> None:
        """Make a whole slot of `row`, whose first `payload_bytes` are the payload."""
        trailer = np.frombuffer(self._head(identity.chain_pos) + identity.packed(), np.uint8)
        self.write_trailers(row[None], trailer[None], origin, class_id, stored_at_s)
        self.write_checksum(row)

    def mismatches(self, rows: _Slots, expected: Trailers) -> list[str | None]:
        """Per row why it is not the whole block whose trailer is expected, or None where it is."""
        trailers = rows[:, self._trailer_at : self._checksum_at]
        known = (self._heads(rows) ^ expected[:, :_KEY_AT].view(_WORD)) & _KNOWN
        if known.any() or not np.array_equal(trailers[:, _KEY_AT:], expected[:, _KEY_AT:]):
            return [self._mismatch(row, wanted.tobytes()) for row, wanted in zip(rows, expected, strict=True)]
        # What follows is most of the work: one pass over the bytes, and little else.
        digest, end, size = xxhash.xxh3_128_digest, self._checksum_at, self.slot_bytes
        flat = rows.reshape(-1).data
        return [
            None if digest(flat[at : at + end]) == flat[at + end : at + size] else "checksum"
            for at in range(0, len(flat), size)
        ]

    def _mismatch(self, row: Row, expected: bytes) -> str | None:
        trailer = row[self._trailer_at :].tobytes()
        if trailer[: _HEAD.size] == bytes(_HEAD.size):
            return "no trailer"
        magic, version, _, _, payload_bytes, _, _, check = _HEAD.unpack_from(trailer)
        if magic != MAGIC or version != FORMAT:
            return "not a slot of this format"
        if payload_bytes != self.payload_bytes or check != self._check:
            return "another geometry"
        if trailer[_CHAIN_AT:-CHECKSUM_BYTES] != expected[_CHAIN_AT:]:
            return "another block"
        if trailer[-CHECKSUM_BYTES:] != self._checksum(row):
            return "checksum"
        return None

    def claims(self, trailer: bytes, key_prefix: bytes) -> bool:
        """Whether a trailer says it is a block whose key starts so; says nothing about the payload."""
        return trailer.startswith(MAGIC) and trailer.startswith(key_prefix, _KEY_AT)

    def decode(self, row: Row) -> Trailer | str:
        """Return the trailer of a slot whose checksum holds, or why there is none."""
        trailer = row[self._trailer_at :].tobytes()
        if trailer[: _HEAD.size] == bytes(_HEAD.size):
            return "no trailer"
        magic, version, origin, class_id, payload_bytes, stored_at_s, chain_pos, check = _HEAD.unpack_from(trailer)
        if magic != MAGIC or version != FORMAT:
            return "not a slot of this format"
        if payload_bytes != self.payload_bytes or check != self._check:
            return "another geometry"
        if trailer[-CHECKSUM_BYTES:] != self._checksum(row):
            return "checksum"
        key, parent, namespace = _IDENTITY.unpack_from(trailer, _KEY_AT)
        ids = trailer[_TOKENS_AT : _TOKENS_AT + TOKEN_BYTES]
        return Trailer(BlockIdentity(key, parent, namespace, ids, chain_pos), Origin(origin), class_id, stored_at_s)

    def _head(self, chain_pos: int) -> bytes:
        return _HEAD.pack(MAGIC, FORMAT, 0, 0, self.payload_bytes, 0, chain_pos, self._check)

    def _heads(self, rows: _Slots) -> npt.NDArray[np.uint32]:
        """The heads in `rows` as words, a view: they lie at multiples of four bytes."""
        return rows[:, self._trailer_at : self._trailer_at + _KEY_AT].view(_WORD)

    def _checksum(self, row: Row) -> bytes:
        return xxhash.xxh3_128_digest(row[: self._checksum_at].data)
