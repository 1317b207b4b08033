"""Sessions side by side, and a store closed and opened: cases 01 and 07."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal

import pytest
from store_kit import GEOMETRY, NS, SLOT, census, check_space, config, prompt

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import KVStore, Origin, SwaWindow, chain_keys

if TYPE_CHECKING:
    from cases.conftest import World

SESSIONS = 6
TURNS = 25


class Session:
    """A conversation that grows, is asked for again, and now and then starts anew from a beginning it shares."""

    def __init__(self, world: World, store: KVStore, number: int, start: threading.Barrier) -> None:
        self.world, self.store = world, store
        self.random = random.Random(number)
        self.start = start
        self.counts: Counter[str] = Counter()
        self.shared = [number // 2] * 4
        self.path = [*self.shared]

    def run(self) -> Counter[str]:
        self.start.wait()
        for _ in range(TURNS):
            if len(self.path) > 20:
                self.path = [*self.shared]
            self.path += [self.random.randrange(3) for _ in range(self.random.randrange(1, 5))]
            self.turn(prompt(self.path))
        return self.counts

    def turn(self, tokens: list[int]) -> None:
        keys = chain_keys(NS, tokens)
        hit = self.store.lookup(NS, tokens)
        assert hit.keys == keys[: len(hit.keys)]
        self.counts["loaded"] += self.world.load(self.store, hit)
        for key in (keys[len(self.shared) - 1], keys[-1]):
            with self.store.lease_window(key) as window:
                if window is not None:
                    assert bytes(window.data or b"") == self.window_of(key)
                    self.counts["windows"] += 1
            self.store.put_window(key, SwaWindow(128, memoryview(self.window_of(key)), 0, Origin.EXACT))
        first = self.random.choice([0, len(hit.keys)])
        done = self.store.commit(NS, tokens, self.world.content(keys[first:]), first_block=first)
        self.counts["stored"] += done.new
        again = self.store.lookup(NS, tokens)
        self.counts["loaded"] += self.world.load(self.store, again)

    def window_of(self, key: bytes) -> bytes:
        return key * (GEOMETRY.swa_bytes // len(key))


@pytest.mark.parametrize("place", ["memory", "memory without punch", "files"])
def test_case_01_interleaved_sessions_get_their_own_blocks(
    world: World, place: Literal["memory", "memory without punch", "files"]
) -> None:
    """Sessions that stored and read at once, in a cache too small for them, were given each other's blocks.

    Every block here is filled from its own key and compared with it whenever it comes back; what is not there misses.
    """
    settings = config(
        capacity=64 * 3 * SLOT, capacity_blocks=60, swa_bytes=4 * GEOMETRY.swa_bytes, fsync="none", read_threads=4,
        maintenance_interval_s=0.01,
    )  # fmt: skip
    backend = MemoryBackend(can_punch=place == "memory")
    store = world.on_files(settings) if place == "files" else world.on(backend, settings)
    start = threading.Barrier(SESSIONS)
    sessions = [Session(world, store, number, start) for number in range(SESSIONS)]
    with ThreadPoolExecutor(SESSIONS) as pool:
        counts = sum((future.result() for future in [pool.submit(session.run) for session in sessions]), Counter[str]())
    told = store.stats().counts
    assert min(counts["loaded"], counts["windows"], counts["stored"]) > 0
    assert told['blocks_evicted{reason="capacity"}'] > 0, "the cache was too small"
    assert told.get("blocks_quarantined", 0) == 0
    assert told["blocks_loaded"] == counts["loaded"]
    assert census(store).totals[1] <= 60
    if place != "files":
        check_space(store, backend)


def test_case_07_a_store_opened_again_has_everything_and_writes_nothing(world: World) -> None:
    """After a restart the cache was empty though its files were full, and wrote all of it again.

    Here a hundred blocks are a hundred hits of the same bytes, nothing is rewritten, and all counts are as before.
    """
    prompts = [prompt([number, *range(9)]) for number in range(10)]
    store = world.on_files()
    assert [world.put(store, tokens) for tokens in prompts] == [10] * 10
    store.close()
    told = stat(world)
    sizes = {path: path.stat().st_size for path in world.segments()}
    store = world.on_files()
    before = store.stats()
    assert before.blocks == 100
    assert [world.get(store, tokens) for tokens in prompts] == [10] * 10
    for tokens in prompts:
        done = store.commit(NS, tokens, world.content(chain_keys(NS, tokens)))
        assert (done.new, done.present, done.dropped) == (0, 10, 0)
    after = store.stats()
    assert after.counts["bytes_written"] == 0
    for name in ("blocks", "extents", "segments", "physical_bytes"):
        assert getattr(after, name) == getattr(before, name)
    store.close()
    assert {path: path.stat().st_size for path in world.segments()} == sizes
    assert stat(world) == told
    assert told["blocks"] == 100


def stat(world: World) -> dict[str, object]:
    """What `kvctl stat` counts."""
    code, printed = world.kvctl("stat", "--json")
    assert code == 0
    told = json.loads(printed)
    return {name: told[name] for name in ("blocks", "extents", "segments", "physical_bytes", "live_bytes", "damage")}
