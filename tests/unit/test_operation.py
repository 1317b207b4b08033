"""What an operator changes: lives, evictions and an index built anew, each as it was planned, and nothing unasked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest
from inspection_kit import (
    NS,
    POLICY,
    SLOT,
    Place,
    block_count,
    block_of,
    check,
    held,
    key_of,
    place_fixture,  # noqa: F401
    prompt,
    segment_files,
    writer_alive,
)

from duokv.kvstore.census import read_stat
from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.index import IndexTxn
from duokv.kvstore.inspection import StoreView
from duokv.kvstore.keys import chain_keys
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
from duokv.kvstore.policy import ClassRule
from duokv.kvstore.policybook import PolicyBook, decode_policy
from duokv.kvstore.reclaim import ReclaimPlan

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


def plan(place: Place, make: Callable[[StoreView, IndexTxn], ReclaimPlan]) -> ReclaimPlan:
    with place.inspect() as view, view.snapshot() as txn:
        return make(view, txn)


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
