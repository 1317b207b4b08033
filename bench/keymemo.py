"""Token ids and keys of a trace's blocks, each block's derived once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from duokv.bench.workload import Run
from duokv.kvstore.errors import UsageError
from duokv.kvstore.keys import BLOCK_TOKENS, KEY_BYTES, TOKEN_BYTES, chain_blob

# Token ids are below 2**17, the power of two next to the vocabularies of the models this store serves.
TOKEN_BITS = 17
# Tokens of fewer blocks at a time cost more a block for numpy's calls, of more for the cache they fall out of.
_PAGE_IDS = 128
_PAGE_BYTES = _PAGE_IDS * TOKEN_BYTES

Chain: TypeAlias = Callable[[bytes, bytes, int], bytes]


class Piece(NamedTuple):
    """`blocks` chain ids from `first` on, each the parent of the next; `before` is the first one's, -1 for none."""

    before: int
    first: int
    blocks: int

    @property
    def end(self) -> int:
        """The chain id after the last one."""
        return self.first + self.blocks


Derived: TypeAlias = Callable[[Piece], bytes | None]
"""The keys of pieces that someone else derives, asked for in order; None if there will be no more."""


def block_tokens(chain_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Derive the token ids of blocks: int64 [n] chain ids (>= 0) -> uint32 [n, 128], each below 2**17.

    A promise, since recorded keys depend on it. Block `c` takes outputs 64*c .. 64*c+63 of splitmix64 seeded with 0
    (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014); the top 17 bits of each output's
    low and then high half are two tokens.
    """
    per_block = BLOCK_TOKENS // 2
    gamma = np.uint64(0x9E3779B97F4A7C15)
    before = chain_ids.astype(np.uint64) * np.uint64(per_block)
    z: npt.NDArray[np.uint64] = np.add.outer(before * gamma, np.arange(1, per_block + 1, dtype=np.uint64) * gamma)
    shifted = np.empty_like(z)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(z, np.uint64(shift), out=shifted)
        z ^= shifted
        z *= np.uint64(factor)
    np.right_shift(z, np.uint64(31), out=shifted)
    z ^= shifted
    halves: npt.NDArray[np.uint32] = z.astype("<u8", copy=False).view("<u4").astype(np.uint32, copy=False)
    halves >>= np.uint32(32 - TOKEN_BITS)
    return halves


class KeyMemo:
    """The key of every chain id met so far; not thread-safe.

    `root` (32 bytes) is the parent of a prompt's first block; `chain(parent key, token ids of n blocks as u32 LE, n)`
    gives their keys, concatenated. Takes 34 bytes a chain id up to the largest id met, doubled for growth, and up to
    `token_bytes` for token ids that may be needed again: little will do for `keys`, since ids are mostly met in order.
    """

    def __init__(self, root: bytes, chain: Chain = chain_blob, *, token_bytes: int = 1 << 20) -> None:
        self._root = root
        self._chain = chain
        self._keys = np.empty(0, np.uint8)
        self._view = self._keys.data
        self._met = bytearray()
        self._derived = bytearray()
        self._pieces: deque[Piece] = deque()
        """Met and not derived yet."""
        self._given: Derived | None = None
        self._distinct = 0
        self._page = lru_cache(-(-token_bytes // _PAGE_BYTES))(_page_of_tokens)

    @property
    def distinct(self) -> int:
        """Number of different chain ids whose keys are known."""
        return self._distinct

    def keys(self, runs: Sequence[Run]) -> bytes:
        """Return the keys of a prompt's blocks in order, 32 bytes each, concatenated.

        Raises UsageError where a new prefix ends in a chain id that already stands for another one.
        """
        if not runs:
            return b""
        self._meet(runs)
        view = self._view
        return b"".join([view[KEY_BYTES * first : KEY_BYTES * (first + count)] for first, count in runs])

    def part(self, runs: Sequence[Run], first: int, end: int) -> bytes:
        """The same for blocks [first, end) of the prompt only."""
        if runs:
            self._meet(runs)
        parts = []
        for start, count in runs:
            if first < count:
                parts.append(self._view[KEY_BYTES * (start + first) : KEY_BYTES * (start + min(count, end))])
                if end <= count:
                    break
                first = 0
            else:
                first -= count
            end -= count
        return b"".join(parts)

    def hashed(self, runs: Sequence[Run]) -> bytes:
        """The keys of a prompt's blocks, each derived anew, as a lookup of the prompt does; nothing is learnt."""
        tokens = b"".join([part for first, count in runs for part in self._tokens(first, first + count)])
        return self._chain(self._root, tokens, len(tokens) // TOKEN_BYTES)

    def plan(self, prompts: Iterable[Sequence[Run]]) -> Sequence[Piece]:
        """Meet prompts in the order in which their keys will be asked for; returns what is to be derived for them."""
        for runs in prompts:
            self._note(runs)
        return tuple(self._pieces)

    def take_from(self, given: Derived) -> None:
        """Have someone else derive what was planned."""
        self._given = given

    def derive(self, piece: Piece) -> bytes:
        """Derive a piece's keys, given those of what is before it; returns them."""
        self._grow(piece.end)
        keys = None if self._given is None else self._given(piece)
        if keys is None:
            self._given = None
            parent = self._key(piece.before) if piece.before >= 0 else self._root
            keys = self._chain(parent, b"".join(self._tokens(piece.first, piece.end)), piece.blocks)
        self._view[KEY_BYTES * piece.first : KEY_BYTES * piece.end] = keys
        self._derived[piece.first : piece.end] = bytes([1]) * piece.blocks
        self._distinct += piece.blocks
        return keys

    def _meet(self, runs: Sequence[Run]) -> None:
        # An id is met and derived with its whole prefix, so the last one answers for all.
        last = sum(runs[-1]) - 1
        if last >= len(self._derived) or not self._derived[last]:
            self._note(runs)
            while not self._derived[last]:
                self.derive(self._pieces.popleft())

    def _note(self, runs: Sequence[Run]) -> None:
        """Note the pieces of a prompt that were not met before."""
        met = self._met
        last = sum(runs[-1]) - 1 if runs else -1
        if last < len(met) and (last < 0 or met[last]):
            return
        ids, find = len(met), met.find
        at = 0
        for at, (first, count) in enumerate(runs):  # noqa: B007  the last id is new, so one of them has the first new
            if first + count > ids or find(0, first, first + count) >= 0:
                break
        self._grow(max(map(sum, runs[at:])))
        start, blocks = runs[at]
        new = find(0, start, start + blocks)
        before = new - 1 if new > start else sum(runs[at - 1]) - 1 if at else -1
        for first, count in ((new, start + blocks - new), *runs[at + 1 :]):
            if (twice := find(1, first, first + count)) >= 0:
                reason = "stands for two prefixes, its own and another's"
                raise UsageError(f"chain id {twice}: {reason}; number the trace's blocks anew")
            met[first : first + count] = bytes([1]) * count
            self._pieces.append(Piece(before, first, count))
            before = first + count - 1

    def _tokens(self, first: int, end: int) -> Iterator[bytes]:
        """The token ids of blocks [first, end), in pieces."""
        while first < end:
            page, at = divmod(first, _PAGE_IDS)
            upto = min(_PAGE_IDS, at + end - first)
            yield self._page(page)[at * TOKEN_BYTES : upto * TOKEN_BYTES]
            first += upto - at

    def _key(self, chain_id: int) -> bytes:
        return bytes(self._view[KEY_BYTES * chain_id : KEY_BYTES * (chain_id + 1)])

    def _grow(self, ids: int) -> None:
        have = len(self._met)
        if ids <= have:
            return
        room = max(ids, 2 * have)
        # Untouched pages of a fresh array cost no memory, so doubling is only an address range.
        keys = np.empty(KEY_BYTES * room, np.uint8)
        keys[: len(self._keys)] = self._keys
        self._keys, self._view = keys, keys.data
        self._met.extend(bytes(room - have))
        self._derived.extend(bytes(room - have))


def _page_of_tokens(page: int) -> bytes:
    # As bytes, since keys are promised of u32 LE on any machine.
    return block_tokens(np.arange(page * _PAGE_IDS, (page + 1) * _PAGE_IDS)).astype("<u4", copy=False).tobytes()
