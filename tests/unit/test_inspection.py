"""Views over a store in a folder, and what an operator changes: every claim checked against the store itself."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from duokv.kvstore import inspection
from duokv.kvstore.backend import Backend, ReadOp
from duokv.kvstore.census import list_extents, list_segments, read_stat
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.explain import Absent, BlockView, explain, find_prefix
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.hostlocks import HostLocks
from duokv.kvstore.index import Index, IndexTxn
from duokv.kvstore.inspection import StoreView, inspect_store, operate_store
from duokv.kvstore.keys import Namespace, chain_keys
from duokv.kvstore.opening import open_store
from duokv.kvstore.operation import (
    change_ttl,
    evict,
    plan_all,
    plan_class,
    plan_expired,
    plan_key,
    plan_older,
    plan_oldest,
    rebuild_index,
)
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import ClassRule, Policy
from duokv.kvstore.policybook import PolicyBook, decode_policy
from duokv.kvstore.reclaim import ReclaimPlan
from duokv.kvstore.store import KVStore
from duokv.kvstore.verification import VerifyReport, clear_noted, repair, verify

NS = Namespace("model", "weights", "tokenizer", "format")
GEOMETRY = CacheGeometry.opaque("test", payload_bytes=3000)
SLOT = GEOMETRY.slot_bytes
POLICY = Policy(
    {"brief": ClassRule(10.0), "long": ClassRule(100.0), "still": ClassRule(50.0, "fixed"), "keep": ClassRule(None)},
    default="brief",
).numbered()


@dataclass
class Place:
    """A store in a folder, and a clock whose hands a test moves."""

    folder: Path
    now: float = 1_700_000_000.0
    config: StoreConfig = field(
        default_factory=lambda: StoreConfig(
            swa_bytes=0, maintenance_interval_s=0.0, segment_bytes=8 * SLOT, preallocate_bytes=SLOT, use_flush_s=0.0,
            seed_policy=POLICY, direct="off", fsync="none",
        )
    )  # fmt: skip

    @property
    def clock(self) -> Clock:
        return Clock(wall=lambda: self.now, monotonic=lambda: self.now)

    def engine(self) -> KVStore:
        return open_store(str(self.folder), geometry=GEOMETRY, config=self.config, clock=self.clock)

    @contextmanager
    def inspect(self) -> Iterator[StoreView]:
        with inspect_store(str(self.folder), config=self.config, clock=self.clock) as view:
            yield view

    @contextmanager
    def operate(self) -> Iterator[StoreView]:
        with operate_store(str(self.folder), config=self.config, clock=self.clock) as view:
            yield view

    def store(self, *commits: tuple[Sequence[int], str], origin: Origin = Origin.EXACT) -> None:
        """One commit per (path, class)."""
        with self.engine() as store:
            for path, traffic in commits:
                data = [payload(path[: i + 1]) for i in range(len(path))]
                store.commit(NS, prompt(path), data, traffic=traffic, origin=origin)

    def tree(self) -> dict[str, str]:
        """Every file of the store with a digest of its bytes."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "a store #1")


def prompt(path: Sequence[int], tail: int = 1) -> list[int]:
    return [number for number in path for _ in range(128)] + [7] * tail


def payload(path: Sequence[int]) -> bytes:
    return hashlib.shake_128(repr(tuple(path)).encode()).digest(GEOMETRY.payload_bytes)


def key_of(path: Sequence[int]) -> str:
    return chain_keys(NS, prompt(path))[-1].hex()


def segment_files(place: Place) -> list[Path]:
    return sorted(place.folder.glob("seg/*/*.seg"))


def block_of(place: Place, path: Sequence[int]) -> BlockView:
    with place.inspect() as view:
        found = explain(view, key_of(path))
    assert isinstance(found, BlockView)
    return found


def held(place: Place, *paths: Sequence[int]) -> list[int]:
    """How many leading blocks of each path a lookup finds, without using them."""
    with place.inspect() as view:
        return [find_prefix(view, NS, prompt(path)).hit_blocks for path in paths]


def plan(place: Place, make: Callable[[StoreView, IndexTxn], ReclaimPlan]) -> ReclaimPlan:
    with place.inspect() as view, view.snapshot() as txn:
        return make(view, txn)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_looking_writes_nothing(place: Place) -> None:
    place.store(([1, 2, 3], "brief"), ([4, 5], "long"))
    before = place.tree()
    with place.inspect() as view:
        read_stat(view)
        list_extents(view)
        list_segments(view)
        explain(view, key_of([1]))
        find_prefix(view, NS, prompt([1, 2]))
        change_ttl(view, "brief", 1.0, dry_run=True)
        with view.snapshot() as txn:
            evict(view, plan_all(txn), dry_run=True)
        assert verify(view).clean
    assert place.tree() == before


def test_a_view_cannot_change_anything(place: Place) -> None:
    place.store(([1], "brief"))
    with place.inspect() as view, pytest.raises(StoreError, match="inspection only"):
        clear_noted(view)


@pytest.mark.parametrize("opened", [inspect_store, operate_store])
def test_no_store_is_no_store_and_stays_so(tmp_path: Path, opened: Callable[..., Iterator[StoreView]]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, reason in ((empty, "no store here"), (tmp_path / "nowhere", "ENOENT")):
        with pytest.raises(StoreError, match=reason), opened(str(folder)):  # type: ignore[attr-defined]
            pass
    assert list(tmp_path.rglob("*")) == [empty]


def test_another_geometry_is_refused(place: Place) -> None:
    place.store(([1], "brief"))
    with pytest.raises(StoreError, match="geometry 'test'"), inspect_store(str(place.folder), geometry="tiny"):
        pass


@pytest.mark.parametrize("size", [0, 100, 4096, 8192])
def test_a_cut_index_is_an_error_and_not_a_crash(place: Place, size: int) -> None:
    place.store(([1, 2], "brief"))
    os.truncate(place.folder / "index" / "data.mdb", size)
    with place.inspect() as view, pytest.raises(StoreError, match="cut short; build it anew with kvctl rebuild"):
        read_stat(view)


def test_an_index_in_doubt_is_shown_and_not_changed(place: Place) -> None:
    place.store(([1], "brief"))
    with place.operate() as view, view.writable.write() as txn:
        txn.put_meta(b"boot", b"another")
        txn.put_meta(b"writer:gone", b"")
    with place.inspect() as view:
        found = read_stat(view)
    assert found.doubtful == "the machine went down under a running writer"
    assert [(writer.name, writer.alive) for writer in found.writers] == [("gone", False)]
    with pytest.raises(StoreError, match=r"in doubt.*kvctl rebuild"), place.operate():
        pass


def test_locks_say_who_lives_and_keep_engines_out(place: Place) -> None:
    place.store(([1], "brief"))
    locks = HostLocks(place.folder)
    with locks.keep_out() as quiet:
        assert quiet
        fd = os.open(place.folder / "locks" / "open", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    with writer_alive(place, "mine"):
        assert locks.writers() == ["mine"]
        assert locks.alive("mine")
        with locks.keep_out() as quiet:
            assert not quiet
    assert locks.writers() == []
    assert HostLocks(None).alive("mine") is None


def test_a_change_under_a_reader_without_a_lock_is_an_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.store(([1], "brief"))

    versions = itertools.count()

    class Restless(Index):
        def version(self) -> int:
            return next(versions)

    monkeypatch.setattr(inspection, "Index", Restless)
    with writer_alive(place, "mine"), place.inspect() as view:
        read_stat(view)  # under LMDB's lock a writer does no harm
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(StoreError, match="changed while it was read without a lock"):
            read_stat(view)


@contextmanager
def writer_alive(place: Place, name: str) -> Iterator[None]:
    fd = os.open(place.folder / "locks" / f"writer-{name}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


# -- sums and lists ----------------------------------------------------------------------------------------------------


def test_stat_counts_by_class_and_life(place: Place) -> None:
    with place.engine() as store:
        for path, traffic in (([1, 2, 3], "brief"), ([4, 5], "long")):
            store.commit(NS, prompt(path), [payload(path[: i + 1]) for i in range(len(path))], traffic=traffic)
        store.lookup(NS, prompt([1]), traffic="long")
        store.pin(chain_keys(NS, prompt([4])), ttl_s=1000)
    place.now += 20
    with place.inspect() as view:
        found = read_stat(view)
    assert (found.blocks, found.alive, found.expired, found.pinned) == (5, 3, 2, 1)
    assert {c.name: (c.alive, c.expired) for c in found.classes} == {
        "brief": (0, 3), "long": (3, 0), "still": (0, 0), "keep": (0, 0),
    }  # fmt: skip
    assert (found.extents, found.segments, found.active_segments, found.damage) == (2, 2, 0, 0)
    assert found.live_bytes == 5 * SLOT
    assert found.physical_bytes == found.live_bytes + found.dead_bytes
    assert found.physical_bytes == sum(path.stat().st_blocks * 512 for path in segment_files(place))
    assert found.index_bytes_per_block == found.index_bytes / 5
    assert (found.default_class, found.policy_version, found.writers, found.doubtful) == ("brief", 1, (), None)


def test_lists_filter_and_stop(place: Place) -> None:
    place.store(([1, 2, 3], "brief"), ([4, 5], "long"), ([6], "long"))
    place.now += 20
    with place.inspect() as view:
        every, total = list_extents(view)
        assert total == 3
        assert [(one.blocks, one.alive, one.keeper) for one in every] == [
            (3, 0, "brief"),
            (2, 2, "long"),
            (1, 1, "long"),
        ]
        assert every[0].key == key_of([1])[:32]
        shown, total = list_extents(view, traffic="long", limit=1)
        assert ([one.key for one in shown], total) == ([key_of([4])[:32]], 2)
        assert list_extents(view, state="expired")[1] == 1
        assert list_extents(view, state="alive")[1] == 2
        assert list_extents(view, state="pinned")[1] == 0
        assert list_extents(view, segment=every[0].segment)[1] == 1
        with pytest.raises(UsageError, match="did you mean 'long'"):
            list_extents(view, traffic="lnog")
        files = list_segments(view)
    assert [place.folder / one.file for one in files] == segment_files(place)
    assert [(one.stored_by, one.used, one.live, one.sealed) for one in files] == [
        ("brief", 3, 3, True), ("long", 3, 3, True),
    ]  # fmt: skip


# -- explain -----------------------------------------------------------------------------------------------------------


def test_explain_finds_the_bytes_and_the_reason(place: Place) -> None:
    path = [1, 2, 3]
    place.store(([9], "brief"), (path, "brief"))
    place.now += 5
    with place.engine() as store:
        store.lookup(NS, prompt(path[:2]), traffic="long")
    found = block_of(place, path[:2])
    assert found.key == key_of(path[:2])
    assert (found.alive, found.keeper, found.until_s) == (True, "long", place.now + 100)
    assert (found.stored_s, found.stored_by, found.origin) == (place.now - 5, "brief", "exact")
    assert (found.chain_pos, found.first_token, found.extent_blocks) == (1, 128, 3)
    assert (found.content, found.parent) == ("whole", key_of(path[:1]))
    uses = {use.name: (use.last_use_s, use.until_s, use.alive) for use in found.uses}
    assert uses["brief"] == (place.now - 5, place.now + 5, True)
    assert uses["long"] == (place.now, place.now + 100, True)
    assert uses["keep"] == (None, None, False)
    raw = (place.folder / found.file).read_bytes()
    assert raw[found.file_offset :][: GEOMETRY.payload_bytes] == payload(path[:2])
    assert block_of(place, path).keeper == "brief", "the use covered only the first two blocks"


def test_explain_tells_pins_and_fixed_lives_and_expiry(place: Place) -> None:
    with place.engine() as store:
        store.commit(NS, prompt([1]), [payload([1])], traffic="still")
        store.pin(chain_keys(NS, prompt([1])), ttl_s=60)
    start = place.now
    place.now += 55
    found = block_of(place, [1])
    assert (found.alive, found.keeper, found.until_s, found.pinned_until_s) == (True, "(pin)", start + 60, start + 60)
    assert [(use.until_s, use.alive) for use in found.uses if use.name == "still"] == [(start + 50, False)]
    place.now += 10
    assert not block_of(place, [1]).alive
    assert block_of(place, [1]).parent is None, "the first block's parent is the tenant's root"


def test_explain_takes_the_beginning_of_a_key(place: Place) -> None:
    place.store(*[([number], "brief") for number in range(40)])
    whole = key_of([5])
    with place.inspect() as view:
        for digits in (whole, whole[:32], whole[:17], whole[:12].upper()):
            found = explain(view, digits)
            assert isinstance(found, BlockView)
            assert found.key == whole
        assert explain(view, whole[:32] + "0" * 32) == Absent(whole[:32] + "0" * 32, False, ())
        assert explain(view, "0123456789") == Absent("0123456789", False, ())
        for bad in ("xyz", "abc", "12 45", "0" * 65):
            with pytest.raises(UsageError, match="hex digits"):
                explain(view, bad)


def test_explain_asks_for_more_digits_where_several_blocks_fit(place: Place) -> None:
    with place.engine() as store:
        keys = [bytes([0xAB, 0xCD, number]) + bytes(29) for number in range(3)] + [b"inside \xab\xcd" + bytes(23)]
        store.blocks.commit(b"".join(keys), 4, "brief", first=0, payload=None, origin=Origin.EXACT)
    with place.inspect() as view, pytest.raises(UsageError, match="fits 3 blocks; give more digits"):
        explain(view, "abcd")


def test_explain_knows_what_was_cut_and_what_was_damaged(place: Place) -> None:
    path = [1, 2, 3, 4]
    place.store((path, "brief"))
    with place.operate() as view, view.snapshot() as txn:
        cut = plan_key(txn, key_of(path))
    with place.operate() as view:
        evict(view, cut)
    flip(place, block_of(place, path[:2]))
    found = block_of(place, path[:2])
    assert (found.content, found.key) == ("checksum", key_of(path[:2])[:32])
    with place.engine() as store:
        assert len(read(store, path)) == 1
    with place.inspect() as view:
        gone, damaged = explain(view, key_of(path)), explain(view, key_of(path[:2]))
    assert gone == Absent(key_of(path), True, ())
    assert isinstance(damaged, Absent)
    assert [(one.reason, one.found_s) for one in damaged.damage] == [("checksum", place.now)]


def flip(place: Place, block: BlockView) -> None:
    with (place.folder / block.file).open("r+b") as file:
        file.seek(block.file_offset + 10)
        byte = file.read(1)[0]
        file.seek(block.file_offset + 10)
        file.write(bytes([byte ^ 1]))


def read(store: KVStore, path: Sequence[int]) -> list[bytes]:
    hit = store.lookup(NS, prompt(path))
    out = np.zeros((max(1, len(hit.keys)), GEOMETRY.payload_bytes), np.uint8)
    return [row.tobytes() for row in out[: store.load(hit, out, deadline_s=60)]]


# -- prefix ------------------------------------------------------------------------------------------------------------


def test_prefix_says_where_a_hit_ends_and_why(place: Place) -> None:
    path = [1, 2, 3, 4]
    place.store((path[:2], "brief"), (path, "long"))
    with place.inspect() as view:
        whole = find_prefix(view, NS, prompt(path))
        assert (whole.hit_blocks, whole.hit_tokens, whole.blocks, whole.reason, whole.miss_key) == (
            4,
            512,
            4,
            None,
            None,
        )
        longer = find_prefix(view, NS, prompt([*path, 5, 6]))
        assert (longer.hit_blocks, longer.reason, longer.miss_block) == (4, "absent", 4)
        assert longer.miss_key == key_of([*path, 5])
        exactly = find_prefix(view, NS, prompt(path, tail=0))
        assert (exactly.blocks, exactly.hit_tokens) == (3, 384), "a row is left to compute"
        assert find_prefix(view, Namespace("other", "w", "t", "f"), prompt(path)).hit_blocks == 0
    place.now += 1000
    with place.inspect() as view:
        gone = find_prefix(view, NS, prompt(path))
    assert (gone.hit_blocks, gone.reason, gone.stored_blocks) == (0, "expired", 4)


def test_prefix_ends_at_approximate_blocks_if_asked(place: Place) -> None:
    path = [1, 2, 3]
    place.store((path[:1], "keep"))
    place.store((path, "keep"), origin=Origin.APPROX)
    with place.inspect() as view:
        assert find_prefix(view, NS, prompt(path)).hit_blocks == 3
        found = find_prefix(view, NS, prompt(path), exact_only=True)
    assert (found.hit_blocks, found.reason, found.miss_block) == (1, "approx", 1)


def test_asking_uses_nothing(place: Place) -> None:
    place.store(([1], "brief"))
    until = block_of(place, [1]).until_s
    place.now += 5
    assert held(place, [1]) == [1]
    assert block_of(place, [1]).until_s == until


# -- ttl ---------------------------------------------------------------------------------------------------------------


def test_a_new_life_holds_at_once_and_for_what_is_stored(place: Place) -> None:
    place.store(([1, 2], "brief"), ([3], "long"))
    place.now += 20
    with place.inspect() as view:
        planned = change_ttl(view, "long", 5.0, dry_run=True)
    assert (planned.freed_blocks, planned.freed_bytes, planned.applied) == (1, SLOT, False)
    assert held(place, [1, 2], [3]) == [0, 1]
    with place.operate() as view:
        done = change_ttl(view, "long", 5.0)
        longer = change_ttl(view, "brief", None, mode="fixed")
    assert (done.freed_blocks, done.applied, done.policy_version) == (1, True, 2)
    assert done.before == ClassRule(100.0)
    assert (longer.revived_blocks, longer.freed_blocks, longer.after) == (2, 0, ClassRule(None, "fixed"))
    assert held(place, [1, 2], [3]) == [2, 0]
    on_disk = decode_policy((place.folder / "policy.json").read_bytes(), where="policy.json")
    assert (on_disk.version, on_disk.classes["long"], on_disk.ids) == (3, ClassRule(5.0), POLICY.ids)


def test_the_same_life_changes_nothing(place: Place) -> None:
    place.store(([1], "brief"))
    before = (place.folder / "policy.json").read_bytes()
    with place.operate() as view:
        assert change_ttl(view, "brief", 10.0).policy_version == 1
    assert (place.folder / "policy.json").read_bytes() == before


def test_a_class_is_new_only_on_purpose(place: Place) -> None:
    place.store(([1], "brief"))
    with place.operate() as view:
        with pytest.raises(UsageError, match=r"'breif'.*did you mean 'brief'"):
            change_ttl(view, "breif", 1.0)
        assert change_ttl(view, "batch", 1.0, add=True).before is None
        with view.snapshot() as txn:
            policy = view.policy(txn)
    assert policy.class_id("batch") not in POLICY.ids.values()


def test_the_policy_file_is_written_before_the_index(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.store(([1], "brief"))

    def refuse(name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full", name)

    with place.operate() as view:
        monkeypatch.setattr(view.backend, "write_file", refuse)
        with pytest.raises(OSError, match="full"):
            change_ttl(view, "brief", 1.0)
        with view.snapshot() as txn:
            assert view.policy(txn).version == 1


def test_a_lost_policy_starts_over_without_taking_old_blocks_for_its_own(place: Place) -> None:
    place.store(([1], "long"))
    with place.operate() as view, view.writable.write() as txn:
        txn.drop_meta(b"policy")
        txn.put_meta(b"policy_version", b"lost")
    with place.operate() as view:
        change_ttl(view, "quick", 1.0, add=True)
    place.now += 1000
    found = block_of(place, [1])
    assert found.alive
    assert found.until_s is None
    assert found.keeper == f"(unknown {POLICY.ids['long']})"


# -- evict -------------------------------------------------------------------------------------------------------------


def test_evict_expired_frees_the_disk(place: Place) -> None:
    place.store(([1, 2, 3], "brief"), ([4], "long"))
    before = sum(path.stat().st_blocks * 512 for path in segment_files(place))
    place.now += 20
    expired = plan(place, plan_expired)
    with place.operate() as view:
        done = evict(view, expired)
    after = sum(path.stat().st_blocks * 512 for path in segment_files(place))
    assert (done.blocks, done.bytes, done.applied, done.notes) == (3, 3 * SLOT, True, ())
    assert done.returned_bytes == before - after > 0
    assert held(place, [4]) == [1]
    assert block_count(place) == 1


def test_evict_a_class_spares_what_others_keep(place: Place) -> None:
    place.store(([1, 2], "keep"), ([3], "keep"))
    with place.engine() as store:
        store.lookup(NS, prompt([1]), traffic="long")
        store.pin(chain_keys(NS, prompt([3])), ttl_s=5)
    chosen = plan(place, lambda view, txn: plan_class(view, txn, "keep"))
    assert [(cut.blocks, cut.keep) for cut in chosen.cuts] == [(2, 1)]
    with place.inspect() as view, view.snapshot() as txn, pytest.raises(UsageError, match="did you mean 'keep'"):
        plan_class(view, txn, "kep")


def test_evict_by_age_looks_at_every_class(place: Place) -> None:
    place.store(([1, 2], "keep"), ([3], "brief"))
    place.now += 30
    with place.engine() as store:
        store.lookup(NS, prompt([1]), traffic="brief")
    chosen = plan(place, lambda view, txn: plan_older(view, txn, 20.0))
    assert sorted((cut.blocks, cut.keep) for cut in chosen.cuts) == [(1, 0), (2, 1)]


def test_evict_the_oldest_takes_leaves_first_and_spares_pins(place: Place) -> None:
    place.store(([1, 2, 3], "keep"))
    place.now += 1
    place.store(([4, 5], "keep"))
    with place.engine() as store:
        store.pin(chain_keys(NS, prompt([1])), ttl_s=1000)
    chosen = plan(place, lambda view, txn: plan_oldest(view, txn, 3))
    with place.operate() as view:
        assert evict(view, chosen).blocks == 3
    assert held(place, [1, 2, 3], [4, 5]) == [1, 1]


def test_evict_a_key_takes_its_extents_rest(place: Place) -> None:
    place.store(([1, 2, 3], "keep"))
    with place.inspect() as view, view.snapshot() as txn:
        chosen = plan_key(txn, key_of([1, 2])[:20])
        with pytest.raises(UsageError, match="not in the store"):
            plan_key(txn, "0" * 64)
    with place.operate() as view:
        assert evict(view, chosen).blocks == 2
    assert held(place, [1, 2, 3]) == [1]


def test_evict_all_leaves_no_segment_and_children_go_before_parents(place: Place) -> None:
    place.store(([1, 2], "keep"), ([1, 2, 3], "keep"), ([4], "keep"))
    with place.engine() as store:
        store.pin(chain_keys(NS, prompt([4])), ttl_s=1000)
    with place.inspect() as view:
        physical = read_stat(view).physical_bytes
    chosen = plan(place, lambda _, txn: plan_all(txn))
    assert chosen.cuts[0].blocks == 1, "the extent of block 3 goes before that of its parents"
    with place.operate() as view:
        done = evict(view, chosen)
    assert (done.blocks, done.returned_bytes) == (4, physical)
    assert segment_files(place) == []
    with place.engine() as store:
        assert store.stats().physical_bytes == 0


def block_count(place: Place) -> int:
    with place.inspect() as view:
        return read_stat(view).blocks


# -- verify ------------------------------------------------------------------------------------------------------------


def check(place: Place, limit: int | None = None) -> VerifyReport:
    with place.inspect() as view:
        return verify(view, limit=limit)


def test_verify_names_a_flipped_bit_and_repairs(place: Place) -> None:
    place.store(([1, 2, 3], "keep"), ([4], "keep"))
    flip(place, block_of(place, [1, 2]))
    report = check(place)
    assert (report.blocks, report.checked, report.clean) == (4, 4, False)
    assert [(bad.key, bad.reason, bad.unreadable) for bad in report.bad] == [(key_of([1, 2])[:32], "checksum", False)]
    with place.operate() as view:
        assert repair(view, report) == 2
    after = check(place)
    assert (after.bad, after.differences, [noted.reason for noted in after.noted]) == ([], [], ["checksum"])
    assert held(place, [1, 2, 3], [4]) == [1, 1]
    with place.operate() as view:
        clear_noted(view)
    assert check(place).clean


def test_verify_sees_blocks_that_changed_places(place: Place) -> None:
    place.store(([1, 2, 3], "keep"))
    first, second = block_of(place, [1]), block_of(place, [1, 2])
    file = place.folder / first.file
    raw = bytearray(file.read_bytes())
    one, two = slice(first.file_offset, first.file_offset + SLOT), slice(second.file_offset, second.file_offset + SLOT)
    raw[one], raw[two] = raw[two], raw[one]
    file.write_bytes(raw)
    assert [(bad.slot, bad.reason) for bad in check(place).bad] == [
        (0, "another block"), (1, "another block"), (2, "another parent"),
    ]  # fmt: skip


def test_verify_misses_files_and_finds_strays(place: Place) -> None:
    place.store(([1, 2], "keep"), ([3], "long"))
    lost, kept = segment_files(place)
    lost.unlink()
    (kept.parent / "000000ff.seg").write_bytes(b"?")
    report = check(place)
    assert [(one.file, one.blocks) for one in report.missing] == [(str(lost.relative_to(place.folder)), 2)]
    assert report.strays == [str((kept.parent / "000000ff.seg").relative_to(place.folder))]
    with place.operate() as view:
        assert repair(view, report) == 2
    assert check(place).missing == []
    assert block_count(place) == 1


def test_verify_reads_what_a_cut_file_still_has(place: Place) -> None:
    place.store(([1, 2, 3], "keep"))
    os.truncate(segment_files(place)[0], SLOT + 100)
    report = check(place)
    assert [(bad.slot, bad.reason) for bad in report.bad] == [(1, "short read"), (2, "short read")]
    assert [one.what for one in report.differences] == ["bytes on disk"]
    with place.operate() as view:
        assert repair(view, report) == 2
        clear_noted(view)
    assert check(place).clean


def test_verify_checks_the_accounts(place: Place) -> None:
    place.store(([1, 2, 3], "keep"))
    with place.operate() as view, view.writable.write() as txn:
        ((number, info),) = txn.segments()
        info.live += 5
        info.allocated += 10 * SLOT
        txn.put_segment(number, info)
    report = check(place)
    assert {(one.what, one.indexed - one.counted) for one in report.differences} == {
        ("live blocks", 5), ("bytes on disk", 10 * SLOT),
    }  # fmt: skip
    assert not report.clean
    with place.operate() as view:
        repair(view, report)
    assert check(place).clean


def test_verify_stops_at_its_limit(place: Place) -> None:
    place.store(([1, 2, 3], "keep"), ([4, 5], "long"))
    seen: list[tuple[int, int]] = []
    with place.inspect() as view:
        report = verify(view, limit=4, on_progress=lambda done, total: seen.append((done, total)))
    assert (report.checked, report.clean) == (4, True)
    assert seen == [(3, 4), (4, 4)]


def with_reads(view: StoreView, read: Callable[[Backend, Sequence[ReadOp], float], list[int]]) -> None:
    """Let `read(backend, ops, deadline_s)` answer the backend's reads."""
    backend = view.backend

    class Changed:
        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        def read_many(self, ops: Sequence[ReadOp], *, deadline_s: float) -> list[int]:
            return read(backend, ops, deadline_s)

    view.backend = Changed()  # type: ignore[assignment]


def test_verify_gives_up_a_backend_that_hangs(place: Place) -> None:
    place.store(*[([number], "keep") for number in range(40)])
    release = threading.Event()
    tried: list[ReadOp] = []

    def hang(backend: Backend, ops: Sequence[ReadOp], deadline_s: float) -> list[int]:
        tried.extend(ops)
        release.wait()
        return [-errno.EIO for _ in ops]

    with place.inspect() as view:
        with_reads(view, hang)
        report = verify(view, deadline_s=0.01)
    release.set()
    assert len(tried) <= 3, "after three late reads nothing more is asked of it"
    assert (report.checked, report.unread, report.bad, report.clean) == (0, 40, [], False)


def test_verify_tells_an_unreadable_slot_from_a_damaged_one(place: Place) -> None:
    place.store(([1, 2, 3], "keep"))
    at = block_of(place, [1, 2]).file_offset

    def fail(backend: Backend, ops: Sequence[ReadOp], deadline_s: float) -> list[int]:
        (op,) = ops
        hit = op.offset <= at < op.offset + op.nbytes
        return [-errno.EIO] if hit else backend.read_many(ops, deadline_s=deadline_s)

    with place.inspect() as view:
        with_reads(view, fail)
        report = verify(view)
    assert [(bad.slot, bad.reason, bad.unreadable) for bad in report.bad] == [(1, "EIO", True)]
    with place.operate() as view:
        assert repair(view, report) == 0
    assert held(place, [1, 2, 3]) == [3]


def test_verify_does_not_blame_what_went_meanwhile(place: Place) -> None:
    """A slot is punched after the index let go of it, so zeros under an old snapshot are no damage."""
    place.store(([1, 2, 3], "keep"))
    with place.operate() as view:

        def cut_then_read(backend: Backend, ops: Sequence[ReadOp], deadline_s: float) -> list[int]:
            with view.snapshot() as txn:
                chosen = plan_key(txn, key_of([1, 2])) if txn.totals()[1] == 3 else None
            if chosen is not None:
                evict(view, chosen)
            return backend.read_many(ops, deadline_s=deadline_s)

        with_reads(view, cut_then_read)
        report = verify(view)
    assert (report.bad, report.missing, report.differences) == ([], [], [])


# -- rebuild -----------------------------------------------------------------------------------------------------------


def rebuild(place: Place, *, force: bool = False) -> tuple[int, int, bool]:
    done = rebuild_index(str(place.folder), config=place.config, clock=place.clock, force=force)
    return done.segments, done.blocks, done.lives_known


def test_a_rebuild_finds_every_block_with_its_life(place: Place) -> None:
    place.store(([1, 2, 3], "brief"), ([4], "long"))
    until = block_of(place, [4]).until_s
    for file in (place.folder / "index").iterdir():
        file.unlink()
    with place.inspect() as view, pytest.raises(StoreError, match="not there; build it with kvctl rebuild"):
        read_stat(view)
    place.now += 5
    assert rebuild(place) == (2, 4, True)
    assert held(place, [1, 2, 3], [4]) == [3, 1]
    assert block_of(place, [4]).until_s == until
    assert check(place).clean


def test_a_rebuild_takes_lives_from_the_old_index(place: Place) -> None:
    place.store(([1], "brief"))
    place.now += 5
    with place.engine() as store:
        store.lookup(NS, prompt([1]), traffic="long")
        store.blocks.flush_uses()
        saved = (place.folder / "lives.ckpt").read_bytes()
    (place.folder / "lives.ckpt").write_bytes(saved)  # as if the engine had died before its checkpoint
    assert rebuild(place) == (1, 1, True)
    assert block_of(place, [1]).until_s == place.now + 100


def test_no_rebuild_under_a_writer(place: Place) -> None:
    place.store(([1], "brief"))
    before = place.tree()
    with writer_alive(place, "mine"):
        before = place.tree()
        with pytest.raises(StoreError, match="writer mine is running; stop that engine, then rebuild"):
            rebuild(place)
        assert place.tree() == before


def damage_cut(place: Place) -> str:
    file = segment_files(place)[0]
    os.truncate(file, SLOT)
    return f"{file.name}: cut short"


def damage_foreign(place: Place) -> str:
    file = segment_files(place)[0]
    file.with_name("0000000f.seg").write_bytes(b"not a segment" * 1000)
    return "0000000f.seg: not a segment of this store"


def damage_policy(place: Place) -> str:
    (place.folder / "policy.json").write_text('{"classes": 1}')
    return "policy.json: not a policy"


@pytest.mark.parametrize("damage", [damage_cut, damage_foreign, damage_policy])
def test_a_rebuild_gives_nothing_up_unasked(place: Place, damage: Callable[[Place], str]) -> None:
    place.store(([1, 2], "keep"), ([3], "long"))
    reason = damage(place)
    before = place.tree()
    with pytest.raises(StoreError, match=reason) as caught:
        rebuild(place)
    assert "--force" in str(caught.value)
    assert place.tree() == before
    rebuild(place, force=True)
    place.now += 1
    assert held(place, [3]) == [1]
    assert check(place).clean


def test_an_absent_policy_deletes_nothing_at_the_second_open_either(place: Place) -> None:
    place.store(([1], "brief"))
    (place.folder / "policy.json").unlink()
    for file in (place.folder / "index").iterdir():
        file.unlink()
    rebuild(place)
    place.now += 1_000_000
    for _ in range(2):
        with place.engine() as store:
            store.maintain()
    assert held(place, [1]) == [1]


def test_set_policies_survive_a_rebuild(place: Place) -> None:
    place.store(([1], "brief"))
    with place.operate() as view:
        change_ttl(view, "brief", 77.0)
    rebuild(place)
    with place.inspect() as view, view.snapshot() as txn:
        assert PolicyBook().current(txn).classes["brief"] == ClassRule(77.0)
