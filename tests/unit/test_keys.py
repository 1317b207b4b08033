"""Block keys: everything that changes KV changes the key, and nothing else does."""

from __future__ import annotations

import array
import hashlib
import hmac
import itertools
import struct
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore.errors import UsageError
from duokv.kvstore.keys import BlockKeys, Media, Namespace, TokenIds, chain_keys, token_bytes

NS = Namespace("model", "weights-1017", "tokenizer", "fp4")
TOKENS = list(range(1000, 1000 + 3 * 128))
TEXT = st.text(st.characters(codec="utf-8"), max_size=3)
NAMESPACES = st.builds(
    Namespace,
    *[TEXT] * 7,
    adapter=st.none() | TEXT,
    salt=st.none() | st.binary(max_size=3) | st.binary(min_size=62, max_size=66),
)


def plain_root(ns: Namespace) -> bytes:
    """The root as its definition reads, without a line of the product's code."""
    message = struct.pack("<I", 0)
    texts = [ns.model, ns.weights, ns.tokenizer, ns.kv_format, ns.layout, ns.rope, ns.parallel, ns.adapter]
    for text in texts:
        message += b"\0" if text is None else b"\1" + struct.pack("<I", len(text.encode())) + text.encode()
    salt = b"\0" if ns.salt is None else b"\1" + ns.salt
    return hmac.new(hashlib.sha256(salt).digest(), message, "sha256").digest()


def plain_keys(ns: Namespace, tokens: Sequence[int], media: Sequence[Media] = ()) -> list[bytes]:
    keys = [plain_root(ns)]
    for first in range(0, len(tokens) - 127, 128):
        body = keys[-1] + b"".join(struct.pack("<I", token) for token in tokens[first : first + 128])
        for item in sorted(media, key=lambda item: item.offset):
            if item.offset < first + 128 and item.offset + item.length > first:
                body += struct.pack("<III", item.offset, item.length, len(item.digest)) + item.digest
        keys.append(hashlib.sha256(body).digest())
    return keys[1:]


def keys(ns: Namespace = NS, tokens: TokenIds = TOKENS, media: Sequence[Media] = ()) -> BlockKeys:
    return chain_keys(ns, tokens, media)


@given(NAMESPACES, st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_keys_are_the_defined_hashes(ns: Namespace, tokens: list[int]) -> None:
    assert ns.root() == plain_root(ns)
    assert list(keys(ns, tokens)) == plain_keys(ns, tokens)


@given(NAMESPACES, NAMESPACES)
def test_different_namespaces_have_different_roots(one: Namespace, other: Namespace) -> None:
    assert (one.root() == other.root()) == (one == other)


@pytest.mark.parametrize("field", [field.name for field in fields(Namespace)])
def test_every_field_of_the_namespace_counts(field: str) -> None:
    value = b"other" if field == "salt" else "other"
    changed = keys(replace(NS, **{field: value}))  # type: ignore[arg-type]
    assert not set(changed) & set(keys())


def test_salts_that_pad_or_hash_to_the_same_mac_key_differ() -> None:
    """HMAC itself pads short keys with zeros and hashes those over 64 bytes."""
    long = b"x" * 65
    salts = [None, b"", b"\0", b"\0\0", b"a", b"a\0", b"a" + bytes(63), long, hashlib.sha256(long).digest()]
    roots = [replace(NS, salt=salt).root() for salt in salts]
    assert len(set(roots)) == len(salts)


@given(st.integers(0, 383), st.integers(0, 2**32 - 1))
def test_a_token_changes_its_block_and_all_later_ones_only(at: int, token: int) -> None:
    changed = TOKENS.copy()
    changed[at] = token
    same = [one == other for one, other in zip(keys(), keys(tokens=changed), strict=True)]
    assert same == [block < at // 128 or token == TOKENS[at] for block in range(3)]


def test_position_in_the_chain_counts() -> None:
    repeated = keys(tokens=TOKENS[:128] * 3)
    assert len(set(repeated)) == 3


def test_only_whole_blocks_have_keys() -> None:
    for length in (0, 1, 127, 128, 129, 255, 256):
        assert len(keys(tokens=TOKENS[:length])) == length // 128


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        range(1000, 1384),
        np.array(TOKENS, np.int32),
        np.array(TOKENS, np.int64),
        np.array(TOKENS, ">u4"),
        np.repeat(np.array(TOKENS, np.int64), 2)[::2],
        memoryview(array.array("i", TOKENS)),
    ],
    ids=["tuple", "range", "int32", "int64", "big-endian", "strided", "memoryview"],
)
def test_the_kind_of_buffer_does_not_matter(tokens: TokenIds) -> None:
    assert keys(tokens=tokens) == keys()


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [2**32],
        [1.5],
        np.array([-1]),
        np.array([2**32], np.int64),
        np.array([1.0]),
        np.zeros((2, 128), np.int32),
    ],
    ids=["negative", "too large", "float", "negative array", "too large array", "float array", "two dimensions"],
)
def test_what_is_no_token_is_refused_in_one_line(tokens: TokenIds) -> None:
    with pytest.raises(UsageError, match=r"^tokens: [^\n]+$"):
        token_bytes(tokens)


# Media


def test_media_change_the_blocks_they_touch_and_all_later_ones() -> None:
    for offset, length, touched in ((0, 1, 0), (127, 1, 0), (128, 1, 1), (100, 100, 0), (256, 128, 2)):
        media = [Media(offset, length, b"image")]
        assert list(keys(media=media)) == plain_keys(NS, TOKENS, media)
        same = [one == other for one, other in zip(keys(), keys(media=media), strict=True)]
        assert same == [block < touched for block in range(3)]
    assert keys(media=[Media(384, 10, b"later")]) == keys()


def test_place_length_and_content_of_media_count() -> None:
    chains = [
        keys(media=media)
        for media in (
            [Media(0, 8, b"ab")],
            [Media(1, 8, b"ab")],
            [Media(0, 9, b"ab")],
            [Media(0, 8, b"a")],
            [Media(0, 8, b"ab"), Media(8, 8, b"ab")],
            [Media(0, 16, b"abab")],
        )
    ]
    assert len({chain[0] for chain in chains}) == len(chains)
    two = [Media(0, 8, b"a"), Media(200, 8, b"b")]
    assert keys(media=two) == keys(media=two[::-1])


@pytest.mark.parametrize(
    "media",
    [
        [Media(-1, 2, b"d")],
        [Media(0, 0, b"d")],
        [Media(0, 1, b"")],
        [Media(0, 5, b"d"), Media(4, 1, b"e")],
    ],
    ids=["negative", "empty", "no digest", "overlap"],
)
def test_media_that_cannot_be_meant_are_refused(media: list[Media]) -> None:
    with pytest.raises(UsageError, match=r"^media at token -?\d+: [^\n]+$"):
        keys(media=media)


# BlockKeys


def test_block_keys_are_a_sequence_over_one_blob() -> None:
    chain = keys()
    assert (len(chain), len(chain.blob)) == (3, 96)
    assert list(chain) == [chain[0], chain[1], chain[-1]]
    for start, stop in itertools.product(range(-4, 5), repeat=2):
        assert list(chain[start:stop]) == list(chain)[start:stop]
    assert list(chain[::-1]) == list(chain)[::-1]
    assert chain[1:] == BlockKeys(chain.blob[32:])
    assert hash(chain[:3]) == hash(chain)
    assert chain != list(chain)
    assert repr(chain) == "BlockKeys(3 keys)"
    with pytest.raises(IndexError):
        chain[3]
    with pytest.raises(UsageError, match="whole keys"):
        BlockKeys(b"x" * 33)
