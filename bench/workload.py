"""Request traces: read them, and find where outputs ended.

A trace names 128-token blocks by *chain id*: an id stands for the whole prefix up to and including its block, so equal
ids mean equal prefixes and an id has one parent. Traces carry no token ids; `keymemo` derives them from the chain ids.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from duokv.kvstore.errors import UsageError
from duokv.kvstore.keys import BLOCK_TOKENS

# Chain ids are dense and index arrays: the bound keeps a stray id from asking for more than 8 GiB of keys.
MAX_CHAIN_IDS = 2**28

_AGENT_TRACES = frozenset({"weka_agent", "lmcache_miniswe"})
# (first chain id, number of blocks): consecutive blocks of a prompt whose ids count up by one.
Run: TypeAlias = tuple[
    Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHAIN_IDS)], Annotated[int, msgspec.Meta(ge=1, le=MAX_CHAIN_IDS)]
]


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
