"""The block slots in use, and which of them hold a block that another request may read at its own key."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from duokv.engine.slots import BlockSlots


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A whole block in a slot. exact: its bytes are a cold run's."""

    slot: int
    exact: bool


class LiveBlocks:
    """Slots with reference counts, shared between live requests by block key. Thread-safe.

    Nothing is kept alive here: a block can be shared as long as a request holds its slot. Shared slots are never
    written, since their blocks are below every reader's write floor and complete in their writer's.
    """

    def __init__(self, slots: BlockSlots) -> None:
        self.slots = slots
        self._lock = threading.Lock()
        self._by_key: dict[bytes, LiveBlock] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Slots that nobody holds."""
        return self.slots.free

    def allocate(self, n: int) -> list[int]:
        """Take n slots; SlotsExhausted, with none taken, if fewer are free."""
        with self._lock:
            return self.slots.allocate(n)

    def release(self, slots: Sequence[int]) -> None:
        """Give references back."""
        with self._lock:
            for slot in self.slots.release(slots):
                key = self._key_of.pop(slot, None)
                if key is not None:
                    del self._by_key[key]

    def hold(self, keys: Iterable[bytes], *, exact_blocks: int) -> list[LiveBlock]:
        """Take a reference to each of the leading blocks of `keys` that are live.

        exact_blocks: the store holds the first so many in exact bytes, so approximate ones do not stand in for them.
        """
        with self._lock:
            held: list[LiveBlock] = []
            for key in keys:
                block = self._by_key.get(key)
                if block is None or (len(held) < exact_blocks and not block.exact):
                    break
                held.append(block)
            self.slots.retain([block.slot for block in held])
            return held

    def live_run(self, keys: Iterable[bytes]) -> int:
        """How many leading blocks of `keys` are live now."""
        with self._lock:
            run = 0
            for key in keys:
                if key not in self._by_key:
                    break
                run += 1
            return run

    def share(self, keys: Iterable[bytes], blocks: Iterable[LiveBlock]) -> None:
        """Let others read whole blocks under their keys, as long as their slots are held; exact ones come first."""
        with self._lock:
            for key, block in zip(keys, blocks, strict=True):
                known = self._by_key.get(key)
                if known is None or (block.exact and not known.exact):
                    if known is not None:
                        del self._key_of[known.slot]
                    self._by_key[key] = block
                    self._key_of[block.slot] = key

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise, as `BlockSlots.check_integrity` does, unless references are those of `held`, a slot per reference."""
        with self._lock:
            expected = Counter(held)
            self.slots.check_integrity(expected)
            lost = self._key_of.keys() - expected.keys()
            if lost:
                raise AssertionError(f"block slots {sorted(lost)} are shared and nobody holds them")
