"""Walking a prompt through the index: what is there, what is alive, what a commit has to write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from duokv.kvstore.extent import PLACE, Cutoffs, Life
from duokv.kvstore.index import Hop, IndexTxn, is_approx
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.lives import LifeCache
from duokv.kvstore.origin import Origin
from duokv.kvstore.reader import Span

Runs = list[tuple[int, int]]
"""[(first block, blocks)], rising and apart."""


MissReason = Literal["absent", "expired", "approx", "index"]


@dataclass(frozen=True, slots=True)
class Found:
    """The leading blocks of a prompt that are stored and alive, and why the next one is not.

    held: (8-byte place, life, leading blocks of it that the prompt has) per extent. version: the index's when they were
    found. tail: key of the last block if these are all the blocks stored of the prompt and all exact, else None.
    exact: how many of the leading blocks are exact.
    """

    held: tuple[tuple[bytes, Life, int], ...]
    blocks: int
    reason: MissReason | None
    version: int = -1
    tail: bytes | None = None
    exact: int = 0

    def spans(self, until: int | None = None) -> tuple[Span, ...]:
        """Where the blocks are, or those before block `until`."""
        spans = []
        block = 0
        for place, _, count in self.held:
            left = count if until is None else min(count, until - block)
            if left <= 0:
                break
            segment, slot = PLACE.unpack(place)
            spans.append(Span(segment, slot, block, left))
            block += count
        return tuple(spans)

    def still_holds(self, version: int, blob: bytes, blocks: int) -> bool:
        """Whether a commit of a prompt's first `blocks` blocks may take this for its own walk's beginning."""
        if not self.held or self.version != version or self.tail is None or blocks < self.blocks:
            return False
        _, life, count = self.held[-1]
        at = self.blocks * KEY_BYTES
        return (count == life.n or blocks == self.blocks) and blob[at - KEY_BYTES : at] == self.tail


@dataclass(slots=True)
class CommitWalk:
    """A prompt against the index.

    stored: the index's count of extents ever stored. hops: (place, life, blocks of the prompt) per extent found. runs:
    blocks to write. replace: hops whose blocks from an offset on are approximate and are to be replaced by exact ones.
    present: blocks of the commit found stored.
    """

    blob: bytes
    blocks: int
    first: int
    origin: Origin
    stored: int
    hops: list[tuple[bytes, Life, int]] = field(default_factory=list)
    runs: Runs = field(default_factory=list)
    replace: list[tuple[Hop, int]] = field(default_factory=list)
    present: int = 0

    def repeated(self, txn: IndexTxn, cache: LifeCache) -> CommitWalk:
        """The same walk as of `txn`."""
        return walk_for_commit(txn, cache, self.blob, self.blocks, self.first, self.origin)


def walk_for_commit(
    txn: IndexTxn, cache: LifeCache, blob: bytes, blocks: int, first: int, origin: Origin,
    known: Found | None = None, version: int = -1,
) -> CommitWalk:  # fmt: skip
    """Find what is stored of a prompt's first `blocks` blocks, and what a commit from block `first` on must write."""
    walk = CommitWalk(blob, blocks, first, origin, txn.stored())
    reachable = True
    block = 0
    if known is not None and known.still_holds(version, blob, blocks):
        walk.hops.extend(known.held)
        block = known.blocks
        walk.present = max(0, block - first)
    while block < blocks:
        hops = txn.walk(blob, block, blocks)
        if not hops:
            # At least one: an extent whose life is gone holds nothing either.
            absent = max(1, txn.absent_run(blob, block, blocks))
            reachable = reachable and block >= first
            if reachable:
                extend_runs(walk.runs, block, absent)
            block += absent
            continue
        for hop in hops:
            block, place, record, raw, count = hop
            walk.hops.append((place, cache.get(place, raw), count))
            low = max(first, block)
            covered = block + count - low
            if covered > 0 and reachable and origin is Origin.EXACT and is_approx(record):
                walk.replace.append((hop, low - block))
                extend_runs(walk.runs, low, covered)
            elif covered > 0:
                walk.present += covered
        block += count
    return walk


def alive_lead(held: list[tuple[bytes, Life, int]], cutoffs: Cutoffs) -> tuple[int, int]:
    """How many extents of a walk are alive as far as the prompt goes, and the alive blocks of the next one.

    A use covers a prefix, so under sliding rules a parent is never older than its child and the last one speaks for
    all; a fixed life counts from the store time, and a parent is stored first.
    """
    if not held or (not cutoffs.any_fixed and held[-1][1].alive(cutoffs) >= held[-1][2]):
        return len(held), 0
    for i, (_, life, count) in enumerate(held):
        alive = life.alive(cutoffs)
        if alive < count:
            return i, alive
    return len(held), 0


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


def head_of_runs(runs: Runs, count: int) -> Runs:
    """The leading `count` blocks of runs: parents before leaves."""
    kept = []
    for first, length in runs:
        if count <= 0:
            break
        kept.append((first, min(length, count)))
        count -= length
    return kept
