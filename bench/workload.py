"""Request traces: read them, give their blocks token ids and keys, and find where outputs ended.

A trace names 128-token blocks by *chain id*: an id stands for the whole prefix up to and including its block, so equal
ids mean equal prefixes and an id has one parent. Traces carry no token ids; they are derived from the chain ids.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from duokv.kvstore.errors import UsageError
from duokv.kvstore.keys import KEY_BYTES, TOKEN_BYTES, chain_blob

BLOCK_TOKENS = 128
# Token ids are below 2**17, the power of two next to the vocabularies of the models this store serves.
TOKEN_BITS = 17
# Chain ids are dense and index arrays: the bound keeps a stray id from asking for more than 8 GiB of keys.
MAX_CHAIN_IDS = 2**28

_AGENT_TRACES = frozenset({"weka_agent", "lmcache_miniswe"})
# Tokens of fewer blocks at a time cost more a block for numpy's calls, of more for the cache they fall out of.
_PAGE_IDS = 128
_PAGE_BYTES = _PAGE_IDS * TOKEN_BYTES

# (first chain id, number of blocks): consecutive blocks of a prompt whose ids count up by one.
Run: TypeAlias = tuple[
    Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHAIN_IDS)], Annotated[int, msgspec.Meta(ge=1, le=MAX_CHAIN_IDS)]
]
Chain: TypeAlias = Callable[[bytes, bytes, int], bytes]


class TraceRequest(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    gc=False,
    rename={"session": "s", "input_tokens": "i", "output_tokens": "o", "runs": "b", "response_s": "a"},
):
    """One request of a trace; immutable.

    `t` is the arrival in seconds from the trace's own zero. `runs` lists the full blocks of the prompt in order (a
    trace may list fewer than `input_tokens // 128`). `response_s` is the time from arrival to the end of the response
    in seconds, None where unknown. `session` is empty where unknown.
    """

    t: float
    session: str
    input_tokens: Annotated[int, msgspec.Meta(ge=0)]
    output_tokens: Annotated[int, msgspec.Meta(ge=0)]
    runs: tuple[Run, ...]
    response_s: Annotated[float, msgspec.Meta(ge=0)] | None = None

    @property
    def blocks(self) -> int:
        """Number of full blocks listed."""
        return sum([count for _, count in self.runs])

    @property
    def answered_at(self) -> float | None:
        """When the response ended, in seconds on the clock of `t`; None where unknown.

        The traces' `a` is relative to the arrival: read so, 99.9 % of the answers of weka_agent end before the next
        prompt of their session, and read as a time of the trace all but one would end before their own prompt.
        """
        return None if self.response_s is None else self.t + self.response_s


def read_trace(path: Path | str, *, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a JSONL trace, gzip where the name ends in `.gz`, at most `limit` of them.

    Raises UsageError, at the line reached, for a file that cannot be read and for a line that does not parse or cannot
    be meant: an unknown or missing field, a negative number, time going backwards, more blocks than fit the prompt.
    """
    path = Path(path)
    if limit is not None and limit < 0:
        raise UsageError(f"--limit {limit}: a number of requests is not negative; give 1 or more, or leave it out")
    decode = msgspec.json.Decoder(TraceRequest).decode
    number, before = 0, -math.inf
    try:
        with _open(path) as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                try:
                    request = decode(line)
                except msgspec.DecodeError as error:
                    raise _bad_line(path, number, str(error)) from None
                if fault := _fault(request, before):
                    raise _bad_line(path, number, fault)
                before = request.t
                yield request
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        if number == 0:
            raise UsageError(f"{path.name}: {error}; name it without .gz if it is plain, or fetch it again") from None
        wayout = f"fetch the file again, or use --limit {number}"
        raise UsageError(f"{path.name} line {number + 1}: damaged gzip data ({error}); {wayout}") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give the path of a trace that can be read") from None


def _open(path: Path) -> io.BufferedIOBase:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _fault(request: TraceRequest, before: float) -> str | None:
    if request.t < before:
        return f"t goes back from {before} to {request.t}"
    room = request.input_tokens // BLOCK_TOKENS
    if request.blocks > room:
        return f"{request.blocks} full blocks listed, {request.input_tokens} input tokens have {room}"
    if any(first + count > MAX_CHAIN_IDS for first, count in request.runs):
        return f"a run reaches past chain id {MAX_CHAIN_IDS - 1}"
    return None


def _bad_line(path: Path, number: int, reason: str) -> UsageError:
    cut = f", or use --limit {number - 1}" if number > 1 else ""
    return UsageError(f"{path.name} line {number}: {reason}; fix or cut that line{cut}")


def trace_class(path: Path | str) -> str:
    """The traffic class to assume for a trace, by its file name: "agent" or "chat" (also of an unknown name)."""
    return "agent" if Path(path).name.partition(".")[0] in _AGENT_TRACES else "chat"


def traces_dir(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder of traces, `$DUOKV_DATA/traces`, whether or not it exists; None if the variable is unset or empty."""
    data = environ.get("DUOKV_DATA", "")
    return Path(data) / "traces" if data else None


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
    gives their keys, concatenated. Takes 33 bytes a chain id up to the largest id met, doubled for growth, and up to
    `token_bytes` for token ids that may be needed again: little will do for `keys`, since ids are mostly met in order.
    """

    def __init__(self, root: bytes, chain: Chain = chain_blob, *, token_bytes: int = 1 << 20) -> None:
        self._root = root
        self._chain = chain
        self._keys = np.empty(0, np.uint8)
        self._view = self._keys.data
        self._known = bytearray()
        self._distinct = 0
        self._page = lru_cache(-(-token_bytes // _PAGE_BYTES))(_page_of_tokens)

    @property
    def distinct(self) -> int:
        """Number of different chain ids met."""
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

    def _meet(self, runs: Sequence[Run]) -> None:
        last = sum(runs[-1]) - 1
        # An id is learnt with its whole prefix, so the last one answers for all.
        if last >= len(self._known) or not self._known[last]:
            self._learn(runs)

    def _learn(self, runs: Sequence[Run]) -> None:
        ids, find = len(self._known), self._known.find
        at = 0
        for at, (first, count) in enumerate(runs):  # noqa: B007  the last id is new, so one of them has the first new
            if first + count > ids or find(0, first, first + count) >= 0:
                break
        self._grow(max(map(sum, runs[at:])))
        start, blocks = runs[at]
        new = find(0, start, start + blocks)
        before = new - 1 if new > start else sum(runs[at - 1]) - 1 if at else -1
        parent = self._key(before) if before >= 0 else self._root
        for first, count in ((new, start + blocks - new), *runs[at + 1 :]):
            if (twice := find(1, first, first + count)) >= 0:
                reason = "stands for two prefixes, its own and another's"
                raise UsageError(f"chain id {twice}: {reason}; number the trace's blocks anew")
            parent = self._derive(parent, first, count)

    def _derive(self, parent: bytes, first: int, count: int) -> bytes:
        """Make the keys of `count` ids from `first` on known; returns the last one."""
        end = first + count
        keys = self._chain(parent, b"".join(self._tokens(first, end)), count)
        self._view[KEY_BYTES * first : KEY_BYTES * end] = keys
        self._known[first:end] = bytes([1]) * count
        self._distinct += count
        return keys[-KEY_BYTES:]

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
        have = len(self._known)
        if ids <= have:
            return
        room = max(ids, 2 * have)
        # Untouched pages of a fresh array cost no memory, so doubling is only an address range.
        keys = np.empty(KEY_BYTES * room, np.uint8)
        keys[: len(self._keys)] = self._keys
        self._keys, self._view = keys, keys.data
        self._known.extend(bytes(room - have))


def _page_of_tokens(page: int) -> bytes:
    # As bytes, since keys are promised of u32 LE on any machine.
    return block_tokens(np.arange(page * _PAGE_IDS, (page + 1) * _PAGE_IDS)).astype("<u4", copy=False).tobytes()


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """Where and when a request's output ended.

    `tokens` is prompt plus output; `runs` are those of the prompt that carries it, which begin with its `tokens // 128`
    full blocks; `t` is in seconds on the trace's clock.
    """

    t: float
    tokens: int
    runs: tuple[Run, ...]


def with_output_ends(requests: Iterable[TraceRequest]) -> Iterator[tuple[TraceRequest, OutputEnd | None]]:
    """Pair every request, in arrival order, with the end of its output, or None where that is unknown.

    A trace names generated tokens only where a later prompt carries them, so the end of an output is known only from
    the next prompt of the same session, which must begin with all blocks of this prompt and reach past its output;
    without a session there is no next prompt. The end is at the answer's end if that is known, though not after the
    prompt that carries it, else at the arrival. All requests are held in memory, since the next prompt may come late.
    """
    held = list(requests)
    following: list[TraceRequest | None] = []
    upcoming: dict[str, TraceRequest] = {}
    for request in reversed(held):
        following.append(upcoming.get(request.session))
        if request.session:
            upcoming[request.session] = request
    for request, later in zip(held, reversed(following), strict=True):
        yield request, None if later is None else _output_end(request, later)


def _output_end(request: TraceRequest, later: TraceRequest) -> OutputEnd | None:
    tokens = request.input_tokens + request.output_tokens
    blocks, later_blocks = request.blocks, later.blocks
    # A prompt that lists fewer blocks than it fills does not say which, so positions in it are unknown.
    placed = blocks == request.input_tokens // BLOCK_TOKENS and later_blocks == later.input_tokens // BLOCK_TOKENS
    if not placed or later_blocks < tokens // BLOCK_TOKENS or not _begins_with(later.runs, request.runs, blocks):
        return None
    answered = request.answered_at
    t = request.t if answered is None else min(answered, later.t)
    return OutputEnd(t, tokens, later.runs)


def _begins_with(runs: Sequence[Run], head: Sequence[Run], blocks: int) -> bool:
    """Whether a prompt begins with all `blocks` blocks of another."""
    last = len(head) - 1
    # Runs are mostly carried over as they were, the last one made longer.
    carried = (
        0 <= last < len(runs)
        and runs[last][0] == head[last][0]
        and runs[last][1] >= head[last][1]
        and runs[:last] == head[:last]
    )
    return carried or head_runs(runs, blocks) == head_runs(head, blocks)


def head_runs(runs: Sequence[Run], blocks: int) -> tuple[Run, ...]:
    """The first `blocks` blocks of a prompt, in the fewest runs, so that equal heads compare equal."""
    head: list[Run] = []
    for first, count in runs:
        take = min(count, blocks)
        if take == 0:
            break
        blocks -= take
        if head and sum(head[-1]) == first:
            head[-1] = (head[-1][0], head[-1][1] + take)
        else:
            head.append((first, take))
    return tuple(head)
