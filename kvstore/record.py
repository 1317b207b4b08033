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
_IDENTITY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}s{NAMESPACE_BYTES}s")
_KEY_AT = _HEAD.size
_TOKENS_AT = _KEY_AT + _IDENTITY.size
assert _TOKENS_AT + TOKEN_BYTES + CHECKSUM_BYTES == TRAILER_BYTES

Row = npt.NDArray[np.uint8]
"""One slot in memory: `[slot_bytes]` uint8."""


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
        self._check = int.from_bytes(geometry.digest[:4], "little")

    def seal(self, row: Row, identity: BlockIdentity, origin: Origin, class_id: int, stored_at_s: int) -> None:
        """Zero the padding of `row`, whose first `payload_bytes` are the payload, and write its trailer."""
        row[self.payload_bytes : self._trailer_at] = 0
        head = _HEAD.pack(
            MAGIC,
            FORMAT,
            origin,
            class_id,
            self.payload_bytes,
            stored_at_s & 0xFFFFFFFF,
            identity.chain_pos,
            self._check,
        )
        body = head + identity.packed()
        row[self._trailer_at : self.slot_bytes - CHECKSUM_BYTES] = np.frombuffer(body, np.uint8)
        row[self.slot_bytes - CHECKSUM_BYTES :] = np.frombuffer(self._checksum(row), np.uint8)

    def mismatch(self, row: Row, identity: BlockIdentity) -> str | None:
        """Return why `row` is not the whole block `identity`, or None when it is."""
        trailer = row[self._trailer_at :].tobytes()
        if trailer[: _HEAD.size] == bytes(_HEAD.size):
            return "no trailer"
        magic, version, _, _, payload_bytes, _, chain_pos, check = _HEAD.unpack_from(trailer)
        if magic != MAGIC or version != FORMAT:
            return "not a slot of this format"
        if payload_bytes != self.payload_bytes or check != self._check:
            return "another geometry"
        if trailer[_KEY_AT:-CHECKSUM_BYTES] != identity.packed() or chain_pos != identity.chain_pos:
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

    def _checksum(self, row: Row) -> bytes:
        return xxhash.xxh3_128_digest(row[: self.slot_bytes - CHECKSUM_BYTES].data)
