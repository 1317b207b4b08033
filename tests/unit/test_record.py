"""A slot is accepted only if it is, whole, the very block that was asked for."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.origin import Origin
from duokv.kvstore.record import BlockCodec, BlockIdentity, Chain, Row, Trailer

GEOMETRY = CacheGeometry.opaque("t", payload_bytes=3000)
CODEC = BlockCodec(GEOMETRY)
BLOCK = BlockIdentity(b"k" * 32, b"p" * 32, b"n" * 32, bytes(range(256)) * 2, 7)
PAYLOAD = np.arange(3000, dtype=np.uint16).astype(np.uint8)
AT = 4096 - 640


def sealed(identity: BlockIdentity = BLOCK, origin: Origin = Origin.APPROX, geometry: CacheGeometry = GEOMETRY) -> Row:
    row = np.full(geometry.slot_bytes, 0xEE, np.uint8)
    row[: len(PAYLOAD)] = PAYLOAD
    BlockCodec(geometry).seal(row, identity, origin, 3, 1_790_000_000)
    return row


def mismatch(row: Row, asked: BlockIdentity) -> str | None:
    """Why `row`, between others, is not that block. Its chain has the right keys and ids at its position."""
    at = asked.chain_pos
    blob = b"o" * 32 * (at - 1) + asked.parent + asked.key + b"o" * 32
    ids = bytes(512) * at + asked.ids + bytes(512)
    chain = Chain(asked.namespace, blob, ids)
    return CODEC.mismatches(row[None], CODEC.expected_trailers(chain, at, 1))[0]


def test_the_trailer_lies_where_the_format_says() -> None:
    raw = sealed().tobytes()
    assert raw[:3000] == PAYLOAD.tobytes()
    assert raw[3000:AT] == bytes(AT - 3000)
    head = struct.unpack_from("<4sBBHIII4s", raw, AT)
    assert head == (b"DKVB", 0, 1, 3, 3000, 1_790_000_000, 7, GEOMETRY.digest[:4])
    fields = [raw[AT + start : AT + end] for start, end in ((24, 56), (56, 88), (88, 112), (112, 624))]
    assert fields == [BLOCK.key, BLOCK.parent, BLOCK.namespace[:24], BLOCK.ids]
    assert raw[-16:] == xxhash.xxh3_128_digest(raw[:-16])


def test_what_was_sealed_verifies_and_tells_what_it_is() -> None:
    row = sealed()
    assert mismatch(row, BLOCK) is None
    told = CODEC.decode(row)
    assert told == Trailer(replace(BLOCK, namespace=BLOCK.namespace[:24]), Origin.APPROX, 3, 1_790_000_000)
    assert CODEC.claims(row[AT:].tobytes(), BLOCK.key[:16])
    assert not CODEC.claims(row[AT:].tobytes(), b"x" * 16)
    assert not CODEC.claims(bytes(640), BLOCK.key[:16])


@given(st.integers(0, 8 * 4096 - 1))
def test_no_flipped_bit_goes_unseen(bit: int) -> None:
    row = sealed()
    row[bit // 8] ^= 1 << bit % 8
    assert mismatch(row, BLOCK) is not None
    assert isinstance(CODEC.decode(row), str)


@pytest.mark.parametrize(
    "asked",
    [
        replace(BLOCK, key=b"x" * 32),
        replace(BLOCK, key=BLOCK.key[:16] + b"x" * 16),
        replace(BLOCK, parent=b"x" * 32),
        replace(BLOCK, namespace=b"x" * 32),
        replace(BLOCK, ids=bytes(512)),
        replace(BLOCK, chain_pos=8),
    ],
    ids=["key", "key with the same prefix", "parent", "namespace", "tokens", "position"],
)
def test_a_whole_slot_of_another_block_is_refused(asked: BlockIdentity) -> None:
    assert mismatch(sealed(), asked) == "another block"
    assert mismatch(sealed(asked), asked) is None


@pytest.mark.parametrize(
    "geometry",
    [CacheGeometry.opaque("other", payload_bytes=3000), CacheGeometry.opaque("t", payload_bytes=3001)],
    ids=["same size, other name", "same slot, other payload"],
)
def test_a_slot_of_another_geometry_is_refused(geometry: CacheGeometry) -> None:
    assert mismatch(sealed(geometry=geometry), BLOCK) == "another geometry"
    assert CODEC.decode(sealed(geometry=geometry)) == "another geometry"


def test_the_reason_tells_a_hole_from_damage() -> None:
    for row, reason in (
        (np.zeros(4096, np.uint8), "no trailer"),
        (np.full(4096, 0x55, np.uint8), "not a slot of this format"),
    ):
        assert mismatch(row, BLOCK) == reason
        assert CODEC.decode(row) == reason
    newer = sealed()
    newer[AT + 4] = 1
    assert mismatch(newer, BLOCK) == "not a slot of this format"
    torn = sealed()
    torn[:512] = 0
    assert mismatch(torn, BLOCK) == "checksum"


def test_the_old_content_of_a_row_leaves_no_trace() -> None:
    one, other = sealed(), np.zeros(4096, np.uint8)
    other[:3000] = PAYLOAD
    CODEC.seal(other, BLOCK, Origin.APPROX, 3, 1_790_000_000)
    assert (one == other).all()


IDS = np.arange(5 * 128, dtype="<u4").tobytes()
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(5)]
CHAIN = Chain(b"r" * 32, b"".join(KEYS), IDS)


def identity(block: int) -> BlockIdentity:
    parent = KEYS[block - 1] if block else CHAIN.root
    return BlockIdentity(KEYS[block], parent, CHAIN.root, IDS[512 * block : 512 * (block + 1)], block)


def together(first: int, count: int) -> npt.NDArray[np.uint8]:
    """Blocks of the chain, sealed as a commit does it."""
    rows = np.full((count, 4096), 0xEE, np.uint8)
    CODEC.write_trailers(rows, CODEC.expected_trailers(CHAIN, first, count), Origin.APPROX, 0xABCD, (1 << 32) + 5)
    for row in rows:
        row[:3000] = PAYLOAD
        CODEC.write_checksum(row)
    return rows


@pytest.mark.parametrize(("first", "count"), [(0, 5), (0, 1), (2, 3), (4, 1)])
def test_slots_that_are_sealed_together_are_as_those_sealed_one_by_one(first: int, count: int) -> None:
    rows = together(first, count)
    for i, row in enumerate(rows):
        one = np.full(4096, 0x77, np.uint8)
        one[:3000] = PAYLOAD
        CODEC.seal(one, identity(first + i), Origin.APPROX, 0xABCD, 5)
        assert (row == one).all()
    assert CODEC.mismatches(rows, CODEC.expected_trailers(CHAIN, first, count)) == [None] * count


@given(st.integers(0, 4), st.integers(0, 8 * 4096 - 1))
def test_no_flipped_bit_of_one_among_many_goes_unseen(row: int, bit: int) -> None:
    rows = together(0, 5)
    rows[row, bit // 8] ^= 1 << bit % 8
    found = CODEC.mismatches(rows, CODEC.expected_trailers(CHAIN, 0, 5))
    assert [i for i, reason in enumerate(found) if reason is not None] == [row]


def test_blocks_in_each_others_slots_are_refused_and_only_those() -> None:
    rows = together(0, 5)
    rows[[1, 3]] = rows[[3, 1]]
    rows[4] = 0
    frames = CODEC.expected_trailers(CHAIN, 0, 5)
    assert CODEC.mismatches(rows, frames) == [None, "another block", None, "another block", "no trailer"]
