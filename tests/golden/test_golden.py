"""Bytes and keys of format 0 as they were first written. Running this file writes the fixtures anew.

A difference means that stores and keys made before can no longer be read: that takes a new format or schema number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from duokv.kvstore.extent import PREFIX_BYTES, Extent, Life, stamp_of
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import KEY_BYTES, Media, Namespace, chain_keys, token_bytes
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import PIN_CLASS
from duokv.kvstore.record import BlockCodec, BlockIdentity
from duokv.kvstore.segment import encode_footer

HERE = Path(__file__).parent
SMALL = CacheGeometry.opaque("golden", payload_bytes=3000, swa_bytes=4096)
NAMESPACES: Mapping[str, Namespace] = {
    "plain": Namespace("deepseek-v4.1-flash", "1017", "v4", "fp4"),
    "all fields": Namespace("m", "w", "t", "fp8", "block-wise", "yarn:40", "tp=2/rank=1", "lora:X", b"tenant"),
    "empty adapter": Namespace("m", "w", "t", "fp8", adapter=""),
    "empty salt": Namespace("m", "w", "t", "fp8", salt=b""),
    "salt of zeros": Namespace("m", "w", "t", "fp8", salt=b"a\0\0"),
    "long salt": Namespace("m", "w", "t", "fp8", salt=bytes(range(100))),
    "not ASCII": Namespace("modèle", "重み", "t", "fp8", adapter="ключ"),
}
MEDIA: Mapping[str, tuple[Media, ...]] = {
    "text": (),
    "one image": (Media(5, 64, b"sha256-of-an-image"),),
    "across blocks": (Media(300, 1, b"c"), Media(100, 60, b"\xff" * 32)),
}
STAMP = stamp_of(1_790_000_000.5) + 3


def tokens(n: int = 3 * 128 + 1) -> list[int]:
    """Ids that use all four bytes."""
    return [(i * 2_654_435_761 + 12_345) % 2**32 for i in range(n)]


def key_vectors() -> bytes:
    vectors = {
        f"{name} / {kind}": [key.hex() for key in chain_keys(ns, tokens(), media)]
        for name, ns in NAMESPACES.items()
        for kind, media in MEDIA.items()
    }
    return json.dumps(vectors, indent=1, ensure_ascii=False).encode() + b"\n"


def slot() -> bytes:
    """The second block of the prompt as an approximate block of class 2."""
    root = NAMESPACES["plain"].root()
    chain = chain_keys(NAMESPACES["plain"], tokens())
    identity = BlockIdentity(chain[1], chain[0], root, bytes(token_bytes(tokens()[128:256])), 1)
    row = np.full(SMALL.slot_bytes, 0xAA, np.uint8)
    row[: SMALL.payload_bytes] = np.arange(SMALL.payload_bytes) % 251
    BlockCodec(SMALL).seal(row, identity, Origin.APPROX, 2, 1_790_000_000)
    return row.tobytes()


def extent(first: int = 1, blocks: int = 2) -> Extent:
    blob = chain_keys(NAMESPACES["plain"], tokens()).blob
    prefixes = b"".join(blob[i * KEY_BYTES :][:PREFIX_BYTES] for i in range(first, first + blocks))
    return Extent(0x01020304, 5 + first, first, 2, Origin.APPROX, prefixes)


def life() -> Life:
    """Three blocks of two classes, of which a pin holds one."""
    life = Life.born(3, 1, extent().prefixes[:PREFIX_BYTES], 2, STAMP)
    life.use(2, 1, STAMP + 9)
    life.use(1, 2, STAMP + 1)
    life.use(PIN_CLASS, 1, stamp_of(1_790_000_060))
    return life


def footer() -> bytes:
    return encode_footer([(STAMP, extent(0, 1)), (STAMP + 1, extent())], 9, SMALL)


def geometries() -> bytes:
    names = ("deepseek-v4.1-flash", "deepseek-v4.1-flash-hopper", "deepseek-v4-flash", "deepseek-v4-pro", "tiny")
    digests = {name: CacheGeometry.preset(name).digest.hex() for name in names}
    return json.dumps(digests | {"opaque": SMALL.digest.hex()}, indent=1).encode() + b"\n"


FIXTURES: Mapping[str, Callable[[], bytes]] = {
    "keys.json": key_vectors,
    "geometries.json": geometries,
    "slot.bin": slot,
    "footer.bin": footer,
    "extent.bin": lambda: extent().encode(),
    "life.bin": lambda: life().encode(),
}


@pytest.mark.parametrize("name", FIXTURES)
def test_bytes_are_as_they_were(name: str) -> None:
    assert FIXTURES[name]() == (HERE / name).read_bytes()


def test_vectors_do_not_repeat() -> None:
    """A field that is left out of the hash would show as two equal chains."""
    vectors: dict[str, list[str]] = json.loads((HERE / "keys.json").read_bytes())
    every = [key for chain in vectors.values() for key in chain]
    assert len(every) == len(NAMESPACES) * len(MEDIA) * 3
    # Each kind of media touches the first block, so no two chains share one.
    assert len(set(every)) == len(every)


def test_old_bytes_are_read() -> None:
    assert Extent.decode((HERE / "extent.bin").read_bytes()).place == extent().place
    assert Life.decode((HERE / "life.bin").read_bytes()).steps == life().steps


if __name__ == "__main__":
    for name, make in FIXTURES.items():
        (HERE / name).write_bytes(make())
