"""The laws of a whole store as tests, over any backend.

A backend of your own carries a store if a subclass that provides `open_place` passes:

    class TestStoreOnMine(StoreContract):
        @pytest.fixture
        def open_place(self, tmp_path):
            return lambda name: MyBackend(tmp_path / name)
"""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from store_kit import GEOMETRY, NS, SLOT, Hands, check_space, config, open_test_store, payloads, prompt

from duokv.connectors.fs_faulty import Fail, Fault, FaultyBackend, Kind
from duokv.kvstore.answers import PrefixHit
from duokv.kvstore.backend import Backend
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import StoreError
from duokv.kvstore.keys import chain_keys
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore

OpenPlace = Callable[[str], Backend]
Path_ = tuple[int, ...]
TRUNK = (0,) * 7
BRANCH = (0, 0, 1, 1)
OTHER = (2,) * 5
NEW = (7,) * 4


class Bench:
    """A store under test, with all that was ever committed to it."""

    def __init__(self, place: Callable[[], Backend], index: Path, settings: StoreConfig, *faults: Fault) -> None:
        self.backend = FaultyBackend(place(), faults)
        self.hands = Hands()
        self._place = place
        self._index = index
        self._settings = settings
        self._serial = 0
        self.written: dict[bytes, set[bytes]] = {}
        try:
            self.store = self._open()
        except (OSError, StoreError):
            # Opening may fail, as a whole; then it can be tried again.
            self.backend.heal()
            self.backend.inner = place()
            self.store = self._open()

    def _open(self) -> KVStore:
        self.hands.now += 1.0
        return open_test_store(self.backend, self._index, self.hands, self._settings)

    def reopen(self, *, rebuild: bool = False) -> None:
        self.store.close()
        self.backend.inner = self._place()
        if rebuild:
            shutil.rmtree(self._index)
        self.store = self._open()

    def commit(self, path: Path_, *, first: int = 0, traffic: str = "long", origin: Origin = Origin.EXACT) -> int:
        """Commit new bytes; returns how many blocks the store says it wrote."""
        self.hands.now += 1.0
        self._serial += 1
        blocks = payloads(path, first, self._serial)
        for key, block in zip(chain_keys(NS, prompt(path))[first:], blocks, strict=True):
            self.written.setdefault(key, set()).add(block)
        done = self.store.commit(NS, prompt(path), blocks, first_block=first, traffic=traffic, origin=origin)
        assert done.new + done.present + done.dropped == len(blocks)
        return done.new

    def read(self, path: Path_, *, require: Origin | None = None) -> list[bytes]:
        """What a lookup and a load give; never anything that was not committed."""
        self.hands.now += 1.0
        return self.load(self.store.lookup(NS, prompt(path), "long", require=require))

    def load(self, hit: PrefixHit) -> list[bytes]:
        rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
        loaded = [row.tobytes() for row in rows[: self.store.load(hit, rows)]]
        for key, block in zip(hit.keys, loaded, strict=False):
            assert block in self.written[key]
        return loaded

    def check(self) -> None:
        check_space(self.store, self.backend)


MakeBench = Callable[..., Bench]
"""(settings, *faults) -> a store in a place of its own, closed at the end of the test."""


class StoreContract:
    """Tests that a store passes on every backend."""

    @pytest.fixture
    def open_place(self) -> OpenPlace:
        """Override: each call opens the place of that name anew; it is empty at first."""
        raise NotImplementedError("give the subclass an open_place fixture")

    @pytest.fixture
    def make_bench(self, open_place: OpenPlace, tmp_path: Path) -> Iterator[MakeBench]:
        benches: list[Bench] = []

        def make(settings: StoreConfig, *faults: Fault) -> Bench:
            name = f"place-{len(benches)}"
            benches.append(Bench(partial(open_place, name), tmp_path / f"index {name}", settings, *faults))
            return benches[-1]

        yield make
        for bench in benches:
            bench.store.close()

    @pytest.fixture
    def bench(self, make_bench: MakeBench) -> Bench:
        return make_bench(config())

    def test_what_is_stored_is_found_and_read_back(self, bench: Bench) -> None:
        assert bench.commit(TRUNK) == 7
        assert bench.commit(BRANCH, first=1) == 2
        assert bench.read(TRUNK) == payloads(TRUNK, serial=1)
        assert bench.read(BRANCH) == payloads(TRUNK[:2], serial=1) + payloads(BRANCH, 2, serial=2)
        assert bench.read(OTHER) == []
        bench.check()

    @pytest.mark.parametrize("rebuild", [False, True], ids=["reopened", "rebuilt"])
    def test_a_closed_store_keeps_everything(self, bench: Bench, rebuild: bool) -> None:
        bench.commit(TRUNK)
        bench.commit(BRANCH, first=2, origin=Origin.APPROX)
        bench.commit(OTHER, origin=Origin.APPROX)
        bench.commit(OTHER[:3])
        bench.reopen(rebuild=rebuild)
        assert bench.read(TRUNK) == payloads(TRUNK, serial=1)
        assert bench.read(BRANCH)[2:] == payloads(BRANCH, 2, serial=2)
        assert bench.read(OTHER) == payloads(OTHER[:3], serial=4) + payloads(OTHER, 3, serial=3)
        assert len(bench.read(OTHER, require=Origin.EXACT)) == 3
        bench.check()

    def test_exact_blocks_replace_approximate_ones_and_never_the_reverse(self, bench: Bench) -> None:
        bench.commit(TRUNK, origin=Origin.APPROX)
        assert bench.commit(TRUNK[:5], first=2) == 3
        assert bench.commit(TRUNK, origin=Origin.APPROX) == 0
        serials = (1, 1, 2, 2, 2, 1, 1)
        assert bench.read(TRUNK) == [payloads(TRUNK[: i + 1], i, serials[i])[0] for i in range(7)]
        bench.check()

    def test_expiry_gives_the_space_back(self, bench: Bench) -> None:
        bench.commit(TRUNK, traffic="brief")
        bench.commit(OTHER, traffic="brief")
        bench.hands.now += 100.0
        bench.store.maintain()
        bench.reopen()
        assert bench.backend.list("seg/") == []
        bench.check()

    @pytest.mark.parametrize("slots", [12, 40])
    def test_capacity_is_physical(self, make_bench: MakeBench, slots: int) -> None:
        capacity = slots * SLOT
        bench = make_bench(config(capacity=capacity, preallocate_bytes=4 * SLOT))
        for number in range(40):
            bench.commit((number, number, number), traffic="long" if number % 3 else "keep")
            assert sum(file.allocated for file in bench.backend.list("seg/")) <= capacity
            if bench.backend.can_punch:
                assert len(bench.read((number, number, number))) == 3, "what was just written is no victim"
        bench.check()

    def test_a_hit_outlives_its_blocks(self, make_bench: MakeBench) -> None:
        bench = make_bench(config(capacity_blocks=8))
        bench.commit(TRUNK)
        hit = bench.store.lookup(NS, prompt(TRUNK), "long")
        bench.commit(OTHER)
        assert bench.load(hit) == payloads(TRUNK[:3], serial=1)
        bench.commit(TRUNK)
        assert len(bench.load(hit)) == 7
        assert bench.store.stats().counts.get("blocks_quarantined", 0) == 0
        bench.check()

    def test_any_operation_may_fail(self, make_bench: MakeBench) -> None:
        """Commits, lookups and loads never raise; when the trouble is over the books balance and all goes on."""
        self._fail_each(make_bench, "segment", lasting=False)

    @pytest.mark.torture
    @pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
    @pytest.mark.parametrize("fsync", ["none", "segment", "always"])
    def test_any_operation_may_fail_for_good(self, make_bench: MakeBench, lasting: bool, fsync: str) -> None:
        self._fail_each(make_bench, fsync, lasting=lasting)

    def _fail_each(self, make_bench: MakeBench, fsync: str, *, lasting: bool) -> None:
        settings = config(capacity_blocks=10, fsync=fsync)
        for nth in itertools.count(1):
            if not self._survives(make_bench(settings, Fail(kind=None, nth=nth, lasting=lasting))):
                return

    @pytest.mark.parametrize("kind", ["create", "reserve", "write"])
    def test_a_full_device_is_a_drop(self, make_bench: MakeBench, kind: Kind) -> None:
        for nth in itertools.count(1):
            if not self._survives(make_bench(config(capacity_blocks=10), Fail(kind=kind, nth=nth, errno=errno.ENOSPC))):
                return

    def _survives(self, bench: Bench) -> bool:
        """Work while something fails, see that all is well afterwards, and return whether anything did fail."""
        try:
            self._work(bench)
            bench.backend.heal()
            # A device that failed in between may have cost blocks, never the balance.
            bench.store.maintain()
            bench.store.flush()
            bench.check()
            assert bench.commit(NEW) == len(NEW)
            assert len(bench.read(NEW)) == len(NEW)
            before = {path: bench.read(path) for path in (TRUNK, BRANCH, OTHER, NEW)}
            bench.reopen()
            bench.check()
            assert {path: bench.read(path) for path in before} == before
        except BaseException as error:
            error.add_note("\n".join(map(str, bench.backend.log)))
            raise
        return bench.backend.fired > 0

    def _work(self, bench: Bench) -> None:
        bench.commit(TRUNK[:5], origin=Origin.APPROX)
        bench.read(TRUNK)
        bench.commit(TRUNK)
        self._wait(bench.store.flush)
        bench.commit(BRANCH, first=2, traffic="brief")
        bench.read(BRANCH)
        bench.commit(OTHER)
        self._wait(bench.store.flush)
        bench.hands.now += 50.0
        self._wait(bench.store.maintain)
        bench.read(TRUNK)
        bench.commit((3, 3, 3, 3), traffic="keep")

    def _wait(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if error.strerror != "injected fault":
                raise
