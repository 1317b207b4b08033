"""What a backend may do to a store: cases 02, 08, 09, 11 and 15."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import store_kit
from store_kit import GEOMETRY, NS, SLOT, census, check_space, config, payloads, prompt, record

from duokv.connectors.fs_faulty import Fail, FaultyBackend, Kind, Stall, fail_each
from duokv.connectors.fs_memory import MemoryBackend
from duokv.connectors.fs_posix import PosixBackend
from duokv.kvstore import KVStore, chain_keys
from duokv.kvstore.events import BlockQuarantined, StoreFailed

if TYPE_CHECKING:
    from cases.conftest import World

TOKENS = prompt(range(8))
KEYS = chain_keys(NS, TOKENS)


def count(store: KVStore, name: str) -> int:
    return store.stats().counts.get(name, 0)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", ["write", "create", "reserve", "seal", "sync"])
def test_case_02_a_put_that_fails_half_way_leaves_nothing(world: World, kind: Kind, lasting: bool) -> None:
    """EIO in the middle of a put left a temporary file behind and an entry that pointed at half a block.

    Whatever operation fails, once or for good: what is not stored misses, what was promised is there, no file is left
    that the index does not know, and a failure that cost blocks is counted once.
    """
    rounds = 0
    for backend in fail_each(MemoryBackend, kind, lasting=lasting):
        rounds += 1
        store = world.fresh(backend, config(fsync="always"))
        events = record(store)
        done = store.commit(NS, TOKENS, world.content(KEYS))
        assert done.new + done.dropped == 8
        assert world.get(store, TOKENS) == done.new
        failures = [event for event in events if isinstance(event, StoreFailed)]
        assert len(failures) == count(store, "store_failures") == (done.dropped > 0)
        backend.heal()
        known = census(store).segments
        assert {file.name for file in backend.list("seg/")} == {info.name(number) for number, info in known.items()}
        if kind == "write":
            assert all(info.live for info in known.values())
        assert world.put(store, TOKENS) == done.dropped
        assert world.get(store, TOKENS) == 8
        store.flush()
        check_space(store, backend)
        store.close()
    assert rounds > 2


@pytest.mark.parametrize("torn_bytes", [0, 1, SLOT, 2 * SLOT + 100])
def test_case_02_a_write_that_fails_half_way_leaves_no_file_on_disk(world: World, torn_bytes: int) -> None:
    """The same on files: some of the block's bytes reached the disk before EIO."""
    backend = FaultyBackend(PosixBackend(world.root))
    store = world.on_files(backend=backend)
    backend.inject(Fail(kind="write", nth=2, torn_bytes=torn_bytes))
    assert store.commit(NS, TOKENS, world.content(KEYS)).dropped == 8
    hit = store.lookup(NS, TOKENS)
    assert (hit.tokens, world.load(store, hit)) == (0, 0)
    assert count(store, "store_failures") == 1
    assert world.segments() == []
    assert list((world.root / ".tmp").iterdir()) == [world.root / ".tmp" / "in-use"]


@pytest.mark.parametrize("blocks", [2, 4], ids=["by the flush", "when a segment was full"])
def test_case_02_a_sync_that_failed_is_not_made_good_by_a_later_one(world: World, blocks: int) -> None:
    """After a failed fsync the kernel may call the next one a success though the pages are lost.

    What was not durable is given up, so that whatever is still there after a flush that returned is durable.
    """
    backend = FaultyBackend(MemoryBackend())
    store = world.on(backend)
    backend.inject(Fail(kind="sync"))
    done = store.commit(NS, TOKENS[: blocks * 128], world.content(KEYS[:blocks]))
    if blocks == 2:
        with pytest.raises(OSError, match="injected"):
            done.wait_durable()
    assert backend.fired == 1
    store.flush()
    assert store.lookup(NS, TOKENS).tokens == 0
    world.put(store, TOKENS)
    assert world.get(store, TOKENS) == 8
    store.flush()
    check_space(store, backend)


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: SLOT + 1])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path) -> None:
    """Another segment of the same store under this name."""
    path.write_bytes(next(other for other in path.parent.iterdir() if other != path).read_bytes())


@pytest.mark.parametrize("closed", [False, True], ids=["running", "reopened"])
@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize("harm", [remove, empty, shorten, zero, swap])
def test_case_08_a_segment_that_is_gone_after_the_lookup_is_a_miss(
    world: World, harm: Callable[[Path], None], segment: int, closed: bool
) -> None:
    """The file behind a promised hit was deleted, and the request was retried for ever.

    Here the load gives what lies before it, the next lookup ends there, and the backend is asked at most twice; the
    same when the file is there and its content is not, and for the segment still being written.
    """
    store = world.on_files()
    world.put(store, TOKENS)
    if closed:
        store.close()
    backend = FaultyBackend(PosixBackend(world.root))
    if closed:
        store = world.on_files(backend=backend)
    else:
        store._reader._backend = backend
    hit = store.lookup(NS, TOKENS)
    assert hit.tokens == 8 * 128
    harm(world.segments()[segment])
    lead = world.load(store, hit)
    assert 3 * segment <= lead <= 3 * segment + 1
    assert sum(operation.kind == "read" for operation in backend.log) <= 2 * 3
    hit = store.lookup(NS, TOKENS)
    assert hit.tokens == lead * 128
    assert world.load(store, hit) == lead
    assert count(store, "store_failures") == 0
    for _ in range(3):  # what else lies in a damaged file is found out block by block
        world.put(store, TOKENS)
        if world.load(store, store.lookup(NS, TOKENS)) == 8:
            break
    assert world.get(store, TOKENS) == 8
    census(store)


@pytest.mark.parametrize("byte", [0, GEOMETRY.payload_bytes - 1, GEOMETRY.payload_bytes + 7, SLOT - 640, SLOT - 1])
def test_case_09_a_flipped_bit_is_a_miss_and_the_record_is_taken_out(world: World, byte: int) -> None:
    """A bit that flipped on the disk, in the payload or beside it, was given to the model.

    Here the block and all after it miss; it is named in an event, counted, and out of the index.
    """
    store = world.on_files()
    world.put(store, TOKENS)
    events = record(store)
    path, slot = world.segments()[1], 1
    raw = bytearray(path.read_bytes())
    raw[slot * SLOT + byte] ^= 0x10
    path.write_bytes(raw)
    hit = store.lookup(NS, TOKENS)
    assert (hit.tokens, world.load(store, hit)) == (8 * 128, 4)
    (found,) = [event for event in events if isinstance(event, BlockQuarantined)]
    assert (found.key, found.slot) == (KEYS[4], slot)
    assert found.segment.endswith(path.name)
    assert count(store, "blocks_quarantined") == 1
    assert world.get(store, TOKENS) == 4
    assert world.put(store, TOKENS) == 2
    assert world.get(store, TOKENS) == 8


@pytest.mark.parametrize("loaded", [False, True], ids=["unread", "found by a load"])
def test_case_09_kvctl_verify_names_the_damage(world: World, loaded: bool) -> None:
    """The same for an operator: `kvctl verify` names the block and fails, also when a load has taken it out already."""
    store = world.on_files()
    world.put(store, TOKENS)
    path = world.segments()[1]
    raw = bytearray(path.read_bytes())
    raw[SLOT] ^= 1
    path.write_bytes(raw)
    if loaded:
        assert world.load(store, store.lookup(NS, TOKENS)) == 4
    store.close()
    code, printed = world.kvctl("verify", "--json")
    assert code == 1
    assert KEYS[4].hex()[:32] in printed
    assert not any(key.hex()[:32] in printed for key in (KEYS[3], KEYS[5]))


@pytest.mark.parametrize("lent", [True, False], ids=["lent rows", "own rows"])
def test_case_09_a_backend_that_hangs_is_a_miss_within_the_deadline(world: World, lent: bool) -> None:
    """A read that took a minute held its request up for a minute. Here the caller goes on; the block stays good.

    The read may still write when it ends: not into memory that by then is someone else's.
    """
    backend = FaultyBackend(MemoryBackend())
    store = world.on(backend, config(read_deadline_s=0.05))
    world.put(store, TOKENS)
    ends = threading.Event()
    backend.inject(Stall(kind="read", until=ends))
    hit = store.lookup(NS, TOKENS)
    with store.buffers(8) as rows:
        out = rows.rows if lent else rows.rows.copy()
        assert store.load(hit, out) == 0  # returns, though `ends` was not set
    with store.buffers(8) as others:
        others.rows[:] = 0xEE
        ends.set()
        out = store.buffers(8).rows
        assert store.load(store.lookup(NS, TOKENS), out, deadline_s=60) == 8
        assert (others.rows == 0xEE).all()
    assert count(store, 'load_misses{reason="deadline"}') == 8
    assert count(store, "blocks_quarantined") == 0


@pytest.mark.parametrize("closed", [False, True], ids=["running", "reopened"])
@pytest.mark.parametrize("can_punch", [True, False])
@pytest.mark.parametrize("victim", [0, -1])
def test_case_11_a_segment_removed_by_hand_does_not_break_eviction(
    world: World, victim: int, can_punch: bool, closed: bool
) -> None:
    """Eviction met a file that an operator had removed, raised, and from then on nothing could be stored.

    Here eviction goes on, the index forgets what is gone, and the books agree with the disk.
    """
    backend = MemoryBackend(can_punch=can_punch)
    settings = config(capacity=200 * SLOT)
    store = world.on(backend, settings)
    for number in range(60):
        world.put(store, prompt([number, number]))
    if closed:
        store.close()
        world.hands.now += 1
        store = world.on(backend, settings)
    gone = backend.list("seg/")[victim].name
    backend.remove(gone)
    for number in range(60, 180):
        assert world.put(store, prompt([number, number])) == 2
        assert world.get(store, prompt([number, number])) == 2
    assert count(store, "store_failures") == 0
    assert gone not in {info.name(number) for number, info in census(store).segments.items()}
    check_space(store, backend)


CHILD = """
import sys
import numpy as np
from store_kit import GEOMETRY, NS, config, payloads, prompt
from duokv.kvstore import open_store

slot = GEOMETRY.slot_bytes
settings = config(segment_bytes=32 * slot, preallocate_bytes=17 * slot)
store = open_store(sys.argv[1], geometry=GEOMETRY, config=settings)
for number in range(int(sys.argv[2]), 1_000_000):
    path = [number] * 10
    done = store.commit(NS, prompt(path), payloads(path))
    print(number, done.new, done.present, flush=True)
"""


def test_case_15_a_killed_writer_leaves_a_store_that_opens(world: World) -> None:
    """A process killed in a put left files nobody counted, and after a few kills the disk was full of them.

    Here each opening finds what was committed, sweeps the rest, and the space it reports is the space that is taken.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(store_kit.__file__).parent)}
    number = 0
    for round_ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, f"file://{world.root}", str(number)], env=environment, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        try:
            for said in range(3 + 2 * round_):
                number, new, present = map(int, child.stdout.readline().split())
                # The one before may have been killed between storing its next prompt and saying so.
                assert (new, present) == (10, 0) or (said == 0 and (new, present) == (0, 10))
        finally:
            child.kill()
            assert child.wait() == -signal.SIGKILL
            child.stdout.close()

        store = world.on_files()
        path = [number] * 10
        hit = store.lookup(NS, prompt(path))
        with store.buffers(10) as rows:
            assert store.load(hit, rows.rows) == 10
            assert [bytes(row[: GEOMETRY.payload_bytes]) for row in rows.rows] == payloads(path)
        known = census(store).segments
        assert all(info.sealed for info in known.values()), "dead writers' segments are finished"
        assert [file.relative_to(world.root).as_posix() for file in world.segments()] == sorted(
            info.name(segment) for segment, info in known.items()
        )
        assert store.stats().physical_bytes == sum(file.stat().st_blocks * 512 for file in world.segments())
        assert list((world.root / ".tmp").iterdir()) == [world.root / ".tmp" / "in-use"]
        store.close()
        number += 1
    assert world.kvctl("verify")[0] == 0
