"""Which copy of a block a rebuild keeps, where segments hold two.

A crash leaves copies behind: approximate blocks whose exact successors were written and not yet published, or not yet
punched; slots of a commit that failed; the same blocks stored by two processes at once. The index holds a block once.
"""

from __future__ import annotations

from duokv.kvstore.extent import PREFIX_BYTES, Extent, Life
from duokv.kvstore.index import IndexTxn


def place_extent(txn: IndexTxn, extent: Extent, life: Life) -> None:
    """Enter an extent. Of two that begin with one block the exact one keeps it, else the longer one; what the other
    has beyond its end stays."""
    other = txn.extent(life.first)
    held = None if other is None else txn.life(other.place)
    if other is not None and held is not None:
        if (extent.origin, -life.n) < (other.origin, -held.n):
            txn.drop_extent(held, other.place)
            txn.put_extent(extent)
            txn.put_life(extent.place, life)
            _place_rest(txn, other, held, life.n)
        else:
            _place_rest(txn, extent, life, held.n)
        return
    txn.put_extent(extent)
    txn.put_life(extent.place, life)


def part_overlaps(txn: IndexTxn) -> None:
    """Cut extents that begin inside others, or those others, until each block is held once; exact ones first."""
    for number, _ in txn.segments():
        for place, _ in list(txn.lives(number)):
            life = txn.life(place)
            extent = None if life is None else txn.extent(life.first)
            if life is not None and extent is not None:
                _part(txn, extent, life)


def _part(txn: IndexTxn, extent: Extent, life: Life) -> None:
    for block in range(1, life.n):
        other = txn.extent(extent.prefixes[block * PREFIX_BYTES : (block + 1) * PREFIX_BYTES])
        held = None if other is None else txn.life(other.place)
        if other is None or held is None:
            continue
        if other.origin < extent.origin:
            _place_rest(txn, extent, life, block + held.n)
            life.cut(block)
            txn.put_life(extent.place, life)
            return
        txn.drop_extent(held, other.place)
        _place_rest(txn, other, held, life.n - block)


def _place_rest(txn: IndexTxn, extent: Extent, life: Life, start: int) -> None:
    if start < life.n:
        rest = extent.rest(start)
        place_extent(txn, rest, life.rest(start, rest.prefixes[:PREFIX_BYTES]))
