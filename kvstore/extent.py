"""Extents and their lives: the bookkeeping unit of Block KV.

An extent is the new blocks of one commit in consecutive slots of one segment. Per traffic class its life is a short
falling staircase of (up to block, stamp): every use covers a prefix, so blocks further from the root were last used
earlier, and a handful of steps is exact. Stamps are milliseconds since the epoch shifted by 20 bits of sequence, so
that one number orders uses within a process and dates them.
"""

from __future__ import annotations

import struct

import numpy as np

from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import BORN_CLASS, PIN_CLASS, Policy

PREFIX_BYTES = 16
"""Bytes of a block's key that the index keeps; the slot's trailer holds all 32 and a load compares them."""
SEQUENCE_BITS = 20

_KEY = np.dtype([("prefix", f"V{PREFIX_BYTES}"), ("rest", f"V{KEY_BYTES - PREFIX_BYTES}")])
Steps = dict[int, list[tuple[int, int]]]
"""class number -> [(up to block, stamp)], up-to rising, stamps falling. The lists are never changed in place."""

PLACE = struct.Struct(">II")
_EXTENT = struct.Struct(">IIIIHBB")
# segment, first slot, blocks at first, chain position, class that stored it, origin, 0
EXTENT_HEAD = _EXTENT.size
_LIFE = struct.Struct(f"<II{PREFIX_BYTES}s")
_STEP = struct.Struct("<HHIQ")
_BORN = struct.Struct(f"<II{PREFIX_BYTES}sHHIQHHIQ")
"""A life with two steps, as most are."""


def prefixes_of(keys: bytes) -> bytes:
    """The prefixes of concatenated keys, concatenated."""
    return np.frombuffer(keys, _KEY)["prefix"].tobytes()


def place_of(segment: int, slot: int) -> int:
    """Where an extent starts, as one integer: the extent's identity, since slots are never reused."""
    return segment << 32 | slot


def stamp_of(now_s: float) -> int:
    """The first stamp of a point in time (seconds since the epoch)."""
    return round(now_s * 1000) << SEQUENCE_BITS


def stamp_s(stamp: int) -> float:
    """The time of a stamp in seconds since the epoch."""
    return (stamp >> SEQUENCE_BITS) / 1000


class Cutoffs(dict[int, tuple[int, bool]]):
    """A policy at a moment: class number -> (oldest stamp still alive, counted from the store time?)."""

    def __init__(self, policy: Policy, now_s: float) -> None:
        super().__init__({PIN_CLASS: (stamp_of(now_s), False)})
        self.any_fixed = policy.any_fixed
        self._policy = policy
        self._now_s = now_s

    def __missing__(self, class_id: int) -> tuple[int, bool]:
        rule = self._policy.rule_of(class_id)
        oldest = 0 if rule.ttl_s is None else max(0, stamp_of(self._now_s - rule.ttl_s))
        self[class_id] = cutoff = (oldest, rule.mode == "fixed")
        return cutoff


class Extent:
    """The unchanging part of an extent's record, and the key prefixes of its blocks (`prefixes`, 16 bytes each)."""

    __slots__ = ("chain_pos", "class_id", "first_slot", "origin", "prefixes", "segment")

    def __init__(
        self, segment: int, first_slot: int, chain_pos: int, class_id: int, origin: Origin, prefixes: bytes
    ) -> None:
        self.segment = segment
        self.first_slot = first_slot
        self.chain_pos = chain_pos
        self.class_id = class_id
        self.origin = origin
        self.prefixes = prefixes

    @property
    def blocks(self) -> int:
        """Blocks written at first; cuts since then are in the life."""
        return len(self.prefixes) // PREFIX_BYTES

    @property
    def place(self) -> int:
        """The extent's identity."""
        return place_of(self.segment, self.first_slot)

    def rest(self, start: int) -> Extent:
        """The blocks from `start` on as an extent of their own."""
        return Extent(
            self.segment, self.first_slot + start, self.chain_pos + start, self.class_id, self.origin,
            self.prefixes[start * PREFIX_BYTES :],
        )  # fmt: skip

    def encode(self) -> bytes:
        """The record's bytes (FORMAT.md)."""
        head = _EXTENT.pack(self.segment, self.first_slot, self.blocks, self.chain_pos, self.class_id, self.origin, 0)
        return head + self.prefixes

    @classmethod
    def decode(cls, raw: bytes) -> Extent:
        """Read a record; ValueError if it is not whole."""
        if len(raw) < EXTENT_HEAD:
            raise ValueError("extent record cut short")
        segment, slot, blocks, chain_pos, class_id, origin, _ = _EXTENT.unpack_from(raw)
        if len(raw) != EXTENT_HEAD + blocks * PREFIX_BYTES:
            raise ValueError("extent record of a wrong length")
        return cls(segment, slot, chain_pos, class_id, Origin(origin), raw[EXTENT_HEAD:])


class Life:
    """The changing part: blocks still present, and the uses per class. Not thread-safe."""

    __slots__ = ("chain_pos", "first", "n", "steps")

    def __init__(self, n: int, chain_pos: int, first: bytes, steps: Steps) -> None:
        self.n = n
        self.chain_pos = chain_pos
        self.first = first
        self.steps = steps

    @classmethod
    def born(cls, n: int, chain_pos: int, first: bytes, class_id: int, stamp: int) -> Life:
        """The life of an extent just stored by a class."""
        steps = [(n, stamp)]
        return cls(n, chain_pos, first, {class_id: steps, BORN_CLASS: steps})

    def encode(self) -> bytes:
        """The record's bytes (FORMAT.md)."""
        if len(self.steps) == 2:
            (one, first), (other, second) = self.steps.items()
            if len(first) == len(second) == 1:
                return _BORN.pack(self.n, self.chain_pos, self.first, one, 0, *first[0], other, 0, *second[0])
        pack = _STEP.pack
        return _LIFE.pack(self.n, self.chain_pos, self.first) + b"".join(
            [pack(class_id, 0, upto, stamp) for class_id, steps in self.steps.items() for upto, stamp in steps]
        )

    @classmethod
    def decode(cls, raw: bytes) -> Life:
        """Read a record."""
        n, chain_pos, first = _LIFE.unpack_from(raw)
        steps: Steps = {}
        for class_id, _, upto, stamp in _STEP.iter_unpack(raw[_LIFE.size :]):
            steps.setdefault(class_id, []).append((upto, stamp))
        return cls(n, chain_pos, first, steps)

    @staticmethod
    def head(raw: bytes) -> tuple[int, bytes]:
        """(blocks, key prefix of the first one) of a record."""
        n, _, first = _LIFE.unpack_from(raw)
        return n, first

    def use(self, class_id: int, upto: int, stamp: int) -> None:
        """Record a use of the first `upto` blocks; older than what is recorded changes nothing (merge by max)."""
        self.steps[class_id] = raise_steps(self.steps.get(class_id), upto, stamp)

    def merge(self, other: Life) -> None:
        """Take the later of each block's uses from another copy of the same life."""
        for class_id, steps in other.steps.items():
            for upto, stamp in steps:
                self.use(class_id, upto, stamp)

    def inherit(self, old: Life, offset: int) -> None:
        """Take the classes' uses of blocks this life replaces, the first being block `offset` of it (or negative)."""
        for class_id, steps in old.steps.items():
            for upto, stamp in steps:
                reach = min(self.n, upto + offset)
                if class_id != BORN_CLASS and reach > 0:
                    self.use(class_id, reach, stamp)

    def cut(self, n: int) -> None:
        """Shorten to the first `n` blocks."""
        self.n = n
        for class_id, steps in list(self.steps.items()):
            kept = [step for step in steps if step[0] <= n]
            if len(kept) < len(steps) and (not kept or kept[-1][0] < n):
                kept.append((n, steps[len(kept)][1]))
            if kept and n:
                self.steps[class_id] = kept
            else:
                del self.steps[class_id]

    def rest(self, start: int, first: bytes) -> Life:
        """The life of the blocks from `start` on as an extent of their own, whose first block's prefix is `first`."""
        steps = {
            class_id: [(upto - start, stamp) for upto, stamp in steps if upto > start]
            for class_id, steps in self.steps.items()
            if steps[-1][0] > start
        }
        return Life(self.n - start, self.chain_pos + start, first, steps)

    def alive(self, cutoffs: Cutoffs) -> int:
        """How many leading blocks are within their life."""
        n = self.n
        best = 0
        for class_id, steps in self.steps.items():
            if class_id == BORN_CLASS or steps[-1][0] <= best:
                continue
            oldest, fixed = cutoffs[class_id]
            upto = _upto(steps, 0 if fixed else oldest)
            if fixed:
                upto = min(upto, _upto(self.steps.get(BORN_CLASS, []), oldest))
            if upto >= n:
                return n
            best = max(best, upto)
        return best

    def deadline(self, block: int, policy: Policy) -> tuple[float | None, int | None]:
        """When block `block` dies (seconds since the epoch, None = never) and the class number that keeps it so long.

        (0.0, None) when no class ever used it.
        """
        latest, keeper = 0.0, None
        for class_id, steps in self.steps.items():
            stamp = _stamp_at(steps, block)
            if class_id == BORN_CLASS or stamp is None:
                continue
            if class_id == PIN_CLASS:
                until = stamp_s(stamp)
            else:
                rule = policy.rule_of(class_id)
                if rule.ttl_s is None:
                    return None, class_id
                start = stamp if rule.mode == "sliding" else _stamp_at(self.steps.get(BORN_CLASS, []), block) or 0
                until = stamp_s(start) + rule.ttl_s
            if until > latest or keeper is None:
                latest, keeper = until, class_id
        return latest, keeper

    def last_use(self, block: int) -> int:
        """The latest stamp of any class for a block; 0 when none."""
        return max(
            (_stamp_at(steps, block) or 0 for class_id, steps in self.steps.items() if class_id < PIN_CLASS), default=0
        )

    def pinned(self, now_s: float) -> int:
        """How many leading blocks a pin holds now."""
        return min(self.n, _upto(self.steps.get(PIN_CLASS, []), stamp_of(now_s)))

    def tail_start(self) -> int:
        """First block of the tail whose blocks all share one latest use: what falls together."""
        return max(
            (
                upto
                for class_id, steps in self.steps.items()
                for upto, _ in steps
                if class_id < PIN_CLASS and upto < self.n
            ),
            default=0,
        )


def raise_steps(steps: list[tuple[int, int]] | None, upto: int, stamp: int) -> list[tuple[int, int]]:
    """Return the staircase with every block below `upto` raised to at least `stamp`."""
    if not steps or (steps[0][1] <= stamp and steps[-1][0] <= upto):
        return [(upto, stamp)]
    kept_above = [step for step in steps if step[1] > stamp]
    if kept_above and kept_above[-1][0] >= upto:
        return steps
    kept_below = [step for step in steps if step[1] <= stamp and step[0] > upto]
    return [*kept_above, (upto, stamp), *kept_below]


def _upto(steps: list[tuple[int, int]], oldest: int) -> int:
    """How many leading blocks have a stamp of at least `oldest`."""
    best = 0
    for upto, stamp in steps:
        if stamp < oldest:
            break
        best = upto
    return best


def _stamp_at(steps: list[tuple[int, int]], block: int) -> int | None:
    for upto, stamp in steps:
        if block < upto:
            return stamp
    return None
