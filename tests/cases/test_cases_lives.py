"""Space and lives: cases 10, 12, 13 and 14."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

import pytest
from store_kit import GEOMETRY, NS, SLOT, census, check_space, config, prompt, record

from duokv.connectors.fs_faulty import FaultyBackend, Operation
from duokv.connectors.fs_memory import MemoryBackend
from duokv.connectors.fs_posix import PosixBackend
from duokv.kvstore import CacheGeometry, ClassRule, KVStore, Policy, StoreConfig, SwaWindow, chain_keys, open_store
from duokv.kvstore.events import BlocksEvicted
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import PIN_CLASS

if TYPE_CHECKING:
    from cases.conftest import World

MIB = 1 << 20
DAY_S = 86_400.0
LARGE = CacheGeometry.opaque("large", payload_bytes=60 * 1024, swa_bytes=4096)


def evicted(store: KVStore, reason: str) -> int:
    return store.stats().counts.get(f'blocks_evicted{{reason="{reason}"}}', 0)


# 10


def prompts(total_blocks: int, sizes: Sequence[int]) -> Iterator[list[int]]:
    """Prompts of these many blocks in turn, none like another, until they are `total_blocks`."""
    made = turn = 0
    while made < total_blocks:
        blocks = sizes[turn % len(sizes)]
        yield prompt([turn] * blocks)
        made, turn = made + blocks, turn + 1


class Watched(FaultyBackend):
    """Counts the bytes its segment files take before every operation."""

    most = 0

    def _begin(self, operation: Operation) -> list[object]:  # type: ignore[override]
        self.most = max(self.most, sum(file.allocated for file in self.inner.list("seg/")))
        self.log.clear()
        return super()._begin(operation)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("geometry", "sizes", "ahead"),
    [(LARGE, [1], 1), (LARGE, [20], 2 * MIB), (GEOMETRY, [2005, 3, 700, 1, 3000], MIB // 8)],
    ids=["one block", "twenty blocks", "mixed and too many"],
)
@pytest.mark.parametrize("can_punch", [True, False], ids=["punch", "whole files"])
def test_case_10_capacity_holds_at_every_operation(
    world: World, can_punch: bool, geometry: CacheGeometry, sizes: list[int], ahead: int
) -> None:
    """A cache of 8 MiB was written 80 MiB, counted its entries and not what they took, and filled the disk.

    Here the bytes that files take, space reserved ahead included, never exceed the capacity by more than one record.
    """
    backend = Watched(MemoryBackend(can_punch=can_punch, metadata_only=True))
    settings = config(capacity=8 * MIB, segment_bytes=256 * MIB, preallocate_bytes=ahead)
    store = open_store("memory://", geometry=geometry, config=settings, clock=world.hands.clock, backend=backend)
    total = 80 * MIB // geometry.slot_bytes
    for turn, tokens in enumerate(prompts(total, sizes)):
        world.hands.now += 1
        blocks = [bytes(geometry.payload_bytes)] * (len(tokens) // 128)
        done = store.commit(NS, tokens, blocks, traffic=("brief", "long", "keep")[turn // 2 % 3])
        assert done.new > 0
        assert done.dropped == 0 or len(blocks) > 2000
    assert backend.most <= 8 * MIB + geometry.slot_bytes
    assert backend.most > 7 * MIB, "and the space is used"
    store.close()


def test_case_10_capacity_holds_on_disk(world: World) -> None:
    """The same by the blocks that the file system counts, after every commit."""
    settings = config(capacity=8 * MIB, segment_bytes=256 * MIB, preallocate_bytes=8 * MIB, fsync="none")
    store = open_store(f"file://{world.root}", geometry=LARGE, config=settings, clock=world.hands.clock)
    most = written = 0
    for tokens in prompts(80 * MIB // LARGE.slot_bytes, [30]):
        world.hands.now += 1
        written += store.commit(NS, tokens, [bytes(LARGE.payload_bytes)] * 30).new * LARGE.slot_bytes
        most = max(most, sum(path.stat().st_blocks * 512 for path in world.segments()))
    assert written >= 80 * MIB
    assert 7 * MIB < most <= 8 * MIB + LARGE.slot_bytes
    store.close()
    assert sum(path.stat().st_blocks * 512 for path in world.segments()) <= 8 * MIB + LARGE.slot_bytes


# 12


def pins(store: KVStore) -> int:
    """Blocks that a pin holds now."""
    with store._index.read() as txn:
        return sum(life.pinned(store._clock.wall()) for _, life in txn.lives())


@pytest.mark.parametrize("closed", [False, True], ids=["running", "reopened"])
def test_case_12_a_pin_nobody_came_back_for_runs_out(world: World, closed: bool) -> None:
    """A lookup locked its blocks for a load that never came; locked for ever, they filled the cache.

    Here holding blocks is a pin with an end. Before it they stay whatever the pressure; after it they go like others.
    """
    backend, settings = MemoryBackend(), config(capacity_blocks=10)
    store = world.on(backend, settings)
    held = prompt([1] * 6)
    world.put(store, held, traffic="keep")
    assert store.pin(store.lookup(NS, held, "keep").keys, ttl_s=60) == 6
    assert pins(store) == 6
    if closed:
        store.close()
        store = world.on(backend, settings)
    for number in range(10, 20):
        world.hands.now += 5
        world.put(store, prompt([number] * 2), traffic="keep")
    assert pins(store) == 6
    assert store.commit(NS, prompt([30] * 6), world.content(chain_keys(NS, prompt([30] * 6)))).dropped == 2
    assert world.get(store, held, traffic="keep") == 6
    world.hands.now += 11
    assert pins(store) == 0
    assert world.put(store, prompt([31] * 10), traffic="keep") == 10
    assert store.lookup(NS, held).tokens == 0
    assert not [held for held in census(store).blocks.values() if held.stamps.get(PIN_CLASS)]


def test_case_12_kvctl_lists_a_pin_while_it_holds(world: World) -> None:
    """The same for an operator: what is held is listed, and what has run out is not."""
    world.hands.now = time.time()
    store = world.on_files()
    tokens = prompt([1, 2, 3])
    world.put(store, tokens, traffic="keep")
    for ttl_s, held in ((0.0, 0), (3600.0, 3)):
        assert store.pin(chain_keys(NS, tokens), ttl_s=ttl_s) == 3
        assert json.loads(world.kvctl("stat", "--json")[1])["pinned"] == held


def test_case_12_a_pin_outlasts_expiry_and_ends_it(world: World) -> None:
    """The same against the class's own life: a pin keeps an expired block to its own end, and no longer."""
    store = world.on(MemoryBackend())
    tokens = prompt([1, 2, 3])
    world.put(store, tokens, traffic="brief")
    assert store.pin(chain_keys(NS, tokens)[:2], ttl_s=60) == 2
    world.hands.now += 59
    store.maintain()
    hit = store.lookup(NS, tokens, "brief")
    assert (hit.tokens, world.load(store, hit)) == (2 * 128, 2)
    world.hands.now += 11  # past the pin, and past the life after that use
    store.maintain()
    assert (store.lookup(NS, tokens).tokens, store.stats().blocks) == (0, 0)


def test_case_12_a_window_lease_holds_and_then_lets_go(world: World) -> None:
    """The same for windows: one lent is never evicted or expired, and one given back is as free as any."""
    settings = config(swa_bytes=2 * GEOMETRY.swa_bytes, swa_expiry_s=180.0)
    store = world.on(MemoryBackend(), settings)

    def put(key: bytes) -> bool:
        return store.put_window(key, SwaWindow(128, memoryview(key * GEOMETRY.swa_bytes), 0, Origin.EXACT))

    assert put(b"a")
    assert put(b"b")
    with ExitStack() as request:
        lent = [request.enter_context(store.lease_window(key)) for key in (b"a", b"b")]
        world.hands.now += 1000
        store.maintain()
        assert store.stats().windows.leased == 2
        assert not put(b"c"), "no room, and nobody's window is taken"
        assert [window is not None and bytes(window.data or b"")[:1] for window in lent] == [b"a", b"b"]
    assert store.stats().windows.leased == 0
    assert put(b"c")
    world.hands.now += 181
    store.maintain()
    assert store.stats().windows.windows == 0


# 13


def classes(mode: Literal["sliding", "fixed"]) -> StoreConfig:
    rules = {"agent": ClassRule(3 * DAY_S, mode), "chat": ClassRule(7 * DAY_S)}
    return config(seed_policy=Policy(rules, "chat").numbered())


@pytest.mark.parametrize(
    ("mode", "read_at", "asked_at", "hit"),
    [
        ("sliding", 2.9, 3.1, True),
        ("sliding", 2.9, 5.9, True),
        ("sliding", 2.9, 5.9001, False),
        ("sliding", 3.0, 6.0, True),
        ("fixed", 2.9, 3.0, True),
        ("fixed", 2.9, 3.0001, False),
        ("fixed", 2.9, 3.1, False),
    ],
)
@pytest.mark.parametrize("maintained", [False, True], ids=["on disk", "swept"])
def test_case_13_a_life_counts_from_where_its_class_says(
    world: World, mode: Literal["sliding", "fixed"], read_at: float, asked_at: float, hit: bool, maintained: bool
) -> None:
    """A lease of three days was renewed by a read just before its end, or was not; nobody could say which was meant.

    Here the class says: sliding counts from the last use, fixed from the store.
    """
    store = world.on(MemoryBackend(), classes(mode))
    start, tokens = world.hands.now, prompt([1, 2, 3])
    world.put(store, tokens, traffic="agent")
    world.hands.now = start + read_at * DAY_S
    assert world.get(store, tokens, traffic="agent") == 3
    world.hands.now = start + asked_at * DAY_S
    if maintained:
        store.maintain()  # a clock that both hands show has not jumped
    asked = store.lookup(NS, tokens, "agent")
    assert (asked.tokens > 0, world.load(store, asked)) == (hit, 3 if hit else 0)
    assert asked.miss_reason == (None if hit else "absent" if maintained else "expired")


@pytest.mark.parametrize("mode", ["sliding", "fixed"])
def test_case_13_an_expired_entry_is_revived_by_no_read_but_by_a_commit(
    world: World, mode: Literal["sliding", "fixed"]
) -> None:
    """A read after the end found the bytes still on the disk and set the life going again.

    Here asking, by whichever class and however often, changes nothing; storing it again renews it, without rewriting.
    """
    store = world.on(MemoryBackend(), classes(mode))
    tokens = prompt([1, 2, 3])
    world.put(store, tokens, traffic="agent")
    world.hands.now += 3.1 * DAY_S
    for traffic in ("agent", "chat", "agent"):
        assert store.lookup(NS, tokens, traffic).miss_reason == "expired"
        assert store.pin(chain_keys(NS, tokens), ttl_s=60) == 0
    done = store.commit(NS, tokens, world.content(chain_keys(NS, tokens)), traffic="agent")
    assert (done.new, done.present) == (0, 3)
    world.hands.now += 2.9 * DAY_S
    assert world.get(store, tokens, traffic="agent") == 3
    world.hands.now += 3.1 * DAY_S
    assert store.lookup(NS, tokens, "agent").tokens == 0


@pytest.mark.parametrize("mode", ["sliding", "fixed"])
def test_case_13_a_use_by_a_longer_class_keeps_a_block_that_a_shorter_one_stored(
    world: World, mode: Literal["sliding", "fixed"]
) -> None:
    """The same for blocks of two classes: the latest deadline counts, for as much of the prefix as was used."""
    store = world.on(MemoryBackend(), classes(mode))
    start, tokens = world.hands.now, prompt([1, 2, 3])
    world.put(store, tokens, traffic="agent")
    world.hands.now = start + 1 * DAY_S
    assert world.get(store, tokens[: 2 * 128 + 1], traffic="chat") == 2
    world.hands.now = start + 3.1 * DAY_S
    store.maintain()
    assert store.stats().blocks == 2
    hit = store.lookup(NS, tokens, "agent")
    assert (hit.tokens, hit.miss_reason) == (2 * 128, "absent")


# 14


def test_case_14_a_second_life_does_not_end_at_the_first_deadline(world: World) -> None:
    """An entry evicted for space left its timer behind, which killed the entry that took its name later.

    Here the deadline that passes is of something gone: nothing happens, and nothing is counted.
    """
    backend = MemoryBackend()
    store = world.on(backend, config(capacity_blocks=6))
    tokens = prompt([1, 2, 3])
    world.put(store, tokens, traffic="long")
    start = world.hands.now
    world.hands.now = start + 10
    world.put(store, prompt([4] * 6), traffic="keep")
    assert (evicted(store, "capacity"), store.lookup(NS, tokens).tokens) == (3, 0)
    world.hands.now = start + 60
    assert world.put(store, tokens, traffic="long") == 3
    events = record(store)
    before = store.stats()
    world.hands.now = start + 101
    store.maintain()
    assert store.stats().counts == before.counts
    assert not [event for event in events if isinstance(event, BlocksEvicted)]
    assert world.get(store, tokens, traffic="long") == 3
    world.hands.now = start + 101 + 101
    store.maintain()
    assert evicted(store, "expired") == 3
    check_space(store, backend)
    assert store.stats().physical_bytes >= 3 * SLOT


def test_case_14_a_closed_and_opened_store_keeps_the_second_life(world: World) -> None:
    """The same when the old deadline passes while the store is closed, and when the index is lost meanwhile."""
    store = world.on_files(config(capacity_blocks=6), PosixBackend(world.root))
    tokens = prompt([1, 2, 3])
    world.put(store, tokens, traffic="long")
    start = world.hands.now
    world.hands.now = start + 10
    world.put(store, prompt([4] * 6), traffic="keep")
    world.hands.now = start + 60
    world.put(store, tokens, traffic="long")
    store.close()
    world.hands.now = start + 101
    for lost in (False, True):
        if lost:
            for path in (world.root / "index").iterdir():
                path.unlink()
        store = world.on_files(config(capacity_blocks=6))
        store.maintain()
        assert world.get(store, tokens, traffic="long") == 3
        assert evicted(store, "expired") == 0
        store.close()
