"""Walks by former ways against walks that read every extent; uses noted late against uses noted at once."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from duokv.kvstore import lives
from duokv.kvstore.extent import PREFIX_BYTES, Cutoffs, Extent, Life, stamp_of
from duokv.kvstore.hop import Walked
from duokv.kvstore.index import Index, IndexTxn, WriteTxn
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.lives import ExtentCache
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import ClassRule, Policy

POLICIES = (
    Policy({"brief": ClassRule(5.0), "long": ClassRule(40.0)}, "long").numbered(),
    Policy({"brief": ClassRule(30.0, "fixed"), "long": ClassRule(20.0)}, "long").numbered(),
)
Steps = list[int]
# A trunk that two conversations leave at different depths, and a stranger.
TRUNK_AND_BRANCHES = ([0] * 12, [0] * 3 + [1] * 9, [0] * 7 + [2] * 5, [3] * 4)
paths = st.sampled_from([path[:n] for path in TRUNK_AND_BRANCHES for n in range(1, len(path) + 1)])
classes = st.sampled_from([1, 2])


def keys(path: Steps) -> bytes:
    return b"".join(hashlib.sha256(bytes(path[: n + 1])).digest() for n in range(len(path)))


class WalkMachine(RuleBasedStateMachine):
    """A cache that is told of its own writes, beside others' writes; the model notes every use as it happens."""

    @initialize(policy=st.sampled_from(POLICIES), most=st.sampled_from([3, 100_000]))
    def open(self, policy: Policy, most: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="duokv-test-"))
        self.index = Index(self.folder / "index", map_bytes=1 << 24)
        self.kept = lives._MOST_EXTENTS
        lives._MOST_EXTENTS = most
        self.cache = ExtentCache()
        self.telling = True
        self.index.watch(lambda txn, committed: self.cache.ended(txn, committed) if self.telling else None)
        self.policy = policy
        self.now = 1_790_000_000.0
        self.serial = 0
        self.slot = 0
        self.lives: dict[int, Life] = {}
        self.overlaps = False
        """Whether blocks may be stored twice: then lives of those that nothing reaches are not compared."""

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            lives._MOST_EXTENTS = self.kept
            self.index.close()
            shutil.rmtree(self.folder)

    def stamp(self) -> int:
        self.serial += 1
        return stamp_of(self.now) + self.serial

    def walk(self, cache: ExtentCache, txn: IndexTxn, path: Steps) -> Walked:
        return cache.walk(txn, keys(path), 0, len(path))

    @rule(path=paths, blocks=st.integers(1, 4), origin=st.sampled_from(list(Origin)), own=st.booleans())
    def store(self, path: Steps, blocks: int, origin: Origin, own: bool) -> None:
        """What is absent of a prompt's next blocks; what is there is renewed, as commits do."""
        self.telling = own
        with self.index.write() as txn:
            walked = self.walk(self.cache if own else ExtentCache(), txn, path)
            stamp = self.stamp()
            if own:
                self.cache.use_walk(walked.hops, 1, stamp)
            else:
                self.write_uses(txn, walked, stamp)
            self.note_uses(walked, 1, stamp)
            at = walked.end
            blob = keys(path)[at * KEY_BYTES : (at + blocks) * KEY_BYTES]
            prefixes = b"".join(blob[i : i + PREFIX_BYTES] for i in range(0, len(blob), KEY_BYTES))
            if prefixes:
                extent = Extent(1, self.slot, at, 1, origin, prefixes)
                life = Life.born(extent.blocks, at, prefixes[:PREFIX_BYTES], 1, stamp)
                self.slot += extent.blocks
                self.lives[extent.place] = Life.decode(life.encode())
                self.put(txn, extent, life, own=own)
        self.telling = True

    @rule(path=paths, at=st.integers(0, 11), blocks=st.integers(1, 6), own=st.booleans())
    def store_again(self, path: Steps, at: int, blocks: int, own: bool) -> None:
        """Blocks that may be stored already, or without those before them."""
        self.telling = own
        self.overlaps = True
        blob = keys(path)[at * KEY_BYTES : (at + blocks) * KEY_BYTES]
        prefixes = b"".join(blob[i : i + PREFIX_BYTES] for i in range(0, len(blob), KEY_BYTES))
        if prefixes:
            with self.index.write() as txn:
                extent = Extent(1, self.slot, at, 1, Origin.EXACT, prefixes)
                life = Life.born(extent.blocks, at, prefixes[:PREFIX_BYTES], 1, self.stamp())
                self.slot += extent.blocks
                self.lives[extent.place] = Life.decode(life.encode())
                self.put(txn, extent, life, own=own)
        self.telling = True

    def write_uses(self, txn: WriteTxn, walked: Walked, stamp: int) -> None:
        for hop, count in walked.hops:
            place = int.from_bytes(hop.place, "big")
            life = txn.life(place)
            assert life is not None
            life.use(1, count, stamp)
            txn.put_life(place, life)

    def note_uses(self, walked: Walked, class_id: int, stamp: int) -> None:
        for hop, count in walked.hops:
            self.lives[int.from_bytes(hop.place, "big")].use(class_id, count, stamp)

    def put(self, txn: WriteTxn, extent: Extent, life: Life, *, own: bool) -> None:
        txn.put_extent(extent)
        raw = life.encode()
        place = extent.place.to_bytes(8, "big")
        txn.put_raw_life(place, raw)
        if own:
            txn.endings.append(lambda done: self.cache.note_stored(extent, place, life, raw) if done else None)

    @rule(path=paths, class_id=classes)
    def use(self, path: Steps, class_id: int) -> None:
        with self.index.read() as txn:
            walked = self.walk(self.cache, txn, path)
        stamp = self.stamp()
        self.cache.use_walk(walked.hops, class_id, stamp)
        self.note_uses(walked, class_id, stamp)

    @rule(path=paths, keep=st.integers(0, 3), own=st.booleans())
    def cut(self, path: Steps, keep: int, own: bool) -> None:
        """Cut the last extent of a prompt, as reclaim does: leaves first, uses written before."""
        self.telling = own
        with self.index.write() as txn:
            if own:
                self.cache.flush(txn)
            hops = self.walk(ExtentCache(), txn, path).hops
            if hops:
                place = int.from_bytes(hops[-1][0].place, "big")
                life = txn.life(place)
                assert life is not None
                if keep == 0:
                    txn.drop_extent(place, life.first)
                    del self.lives[place]
                elif keep < life.n:
                    life.cut(keep)
                    txn.put_life(place, life)
                    self.lives[place].cut(keep)
        self.telling = True

    @rule(path=paths)
    def fail(self, path: Steps) -> None:
        """A transaction that stores, walks and is given up."""
        with pytest.raises(KeyError):
            self.store_and_fail(path)

    def store_and_fail(self, path: Steps) -> None:
        with self.index.write() as txn:
            at = self.walk(self.cache, txn, path).end
            blob = keys([*path, 9])[at * KEY_BYTES :]
            prefixes = b"".join(blob[i : i + PREFIX_BYTES] for i in range(0, len(blob), KEY_BYTES))
            extent = Extent(1, self.slot, at, 1, Origin.EXACT, prefixes)
            self.put(txn, extent, Life.born(extent.blocks, at, prefixes[:PREFIX_BYTES], 1, self.stamp()), own=True)
            self.walk(self.cache, txn, path)
            raise KeyError

    @rule(seconds=st.sampled_from([0.5, 4.0, 21.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def flush(self) -> None:
        with self.index.write() as txn:
            self.cache.flush(txn)
        with self.index.read() as txn:
            for place, life in txn.lives():
                expected = self.lives[place]
                assert life.n == expected.n
                assert self.overlaps or life.steps == expected.steps

    @precondition(lambda self: not self.overlaps)
    @rule(path=paths)
    def alive(self, path: Steps) -> None:
        with self.index.read() as txn:
            found = self.walk(self.cache, txn, path)
            self.alive_agrees(txn, found)

    def alive_agrees(self, txn: IndexTxn, found: Walked) -> None:
        cutoffs = Cutoffs(self.policy, self.now)
        alive = [self.lives[int.from_bytes(hop.place, "big")].alive(cutoffs) for hop, _ in found.hops]
        whole = next((i for i, (_, count) in enumerate(found.hops) if alive[i] < count), len(alive))
        expected = found.hops[:whole]
        if whole < len(alive) and alive[whole]:
            expected.append((found.hops[whole][0], alive[whole]))
        lead = self.cache.alive_lead(txn, found.hops, cutoffs)
        assert lead == expected
        assert (lead is found.hops) == (whole == len(alive))

    @invariant()
    def walks_agree(self) -> None:
        with self.index.read() as txn:
            for path in TRUNK_AND_BRANCHES:
                for block in range(len(path)):
                    found = self.cache.walk(txn, keys(path), block, len(path))
                    expected = ExtentCache().walk(txn, keys(path), block, len(path))
                    assert [(hop.place, count) for hop, count in found.hops] == [
                        (hop.place, count) for hop, count in expected.hops
                    ]
                    assert (found.end, found.exact) == (expected.end, expected.exact)


TestWalks = WalkMachine.TestCase


@pytest.mark.torture
def test_for_long() -> None:
    run_state_machine_as_test(WalkMachine)
