"""The block store against MemStore, through closes, crashes and rebuilds.

What is stored equals the model after every step, until a crash took last uses or an index with it: if then a parent
looks older than its child, or dead slots came back, only what must hold of any store is checked from there on.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from store_kit import (
    GEOMETRY,
    NS,
    POLICY,
    SLOT,
    Hands,
    census,
    check_space,
    config,
    die,
    files_of,
    open_test_store,
    payloads,
    prompt,
    set_policy,
)

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.answers import Commit, PrefixHit
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.extent import PREFIX_BYTES, stamp_s
from duokv.kvstore.keys import chain_keys
from duokv.kvstore.memstore import MemStore
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import BORN_CLASS, PIN_CLASS, ClassRule, Policy
from duokv.kvstore.store import KVStore
from duokv.kvstore.walk import Committed
from duokv.kvstore.writebehind import Pending

POLICIES = (
    POLICY,
    Policy({"brief": ClassRule(3.0), "long": ClassRule(100.0), "keep": ClassRule(20.0)}, "brief"),
    Policy({"brief": ClassRule(None), "long": ClassRule(5.0), "keep": ClassRule(None)}, "long"),
    Policy({"brief": ClassRule(0.0), "keep": ClassRule(None)}, "brief"),
)
FIXED = (
    Policy({"brief": ClassRule(5.0, "fixed"), "long": ClassRule(20.0), "keep": ClassRule(None)}, "long"),
    Policy({"brief": ClassRule(5.0), "long": ClassRule(50.0, "fixed"), "keep": ClassRule(12.0, "fixed")}, "keep"),
)
# Few enough that prompts meet often: a trunk, branches off it at several depths, and a stranger.
PATHS = [
    path[:n] for path in [(0,) * 8, (0, 0, 1, 1, 1, 1), (0, 0, 0, 0, 0, 1, 1), (2, 2)] for n in range(len(path) + 1)
]
CACHED = (0, 3, 40)
"""Rows of the block cache: none, less than a prompt has, more than there are blocks."""
paths = st.sampled_from(sorted(set(PATHS)))
classes = st.sampled_from(["brief", "long", "keep", None])
origins = st.sampled_from(list(Origin))
Path_ = tuple[int, ...]


class StoreMachine(RuleBasedStateMachine):
    """Every verb in any order, on prompts that share prefixes. What is stored must equal the model after each step."""

    can_punch = True

    policies: tuple[Policy, ...] = POLICIES

    @initialize(
        capacity=st.sampled_from([None, 4, 9]), flush_s=st.sampled_from([0.0, 1.0, 1e6]), cached=st.sampled_from(CACHED)
    )
    def open(self, capacity: int | None, flush_s: float, cached: int) -> None:
        settings = config(capacity_blocks=capacity, use_flush_s=flush_s, cache_bytes=cached * SLOT)
        self.begin(settings, exact=True)

    def begin(self, settings: StoreConfig, *, exact: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="duokv-test-"))
        self.hands = Hands()
        self.settings = settings
        self.backend = MemoryBackend(can_punch=self.can_punch)
        self.serial = 0
        self.boots = 0
        self.written: dict[bytes, set[bytes]] = {}
        self.hits: list[PrefixHit] = []
        self.exact = exact
        self.store = self.opened()
        self.model = MemStore(POLICY, clock=self.hands.clock, capacity_blocks=settings.capacity_blocks)

    def opened(self) -> KVStore:
        # Uses are ordered within a process; between two of them, and a rebuild, only time tells.
        self.hands.now += 1.0
        store = open_test_store(
            self.backend, self.folder / "index", self.hands, self.settings, boot_id=f"boot {self.boots}"
        )
        self.hands.now += 1.0
        return store

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            die(self.store)
            shutil.rmtree(self.folder)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0, 101.0]))
    def pass_time(self, seconds: float) -> None:
        self.hands.now += seconds

    @rule(path=paths, tail=st.sampled_from([0, 1, 127]), traffic=classes, require=st.sampled_from([None, *Origin]))
    def lookup(self, path: Path_, tail: int, traffic: str | None, require: Origin | None) -> None:
        traffic = self.known(traffic)
        hit = self.store.lookup(NS, prompt(path, tail), traffic, require=require)
        expected = self.model.lookup(NS, prompt(path, tail), traffic, require=require)
        if self.exact:
            assert (hit.tokens, hit.keys, hit.miss_reason) == (expected.tokens, expected.keys, expected.miss_reason)
            assert hit.exact_tokens == expected.exact_tokens
            self.check_load(hit, expected)
        assert self.check_bytes(hit) == len(hit.keys), "nothing fails here, so what is found is read back"
        self.hits = [*self.hits[-4:], hit]

    @rule(path=paths, first=st.integers(0, 7), traffic=classes, origin=origins)
    def commit(self, path: Path_, first: int, traffic: str | None, origin: Origin) -> None:
        traffic = self.known(traffic)
        first = min(first, len(path))
        self.serial += 1
        blocks = payloads(path, first, self.serial)
        for key, block in zip(chain_keys(NS, prompt(path))[first:], blocks, strict=True):
            self.written.setdefault(key, set()).add(block)
        done = self.store.commit(NS, prompt(path), blocks, first_block=first, traffic=traffic, origin=origin)
        model = self.model.commit(NS, prompt(path), blocks, first_block=first, traffic=traffic, origin=origin)
        assert done.new + done.present + done.dropped == len(blocks)
        if self.exact:
            self.check_commit(done, model)

    def check_commit(self, done: Commit, model: Commit) -> None:
        assert (done.new, done.present, done.dropped) == (model.new, model.present, model.dropped)

    @rule(path=paths, ttl_s=st.sampled_from([0.0, 5.0, 1000.0]))
    def pin(self, path: Path_, ttl_s: float) -> None:
        keys = chain_keys(NS, prompt(path))
        held, expected = self.store.pin(keys, ttl_s=ttl_s), self.model.pin(keys, ttl_s=ttl_s)
        assert held == expected or not self.exact

    @rule(data=st.data())
    def set_policy(self, data: st.DataObject) -> None:
        self.model.policy = set_policy(self.store, data.draw(st.sampled_from(self.policies)))

    @rule(flush=st.booleans())
    def keep_house(self, flush: bool) -> None:
        if flush:
            self.store.flush()
        else:
            self.store.maintain()
            self.model.maintain()

    @rule()
    def load_old_hits(self) -> None:
        """What a lookup promised earlier may be gone by now, or moved, or replaced; it is never wrong."""
        for hit in self.hits:
            self.check_bytes(hit)

    @rule(how=st.sampled_from(["close", "crash", "rebuild", "crash and rebuild"]), reboot=st.booleans())
    def restart(self, how: str, reboot: bool) -> None:
        """Another process opens the store after a clean close or a crash, with the index as it was or without one.

        A crash takes uses that were not flushed. A rebuild finds what was stored and is whole.
        """
        clean, rebuild = not how.startswith("crash"), how.endswith("rebuild")
        self.store.close() if clean else die(self.store)
        self.backend = self.backend.crash_clone(1.0, random.Random(0))
        if rebuild:
            shutil.rmtree(self.folder / "index")
        self.boots += reboot and (clean or rebuild)
        self.store = self.opened()
        found = set(census(self.store).blocks)
        before = {key[:PREFIX_BYTES] for key in self.model.blocks}
        assert found <= {key[:PREFIX_BYTES] for key in self.written}
        if self.exact and (clean or not rebuild):
            assert found == before
        elif self.exact and self.can_punch:
            assert found <= before
        if not clean:
            self.exact = self.exact and found <= before
            self.adopt()

    @invariant()
    def same_blocks_in_the_space_it_says(self) -> None:
        found = check_space(self.store, self.backend)
        if self.exact:
            expected = {key[:PREFIX_BYTES]: block.origin for key, block in self.model.blocks.items()}
            assert {prefix: held.origin for prefix, held in found.blocks.items()} == expected

    def known(self, traffic: str | None) -> str | None:
        return traffic if traffic in self.model.policy.classes else None

    def check_load(self, hit: PrefixHit, expected: PrefixHit) -> None:
        want = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
        self.model.load(expected, want)
        with self.store.buffers(len(hit.keys)) as lent:
            assert self.store.load(hit, lent.rows) == len(hit.keys)
            assert np.array_equal(lent.rows[:, : GEOMETRY.payload_bytes], want)

    def check_bytes(self, hit: PrefixHit) -> int:
        rows = np.zeros((len(hit.keys), GEOMETRY.payload_bytes), np.uint8)
        loaded = self.store.load(hit, rows)
        for key, row in zip(hit.keys[:loaded], rows, strict=False):
            assert row.tobytes() in self.written[key]
        return loaded

    def adopt(self) -> None:
        """Give the model the store's blocks and last uses, where a crash took some."""
        found = census(self.store).blocks
        order = {
            stamp: i for i, stamp in enumerate(sorted({s for held in found.values() for s in held.stamps.values()}))
        }
        self.model._order = len(order)
        names = {number: name for name, number in self.model.policy.ids.items()}
        self.model.blocks = {key: block for key, block in self.model.blocks.items() if key[:PREFIX_BYTES] in found}
        for key, block in self.model.blocks.items():
            uses = {
                number: (stamp_s(stamp), order[stamp]) for number, stamp in found[key[:PREFIX_BYTES]].stamps.items()
            }
            block.pinned_until = uses.pop(PIN_CLASS, (0.0, 0))[0]
            block.born = uses.pop(BORN_CLASS)
            block.uses = {names[number]: use for number, use in uses.items()}
        self.exact = self.exact and all(
            key in self.model.blocks and child.uses[name] <= self.model.blocks[key].uses.get(name, (0.0, 0))
            for path in PATHS
            for key, child_key in itertools.pairwise(chain_keys(NS, prompt(path)))
            if (child := self.model.blocks.get(child_key)) is not None
            for name in child.uses
        )


class WithoutPunch(StoreMachine):
    """The same where space comes back with whole files only."""

    can_punch = False


class ByBytes(StoreMachine):
    """Limited by physical bytes, with lives that count from the store time: extents and segments decide what fits."""

    policies = (*POLICIES, *FIXED)

    @initialize(
        slots=st.integers(12, 40), flush_s=st.sampled_from([0.0, 1.0, 1e6]), ahead=st.integers(1, 6),
        cached=st.sampled_from(CACHED),
    )  # fmt: skip
    def open(self, slots: int, flush_s: float, ahead: int, cached: int) -> None:
        settings = config(
            capacity=slots * SLOT, use_flush_s=flush_s, preallocate_bytes=ahead * SLOT, cache_bytes=cached * SLOT
        )
        self.begin(settings, exact=False)

    @invariant()
    def capacity_is_physical(self) -> None:
        assert self.settings.capacity is not None
        assert sum(files_of(self.backend).values()) <= self.settings.capacity


class ByBytesWithoutPunch(ByBytes):
    """The same where survivors have to be copied."""

    can_punch = False


class Behind(StoreMachine):
    """The same where commits are written by a thread: what they brought is found at once, whenever that happens.

    Time stands still until it has written, since a life begins when its block is stored.
    """

    @initialize(
        flush_s=st.sampled_from([0.0, 1.0, 1e6]), cached=st.sampled_from(CACHED), room=st.sampled_from([1, 4, 100])
    )
    def open(self, flush_s: float, cached: int, room: int) -> None:
        settings = config(use_flush_s=flush_s, cache_bytes=cached * SLOT, write_behind_bytes=room * SLOT)
        self.begin(settings, exact=True)

    def opened(self) -> KVStore:
        store = super().opened()
        assert store._behind is not None
        write = store._behind._write

        def write_when_let(pending: Pending) -> Committed:
            self.gate.wait()
            return write(pending)

        self.gate = threading.Event()
        self.gate.set()
        store._behind._write = write_when_let
        return store

    @rule()
    def hold_writes(self) -> None:
        """Until something waits for them; a commit does where there is no room."""
        if self.settings.write_behind_bytes == 100 * SLOT:
            self.gate.clear()

    def drain(self) -> None:
        assert self.store._behind is not None
        self.gate.set()
        self.store._behind.drain()

    @rule(path=paths, tail=st.sampled_from([0, 1, 127]), traffic=classes, require=st.sampled_from([None, *Origin]))
    def lookup(self, path: Path_, tail: int, traffic: str | None, require: Origin | None) -> None:
        assert self.store._behind is not None
        for pending in self.store._behind.pending:
            found = self.store.blocks.find(pending.chain.blob, pending.total, None, use=False)
            if pending.origin is Origin.EXACT and found.exact < found.blocks:
                # What is to replace approximate blocks does so when it is written; until then they are found.
                self.drain()
                break
        super().lookup(path, tail, traffic, require)

    def check_load(self, hit: PrefixHit, expected: PrefixHit) -> None:
        self.gate.set()
        super().check_load(hit, expected)

    def check_bytes(self, hit: PrefixHit) -> int:
        self.gate.set()
        return super().check_bytes(hit)

    @rule(path=paths, ttl_s=st.sampled_from([0.0, 5.0, 1000.0]))
    def pin(self, path: Path_, ttl_s: float) -> None:
        self.gate.set()
        super().pin(path, ttl_s)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0, 101.0]))
    def pass_time(self, seconds: float) -> None:
        self.drain()
        super().pass_time(seconds)

    @rule(path=paths, first=st.integers(0, 7), traffic=classes, origin=origins)
    def commit(self, path: Path_, first: int, traffic: str | None, origin: Origin) -> None:
        if min(first, len(path)):
            # One whose parent is not known to be there is waited for.
            self.gate.set()
        super().commit(path, first, traffic, origin)

    def check_commit(self, done: Commit, model: Commit) -> None:
        assert done.dropped == model.dropped
        # What is stored after a gap is copied for nothing.
        assert done.new >= model.new

    @rule(data=st.data())
    def set_policy(self, data: st.DataObject) -> None:
        self.drain()
        super().set_policy(data)

    @rule(flush=st.booleans())
    def keep_house(self, flush: bool) -> None:
        self.drain()
        super().keep_house(flush)

    @rule(how=st.sampled_from(["close", "crash", "rebuild", "crash and rebuild"]), reboot=st.booleans())
    def restart(self, how: str, reboot: bool) -> None:
        self.drain()
        super().restart(how, reboot)

    @invariant()
    def same_blocks_in_the_space_it_says(self) -> None:
        # Not waited for after every step: the next one is to meet what is under way.
        if hasattr(self, "store") and self.gate.is_set() and self.serial % 3 == 0:
            self.drain()
            super().same_blocks_in_the_space_it_says()


TestStore = StoreMachine.TestCase
TestWithoutPunch = WithoutPunch.TestCase
TestByBytes = ByBytes.TestCase
TestByBytesWithoutPunch = ByBytesWithoutPunch.TestCase
TestBehind = Behind.TestCase


@pytest.mark.torture
@pytest.mark.parametrize("machine", [StoreMachine, WithoutPunch, ByBytes, ByBytesWithoutPunch, Behind])
def test_for_long(machine: type[StoreMachine]) -> None:
    run_state_machine_as_test(machine)
