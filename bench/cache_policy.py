"""How much of what traces load the block cache has: its own policy against LRU, by size.

A prompt's blocks that an earlier prompt had are loaded, the others committed; both enter the cache. The store itself
forgets nothing here. Blocks have no bytes and go by the trace's chain ids; the policy is the product's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.table import Table

from duokv.bench.command_line import OneLineParser, number, numbers, progress_bar, terminal
from duokv.bench.table import found_traces, trace_name
from duokv.bench.workload import Run, TraceRequest, read_trace
from duokv.kvstore.blockcache import S3Fifo
from duokv.kvstore.errors import DuoKVError

SIZES = (1_024, 2_048, 4_096, 16_384, 65_536)
PUBLISHED_SHARE = 0.1
"""Part of the rows on probation in the paper."""
_TELL_EVERY = 100
_PLAIN_WIDTH = 100


class Cache(Protocol):
    """Blocks by chain id."""

    def load(self, ids: Sequence[int]) -> int:
        """Want these blocks; those that are absent enter. Returns how many were there before."""

    def store(self, ids: Iterable[int]) -> None:
        """New blocks enter."""


class Lru:
    """Least recently used out first."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._held: OrderedDict[int, None] = OrderedDict()

    def load(self, ids: Sequence[int]) -> int:
        """See `Cache`."""
        held, touch = self._held, self._held.move_to_end
        absent = [block for block in ids if block not in held]
        for block in ids:
            if block in held:
                touch(block)
        self.store(absent)
        return len(ids) - len(absent)

    def store(self, ids: Iterable[int]) -> None:
        """See `Cache`."""
        held = self._held
        for block in ids:
            held[block] = None
            if len(held) > self._rows:
                held.popitem(last=False)


class Fifo:
    """The product's policy, used as `BlockCache` uses it."""

    def __init__(self, policy: S3Fifo) -> None:
        self._policy = policy

    def load(self, ids: Sequence[int]) -> int:
        """See `Cache`."""
        rows = self._policy.find(ids)
        held = rows >= 0
        self._policy.use(rows[held])
        self.store(np.asarray(ids)[~held].tolist())
        return int(held.sum())

    def store(self, ids: Iterable[int]) -> None:
        """See `Cache`."""
        for block in ids:
            row = self._policy.take(block)
            if row is not None:
                self._policy.put(row, block)


POLICIES: Mapping[str, Callable[[int], Cache]] = {
    "lru": Lru,
    "s3_fifo": lambda rows: Fifo(S3Fifo(rows)),
    "s3_fifo_10_percent": lambda rows: Fifo(S3Fifo(rows, small_share=PUBLISHED_SHARE)),
}
"""What is compared; the second is the product's."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One size on one trace: blocks loaded, and by policy the percentage of them that the cache had."""

    trace: str
    cache_blocks: int
    loaded_blocks: int
    percent: Mapping[str, float]


def measure(requests: Iterable[TraceRequest], sizes: Sequence[int]) -> Iterator[tuple[int, dict[tuple[str, int], int]]]:
    """Run a trace through every policy of every size; yields (blocks loaded, hits by policy and size) so far."""
    caches = {(name, rows): make(rows) for name, make in POLICIES.items() for rows in sizes}
    hits = dict.fromkeys(caches, 0)
    seen: set[int] = set()
    loaded = 0
    for request in requests:
        ids = _ids(request.runs)
        # An id stands for its whole prefix: those seen before come first.
        lead = next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        known, new = ids[:lead], ids[lead:]
        for at, cache in caches.items():
            hits[at] += cache.load(known)
            cache.store(new)
        seen.update(new)
        loaded += lead
        yield loaded, hits


def cells(trace: Path, sizes: Sequence[int], limit: int | None, advance: Callable[[int], None]) -> list[Cell]:
    """A whole trace, or its first `limit` requests. UsageError for a trace that cannot be read."""
    steps = measure(read_trace(trace, limit=limit), sizes)
    loaded, hits = 0, dict.fromkeys(((name, rows) for name in POLICIES for rows in sizes), 0)
    while chunk := list(islice(steps, _TELL_EVERY)):
        loaded, hits = chunk[-1]
        advance(len(chunk))
    return [
        Cell(
            trace_name(trace), rows, loaded,
            {name: 100 * hits[name, rows] / loaded if loaded else 0.0 for name in POLICIES},
        )
        for rows in sizes
    ]  # fmt: skip


def table_of(found: Sequence[Cell]) -> Table:
    """A table for people: a row per trace and size."""
    table = Table(title="Loaded blocks that the block cache had, in percent", title_justify="left")
    table.add_column("trace", no_wrap=True)
    for heading in ("cache, blocks", "LRU", "S3-FIFO", "10 % on probation"):
        table.add_column(heading, justify="right")
    for i, cell in enumerate(found):
        last = i + 1 == len(found) or found[i + 1].trace != cell.trace
        shares = [f"{cell.percent[name]:.1f}" for name in POLICIES]
        table.add_row(cell.trace, f"{cell.cache_blocks:,}", *shares, end_section=last)
    return table


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m duokv.bench.cache_policy", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="*", type=Path, help="trace files; default: all in $DUOKV_DATA/traces")
    parser.add_argument("--blocks", type=numbers(1), default=SIZES, help="sizes of the cache, as in 1024,4096")
    parser.add_argument("--limit", type=number(1), help="only the first LIMIT requests of each trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 2 for what cannot be done."""
    given = _arguments(argv)
    try:
        traces = given.traces or found_traces()
        total = sum(sum(1 for _ in read_trace(path, limit=given.limit)) for path in traces)
        with progress_bar("simulated requests", total) as advance:
            found = [cell for path in traces for cell in cells(path, given.blocks, given.limit, advance)]
    except DuoKVError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps([asdict(cell) for cell in found], indent=1))
    else:
        terminal(_PLAIN_WIDTH).print(table_of(found))
    return 0


def _ids(runs: Sequence[Run]) -> list[int]:
    return [block for first, count in runs for block in range(first, first + count)]


if __name__ == "__main__":
    sys.exit(main())
