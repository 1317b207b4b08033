"""Block slots are counted, never given out twice, and hold planes as blocks store them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duokv.engine.config import ModelConfig
from duokv.engine.model import PlaneEntries
from duokv.engine.slots import BlockSlots, PlaneSlots, SlotsExhausted
from duokv.kernels.formats import decode, encode, pack_block
from duokv.kvstore.errors import UsageError

CONFIG = ModelConfig.preset("tiny")
CACHE = CONFIG.cache


def test_a_slot_is_a_stored_payload() -> None:
    slots = BlockSlots(CACHE, 3)
    assert slots.memory.shape == (3, CACHE.payload_bytes)
    assert slots.memory.dtype == torch.uint8
    assert slots.free == 3


def test_asking_for_too_many_takes_none() -> None:
    slots = BlockSlots(CACHE, 3)
    held = slots.allocate(2)
    with pytest.raises(SlotsExhausted, match="2 slots wanted, 1 of 3 free"):
        slots.allocate(2)
    assert slots.free == 1
    slots.check_integrity(dict.fromkeys(held, 1))


def test_release_tells_what_became_free() -> None:
    slots = BlockSlots(CACHE, 4)
    one, other = slots.allocate(2)
    slots.retain([one])
    assert slots.release([one, other]) == [other]
    assert slots.release([one]) == [one]
    assert slots.free == 4


@pytest.mark.parametrize("wrong", [[2], [0, 0]], ids=["never held", "held once"])
def test_what_is_not_held_cannot_be_released(wrong: list[int]) -> None:
    slots = BlockSlots(CACHE, 3)
    held = slots.allocate(2)
    assert held == [0, 1]
    for call in (slots.release, slots.retain):
        if call == slots.retain and wrong == [0, 0]:
            continue
        with pytest.raises(UsageError, match="is not held"):
            call([1, *wrong])
    slots.check_integrity({0: 1, 1: 1})


def test_no_slots_are_refused() -> None:
    with pytest.raises(UsageError, match="0 slots"):
        BlockSlots(CACHE, 0)


def test_freed_slots_are_poisoned_and_their_padding_comes_back_clean() -> None:
    slots = BlockSlots(CACHE, 1, poison=True)
    last = CACHE.planes[-1]
    used = last.offset + last.nbytes
    (slot,) = slots.allocate(1)
    assert bool((slots.memory[slot, :used] == 0xFF).all())
    assert not slots.memory[slot, used:].any()
    slots.memory[slot] = 7
    slots.release([slot])
    assert bool((slots.memory[slot] == 0xFF).all())


@pytest.mark.parametrize("layer", CONFIG.table.owners)
def test_planes_lie_as_blocks_store_them(layer: int) -> None:
    """Entries written in any order and slots are the bytes that the geometry lays out, and only those."""
    slots = BlockSlots(CACHE, 4)
    slots.memory.fill_(0xA5)
    plane = PlaneSlots(CONFIG, layer, slots)
    part = next(part for part in CACHE.planes if part.layer == layer)
    count = 128 // part.ratio
    table = [2, 0]
    latent = torch.randn(2 * count, CONFIG.head_dim)
    index_k = torch.randn(2 * count, CONFIG.index_dim)
    for chosen in torch.split(torch.randperm(2 * count), 37):
        plane.write(plane.places(table, chosen), PlaneEntries(latent[chosen], index_k[chosen]))
    for slot, own in zip(table, (slice(count), slice(count, None)), strict=True):
        stored = slots.memory[slot].clone()
        parts = (
            (encode(latent[own], CONFIG.latent_format), CONFIG.latent_format),
            (
                encode(index_k[own], CONFIG.index_format),
                CONFIG.index_format,
            ),
        )
        written = torch.cat([pack_block(records, fmt) for records, fmt in parts])
        assert torch.equal(stored[part.offset : part.offset + part.nbytes], written)
        stored[part.offset : part.offset + part.nbytes] = 0xA5
        assert bool((stored == 0xA5).all())
    assert bool((slots.memory[[1, 3]] == 0xA5).all())
    asked = torch.tensor([0, count, count - 1, 2 * count - 1])
    wanted = decode(encode(latent[asked], CONFIG.latent_format), CONFIG.latent_format, torch.float32)
    assert torch.equal(plane.latents(plane.places(table, asked)), wanted)
    keys = decode(encode(index_k, CONFIG.index_format), CONFIG.index_format, torch.float32)
    assert torch.equal(plane.index_keys(table), keys)


class Holders(RuleBasedStateMachine):
    """Requests that take, share and give back slots, next to a plain count."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = BlockSlots(CACHE, 6)
        self.held: list[int] = []

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        free = 6 - len(set(self.held))
        if count > free:
            with pytest.raises(SlotsExhausted):
                self.slots.allocate(count)
            return
        taken = self.slots.allocate(count)
        assert len(set(taken)) == count
        assert not set(taken) & set(self.held)
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.slots.retain([slot])
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        assert self.slots.release([slot]) == ([] if slot in self.held else [slot])

    @invariant()
    def adds_up(self) -> None:
        expected = {slot: self.held.count(slot) for slot in self.held}
        self.slots.check_integrity(expected)
        assert self.slots.free == 6 - len(expected)
        with pytest.raises(AssertionError, match="references"):
            self.slots.check_integrity({**expected, 0: expected.get(0, 0) + 1})


TestHolders = Holders.TestCase
