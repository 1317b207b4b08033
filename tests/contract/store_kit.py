"""What the tests of whole stores share: small prompts and blocks, a clock to set, and a count of what a store holds."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from duokv.kvstore.backend import Backend
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.events import Event, EventBus
from duokv.kvstore.extent import PREFIX_BYTES, Extent, Life
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.index import IndexTxn, SegmentInfo
from duokv.kvstore.keys import BLOCK_TOKENS, Namespace, chain_keys
from duokv.kvstore.opening import open_store
from duokv.kvstore.policy import ClassRule, Policy
from duokv.kvstore.policybook import PolicyBook, encode_policy
from duokv.kvstore.recovery import POLICY_FILE
from duokv.kvstore.segment import footer_reserve
from duokv.kvstore.store import KVStore

NS = Namespace("model", "weights", "tokenizer", "format")
GEOMETRY = CacheGeometry.opaque("test", payload_bytes=1000, swa_bytes=4096)
SLOT = GEOMETRY.slot_bytes
POLICY = Policy(
    {"brief": ClassRule(10.0), "long": ClassRule(100.0), "keep": ClassRule(None)}, default="brief"
).numbered()


@dataclass
class Hands:
    """A clock whose hands a test moves; both show the same."""

    now: float = 1_700_000_000.0

    @property
    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now, monotonic=lambda: self.now)


class Meanwhile(threading.Event):
    """What happens elsewhere while a backend operation is under way."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._action = action

    def wait(self, timeout: float | None = None) -> bool:
        self._action()
        return True


def prompt(path: Sequence[int], tail: int = 1) -> list[int]:
    """A prompt of one block per number, each filled with it, and `tail` tokens more. Equal paths share a prefix."""
    return [number for number in path for _ in range(BLOCK_TOKENS)] + [7] * tail


def payload(path: Sequence[int], serial: int) -> bytes:
    """The bytes of the last block of `path` as the `serial`-th commit wrote them."""
    return hashlib.shake_128(f"{tuple(path)} {serial}".encode()).digest(GEOMETRY.payload_bytes)


def payloads(path: Sequence[int], first: int = 0, serial: int = 0) -> list[bytes]:
    """The bytes of all blocks of `path` from `first` on."""
    return [payload(path[: i + 1], serial) for i in range(first, len(path))]


def config(**changes: object) -> StoreConfig:
    """Settings for tests: three slots a segment, no threads of its own, reads that wait for a busy machine."""
    standard: dict[str, object] = {
        "segment_bytes": 3 * SLOT, "preallocate_bytes": 2 * SLOT, "swa_bytes": 0, "maintenance_interval_s": 0.0,
        "read_deadline_s": 60.0, "seed_policy": POLICY,
    }  # fmt: skip
    return StoreConfig(**{**standard, **changes})  # type: ignore[arg-type]


def open_test_store(
    backend: Backend, index: Path, hands: Hands, settings: StoreConfig | None = None, *, boot_id: str = "boot"
) -> KVStore:
    """Open the store on `backend` with its index in `index`."""
    settings = msgspec.structs.replace(settings or config(), index_path=str(index))
    return open_store(
        "memory://test", geometry=GEOMETRY, config=settings, clock=hands.clock, backend=backend, boot_id=boot_id
    )


def peer_of(store: KVStore, backend: Backend, hands: Hands) -> KVStore:
    """Another process's store on the same index, as far as one process can have that."""
    return KVStore(
        backend=backend, index=store._index, geometry=store.geometry, config=store.config, clock=hands.clock,
        events=EventBus(), writer_id="peer", held=ExitStack(), close_index=store._index.sync,
    )  # fmt: skip


def set_policy(store: KVStore, policy: Policy) -> Policy:
    """Put a policy in force; returns it as stored."""
    with store._index.write() as txn:
        stored = policy.numbered(store.blocks.policies.current(txn))
        PolicyBook.put(txn, stored)
    store._backend.write_file(POLICY_FILE, encode_policy(stored))
    return stored


def die(store: KVStore) -> None:
    """End a store as the end of its process does: nothing in its memory is written anywhere."""
    store._reader.close()
    store._index.close()


def record(store: KVStore) -> list[Event]:
    """The list into which the store's events go from now on."""
    events: list[Event] = []
    store.events.subscribe(events.append)
    return events


@dataclass
class Held:
    """One stored block as the index has it: its place, the stamp of each class's last use, and its origin."""

    segment: int
    slot: int
    stamps: dict[int, int]
    origin: int


@dataclass
class Census:
    """All the index says, block by block."""

    blocks: dict[bytes, Held] = field(default_factory=dict)
    segments: dict[int, SegmentInfo] = field(default_factory=dict)
    live: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    totals: tuple[int, int] = (0, 0)


def census(store: KVStore) -> Census:
    """Count block by block what the index holds, and check that its parts agree with each other."""
    with store._index.read() as txn:
        return count(txn)


def count(txn: IndexTxn) -> Census:
    """See `census`."""
    found = Census(segments=dict(txn.segments()), totals=txn.totals())
    lives = dict(txn.lives())
    extents = list(txn.extents())
    assert {extent.place for extent in extents} == set(lives), "each extent has a life, each life an extent"
    for extent in extents:
        life = lives[extent.place]
        assert extent.segment in found.segments, "an extent lies in a known segment"
        assert 0 < life.n <= extent.blocks
        assert life.first == extent.prefixes[:PREFIX_BYTES]
        found.live[extent.segment] += life.n
        for block in range(life.n):
            prefix = extent.prefixes[block * PREFIX_BYTES : (block + 1) * PREFIX_BYTES]
            assert prefix not in found.blocks, "a block is stored once"
            found.blocks[prefix] = _held(extent, life, block)
    places = [(held.segment, held.slot) for held in found.blocks.values()]
    assert len(set(places)) == len(places), "a slot holds one block"
    for number, info in found.segments.items():
        assert info.live == found.live[number]
    assert found.totals == (sum(info.allocated for info in found.segments.values()), len(found.blocks))
    return found


def _held(extent: Extent, life: Life, block: int) -> Held:
    stamps = {}
    for class_id, steps in life.steps.items():
        stamp = next((stamp for upto, stamp in steps if block < upto), None)
        if stamp is not None:
            stamps[class_id] = stamp
    return Held(extent.segment, extent.first_slot + block, stamps, extent.origin)


def files_of(backend: Backend) -> dict[str, int]:
    """Physical bytes of each segment file."""
    return {file.name: file.allocated for file in backend.list("seg/")}


def check_space(store: KVStore, backend: Backend, *peers: KVStore) -> Census:
    """What stores say they take is what their files take; unsealed ones may keep room for a footer."""
    found = census(store)
    files = files_of(backend)
    assert set(files) == {info.name(number) for number, info in found.segments.items()}
    writers = [writer for each in (store, *peers) for writer in each.blocks.space.writers()]
    pending = {writer.number: writer.unpublished for writer in writers}
    for number, info in found.segments.items():
        said = info.allocated + pending.get(number, 0)
        assert info.live or not info.sealed, "a sealed segment without a live block is gone"
        spare = 0 if info.sealed else footer_reserve(store.blocks.space.segment_slots)
        assert files[info.name(number)] == said - spare, f"{info.name(number)}: {info}"
    return found


def prefixes_of(path: Sequence[int]) -> list[bytes]:
    """The index's key of each block of a path."""
    return [key[:PREFIX_BYTES] for key in chain_keys(NS, prompt(path))]


MakeBackend = Callable[[], Backend]
