"""Blocks found damaged, kept in the index until an operator has seen them."""

from __future__ import annotations

import msgspec

from duokv.kvstore.index import IndexTxn, WriteTxn

_KEPT = 1000
_NAME = b"damage"


class Damage(msgspec.Struct, frozen=True):
    """A block that did not verify: its key (hex, as much of it as is known), where it was, why, and when (s)."""

    key: str
    segment: int
    slot: int
    reason: str
    found_s: float


def note_damage(txn: WriteTxn, damage: Damage) -> None:
    """Add one finding; the oldest go beyond a thousand."""
    txn.put_meta(_NAME, msgspec.msgpack.encode([*damage_noted(txn), damage][-_KEPT:]))


def damage_noted(txn: IndexTxn) -> list[Damage]:
    """All findings since they were last cleared."""
    raw = txn.meta(_NAME)
    return [] if raw is None else msgspec.msgpack.decode(raw, type=list[Damage])


def clear_damage(txn: WriteTxn) -> None:
    """Forget the findings."""
    txn.drop_meta(_NAME)
