"""Block keys: a SHA-256 chain over everything that changes KV, so that equal keys mean equal KV.

    root   = HMAC-SHA-256(tenant salt, canonical namespace)
    key[i] = SHA-256(key[i-1] or root | 128 token ids, u32 LE | media in the block's range)

Key derivation is a promise with golden vectors; `KEY_SCHEMA` is part of the canonical namespace.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from duokv.kvstore.errors import UsageError

BLOCK_TOKENS = 128
"""Tokens of one block: the grain at which state is stored (DeepInfer's KVSTORE_GRAIN), a multiple of every compression
ratio."""
KEY_BYTES = 32
KEY_SCHEMA = 0
TOKEN_BYTES = 4 * BLOCK_TOKENS

TokenIds: TypeAlias = Sequence[int] | memoryview | npt.NDArray[np.integer]
"""int32/int64 buffer (numpy, torch on the CPU, array, memoryview) or a sequence of int; each id in [0, 2**32)."""


@dataclass(frozen=True)
class Namespace:
    """Everything outside the prompt that changes KV. Two different namespaces never share a block.

    parallel is the layout and this store's rank in it, for example "tp=2/rank=0". `salt` separates tenants: without
    it nobody can probe for another's prompts, since keys cannot be derived.
    """

    model: str
    weights: str
    tokenizer: str
    kv_format: str
    layout: str = ""
    rope: str = ""
    parallel: str = "tp=1/rank=0"
    adapter: str | None = None
    salt: bytes | None = None

    def canonical(self) -> bytes:
        """Length-prefixed encoding of every field but the salt; absent and empty differ."""
        parts = [struct.pack("<I", KEY_SCHEMA)]
        for field in fields(self):
            if field.name == "salt":
                continue
            value = getattr(self, field.name)
            if value is None:
                parts.append(b"\x00")
            else:
                raw = value.encode()
                parts.append(b"\x01" + struct.pack("<I", len(raw)) + raw)
        return b"".join(parts)

    def root(self) -> bytes:
        """The 32-byte parent of every first block."""
        return self._root

    @cached_property
    def _root(self) -> bytes:
        # Hashed first: HMAC pads a short key with zeros, and salts that end in zeros must differ too.
        salt = hashlib.sha256(b"\x00" if self.salt is None else b"\x01" + self.salt).digest()
        return hmac.digest(salt, self.canonical(), "sha256")


@dataclass(frozen=True, slots=True)
class Media:
    """An image or other non-text input whose `length` placeholder tokens start at token `offset`."""

    offset: int
    length: int
    digest: bytes


class BlockKeys(Sequence[bytes]):
    """The 32-byte keys of a prompt's leading blocks in order, kept as one bytes object (`blob`)."""

    __slots__ = ("blob",)

    def __init__(self, blob: bytes = b"") -> None:
        if len(blob) % KEY_BYTES:
            raise UsageError(f"block keys: {len(blob)} bytes are not a multiple of {KEY_BYTES}; concatenate whole keys")
        self.blob = blob

    def __len__(self) -> int:
        return len(self.blob) // KEY_BYTES

    @overload
    def __getitem__(self, index: SupportsIndex) -> bytes: ...
    @overload
    def __getitem__(
        self, index: slice[SupportsIndex | None, SupportsIndex | None, SupportsIndex | None]
    ) -> BlockKeys: ...
    def __getitem__(self, index: SupportsIndex | slice) -> bytes | BlockKeys:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return BlockKeys(b"".join(self[i] for i in range(start, stop, step)))
            return BlockKeys(self.blob[start * KEY_BYTES : stop * KEY_BYTES])
        position = range(len(self))[index]
        return self.blob[position * KEY_BYTES : (position + 1) * KEY_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        blob = self.blob
        return (blob[i : i + KEY_BYTES] for i in range(0, len(blob), KEY_BYTES))

    def __eq__(self, other: object) -> bool:
        return self.blob == other.blob if isinstance(other, BlockKeys) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.blob)

    def __repr__(self) -> str:
        return f"BlockKeys({len(self)} keys)"


def token_bytes(tokens: TokenIds) -> memoryview:
    """Return a copy of token ids as u32 LE bytes; UsageError for floats, ids out of [0, 2**32) or other dimensions."""
    if isinstance(tokens, (list, tuple)):
        try:
            # Reads a list of Python ints twice as fast as struct.pack does, and four times as fast as numpy.
            packed = array("I", tokens)
        except (OverflowError, TypeError) as error:
            raise UsageError(f"tokens: {error}; give integer ids in [0, 2**32)") from None
        if sys.byteorder == "big":
            packed.byteswap()
        return memoryview(packed).cast("B").toreadonly()
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UsageError(f"tokens: {ids.dtype} of shape {ids.shape}; give a flat buffer or sequence of integer ids")
    # One allocation of the prompt's size: with a second one at the same time, allocators take fresh pages each time.
    copied = ids.astype("<u4")
    if ids.itemsize > 4:
        outside = ids.size and (ids.min() < 0 or ids.max() >= 1 << 32)
    else:
        # Of the copy, which is in the processor's cache.
        outside = ids.size and ids.dtype.kind == "i" and copied.view("<i4").min() < 0
    if outside:
        raise UsageError("tokens: an id is outside [0, 2**32); give token ids, not masks or paddings")
    return copied.data.cast("B").toreadonly()


def chain_blob(root: bytes, ids: bytes | memoryview, blocks: int, media: Sequence[Media] = ()) -> bytes:
    """Return the concatenated keys of the first `blocks` blocks of `ids`, u32 LE bytes that hold them all."""
    bodies: Iterator[tuple[bytes]] = struct.iter_unpack(f"{TOKEN_BYTES}s", ids[: blocks * TOKEN_BYTES])
    if media:
        bodies = ((body + _media_in(block, media),) for block, (body,) in enumerate(bodies))
    # A copy of a hash begun is cheaper than beginning one, and two updates than joining their bytes first.
    begin = hashlib.sha256().copy
    key = root
    keys = []
    for (body,) in bodies:
        state = begin()
        state.update(key)
        state.update(body)
        key = state.digest()
        keys.append(key)
    return b"".join(keys)


def chain_keys(ns: Namespace, tokens: TokenIds, media: Sequence[Media] = ()) -> BlockKeys:
    """Return the keys of all whole blocks of `tokens`. Pure; any process and platform derives the same."""
    ids = token_bytes(tokens)
    return BlockKeys(chain_blob(ns.root(), ids, len(ids) // TOKEN_BYTES, check_media(media)))


def check_media(media: Sequence[Media]) -> Sequence[Media]:
    """Return media ordered by offset; UsageError for negative places, empty digests or overlaps."""
    ordered = sorted(media, key=lambda item: item.offset)
    end = 0
    for item in ordered:
        if item.offset < end or item.length <= 0 or not item.digest:
            raise UsageError(f"media at token {item.offset}: overlapping, empty or without digest; one item per range")
        end = item.offset + item.length
    return ordered


def _media_in(block: int, media: Sequence[Media]) -> bytes:
    first, last = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
    return b"".join(
        struct.pack("<III", item.offset, item.length, len(item.digest)) + item.digest
        for item in media
        if item.offset < last and item.offset + item.length > first
    )
