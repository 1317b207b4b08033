"""Power loss before every backend operation and every index transaction of a busy store.

A workload runs once. Before each step the disk is cloned as power loss at that moment might leave it, and the index
copied; afterwards every one of these moments is opened again, by a machine that rebooted and by a process that died.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    GEOMETRY,
    NS,
    Census,
    Hands,
    Meanwhile,
    census,
    check_space,
    config,
    die,
    open_test_store,
    payloads,
    prompt,
)

from duokv.connectors.fs_faulty import FaultyBackend, Stall
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.answers import Commit
from duokv.kvstore.backend import Backend
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.extent import PREFIX_BYTES
from duokv.kvstore.index import WriteTxn
from duokv.kvstore.keys import chain_keys
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore

AGENT = (0,) * 8
BRANCH = (0, 0, 0, 1, 1, 1, 1)
CHAT = (2, 2, 2, 2, 2)
LATE = (3,) * 7
SIDE = (0, 0, 5, 5)
OTHER = (6,) * 6
PATHS = (AGENT, BRANCH, CHAT, LATE, SIDE, OTHER)
NAMES = {"duokv.json", "policy.json", "lives.ckpt"}


@dataclass
class Moment:
    """A store's disk and index at a point of the workload, and what it had been told by then."""

    label: str
    disks: dict[float, MemoryBackend]
    index: Path
    now: float
    written: dict[bytes, frozenset[bytes]]
    held: Census
    reached: set[bytes]
    durable: dict[bytes, frozenset[bytes]]
    """Key -> contents that may be found: what was promised, and what has replaced it since."""


class Recorder:
    """Runs the workload on a store and keeps its moments."""

    def __init__(
        self, folder: Path, settings: StoreConfig, *, can_punch: bool, spared: Sequence[float], seed: int
    ) -> None:
        self.folder = folder
        self.spared = spared
        self.hands = Hands()
        self.inner = MemoryBackend(can_punch=can_punch)
        self.moments: list[Moment] = []
        self._rng = random.Random(seed)
        self._written: dict[bytes, frozenset[bytes]] = {}
        self._promised: dict[bytes, frozenset[bytes]] = {}
        self.faulty = FaultyBackend(self.inner)
        self.store = open_test_store(self.faulty, folder / "index", self.hands, settings)
        self.faulty.inject(Stall(kind=None, lasting=True, until=Meanwhile(self.keep)))
        begin = self.store._index.write

        @contextmanager
        def write() -> Iterator[WriteTxn]:
            self.keep("index")
            with begin() as txn:
                yield txn

        self.store._index.write = write  # type: ignore[method-assign, assignment]

    def keep(self, label: str | None = None) -> None:
        """Remember this moment."""
        copy = self.folder / f"moment {len(self.moments)}"
        shutil.copytree(self.folder / "index", copy)
        held = census(self.store)
        reached = self._reached()
        durable = {key: contents for key, contents in self._promised.items() if key in reached}
        # What was evicted since is promised no more, even if it comes back.
        self._promised = {k: contents for k, contents in self._promised.items() if k[:PREFIX_BYTES] in held.blocks}
        disks = {unsynced: self.inner.crash_clone(unsynced, self._rng) for unsynced in {*self.spared, 1.0}}
        label = f"{len(self.moments)}: before {label or self.faulty.log[-1]}"
        self.moments.append(Moment(label, disks, copy, self.hands.now, dict(self._written), held, reached, durable))

    def _reached(self) -> set[bytes]:
        """Keys that lookups find at this moment: stored, alive, and so are all before them."""
        keys: set[bytes] = set()
        for path in PATHS:
            chain = chain_keys(NS, prompt(path))
            keys.update(chain[: self.store.blocks.find(chain.blob, len(chain), None, use=False).blocks])
        return keys

    def commit(
        self, path: tuple[int, ...], *, first: int = 0, traffic: str = "long", origin: Origin = Origin.EXACT
    ) -> Callable[[], None]:
        """Commit; the function that is returned waits until that is durable."""
        self.hands.now += 1.0
        blocks = payloads(path, first, serial=len(self.moments))
        mine = dict(zip(chain_keys(NS, prompt(path))[first:], blocks, strict=True))
        for key, block in mine.items():
            self._written[key] = self._written.get(key, frozenset()) | {block}
            if key in self._promised:
                self._promised[key] |= {block}
        done = self.store.commit(NS, prompt(path), blocks, first_block=first, traffic=traffic, origin=origin)
        return lambda: self._wait(done)

    def _wait(self, done: Commit) -> None:
        done.wait_durable()
        self._promised = dict(self._written)

    def read(self, path: tuple[int, ...]) -> None:
        hit = self.store.lookup(NS, prompt(path), "brief")
        self.store.load(hit, np.zeros((max(1, len(hit.keys)), GEOMETRY.payload_bytes), np.uint8))

    def workload(self) -> None:
        """Every path through the store: extents over several segments, branches, replacement, eviction, expiry."""
        self.commit(AGENT[:5], origin=Origin.APPROX)
        self.commit(AGENT)()
        self.commit(BRANCH)
        self.read(BRANCH)
        self.commit(CHAT, traffic="brief")()
        self.store.pin(chain_keys(NS, prompt(CHAT[:2])), ttl_s=5.0)
        self.hands.now += 11.0
        self.store.maintain()
        self.commit(LATE)
        self.read(AGENT)
        self.commit(CHAT, traffic="keep")()
        self.commit(SIDE, first=2, origin=Origin.APPROX)()
        self.commit(SIDE, first=2)
        self.commit(OTHER)
        self.store.flush()
        self.store.close()


def record(folder: Path, *, fsync: str, can_punch: bool, spared: Sequence[float], seed: int = 0) -> list[Moment]:
    """All moments of the workload under these settings, with disks that keep such shares of what was not synced."""
    settings = config(capacity_blocks=17, fsync=fsync)
    recorder = Recorder(folder, settings, can_punch=can_punch, spared=spared, seed=seed)
    recorder.workload()
    return recorder.moments


def reopen(moment: Moment, backend: Backend, index: Path, boot_id: str, fsync: str) -> tuple[KVStore, Hands]:
    hands = Hands(moment.now + 0.001)
    settings = config(capacity_blocks=17, fsync=fsync)
    return open_test_store(backend, index, hands, settings, boot_id=boot_id), hands


def found_in(store: KVStore) -> Iterator[tuple[bytes, bytes]]:
    """(key, content) of all that lookups and loads give; what fails to load is looked up no more."""
    for path in PATHS:
        hit = store.lookup(NS, prompt(path), "keep")
        rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
        for i in range(store.load(hit, rows) if hit.keys else 0):
            yield hit.keys[i], rows[i].tobytes()


def check(moment: Moment, unsynced: float, *, rebooted: bool, fsync: str) -> None:
    """What must hold of a store that power loss or a crash stopped at this moment."""
    backend = moment.disks[unsynced].crash_clone(1.0, random.Random(0))
    index = moment.index.with_suffix(f".{unsynced}.{rebooted}")
    shutil.copytree(moment.index, index)
    store, hands = reopen(moment, backend, index, "another boot" if rebooted else "boot", fsync)
    check_space(store, backend)
    assert {file.name for file in backend.list("") if not file.name.startswith("seg/")} <= NAMES
    crashed_only = unsynced == 1.0 and not rebooted
    if crashed_only:
        assert census(store).blocks.keys() == moment.held.blocks.keys()
    found = dict(found_in(store))
    for key, content in found.items():
        assert content in moment.written[key]
    for key, contents in moment.durable.items():
        assert found.get(key) in contents, "a block that was promised to be durable"
    if crashed_only:
        assert found.keys() >= moment.reached
        assert not any(name.startswith("blocks_quarantined") for name in store.stats().counts)
    check_space(store, backend)
    hands.now += 1.0
    assert store.commit(NS, prompt((9, 9)), payloads((9, 9))).new == 2
    check_space(store, backend)
    die(store)
    shutil.rmtree(index)


def check_all(moments: Sequence[Moment], fsync: str) -> None:
    """Each moment after power loss, and after a crash of the process alone."""
    for moment in moments:
        for spared, rebooted in (*((spared, True) for spared in moment.disks), (1.0, False)):
            try:
                check(moment, spared, rebooted=rebooted, fsync=fsync)
            except BaseException as error:
                error.add_note(f"{moment.label}; unsynced={spared}, rebooted={rebooted}")
                raise


def test_power_loss_at_every_step(tmp_path: Path) -> None:
    check_all(record(tmp_path, fsync="segment", can_punch=True, spared=[0.5]), "segment")


@pytest.mark.parametrize(
    ("fsync", "can_punch"),
    [("segment", False), ("always", True), ("always", False), ("none", True)],
    ids=lambda value: f"{value}",
)
def test_power_loss_at_some_steps(tmp_path: Path, fsync: str, can_punch: bool) -> None:
    check_all(record(tmp_path, fsync=fsync, can_punch=can_punch, spared=[0.0, 0.5])[::7], fsync)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("can_punch", [True, False], ids=["punch", "no punch"])
@pytest.mark.parametrize("fsync", ["none", "segment", "always"])
def test_power_loss_in_many_ways(tmp_path: Path, fsync: str, can_punch: bool, seed: int) -> None:
    check_all(record(tmp_path, fsync=fsync, can_punch=can_punch, spared=[0.0, 0.5], seed=seed), fsync)
