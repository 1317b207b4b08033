"""Why a block is there, how long it stays and where its bytes are; why a prompt hits no further."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from duokv.kvstore.damage import Damage, damage_noted
from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.extent import PREFIX_BYTES, Cutoffs, Extent, Life, Steps, stamp_s
from duokv.kvstore.index import IndexTxn, SegmentInfo
from duokv.kvstore.inspection import StoreView
from duokv.kvstore.keys import BLOCK_TOKENS, KEY_BYTES, Media, Namespace, TokenIds, chain_blob, check_media, token_bytes
from duokv.kvstore.lives import ExtentCache
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import BORN_CLASS, PIN_CLASS, Policy
from duokv.kvstore.record import Trailer
from duokv.kvstore.slotcheck import SlotChecker

_LEAST_DIGITS = 4


@dataclass(frozen=True, slots=True)
class ClassUse:
    """A class's part in a block's life. Times in seconds since the epoch.

    last_use_s None: the class never used the block, then until_s says nothing. until_s None: its rule never ends.
    """

    name: str
    ttl_s: float | None
    mode: str
    last_use_s: float | None
    until_s: float | None
    alive: bool


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block in the index.

    key: 64 hex digits, 32 if the slot could not be read. keeper: the class that keeps it longest, "(pin)" for a pin,
    None if no class ever used it. until_s: when it goes (went, if not alive), None never. pinned_until_s: None if never
    pinned. stored_s: when its life began. file_offset: bytes. content: "whole", or what is wrong with the slot.
    parent: the key before it, 64 hex digits, None for a first block or if the slot could not be read.
    """

    key: str
    alive: bool
    keeper: str | None
    until_s: float | None
    pinned_until_s: float | None
    uses: tuple[ClassUse, ...]
    stored_s: float
    stored_by: str
    origin: str
    file: str
    segment: int
    slot: int
    file_offset: int
    slot_bytes: int
    chain_pos: int
    first_token: int
    extent_slot: int
    extent_blocks: int
    content: str
    parent: str | None


@dataclass(frozen=True, slots=True)
class Absent:
    """A key the index does not hold.

    cut: its extent was shortened since: it expired, was evicted or was quarantined. damage: what was noted of it.
    """

    key: str
    cut: bool
    damage: tuple[Damage, ...]


@dataclass(frozen=True, slots=True)
class PrefixView:
    """How much of a prompt a lookup would find now.

    blocks: whole blocks that can hit. stored_blocks: those on disk, expired ones and ones after a gap included.
    miss_key: 64 hex digits of the first block that is no hit; None, as is reason, when all are hits.
    """

    tokens: int
    blocks: int
    hit_blocks: int
    hit_tokens: int
    stored_blocks: int
    reason: str | None
    miss_block: int | None
    miss_key: str | None


def check_key(digits: str) -> str:
    """A block key as people give it, in lower case; UsageError unless it is 4 to 64 hex digits."""
    lower = digits.lower()
    if not _LEAST_DIGITS <= len(lower) <= 2 * KEY_BYTES or not set(lower) <= set(string.hexdigits):
        raise UsageError(f"key {digits!r} is not 4 to 64 hex digits; give a block's key, or the beginning of it")
    return lower


def find_block(txn: IndexTxn, digits: str) -> tuple[Extent, int, Life] | Absent:
    """The extent, offset in it and life of the one block whose key begins so. UsageError if several do."""
    stored: defaultdict[bytes, list[tuple[Extent, int, Life]]] = defaultdict(list)
    cut: set[bytes] = set()
    whole = bytes.fromhex(digits[: len(digits) // 2 * 2])[:PREFIX_BYTES]
    for extent in txn.extents():
        at = extent.prefixes.find(whole)
        while at >= 0:
            prefix = extent.prefixes[at : at + PREFIX_BYTES]
            if at % PREFIX_BYTES == 0 and prefix.hex().startswith(digits[: 2 * PREFIX_BYTES]):
                life = txn.life(extent.place)
                if life is not None and at // PREFIX_BYTES < life.n:
                    stored[prefix].append((extent, at // PREFIX_BYTES, life))
                else:
                    cut.add(prefix)
            at = extent.prefixes.find(whole, at + 1)
    if len(stored) > 1:
        raise UsageError(f"key {digits!r} fits {len(stored)} blocks; give more digits")
    if stored:
        return next(iter(stored.values()))[0]
    # Some were noted by the part of their key that the index keeps.
    damage = tuple(noted for noted in damage_noted(txn) if noted.key.startswith(digits[: len(noted.key)]))
    return Absent(digits, bool(cut), damage)


def explain(view: StoreView, key: str, *, deadline_s: float = 5.0) -> BlockView | Absent:
    """Say all that is known of a block; `key` may be cut short to 4 hex digits. Its slot is read and checked.

    UsageError for a key that is none or that fits several blocks.
    """
    digits = check_key(key)
    checker = SlotChecker(view.backend, view.geometry, threads=1)
    try:
        for attempt in range(2):
            with view.snapshot() as txn:
                found = find_block(txn, digits)
                if isinstance(found, Absent):
                    return found
                policy = view.policy(txn)
                info = txn.segment(found[0].segment)
            extent, offset, life = found
            slot = extent.first_slot + offset
            name = "" if info is None else info.name(extent.segment)
            trailer = checker.check(name, [slot], deadline_s=deadline_s)[0] if name else "its segment is not known"
            # Slots are punched after the index let go of them: one that does not hold may have gone in between.
            if isinstance(trailer, Trailer) or attempt:
                break
        if isinstance(trailer, Trailer) and not trailer.identity.key.hex().startswith(digits):
            return Absent(digits, False, ())
        return _block_view(view, policy, info, extent, offset, life, trailer)
    finally:
        checker.close()


def find_prefix(
    view: StoreView, ns: Namespace, tokens: TokenIds, *, media: Sequence[Media] = (), exact_only: bool = False
) -> PrefixView:
    """Look a prompt up as an engine would, without using it: nothing lives longer for having been asked about."""
    ids = token_bytes(tokens)
    length = len(ids) // 4
    blocks = max(0, length - 1) // BLOCK_TOKENS
    blob = chain_blob(ns.root(), ids, blocks, check_media(media))
    with view.index() as index:
        found = view.blocks(index).find(blob, blocks, None, exact_only=exact_only, use=False)
        if found.reason == "index":
            raise StoreError(f"{view.url}: the index cannot be read; build it anew with kvctl rebuild")
        with index.read() as txn:
            stored = _stored(txn, blob, blocks)
    miss = found.blocks if found.blocks < blocks else None
    key = None if miss is None else blob[miss * KEY_BYTES : (miss + 1) * KEY_BYTES].hex()
    return PrefixView(
        length, blocks, found.blocks, found.blocks * BLOCK_TOKENS, stored, found.reason if key else None, miss, key
    )


def _stored(txn: IndexTxn, blob: bytes, blocks: int) -> int:
    """How many of a prompt's first blocks are on disk, alive or not, gaps left out."""
    at = stored = 0
    cache = ExtentCache()
    while at < blocks:
        here = cache.walk(txn, blob, at, blocks).end - at
        stored += here
        at += here or max(1, txn.absent_run(blob, at, blocks))
    return stored


def _block_view(
    view: StoreView, policy: Policy, info: SegmentInfo | None, extent: Extent, offset: int, life: Life,
    trailer: Trailer | str,
) -> BlockView:  # fmt: skip
    whole = isinstance(trailer, Trailer)
    prefix = extent.prefixes[offset * PREFIX_BYTES : (offset + 1) * PREFIX_BYTES]
    if isinstance(trailer, Trailer) and not trailer.identity.key.startswith(prefix):
        whole, trailer = False, "another block"
    now_s = view.clock.wall()
    until, keeper = life.deadline(offset, policy)
    pin = _last(life.steps, PIN_CLASS, offset)
    slot = extent.first_slot + offset
    chain_pos = extent.chain_pos + offset
    return BlockView(
        key=trailer.identity.key.hex() if isinstance(trailer, Trailer) else prefix.hex(),
        alive=offset < life.alive(Cutoffs(policy, now_s)),
        keeper=None if keeper is None else policy.name_of(keeper),
        until_s=until,
        pinned_until_s=pin,
        uses=_uses(life, offset, policy, now_s),
        stored_s=_last(life.steps, BORN_CLASS, offset) or 0.0,
        stored_by=policy.name_of(extent.class_id),
        origin=Origin(extent.origin).name.lower(),
        file="" if info is None else info.name(extent.segment),
        segment=extent.segment,
        slot=slot,
        file_offset=slot * view.geometry.slot_bytes,
        slot_bytes=view.geometry.slot_bytes,
        chain_pos=chain_pos,
        first_token=chain_pos * BLOCK_TOKENS,
        extent_slot=extent.first_slot,
        extent_blocks=life.n,
        content="whole" if whole else str(trailer),
        # The first block's parent is the tenant's root, from which keys could be guessed.
        parent=trailer.identity.parent.hex() if isinstance(trailer, Trailer) and chain_pos else None,
    )


def _uses(life: Life, offset: int, policy: Policy, now_s: float) -> tuple[ClassUse, ...]:
    numbers = {policy.class_id(name) for name in policy.classes} | {n for n in life.steps if n < PIN_CLASS}
    born = life.steps.get(BORN_CLASS, [])
    cutoffs = Cutoffs(policy, now_s)
    uses = []
    for number in sorted(numbers):
        rule = policy.rule_of(number)
        last = _last(life.steps, number, offset)
        until, alive = None, False
        if last is not None:
            alone = Life(life.n, life.chain_pos, life.first, {number: life.steps[number], BORN_CLASS: born})
            until, alive = alone.deadline(offset, policy)[0], offset < alone.alive(cutoffs)
        uses.append(ClassUse(policy.name_of(number), rule.ttl_s, rule.mode, last, until, alive))
    return tuple(uses)


def _last(steps: Steps, number: int, block: int) -> float | None:
    """The time of a class's last use of a block."""
    return next((stamp_s(stamp) for upto, stamp in steps.get(number, []) if block < upto), None)
