"""Write-back: a bounded queue that never waits, and that says what it dropped."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from engine_kit import CONFIG, NS, World, text

from duokv.connectors.fs_faulty import Fail, Stall
from duokv.engine.writeback import Leavings, WriteBack
from duokv.kvstore import Commit, Origin, SwaWindow, chain_keys
from duokv.kvstore.events import BlocksStored, Degraded

TOKENS = text(1, 700)
KEYS = chain_keys(NS, TOKENS)
PAYLOAD = CONFIG.cache.payload_bytes
USED = CONFIG.cache.planes[-1].offset + CONFIG.cache.planes[-1].nbytes


class Desk:
    """A store, engine memory of random bytes, and a queue between them for two blocks."""

    def __init__(self, capacity_bytes: int = 2 * PAYLOAD) -> None:
        self.world = World()
        self.memory = torch.randint(0, 256, (8, PAYLOAD), dtype=torch.uint8)
        self.writeback = WriteBack(self.world.store, self.memory, capacity_bytes=capacity_bytes)
        self.released = threading.Event()

    def stall(self) -> None:
        """Let the next write to the backend wait."""
        self.world.backend.inject(Stall(kind="write", until=self.released))

    def offer(self, first: int, *slots: int, windows: tuple[int, ...] = (), origin: Origin = Origin.EXACT) -> bool:
        states = tuple(SwaWindow(end, memoryview(state(end)), end - 128, origin) for end in windows)
        return self.writeback.offer(Leavings(NS, TOKENS, "agent", first, slots, states, origin))

    def close(self) -> None:
        self.released.set()
        self.writeback.close()
        self.world.close()


def state(end: int) -> bytes:
    return bytes([end % 251]) * CONFIG.cache.swa_bytes


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def test_blocks_and_states_arrive_under_their_keys(desk: Desk) -> None:
    assert desk.offer(0, 5, 2, windows=(128, 256), origin=Origin.APPROX)
    assert desk.offer(2)
    assert desk.writeback.drain(60.0)
    stored = desk.world.blocks()
    assert [stored[key][0] for key in KEYS[:2]] == [Origin.APPROX] * 2
    for key, slot in zip(KEYS, (5, 2), strict=False):
        assert stored[key][1][:USED] == desk.memory[slot, :USED].numpy().tobytes()
    for end in (128, 256):
        with desk.world.store.lease_window(KEYS[end // 128 - 1]) as window:
            assert window == SwaWindow(end, memoryview(state(end)), end - 128, Origin.APPROX)
    assert [event.traffic for event in desk.world.events if isinstance(event, BlocksStored)] == ["agent"]


def test_padding_is_zero_whatever_its_slot_held_before(desk: Desk) -> None:
    """Nothing writes it, so it would carry another request's bytes into the store."""
    assert USED < PAYLOAD
    assert desk.offer(0, 3)
    assert desk.writeback.drain(60.0)
    assert desk.world.blocks()[KEYS[0]][1][USED:] == bytes(PAYLOAD - USED)


def test_blocks_are_not_overwritten_by_later_ones_while_they_are_stored(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = desk.world.store
    commit = store.commit

    def overtaken(*args: object, **named: object) -> Commit:
        monkeypatch.undo()
        desk.memory[5] = 0
        assert desk.offer(1, 2)
        return commit(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "commit", overtaken)
    expected = [desk.memory[slot, :USED].numpy().tobytes() for slot in (5, 2)]
    assert desk.offer(0, 5)
    assert desk.writeback.drain(60.0)
    stored = desk.world.blocks()
    assert [stored[key][1][:USED] for key in KEYS[:2]] == expected


def test_blocks_are_copied_when_they_are_taken_over(desk: Desk) -> None:
    before = desk.memory[1, :USED].numpy().tobytes()
    desk.stall()
    assert desk.offer(0, 1)
    desk.memory[1] = 0xFF
    desk.released.set()
    assert desk.writeback.drain(60.0)
    assert desk.world.blocks()[KEYS[0]][1][:USED] == before


def test_a_full_queue_drops_counts_and_does_not_wait(desk: Desk) -> None:
    desk.stall()
    assert desk.offer(0, 0)
    assert desk.offer(1, 1)
    assert not desk.offer(2, 2, windows=(256,))
    assert not desk.writeback.drain(0.0)
    assert (desk.writeback.dropped_blocks, desk.writeback.dropped_windows) == (1, 1)
    desk.released.set()
    assert desk.writeback.drain(60.0)
    assert set(desk.world.blocks()) == set(KEYS[:2])
    assert desk.offer(2, 2)
    assert desk.writeback.drain(60.0)
    assert set(desk.world.blocks()) == set(KEYS[:3])


def test_an_empty_queue_takes_what_is_larger_than_itself() -> None:
    desk = Desk(capacity_bytes=0)
    desk.stall()
    assert desk.offer(0, 0, 1, 2, 3)
    assert not desk.offer(4, 4)
    desk.close()
    assert desk.writeback.dropped_blocks == 1


def test_a_store_that_fails_or_is_closed_is_an_event(desk: Desk) -> None:
    desk.world.backend.inject(Fail(kind="write"))
    assert desk.offer(0, 0, windows=(128,))
    assert desk.writeback.drain(60.0)
    assert desk.world.blocks() == {}
    assert desk.offer(0, 0)
    assert desk.writeback.drain(60.0)
    assert len(desk.world.blocks()) == 1
    desk.world.store.close()
    assert desk.offer(1, 1)
    assert desk.writeback.drain(60.0)
    assert [event.what for event in desk.world.events if isinstance(event, Degraded)] == ["write-back"]


def test_closing_stores_what_was_taken_over_and_ends_the_thread(desk: Desk) -> None:
    for block in range(5):
        while not desk.offer(block, block):
            desk.writeback.drain(60.0)
    desk.writeback.close()
    assert len(desk.world.blocks()) == 5
    assert not any(thread.name == "duokv-writeback" for thread in threading.enumerate())


def test_blocks_that_no_memory_could_be_had_for_are_not_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: int) -> None:
        raise MemoryError

    monkeypatch.setattr(desk.world.store, "buffers", none)
    with pytest.raises(MemoryError):
        desk.offer(0, 5, 2)
    monkeypatch.undo()
    assert desk.writeback.drain(1.0)
    assert desk.offer(0, 5, 2)
    assert desk.writeback.drain(60.0)
    assert len(desk.world.blocks()) == 2
