"""What an operator changes: how long classes live, what goes now, and an index built anew from the segments.

The plans are values made from a snapshot, so a dry run and the real thing say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Literal

from duokv.kvstore.backend import FileInfo
from duokv.kvstore.checkpoint import Checkpoint, read_lives, write_lives
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import DuoKVError, StoreError, UsageError, nearest
from duokv.kvstore.events import BlocksEvicted, Degraded, Event, SpaceFreed
from duokv.kvstore.explain import Absent, check_key, find_block
from duokv.kvstore.extent import Cutoffs, Life
from duokv.kvstore.hostlocks import HostLocks
from duokv.kvstore.index import Index, IndexTxn
from duokv.kvstore.indexfile import BootMark
from duokv.kvstore.inspection import StoreView, boot_id, inspect_store
from duokv.kvstore.opening import index_place, local_folder, resolve_backend
from duokv.kvstore.policy import PIN_CLASS, ClassRule, Policy
from duokv.kvstore.policybook import KEEP_ALL, PolicyBook, decode_policy, encode_policy
from duokv.kvstore.reclaim import Cut, Reason, ReclaimPlan, VictimQueue
from duokv.kvstore.record import Trailer
from duokv.kvstore.recovery import POLICY_FILE, Recovered, Recovery, take_lock
from duokv.kvstore.segment import Footer, parse_name, read_footer
from duokv.kvstore.slotcheck import MAX_SLOTS, SlotChecker

_CUTS_PER_TXN = 1000
"""Engines commit between two of these, so none waits long."""
_READ_S = 60.0
_LOCK_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class TtlChange:
    """A class's rule before (None: a new class) and after, and what that does to blocks on disk now.

    freed: blocks that are past their life by the new rule and were not by the old. revived: the reverse.
    """

    name: str
    before: ClassRule | None
    after: ClassRule
    policy_version: int
    freed_blocks: int
    freed_bytes: int
    revived_blocks: int
    applied: bool


@dataclass(frozen=True, slots=True)
class Evicted:
    """Blocks taken out, or that would be, and the bytes of their slots, of so many extents.

    returned_bytes: given back to the file system by now; 0 in a dry run. notes: what the backend refused, for people.
    """

    blocks: int
    bytes: int
    extents: int
    returned_bytes: int
    applied: bool
    notes: tuple[str, ...]


# -- lives of classes --------------------------------------------------------------------------------------------------


def change_ttl(
    view: StoreView, name: str, ttl_s: float | None, *, mode: Literal["sliding", "fixed"] | None = None,
    add: bool = False, dry_run: bool = False,
) -> TtlChange:  # fmt: skip
    """Give a class a life; running engines follow at their next lookup. UsageError for a class unknown unless `add`.

    ttl_s: seconds, None for unbounded. mode: None keeps the class's own ("sliding" for a new one). Nothing is deleted
    here: engines reclaim what is past its life, or `evict`.
    """
    if dry_run:
        with view.snapshot() as txn:
            return _ttl_change(view, txn, _policy_to_change(view, txn), name, ttl_s, mode, add=add, applied=False)[0]
    with view.writable.write() as txn:
        old = _policy_to_change(view, txn)
        change, policy = _ttl_change(view, txn, old, name, ttl_s, mode, add=add, applied=True)
        if change.before != change.after:
            # The file first: a crash in between leaves the old policy in force, and a rebuild takes the new one.
            view.backend.write_file(POLICY_FILE, encode_policy(policy))
            PolicyBook.put(txn, policy)
        return change


def _policy_to_change(view: StoreView, txn: IndexTxn) -> Policy:
    """The policy in force, or one to start from where it was lost: old blocks then belong to no class it names."""
    try:
        policy = view.policy(txn)
    except DuoKVError:
        policy = KEEP_ALL
    if policy.version:
        return policy
    highest = max((number for _, life in txn.lives() for number in life.steps if number < PIN_CLASS), default=0)
    return Policy(KEEP_ALL.classes, KEEP_ALL.default, {KEEP_ALL.default: highest + 1}, version=0)


def _ttl_change(
    view: StoreView, txn: IndexTxn, old: Policy, name: str, ttl_s: float | None,
    mode: Literal["sliding", "fixed"] | None, *, add: bool, applied: bool,
) -> tuple[TtlChange, Policy]:  # fmt: skip
    before = old.classes.get(name)
    if before is None and not add:
        raise UsageError(
            f"traffic class {name!r} is not in the store's policy; {nearest(name, old.classes)}; --add makes a new one"
        )
    after = ClassRule(ttl_s, mode or (before.mode if before else "sliding"))
    new = old if before == after else old.with_rule(name, after).numbered(old)
    was, will = (Cutoffs(policy, view.clock.wall()) for policy in (old, new))
    freed = revived = 0
    for _, life in txn.lives() if new is not old else ():
        difference = life.alive(will) - life.alive(was)
        freed, revived = freed + max(0, -difference), revived + max(0, difference)
    slot = view.geometry.slot_bytes
    return TtlChange(name, before, after, new.version, freed, freed * slot, revived, applied), new


# -- taking blocks out -------------------------------------------------------------------------------------------------


def plan_expired(view: StoreView, txn: IndexTxn) -> ReclaimPlan:
    """All blocks past their life."""
    cutoffs = Cutoffs(view.policy(txn), view.clock.wall())
    return _plan(txn.lives(), lambda life: life.alive(cutoffs), "expired")


def plan_class(view: StoreView, txn: IndexTxn, name: str) -> ReclaimPlan:
    """Blocks that only class `name` keeps; what a pin or another class keeps stays. UsageError for an unknown class."""
    policy = view.policy(txn)
    number = policy.class_id(name)
    cutoffs = Cutoffs(policy, view.clock.wall())

    def keep(life: Life) -> int:
        if number not in life.steps:
            return life.n
        others = {other: steps for other, steps in life.steps.items() if other != number}
        return Life(life.n, life.chain_pos, life.first, others).alive(cutoffs)

    return _plan(txn.lives(), keep, "operator")


def plan_older(view: StoreView, txn: IndexTxn, age_s: float) -> ReclaimPlan:
    """Blocks not used by any class for longer than `age_s` seconds and not pinned."""
    same = ClassRule(age_s)
    policy = view.policy(txn)
    by_age = Policy(dict.fromkeys(policy.classes, same), policy.default, policy.ids, policy.version)
    cutoffs = Cutoffs(by_age, view.clock.wall())
    return _plan(txn.lives(), lambda life: life.alive(cutoffs), "operator")


def plan_oldest(view: StoreView, txn: IndexTxn, blocks: int) -> ReclaimPlan:
    """The `blocks` least recently used blocks that are not pinned, leaves first."""
    queue = VictimQueue.built(txn.lives(), view.policy(txn))
    never = 1 << 64
    return queue.plan_capacity(txn, blocks, before_stamp=never, now_s=view.clock.wall(), reason="operator")


def plan_key(txn: IndexTxn, key: str) -> ReclaimPlan:
    """One block, and those after it in its extent, pinned or not. UsageError if the key is none or fits several."""
    found = find_block(txn, check_key(key))
    if isinstance(found, Absent):
        raise UsageError(f"key {key!r} is not in the store; kvctl explain says what is known of it")
    extent, offset, life = found
    cut = Cut(extent.place, life.n, offset, "operator")
    return ReclaimPlan((cut,))


def plan_all(txn: IndexTxn) -> ReclaimPlan:
    """Every block, pinned or not."""
    return _plan(txn.lives(), lambda _: 0, "operator")


def evict(view: StoreView, plan: ReclaimPlan, *, dry_run: bool = False) -> Evicted:
    """Carry out a plan: out of the index first, then off the backend."""
    slot = view.geometry.slot_bytes
    if dry_run:
        return Evicted(plan.freed, plan.freed * slot, len(plan.cuts), 0, False, ())
    events: list[Event] = []
    unsubscribe = view.events.subscribe(events.append)
    space = view.blocks(view.writable).space
    for at in range(0, len(plan.cuts), _CUTS_PER_TXN):
        space.reclaimer.apply(ReclaimPlan(plan.cuts[at : at + _CUTS_PER_TXN]))
    unsubscribe()
    # Engines may have been quicker with some of it.
    blocks = sum(event.blocks for event in events if isinstance(event, BlocksEvicted))
    returned = sum(event.bytes for event in events if isinstance(event, SpaceFreed))
    notes = tuple(f"{event.what}: {event.reason}" for event in events if isinstance(event, Degraded))
    return Evicted(blocks, blocks * slot, len(plan.cuts), returned, True, notes)


def _plan(lives: Iterable[tuple[int, Life]], keep: Callable[[Life], int], reason: Reason) -> ReclaimPlan:
    cuts = [
        (life.chain_pos, Cut(place, life.n, kept, reason)) for place, life in lives if (kept := keep(life)) < life.n
    ]
    # Leaves before parents, so that stopping half way leaves nothing that cannot be reached.
    cuts.sort(key=lambda item: item[0], reverse=True)
    return ReclaimPlan(tuple(cut for _, cut in cuts))


# -- the index anew ----------------------------------------------------------------------------------------------------


def rebuild_index(
    url: str, *, config: StoreConfig | None = None, clock: Clock | None = None, geometry: str | None = None,
    force: bool = False,
) -> Recovered:  # fmt: skip
    """Build the index anew from segment footers and slot trailers.

    StoreError, with nothing changed, while a writer is alive, and for segment files that are foreign or cut short
    unless `force`: then what cannot be read is given up. Last uses are taken over from the old index or its checkpoint.
    """
    config, clock = config or StoreConfig(), clock or Clock()
    with inspect_store(url, config=config, geometry=geometry) as view, ExitStack() as stack:
        _refuse_writers(url)
        if not force:
            _judge(view)
        backend = resolve_backend(url, config.direct)
        stack.callback(backend.close)
        stack.callback(take_lock(backend, "open", wait_s=_LOCK_WAIT_S).release)
        _refuse_writers(url)
        with suppress(StoreError), view.snapshot() as txn:
            if view.doubtful(txn) is None:
                write_lives(backend, txn)
        if _policy_fault(view) is not None:
            backend.remove(POLICY_FILE)
        place = index_place(url, config).folder
        for name in ("data.mdb", "lock.mdb"):
            (place / name).unlink(missing_ok=True)
        mark = BootMark(place)
        mark.begin(boot_id())
        index = Index(place, map_bytes=config.index_map_bytes)
        stack.callback(mark.finish, index, alone=True)
        recovery = Recovery(
            index=index, backend=backend, geometry=view.geometry, boot_id=boot_id(), emit=view.events.emit,
            now_s=clock.wall(), give_up=force,
        )  # fmt: skip
        return recovery.run()


def _refuse_writers(url: str) -> None:
    alive = HostLocks(local_folder(url)).writers()
    if alive:
        raise StoreError(f"{url}: writer {alive[0]} is running; stop that engine, then rebuild")


def _policy_fault(view: StoreView) -> str | None:
    raw = view.backend.read_file(POLICY_FILE)
    try:
        if raw is not None:
            decode_policy(raw, where=POLICY_FILE)
    except DuoKVError as error:
        return str(error)
    return None


def _judge(view: StoreView) -> None:
    """StoreError for the first file that a rebuild could not take over whole."""
    fault = _policy_fault(view)
    if fault is not None:
        raise StoreError(f"{fault}, or give it up with --force: then nothing expires")
    ends: dict[int, int] = {}
    for place, life in _known_lives(view).items():
        ends[place >> 32] = max(ends.get(place >> 32, 0), (place & 0xFFFFFFFF) + life.n)
    checker = SlotChecker(view.backend, view.geometry, threads=1)
    try:
        for file in view.backend.list("seg/"):
            parsed = parse_name(file.name)
            if parsed is not None:
                segment_fault = _segment_fault(view, file, ends.get(parsed[1], 0), checker)
                if segment_fault is not None:
                    raise StoreError(
                        f"{file.name}: {segment_fault}; restore it or move it out of the store, "
                        "or give up what cannot be read with --force"
                    )
    finally:
        checker.close()


def _known_lives(view: StoreView) -> dict[int, Life]:
    """What the checkpoint says of lives in sealed segments, which are durable, and the old index, if it can be read."""
    known = read_lives(view.backend) or Checkpoint()
    lives = {place: life for place, life in known.lives.items() if place >> 32 in known.sealed}
    with suppress(StoreError), view.snapshot() as txn:
        if view.doubtful(txn) is None:
            lives |= dict(txn.lives())
    return lives


def _segment_fault(view: StoreView, file: FileInfo, end: int, checker: SlotChecker) -> str | None:
    """Why a file is not a whole segment of this store, whose known extents end at slot `end`."""
    slot_bytes = view.geometry.slot_bytes
    slots = file.size // slot_bytes
    if slots < end:
        return f"cut short, {end} slots are known and {slots} are there"
    footer = read_footer(view.backend, file, view.geometry, deadline_s=_READ_S)
    if isinstance(footer, Footer):
        return None
    faults = set()
    for at in range(0, slots, MAX_SLOTS):
        for found in checker.check(file.name, range(at, min(at + MAX_SLOTS, slots)), deadline_s=_READ_S):
            if isinstance(found, Trailer):
                return None
            faults.add(found)
    # A crash leaves slots that were reserved and never written.
    if faults <= {"no trailer"} and file.size % slot_bytes == 0:
        return None
    return f"not a segment of this store ({', '.join(sorted({footer, *faults}))})"
