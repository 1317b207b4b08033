"""Which copy of a block a rebuild keeps, where segments hold two.

A crash leaves copies behind: approximate blocks whose exact successors were written and not yet published, or not yet
punched; slots of a commit that failed; the same blocks stored by two processes at once. The index holds a block once.
"""

from __future__ import annotations

from bisect import bisect_left

from duokv.kvstore.extent import PREFIX_BYTES, Extent, Life
from duokv.kvstore.index import WriteTxn
from duokv.kvstore.policy import BORN_CLASS


def place_extent(txn: WriteTxn, extent: Extent, life: Life) -> None:
    """Enter an extent. Of two that begin with one block the better one keeps it; what the other has beyond it stays."""
    other = txn.extent(life.first)
    held = None if other is None else txn.life(other.place)
    if other is not None and held is not None:
        both = _blocks_of_both(extent, life, other, held)
        if not _is_better(extent, life, other, held):
            _place_rest(txn, extent, life, both)
            return
        txn.drop_extent(other.place, held.first)
    txn.put_extent(extent)
    txn.put_life(extent.place, life)
    if other is not None and held is not None:
        _place_rest(txn, other, held, both)


def part_overlaps(txn: WriteTxn) -> None:
    """Cut extents that begin inside others, or those others, until each block is held once, by the better one."""
    # Few blocks of an extent begin another one, and a set tells that sooner than the index does.
    firsts = {extent.prefixes[:PREFIX_BYTES] for extent in txn.extents()}
    for number, _ in txn.segments():
        for place, _ in list(txn.lives(number)):
            life = txn.life(place)
            extent = None if life is None else txn.extent(life.first)
            if life is not None and extent is not None:
                _part(txn, extent, life, firsts)


def _part(txn: WriteTxn, extent: Extent, life: Life, firsts: set[bytes]) -> None:
    for block in range(1, life.n):
        prefix = extent.prefixes[block * PREFIX_BYTES : (block + 1) * PREFIX_BYTES]
        if prefix not in firsts:
            continue
        other = txn.extent(prefix)
        held = None if other is None else txn.life(other.place)
        if other is None or held is None:
            continue
        both = _blocks_of_both(extent, life, other, held, block)
        if _is_better(other, held, extent, life):
            _place_rest(txn, extent, life, block + both)
            firsts.update(txn.changed_firsts)
            life.cut(block)
            txn.put_life(extent.place, life)
            return
        txn.drop_extent(other.place, held.first)
        _place_rest(txn, other, held, both)
        firsts.update(txn.changed_firsts)


def _is_better(extent: Extent, life: Life, other: Extent, held: Life) -> bool:
    """Exact before approximate, then the younger: a block is stored again only when the one before it was dropped."""
    return (extent.origin, -_born(life), -life.n) < (other.origin, -_born(held), -held.n)


def _blocks_of_both(extent: Extent, life: Life, other: Extent, held: Life, block: int = 0) -> int:
    """How many blocks from block `block` of an extent on another one has from its first on: they may fork."""
    most = min(life.n - block, held.n)
    mine, theirs = extent.prefixes[block * PREFIX_BYTES :], other.prefixes
    ends = range(PREFIX_BYTES, most * PREFIX_BYTES + 1, PREFIX_BYTES)
    # Chained keys: those before an equal one are equal.
    return bisect_left(ends, True, key=lambda end: mine[end - PREFIX_BYTES : end] != theirs[end - PREFIX_BYTES : end])


def _born(life: Life) -> int:
    return max((stamp for _, stamp in life.steps.get(BORN_CLASS, [])), default=0)


def _place_rest(txn: WriteTxn, extent: Extent, life: Life, start: int) -> None:
    if start < life.n:
        rest = extent.rest(start)
        place_extent(txn, rest, life.rest(start, rest.prefixes[:PREFIX_BYTES]))
