"""Block KV in engine memory: a fixed number of slots of one block each, shared by requests and counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from duokv.engine.config import ModelConfig
from duokv.engine.model import PlaneEntries
from duokv.kernels.formats import RecordFormat, block_parts, decode, encode
from duokv.kernels.transfer import transfer_for
from duokv.kvstore.errors import UsageError
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import BLOCK_TOKENS

_POISON = 0xFF
"""Decodes to NaN in every scale and every e4m3 value, so that a read of a freed slot shows."""


class SlotsExhausted(Exception):  # noqa: N818  says what happened
    """Fewer slots are free than were asked for; nothing was taken."""


class BlockSlots:
    """Slots of Block KV and their reference counts. Not thread-safe, but `memory` may be filled by other threads.

    memory: uint8 [num_slots, payload_bytes]; a row is one block's stored payload, so storing and loading copy rows.
    poison: freed and never used slots hold 0xFF, for tests.
    """

    def __init__(self, cache: CacheGeometry, num_slots: int, *, poison: bool = False) -> None:
        if num_slots < 1:
            raise UsageError(f"engine memory of {num_slots} slots holds no block; give at least 1")
        self.memory = torch.zeros((num_slots, cache.payload_bytes), dtype=torch.uint8)
        self.transfer = transfer_for(self.memory)
        """For what comes from the store."""
        self._references = [0] * num_slots
        # Taken from the end: the slot freed last, whose memory is warm, is used first.
        self._free = list(range(num_slots - 1, -1, -1))
        used = max((plane.offset + plane.nbytes for plane in cache.planes), default=cache.payload_bytes)
        self._padding = slice(used, None)
        self._poison = poison
        if poison:
            self.memory.fill_(_POISON)

    @property
    def free(self) -> int:
        """Slots nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots, one reference each; SlotsExhausted, with nothing taken, if there are fewer."""
        if count > len(self._free):
            raise SlotsExhausted(
                f"engine memory: {count} slots wanted, {len(self._free)} of {len(self._references)} free; "
                "release some, or give the engine more"
            )
        taken = [self._free.pop() for _ in range(count)]
        for slot in taken:
            self._references[slot] = 1
        # Nothing else writes a block's padding, and equal blocks are stored as equal bytes.
        self.memory[taken, self._padding] = 0
        return taken

    def retain(self, slots: Iterable[int]) -> None:
        """Add a reference to each slot; UsageError, with nothing added, if one is free."""
        held = self._held(slots)
        for slot in held:
            self._references[slot] += 1

    def release(self, slots: Iterable[int]) -> list[int]:
        """Drop a reference to each slot and return those that became free by it; UsageError if one is free already."""
        freed = []
        for slot in self._held(slots):
            self._references[slot] -= 1
            if self._references[slot] == 0:
                freed.append(slot)
        if self._poison and freed:
            self.memory[freed] = _POISON
        self._free.extend(freed)
        return freed

    def check_integrity(self, expected: Mapping[int, int]) -> None:
        """Compare with the references that slots should have, by slot; those not named should be free.

        AssertionError naming the first slot that differs.
        """
        for slot, count in enumerate(self._references):
            wanted = expected.get(slot, 0)
            assert count == wanted, f"slot {slot} has {count} references, its holders account for {wanted}"
        free = sorted(self._free)
        assert free == [slot for slot, count in enumerate(self._references) if not count], f"free list {free} is wrong"

    def _held(self, slots: Iterable[int]) -> list[int]:
        """Return the slots as a list, checked to have as many references as they occur."""
        listed = list(slots)
        drops: dict[int, int] = {}
        for slot in listed:
            drops[slot] = drops.get(slot, 0) + 1
            if self._references[slot] < drops[slot]:
                raise UsageError(f"slot {slot} is not held; allocate it first, and release it once per reference")
        return listed


class PlaneSlots:
    """One owning layer's plane inside `BlockSlots`, addressed by entries. Views only; as thread-safe as the slots.

    An entry is addressed by its place: slot * entries_per_block + entry mod entries_per_block.
    """

    def __init__(self, config: ModelConfig, layer: int, slots: BlockSlots) -> None:
        plane = next(plane for plane in config.cache.planes if plane.layer == layer)
        middle = plane.offset + plane.latent_bytes
        self.ratio = plane.ratio
        self.entries_per_block = BLOCK_TOKENS // plane.ratio
        self._latent = _Records(slots.memory[:, plane.offset : middle], config.latent_format)
        self._index = _Records(slots.memory[:, middle : middle + plane.index_bytes], config.index_format)

    def places(self, table: list[int], entries: Tensor) -> Tensor:
        """Return the places of `entries` (any shape, none negative) of the request with this block table."""
        per_block = self.entries_per_block
        return torch.tensor(table)[entries // per_block] * per_block + entries % per_block

    def write(self, places: Tensor, entries: PlaneEntries) -> None:
        """Store entries [m] at `places` [m]."""
        self._latent.write(places, entries.latent)
        self._index.write(places, entries.index_k)

    def latents(self, places: Tensor) -> Tensor:
        """Return the stored latents at `places` [m]: fp32 [m, head_dim]."""
        return self._latent.read(places)

    def index_keys(self, table: list[int]) -> Tensor:
        """Return all indexer K of these blocks, in order: fp32 [len(table) * entries_per_block, index_dim]."""
        return self._index.read_blocks(table)


class _Records:
    """One plane's records of one format: views of their values and of their scales, each [num_slots, n, bytes]."""

    def __init__(self, memory: Tensor, fmt: RecordFormat) -> None:
        self._fmt = fmt
        self._parts = block_parts(memory, fmt)

    def write(self, places: Tensor, values: Tensor) -> None:
        records = encode(values, self._fmt)
        at = self._split(places)
        halves = torch.split(records, [self._fmt.data_bytes, self._fmt.scale_bytes], dim=-1)
        for part, new in zip(self._parts, halves, strict=True):
            part[at] = new

    def read(self, places: Tensor) -> Tensor:
        at = self._split(places)
        return decode(torch.cat([part[at] for part in self._parts], -1), self._fmt, torch.float32)

    def read_blocks(self, table: list[int]) -> Tensor:
        rows = torch.tensor(table)
        return decode(torch.cat([part[rows] for part in self._parts], -1), self._fmt, torch.float32).flatten(0, 1)

    def _split(self, places: Tensor) -> tuple[Tensor, Tensor]:
        per_block = self._parts[0].shape[1]
        return places // per_block, places % per_block
