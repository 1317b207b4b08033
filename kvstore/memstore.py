"""MemStore: the block part of KVStore kept in a dictionary, one entry a block. Slow and obviously right.

The oracle of the store's tests, and a store for programs that want no files. Bookkeeping by extent, staircases, heaps,
segments and batches have no part in it: every rule is applied to every block, one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duokv.kvstore.answers import Commit, PrefixHit
from duokv.kvstore.clock import Clock
from duokv.kvstore.keys import BLOCK_TOKENS, BlockKeys, Media, Namespace, TokenIds, chain_keys, token_bytes
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import Policy
from duokv.kvstore.reader import Rows
from duokv.kvstore.staging import Blocks
from duokv.kvstore.walk import MissReason

Use = tuple[float, int]
"""When a block was used (seconds since the epoch), and the use's place in the order of all uses."""


@dataclass(slots=True)
class MemBlock:
    """A stored block. position: its index in its prompt. uses: the last one of each class."""

    payload: bytes
    origin: Origin
    position: int
    born: Use
    uses: dict[str, Use]
    pinned_until: float = 0.0

    @property
    def last_use(self) -> int:
        """The latest use of any class, in the order of uses."""
        return max(order for _, order in self.uses.values())


class MemStore:
    """The block verbs of KVStore, with the same arguments and results. Not thread-safe.

    policy: may be replaced at any time. capacity_blocks: None is unbounded. blocks: what is stored, by block key.
    """

    def __init__(self, policy: Policy, *, clock: Clock, capacity_blocks: int | None = None) -> None:
        self.policy = policy
        self.blocks: dict[bytes, MemBlock] = {}
        self._clock = clock
        self._capacity = capacity_blocks
        self._order = 0

    def lookup(
        self, ns: Namespace, tokens: TokenIds, traffic: str | None = None, *, media: Sequence[Media] = (),
        require: Origin | None = None,
    ) -> PrefixHit:  # fmt: skip
        """See `KVStore.lookup`."""
        keys = chain_keys(ns, tokens, media)[: max(0, len(token_bytes(tokens)) // 4 - 1) // BLOCK_TOKENS]
        self.policy.class_id(traffic)
        reason: MissReason | None = None
        hits = 0
        for key in keys:
            reason = self._miss(key, require)
            if reason is not None:
                break
            hits += 1
        self._use(keys[:hits], traffic)
        origins = [self.blocks[key].origin for key in keys[:hits]]
        exact = origins.index(Origin.APPROX) if Origin.APPROX in origins else hits
        name = traffic or self.policy.default
        return PrefixHit(hits * BLOCK_TOKENS, keys[:hits], reason, name, exact * BLOCK_TOKENS)

    def load(self, hit: PrefixHit, out: Rows, *, first_block: int = 0) -> int:
        """See `KVStore.load`."""
        loaded = 0
        for row, key in zip(out, hit.keys[first_block:], strict=False):
            block = self.blocks.get(key)
            if block is None:
                break
            row[: len(block.payload)] = np.frombuffer(block.payload, np.uint8)
            loaded += 1
        return loaded

    def commit(
        self, ns: Namespace, tokens: TokenIds, blocks: Blocks, *, first_block: int = 0, traffic: str | None = None,
        origin: Origin = Origin.EXACT, media: Sequence[Media] = (),
    ) -> Commit:  # fmt: skip
        """See `KVStore.commit`."""
        keys = chain_keys(ns, tokens, media)[: first_block + len(blocks)]
        self.policy.class_id(traffic)
        held = [key for key in keys if key in self.blocks]
        revived = [self.blocks[key] for key in held if not self._alive(self.blocks[key])]
        use = self._use(held, traffic)
        for block in revived:
            block.born = use
        wanted, present, reachable = [], 0, True
        for position, key in enumerate(keys):
            stored = self.blocks.get(key)
            reachable = reachable and (stored is not None or position >= first_block)
            absent = stored is None or (origin is Origin.EXACT and stored.origin is Origin.APPROX)
            if position >= first_block and absent and reachable:
                wanted.append(position)
            elif position >= first_block and stored is not None:
                present += 1
        granted = self._make_room(len(wanted), use)
        for position in wanted[:granted]:
            source = blocks[position - first_block]
            payload = source.tobytes() if isinstance(source, np.ndarray) else bytes(source)
            new = MemBlock(payload, origin, position, use, {traffic or self.policy.default: use})
            replaced = self.blocks.get(keys[position])
            if replaced is not None:
                new.uses = {**replaced.uses, **new.uses}
                new.pinned_until = replaced.pinned_until
            self.blocks[keys[position]] = new
        return Commit(granted, present, len(blocks) - present - granted, lambda: None)

    def pin(self, keys: BlockKeys, *, ttl_s: float) -> int:
        """See `KVStore.pin`."""
        held = 0
        for key in keys:
            block = self.blocks.get(key)
            if block is None or not self._alive(block):
                break
            block.pinned_until = max(block.pinned_until, self._clock.wall() + ttl_s)
            held += 1
        return held

    def maintain(self) -> None:
        """See `KVStore.maintain`: delete what expired."""
        self.blocks = {key: block for key, block in self.blocks.items() if self._alive(block)}

    def _use(self, keys: Sequence[bytes], traffic: str | None) -> Use:
        self._order += 1
        use = (self._clock.wall(), self._order)
        for key in keys:
            self.blocks[key].uses[traffic or self.policy.default] = use
        return use

    def _miss(self, key: bytes, require: Origin | None) -> MissReason | None:
        block = self.blocks.get(key)
        if block is None:
            return "absent"
        if require is Origin.EXACT and block.origin is Origin.APPROX:
            return "approx"
        return None if self._alive(block) else "expired"

    def _alive(self, block: MemBlock) -> bool:
        """Within the life of any class that used it, or pinned. A class that was removed follows the default's rule."""
        now = self._clock.wall()
        if block.pinned_until >= now:
            return True
        for name, use in block.uses.items():
            rule = self.policy.classes.get(name, self.policy.classes[self.policy.default])
            start = use if rule.mode == "sliding" else block.born
            if rule.ttl_s is None or start[0] + rule.ttl_s >= now:
                return True
        return False

    def _make_room(self, wanted: int, use: Use) -> int:
        """Delete expired blocks, then the least recently used and deepest, until `wanted` fit; how many do fit.

        What the commit of `use` builds on is spared, and what is pinned.
        """
        if self._capacity is None:
            return wanted
        if len(self.blocks) + wanted > self._capacity:
            self.maintain()
        while len(self.blocks) + wanted > self._capacity:
            victims = [
                (block.last_use, -block.position, key)
                for key, block in self.blocks.items()
                if block.last_use < use[1] and block.pinned_until < self._clock.wall()
            ]
            if not victims:
                return max(0, self._capacity - len(self.blocks))
            del self.blocks[min(victims)[2]]
        return wanted
