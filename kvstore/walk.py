"""Walking a prompt through the index: what is there, what is alive, what a commit has to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from duokv.kvstore.extent import PLACE
from duokv.kvstore.hop import Hop, Hops
from duokv.kvstore.index import IndexTxn
from duokv.kvstore.lives import ExtentCache
from duokv.kvstore.origin import Origin
from duokv.kvstore.spans import Span

_T = TypeVar("_T")
Runs = list[tuple[int, int]]
"""[(first block, blocks)], rising and apart."""
MissReason = Literal["absent", "expired", "approx", "index"]


class Found(msgspec.Struct, frozen=True):
    """The leading blocks of a prompt that are stored and alive, and why the next one is not.

    held: (extent, leading blocks of it that the prompt has) each. exact: how many of the leading blocks are exact.
    """

    held: tuple[tuple[Hop, int], ...]
    blocks: int
    reason: MissReason | None
    exact: int = 0

    def lead(self, exact: int) -> int:
        """The leading blocks that may serve who was promised that so many are exact."""
        return self.blocks if self.exact >= exact else self.exact

    def spans(self, until: int | None = None) -> tuple[Span, ...]:
        """Where the blocks are, or those before block `until`."""
        spans = []
        block = 0
        for hop, count in self.held:
            left = count if until is None else min(count, until - block)
            if left <= 0:
                break
            segment, slot = PLACE.unpack(hop.place)
            spans.append(Span(segment, slot, block, left))
            block += count
        return tuple(spans)


class CommitWalk(msgspec.Struct):
    """A prompt against the index.

    snapshot: of the index. hops: the extents found. runs: blocks to write. replace: (extent,
    its first block in the prompt, blocks of it that the prompt has, how many of these stay) of those whose blocks are
    approximate and are to be replaced by exact ones. present: blocks of the commit found stored.
    """

    blob: bytes
    blocks: int
    first: int
    origin: Origin
    snapshot: int
    hops: Hops = []
    runs: Runs = []
    replace: list[tuple[Hop, int, int, int]] = []
    present: int = 0

    def repeated(self, txn: IndexTxn, cache: ExtentCache) -> CommitWalk:
        """The same walk as of `txn`."""
        return walk_for_commit(txn, cache, self.blob, self.blocks, self.first, self.origin)


class Committed(msgspec.Struct, frozen=True):
    """What became of a commit's blocks."""

    new: int
    present: int
    dropped: int


def walk_for_commit(
    txn: IndexTxn, cache: ExtentCache, blob: bytes, blocks: int, first: int, origin: Origin
) -> CommitWalk:
    """Find what is stored of a prompt's first `blocks` blocks, and what a commit from block `first` on must write."""
    walk = CommitWalk(blob, blocks, first, origin, txn.snapshot)
    reachable = True
    block = 0
    while block < blocks:
        walked = cache.walk(txn, blob, block, blocks)
        walk.hops += walked.hops
        if reachable and origin is Origin.EXACT and walked.exact < walked.end:
            _replace_approximate(walk, walked.hops, block)
        elif walked.end > first:
            walk.present += walked.end - max(first, block)
        block = walked.end
        if block < blocks:
            # At least one: an extent whose life is gone holds nothing either.
            absent = max(1, txn.absent_run(blob, block, blocks)) if txn.has_gaps() else blocks - block
            reachable = reachable and block >= first
            if reachable:
                extend_runs(walk.runs, block, absent)
            block += absent
    return walk


def _replace_approximate(walk: CommitWalk, hops: Hops, block: int) -> None:
    """Have the approximate ones among the extents found from block `block` on replaced."""
    for hop, count in hops:
        low = max(walk.first, block)
        covered = block + count - low
        if covered > 0 and hop.approx:
            walk.replace.append((hop, block, count, low - block))
            extend_runs(walk.runs, low, covered)
        elif covered > 0:
            walk.present += covered
        block += count


def extend_runs(runs: Runs, first: int, count: int) -> None:
    """Add (first, count) to runs, joined to the last one where they touch."""
    if runs and runs[-1][0] + runs[-1][1] == first:
        runs[-1] = (runs[-1][0], runs[-1][1] + count)
    else:
        runs.append((first, count))


def overlap(runs: Runs, first: int, count: int) -> Runs:
    """The parts of runs within [first, first + count)."""
    return [
        (low, high - low)
        for start, length in runs
        if (low := max(first, start)) < (high := min(first + count, start + length))
    ]


def head_of(counted: Sequence[tuple[_T, int]], blocks: int) -> list[tuple[_T, int]]:
    """The leading `blocks` blocks of runs or of a walk: parents before leaves."""
    kept = []
    for what, count in counted:
        if blocks <= 0:
            break
        kept.append((what, min(count, blocks)))
        blocks -= count
    return kept
