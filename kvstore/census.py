"""What a store holds: sums, and its extents and segments one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from duokv.kvstore.damage import damage_noted
from duokv.kvstore.extent import Cutoffs, Life, stamp_s
from duokv.kvstore.index import IndexTxn
from duokv.kvstore.inspection import StoreView
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import BORN_CLASS, PIN_CLASS, Policy

State = Literal["alive", "expired", "pinned"]


@dataclass(frozen=True, slots=True)
class WriterStat:
    """A registered writer. alive: None where this backend's locks cannot be looked at."""

    name: str
    alive: bool | None


@dataclass(frozen=True, slots=True)
class ClassStat:
    """A class and the blocks it ever used that are still on disk: kept by its rule now, and past it.

    ttl_s None is unbounded. in_policy False: removed or unknown, so that the default class's rule holds.
    """

    name: str
    ttl_s: float | None
    mode: str
    alive: int
    expired: int
    in_policy: bool


@dataclass(frozen=True, slots=True)
class StoreStat:
    """Sizes of a store now. Blocks unless the name says bytes; `expired` ones are misses that still take space.

    dead_bytes: physical bytes without a block in the index: room reserved ahead, footers, slots not given back.
    doubtful: why the index cannot be trusted until it is rebuilt, None when it can.
    """

    url: str
    geometry: str
    payload_bytes: int
    slot_bytes: int
    created_s: float
    blocks: int
    alive: int
    expired: int
    pinned: int
    extents: int
    segments: int
    active_segments: int
    physical_bytes: int
    live_bytes: int
    dead_bytes: int
    index_bytes: int
    index_bytes_per_block: float
    classes: tuple[ClassStat, ...]
    default_class: str
    policy_version: int
    writers: tuple[WriterStat, ...]
    damage: int
    doubtful: str | None


@dataclass(frozen=True, slots=True)
class ExtentView:
    """An extent. key: 32 hex digits of its first block's key. alive, pinned: leading blocks.

    tail_until_s and head_until_s: when its last and its first block go (seconds since the epoch, None = never).
    keeper: the class that keeps the first block longest, None if none ever used it.
    """

    key: str
    segment: int
    slot: int
    chain_pos: int
    blocks: int
    alive: int
    pinned: int
    origin: str
    stored_by: str
    keeper: str | None
    last_use_s: float
    tail_until_s: float | None
    head_until_s: float | None


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment: slots it has room for, published, still referenced; bytes it takes."""

    number: int
    file: str
    stored_by: str
    slots: int
    used: int
    live: int
    allocated_bytes: int
    sealed: bool
    writer_alive: bool | None
    created_s: float


def read_stat(view: StoreView) -> StoreStat:
    """Sizes and counts. Reads every life: about 10 us an extent."""
    with view.index() as index, index.read() as txn:
        policy = view.policy(txn)
        alive, pinned, by_class = _count(txn, policy, view.clock.wall())
        segments = txn.segments()
        physical, live = txn.totals()
        slot = view.geometry.slot_bytes
        return StoreStat(
            url=view.url,
            geometry=view.geometry.name,
            payload_bytes=view.geometry.payload_bytes,
            slot_bytes=slot,
            created_s=view.manifest.created_s,
            blocks=live,
            alive=alive,
            expired=live - alive,
            pinned=pinned,
            extents=txn.count_extents(),
            segments=len(segments),
            active_segments=sum(not info.sealed for _, info in segments),
            physical_bytes=physical,
            live_bytes=live * slot,
            dead_bytes=physical - live * slot,
            index_bytes=index.file_bytes(),
            index_bytes_per_block=index.file_bytes() / live if live else 0.0,
            classes=by_class,
            default_class=policy.default,
            policy_version=policy.version,
            writers=tuple(WriterStat(name, view.locks.alive(name)) for name in txn.meta_names(b"writer:")),
            damage=len(damage_noted(txn)),
            doubtful=view.doubtful(txn),
        )


def _count(txn: IndexTxn, policy: Policy, now_s: float) -> tuple[int, int, tuple[ClassStat, ...]]:
    """Blocks alive, blocks pinned, and both kinds by class."""
    cutoffs = Cutoffs(policy, now_s)
    alive = pinned = 0
    counts = dict.fromkeys(policy.ids.values(), (0, 0))
    for _, life in txn.lives():
        alive += life.alive(cutoffs)
        pinned += life.pinned(now_s)
        for number, used, kept in _by_class(life, cutoffs):
            before = counts.get(number, (0, 0))
            counts[number] = (before[0] + kept, before[1] + used - kept)
    return alive, pinned, tuple(_class_stat(policy, number, *count) for number, count in sorted(counts.items()))


def list_extents(
    view: StoreView, *, traffic: str | None = None, state: State | None = None, segment: int | None = None,
    limit: int | None = None,
) -> tuple[list[ExtentView], int]:  # fmt: skip
    """Extents in order of place, at most `limit` of them, and how many fit the filters.

    traffic: used by this class. state: with at least one block alive, expired, or pinned. UsageError for a class
    the store does not have.
    """
    with view.snapshot() as txn:
        policy = view.policy(txn)
        number = None if traffic is None else policy.class_id(traffic)
        now_s = view.clock.wall()
        cutoffs = Cutoffs(policy, now_s)
        views: list[ExtentView] = []
        fitting = 0
        for place, life in txn.lives(segment):
            alive, pinned = life.alive(cutoffs), life.pinned(now_s)
            in_state = {"alive": alive > 0, "expired": alive < life.n, "pinned": pinned > 0}
            if (number is not None and number not in life.steps) or (state is not None and not in_state[state]):
                continue
            fitting += 1
            if limit is None or len(views) < limit:
                views.append(_extent_view(txn, policy, place, life, alive, pinned))
        return views, fitting


def list_segments(view: StoreView) -> list[SegmentView]:
    """All segments in order of number."""
    with view.snapshot() as txn:
        policy = view.policy(txn)
        return [
            SegmentView(
                number, info.name(number), policy.name_of(info.class_id), info.slots, info.used, info.live,
                info.allocated, info.sealed, view.locks.alive(info.writer), info.created_s,
            )
            for number, info in txn.segments()
        ]  # fmt: skip


def _by_class(life: Life, cutoffs: Cutoffs) -> Iterator[tuple[int, int, int]]:
    """Per class number: how many leading blocks it used, and how many of them its rule keeps."""
    born = life.steps.get(BORN_CLASS, [])
    for number, steps in life.steps.items():
        if number < PIN_CLASS:
            alone = Life(life.n, life.chain_pos, life.first, {number: steps, BORN_CLASS: born})
            yield number, min(life.n, steps[-1][0]), alone.alive(cutoffs)


def _class_stat(policy: Policy, number: int, alive: int, expired: int) -> ClassStat:
    name, rule = policy.name_of(number), policy.rule_of(number)
    return ClassStat(name, rule.ttl_s, rule.mode, alive, expired, name in policy.classes)


def _extent_view(txn: IndexTxn, policy: Policy, place: int, life: Life, alive: int, pinned: int) -> ExtentView:
    extent = txn.extent(life.first)
    head, keeper = life.deadline(0, policy)
    tail, _ = life.deadline(life.n - 1, policy)
    return ExtentView(
        life.first.hex(), place >> 32, place & 0xFFFFFFFF, life.chain_pos, life.n, alive, pinned,
        "unknown" if extent is None else Origin(extent.origin).name.lower(),
        "unknown" if extent is None else policy.name_of(extent.class_id),
        None if keeper is None else policy.name_of(keeper), stamp_s(life.last_use(0)), tail, head,
    )  # fmt: skip
