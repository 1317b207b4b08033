"""Loading: verified rows, and the right conclusion from a row that does not verify."""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from duokv.connectors.fs_faulty import Corrupt, Delay, Fail, Fault, FaultyBackend, Misdirect, Shorten, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import (
    BlockKeys,
    CacheGeometry,
    Clock,
    Namespace,
    Origin,
    PrefixHit,
    StoreConfig,
    chain_keys,
    open_store,
)
from duokv.kvstore.backend import ReadOp
from duokv.kvstore.errors import UsageError
from duokv.kvstore.events import BlockQuarantined, BlocksLoaded, Event

GEOMETRY = CacheGeometry.opaque("loader", payload_bytes=3000, swa_bytes=64)
NS = Namespace("m", "w", "t", "fp4")
TOKENS = np.arange(8 * 128 + 1, dtype=np.int32)
KEYS = chain_keys(NS, TOKENS)
Bytes = npt.NDArray[np.uint8]


def content(keys: BlockKeys, version: int = 0) -> Bytes:
    """Payloads that only these blocks have."""
    rows = [hashlib.shake_128(key + bytes([version])).digest(GEOMETRY.payload_bytes) for key in keys]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, GEOMETRY.payload_bytes)


class World:
    """A store that holds 8 blocks, written as 5 and 3."""

    def __init__(self) -> None:
        self.backend = FaultyBackend(MemoryBackend(), sleep=lambda _: None)
        self.now = 1_790_000_000.0
        config = StoreConfig(maintenance_interval_s=0, swa_bytes=0, index_map_bytes=1 << 24, buffer_bytes=1 << 22)
        clock = Clock(wall=lambda: self.now)
        self.store = open_store("memory://", geometry=GEOMETRY, config=config, backend=self.backend, clock=clock)
        self.events: list[Event] = []
        self.store.events.subscribe(self.events.append)
        self.put(0, 5)
        self.put(5, 3)
        self.hit = self.look()

    def look(self, require: Origin | None = None) -> PrefixHit:
        return self.store.lookup(NS, TOKENS, require=require)

    def put(self, first: int, count: int, origin: Origin = Origin.EXACT, version: int = 0) -> None:
        blocks = content(KEYS[first : first + count], version)
        done = self.store.commit(NS, TOKENS, blocks, first_block=first, origin=origin)
        assert done.new == count

    def load(self, hit: PrefixHit | None = None, version: int = 0) -> int:
        """Load into lent rows and compare all that is promised."""
        hit = hit or self.hit
        with self.store.buffers(len(hit.keys)) as lent:
            n = self.store.load(hit, lent.rows)
            assert (lent.rows[:n, : GEOMETRY.payload_bytes] == content(hit.keys[:n], version)).all()
        return n

    def cut(self, keep: int) -> None:
        """Take the prompt's blocks from `keep` on out of the index, as reclaim would."""
        for (hop, _), span in zip(self.hit._found.held, self.hit._found.spans(), strict=True):
            self.store.blocks.take_out(int.from_bytes(hop.place, "big"), max(0, keep - span.block), "capacity")

    def last(self) -> BlocksLoaded:
        return next(event for event in reversed(self.events) if isinstance(event, BlocksLoaded))

    def quarantined(self) -> list[BlockQuarantined]:
        return [event for event in self.events if isinstance(event, BlockQuarantined)]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.backend.heal()
    world.store.close()


def test_a_prefix_is_read_in_few_operations(world: World) -> None:
    """Extents that continue each other in the file are one read."""
    before = len(world.backend.log)
    assert world.load() == 8
    assert [operation.kind for operation in world.backend.log[before:]] == ["read"]
    assert world.last() == BlocksLoaded(8, 8, 8 * GEOMETRY.slot_bytes, None)


def test_rows_of_any_layout_get_the_same_bytes(world: World) -> None:
    payload = GEOMETRY.payload_bytes
    wide = np.zeros((8, 5000), np.uint8)
    spread = np.zeros((8, 2, GEOMETRY.slot_bytes), np.uint8)[:, 0]
    for out in (np.zeros((8, payload), np.uint8), wide, spread, np.zeros((99, payload), np.uint8)):
        assert world.store.load(world.hit, out) == 8
        assert (out[:8, :payload] == content(KEYS)).all()


@pytest.mark.parametrize(("first", "rows"), [(0, 3), (3, 9), (4, 2), (5, 3), (7, 1), (8, 4), (2, 0)])
def test_a_part_of_a_hit_can_be_loaded(world: World, first: int, rows: int) -> None:
    expected = content(KEYS)[first : first + rows]
    with world.store.buffers(rows) as lent:
        for out in (lent.rows, np.zeros((rows, GEOMETRY.payload_bytes), np.uint8)):
            assert world.store.load(world.hit, out, first_block=first) == len(expected)
            assert (out[: len(expected), : GEOMETRY.payload_bytes] == expected).all()


def test_only_rows_that_the_store_lent_are_read_into(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = world.backend.read_many
    into: list[memoryview] = []

    def noted(ops: Sequence[ReadOp], *, deadline_s: float) -> list[int]:
        into.extend(view for op in ops for view in op.views)
        return plain(ops, deadline_s=deadline_s)

    monkeypatch.setattr(world.backend, "read_many", noted)
    for own in (True, False):
        with world.store.buffers(8) as lent:
            out = lent.rows if own else np.zeros((8, 4096), np.uint8)
            assert world.store.load(world.hit, out) == 8
            assert {np.may_share_memory(np.frombuffer(view, np.uint8), out) for view in into} == {own}
        into.clear()


def test_rows_that_cannot_hold_a_block_are_refused(world: World) -> None:
    for out in (
        np.zeros((8, GEOMETRY.payload_bytes - 1), np.uint8),
        np.zeros((8, GEOMETRY.payload_bytes), np.int8),
        np.zeros(8 * GEOMETRY.payload_bytes, np.uint8),
        np.frombuffer(bytes(8 * 4096), np.uint8).reshape(8, 4096),
    ):
        with pytest.raises(UsageError, match=r"^load: [^\n]+ rows of 4096 bytes"):
            world.store.load(world.hit, out)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="from block -1"):
        world.store.load(world.hit, np.zeros((8, 4096), np.uint8), first_block=-1)


def test_a_stream_grows_and_every_step_is_verified(world: World) -> None:
    world.backend.inject(Corrupt(nth=1, bit=6 * 8 * GEOMETRY.slot_bytes))
    with world.store.buffers(8) as lent:
        leads = []
        for lead in world.store.load_iter(world.hit, lent.rows):
            assert (lent.rows[:lead, : GEOMETRY.payload_bytes] == content(KEYS[:lead])).all()
            leads.append(lead)
    assert leads == [6]


# What a bad row means


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Corrupt(bit=2 * 8 * 4096 + 5), "checksum"),
        (Corrupt(bit=(3 * 4096 - 1) * 8), "checksum"),
        (Corrupt(bit=(3 * 4096 - 600) * 8), "another block"),
        (Corrupt(bit=(3 * 4096 - 640) * 8), "not a slot of this format"),
        (Shorten(nbytes=2 * 4096), "short read"),
        (Shorten(nbytes=3 * 4096 - 1), "short read"),
    ],
)
def test_damage_is_a_miss_an_event_and_taken_out(world: World, fault: Fault, reason: str) -> None:
    world.backend.inject(fault)
    assert world.load() == 2
    (event,) = world.quarantined()
    assert (event.key, event.slot, event.reason) == (KEYS[2], 2, reason)
    assert world.last() == BlocksLoaded(2, 8, 2 * 4096, reason)
    assert world.look().tokens == 2 * 128
    assert world.load(world.look()) == 2
    world.put(2, 3)
    assert world.load(world.look()) == 8, "what was beyond the damage is found again once it is mended"


def test_bytes_of_another_place_are_damage_however_whole(world: World) -> None:
    world.backend.inject(Misdirect(offset=4096))
    assert world.load() == 0
    assert [event.reason for event in world.quarantined()] == ["another block"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EINVAL, errno.EBADF, 9999])
def test_a_backend_without_bytes_says_nothing_about_the_block(world: World, code: int) -> None:
    world.backend.inject(Fail(kind="read", errno=code))
    assert world.load() == 0
    assert world.quarantined() == []
    assert world.last().reason == errno.errorcode.get(code, "EIO")
    assert world.load(world.look()) == 8


def test_a_late_read_is_a_miss_and_no_damage(world: World) -> None:
    world.backend.inject(Delay(kind="read", seconds=60))
    assert world.load() == 0
    assert world.last() == BlocksLoaded(0, 8, 0, "deadline")
    assert world.load(world.look()) == 8


@pytest.mark.parametrize("keep", [0, 3, 5, 6])
def test_blocks_cut_since_the_lookup_are_a_plain_miss(world: World, keep: int) -> None:
    world.cut(keep)
    assert world.load() == keep
    assert world.quarantined() == []
    assert world.last() == BlocksLoaded(keep, 8, keep * 4096, "cut")


@pytest.mark.parametrize("keep", [0, 3, 6])
def test_blocks_that_moved_since_the_lookup_are_found_in_their_new_place(world: World, keep: int) -> None:
    world.cut(keep)
    world.put(keep, 8 - keep, version=1)
    with world.store.buffers(8) as lent:
        assert world.store.load(world.hit, lent.rows) == 8
        assert (lent.rows[:keep, :3000] == content(KEYS[:keep])).all()
        assert (lent.rows[keep:, :3000] == content(KEYS[keep:], version=1)).all()
    assert world.quarantined() == []
    assert world.last().reason is None


@pytest.mark.parametrize("restored", [2, 5])
def test_fewer_blocks_in_the_new_place_are_as_many_loaded(world: World, restored: int) -> None:
    world.cut(1)
    world.put(1, restored - 1)
    assert world.load() == restored
    assert world.last() == BlocksLoaded(restored, 8, restored * 4096, "cut")


@pytest.mark.parametrize("require", [None, Origin.EXACT])
def test_a_hit_on_exact_blocks_never_loads_approximate_ones(world: World, require: Origin | None) -> None:
    """They took the exact ones' place between lookup and load; nobody may think that they are exact."""
    exact = world.look(require)
    assert exact.exact_tokens == exact.tokens
    world.cut(3)
    world.put(3, 5, Origin.APPROX)
    assert world.load(exact) == 3
    assert world.load(world.look()) == 8


def test_a_hit_says_how_much_of_it_is_exact_and_the_rest_may_be_either(world: World) -> None:
    world.cut(5)
    world.put(5, 3, Origin.APPROX)
    mixed = world.look()
    assert (mixed.tokens, mixed.exact_tokens) == (8 * 128, 5 * 128)
    world.put(5, 3, Origin.EXACT)
    assert world.load(mixed) == 8
    again = world.look()
    assert (again.tokens, again.exact_tokens) == (8 * 128, 8 * 128)
    world.cut(2)
    assert world.look().exact_tokens == 2 * 128


def test_blocks_that_move_twice_are_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One retry, never a chase."""
    world.cut(0)
    reads = [operation.kind for operation in world.backend.log].count("read")
    monkeypatch.setattr(world.store.blocks, "find", lambda *_, **__: world.hit._found)
    assert world.load() == 0
    assert [operation.kind for operation in world.backend.log].count("read") == reads + 2
    assert world.last().reason == "cut"


def test_a_stream_left_open_keeps_its_rows_from_others(world: World) -> None:
    """Copies into them may be under way until it ends."""
    pool = world.store._pool
    lent = world.store.buffers(8)
    steps = world.store.load_iter(world.hit, lent.rows)
    rows = lent.rows
    next(steps)
    lent.release()
    with world.store.buffers(8) as other:
        assert not np.may_share_memory(other.rows, rows)
    before = pool.idle_bytes
    steps.close()
    assert pool.idle_bytes > before


def test_rows_of_a_stream_that_never_began_are_not_lent_again(world: World) -> None:
    with world.store.buffers(8) as lent:
        rows, steps = lent.rows, world.store.load_iter(world.hit, lent.rows)
    with world.store.buffers(8) as other:
        assert not np.may_share_memory(other.rows, rows)
        assert max(steps) == 8
        assert (rows[:, :3000] == content(KEYS)).all()


def test_nothing_to_load_is_an_iterator_as_well(world: World) -> None:
    with world.store.buffers(1) as lent:
        world.store.load_iter(world.hit, lent.rows, first_block=8).close()
        assert world.store.load(world.hit, lent.rows, first_block=8) == 0


@pytest.mark.parametrize("one_by_one", [False, True])
def test_rows_a_late_read_may_write_into_cannot_be_committed(world: World, one_by_one: bool) -> None:
    """It would store another prompt's bytes under these keys, with a checksum of their own."""
    gate = threading.Event()
    world.backend.inject(Stall(kind="read", until=gate))
    other = np.flip(TOKENS)
    with world.store.buffers(8) as lent:
        assert world.store.load(world.hit, lent.rows, deadline_s=0.05) == 0
        lent.rows[:] = 7
        gate.set()
        blocks = list(lent.rows) if one_by_one else lent.rows
        with pytest.raises(UsageError, match=r"^commit: a late read may write into these rows; release them"):
            world.store.commit(NS, other, blocks)
        with world.store.buffers(8) as fresh:
            fresh.rows[:] = 7
            assert world.store.commit(NS, other, fresh.rows).new == 8
    assert world.load() == 8


def test_damage_is_left_to_the_next_load_where_commits_take_longer_than_a_deadline(world: World) -> None:
    held, gate = threading.Event(), threading.Event()

    def commit() -> None:
        with world.store.blocks.writing(60):
            held.set()
            assert gate.wait(30)

    busy = threading.Thread(target=commit)
    busy.start()
    assert held.wait(30)
    world.backend.inject(Corrupt(kind="read", bit=8 * 4096 * 2, lasting=True))
    with world.store.buffers(8) as lent:
        found = world.store.load(world.hit, lent.rows, deadline_s=0.1)
        assert found < 8
        assert world.quarantined() == []
        gate.set()
        busy.join()
        world.store.load(world.hit, lent.rows)
    assert len(world.quarantined()) == 1
