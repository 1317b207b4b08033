"""Is everything there that the index says? Every block read and checked, every file and byte accounted for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from duokv.kvstore.backend import FileInfo
from duokv.kvstore.damage import Damage, clear_damage, damage_noted
from duokv.kvstore.extent import PREFIX_BYTES, Extent, place_of
from duokv.kvstore.index import IndexTxn, SegmentInfo
from duokv.kvstore.inspection import StoreView
from duokv.kvstore.reader import LATE, is_unreadable
from duokv.kvstore.record import Trailer
from duokv.kvstore.segment import parse_name
from duokv.kvstore.slotcheck import MAX_SLOTS, SlotChecker

_PATIENCE = 3
"""Late reads in a row after which a backend is not asked any more."""


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that does not hold. key: 32 hex digits. extent_slot: first slot of its extent.

    unreadable: the backend gave no bytes, which says nothing about the block itself.
    """

    key: str
    file: str
    segment: int
    slot: int
    extent_slot: int
    reason: str
    unreadable: bool


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A segment whose file is gone, with so many blocks."""

    file: str
    segment: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that the index keeps and what was counted instead. segment None: a sum over the store."""

    what: str
    segment: int | None
    indexed: int
    counted: int


@dataclass(slots=True)
class VerifyReport:
    """What was found. Blocks.

    unread: blocks that were to be checked and were not, since the backend did not answer in time. strays: segment files
    the index does not know and no writer owns (the next open sweeps them). noted: damage met earlier and not cleared.
    """

    blocks: int = 0
    checked: int = 0
    unread: int = 0
    bad: list[BadBlock] = field(default_factory=list)
    missing: list[MissingFile] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    noted: list[Damage] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong, now or noted. Strays are no fault."""
        return not (self.bad or self.missing or self.differences or self.noted or self.unread)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A block the index points at: where, and what its trailer must say."""

    slot: int
    extent: Extent
    offset: int

    @property
    def prefix(self) -> bytes:
        return self.extent.prefixes[self.offset * PREFIX_BYTES : (self.offset + 1) * PREFIX_BYTES]

    def fault(self, found: Trailer | str, before: Trailer | None) -> str | None:
        """Why what was read is not this block; `before` is the block before it in its extent."""
        if isinstance(found, str):
            return found
        if not found.identity.key.startswith(self.prefix):
            return "another block"
        if found.identity.chain_pos != self.extent.chain_pos + self.offset:
            return "another position"
        if found.origin is not self.extent.origin:
            return "another origin"
        if before is not None and found.identity.parent != before.identity.key:
            return "another parent"
        return None


class Verifier:
    """One pass over a store. Engines may go on: what they take out meanwhile is no fault. Not thread-safe."""

    def __init__(self, view: StoreView, *, deadline_s: float, on_progress: Callable[[int, int], None]) -> None:
        self._view = view
        self._deadline_s = deadline_s
        self._on_progress = on_progress
        self._report = VerifyReport()
        self._late = 0

    def run(self, limit: int | None = None) -> VerifyReport:
        """Check at most `limit` blocks (None: all), and the accounts. Every read ends after the deadline."""
        report = self._report
        with self._view.snapshot() as txn:
            segments = txn.segments()
            report.blocks = txn.totals()[1]
            report.noted = damage_noted(txn)
        total = report.blocks if limit is None else min(limit, report.blocks)
        checker = SlotChecker(self._view.backend, self._view.geometry, threads=self._view.config.read_threads)
        try:
            for number, info in segments:
                self._check_segment(number, info, checker, total)
        finally:
            checker.close()
        self._check_accounts()
        return report

    def _check_segment(self, number: int, info: SegmentInfo, checker: SlotChecker, total: int) -> None:
        report = self._report
        with self._view.snapshot() as txn:
            wanted = list(_wanted(txn, number))
        name = info.name(number)
        if not self._view.backend.list(name):
            with self._view.snapshot() as txn:
                if (known := txn.segment(number)) is not None:
                    report.missing.append(MissingFile(name, number, known.live))
            return
        before: Trailer | None = None
        for at in range(0, len(wanted), MAX_SLOTS):
            part = wanted[at : at + max(0, min(MAX_SLOTS, total - report.checked - report.unread))]
            if not part:
                return
            if self._late >= _PATIENCE:
                report.unread += len(part)
                continue
            found = checker.check(name, [block.slot for block in part], deadline_s=self._deadline_s)
            self._late = self._late + 1 if LATE in found else 0
            bad = []
            for block, trailer in zip(part, found, strict=True):
                report.unread += trailer == LATE
                report.checked += trailer != LATE
                fault = None if trailer == LATE else block.fault(trailer, before if block.offset else None)
                before = trailer if isinstance(trailer, Trailer) else None
                if fault is not None:
                    bad.append(_bad(name, number, block, fault))
            report.bad += self._still_there(bad)
            self._on_progress(report.checked + report.unread, total)

    def _still_there(self, bad: list[BadBlock]) -> list[BadBlock]:
        """Those that the index still points at: slots are punched after it has let go of them."""
        if not bad:
            return []
        with self._view.snapshot() as txn:
            lives = {block.extent_slot: txn.life(place_of(block.segment, block.extent_slot)) for block in bad}
            known = txn.segment(bad[0].segment) is not None
        return [
            block
            for block in bad
            if known and (life := lives[block.extent_slot]) is not None and block.slot - block.extent_slot < life.n
        ]

    def _check_accounts(self) -> None:
        view = self._view
        first = self._differences()
        # Engines at work move numbers between two looks; what is really wrong stays.
        second = set(self._differences()) if first else set()
        self._report.differences = [difference for difference in first if difference in second]
        with view.snapshot() as txn:
            known = {info.name(number) for number, info in txn.segments()}
        for file in view.backend.list("seg/"):
            parsed = parse_name(file.name)
            if file.name not in known and (parsed is None or view.locks.alive(parsed[0]) is False):
                self._report.strays.append(file.name)

    def _differences(self) -> list[Difference]:
        view = self._view
        live: defaultdict[int, int] = defaultdict(int)
        with view.snapshot() as txn:
            for place, life in txn.lives():
                live[place >> 32] += life.n
            lives = sum(1 for _ in txn.lives())
            segments, totals, extents = dict(txn.segments()), txn.totals(), txn.count_extents()
        files = {file.name: file for file in view.backend.list("seg/")}
        allocated = sum(info.allocated for info in segments.values())
        found = [
            Difference("extents with a life", None, extents, lives),
            Difference("live blocks", None, totals[1], sum(live.values())),
            Difference("bytes of all segments", None, totals[0], allocated),
            *(Difference("live blocks", number, info.live, live[number]) for number, info in segments.items()),
        ]
        wrong = [difference for difference in found if difference.indexed != difference.counted]
        for number, info in segments.items():
            file = files.get(info.name(number))
            if file is not None and info.sealed and self._takes_more(info, file):
                wrong.append(Difference("bytes on disk", number, info.allocated, file.allocated))
        return wrong

    def _takes_more(self, info: SegmentInfo, file: FileInfo) -> bool:
        """Whether a file's space differs by more than the file system needs to keep track of holes (16 B each)."""
        return abs(file.allocated - info.allocated) > self._view.geometry.slot_bytes + 16 * info.used


def verify(
    view: StoreView, *, limit: int | None = None, deadline_s: float = 10.0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:  # fmt: skip
    """Read and check what the index points at.

    deadline_s: for each read of up to 32 blocks; after three late ones in a row the rest counts as unread, so that a
    backend that hangs cannot hang this. on_progress: called with (blocks done, blocks to do).
    """
    return Verifier(view, deadline_s=deadline_s, on_progress=on_progress).run(limit)


def repair(view: StoreView, report: VerifyReport) -> int:
    """Take damaged blocks and lost segments out of the index and set the accounts right; returns the blocks taken out.

    A damaged block goes with those after it in its extent, and stays noted. What was only unreadable stays.
    """
    blocks = view.blocks(view.writable)
    with view.writable.read() as txn:
        before = txn.totals()[1]
    for bad in sorted(report.bad, key=lambda bad: bad.slot, reverse=True):
        if not bad.unreadable:
            place = place_of(bad.segment, bad.extent_slot)
            blocks.quarantine(place, bad.slot - bad.extent_slot, bytes.fromhex(bad.key), bad.reason)
    for missing in report.missing:
        blocks.lose_segment(missing.segment)
    with view.writable.read() as txn:
        after = txn.totals()[1]
    for difference in report.differences:
        _set_right(view, difference)
    return before - after


def clear_noted(view: StoreView) -> None:
    """Forget the damage noted so far."""
    with view.writable.write() as txn:
        clear_damage(txn)


def _set_right(view: StoreView, difference: Difference) -> None:
    if difference.segment is None:
        return
    with view.writable.write() as txn:
        info = txn.segment(difference.segment)
        if info is None:
            return
        if difference.what == "live blocks":
            info.live = sum(life.n for _, life in txn.lives(difference.segment))
        else:
            info.allocated = sum(file.allocated for file in view.backend.list(info.name(difference.segment)))
        txn.put_segment(difference.segment, info)


def _wanted(txn: IndexTxn, segment: int) -> Iterator[_Wanted]:
    """All blocks of a segment whose keys the index knows, in order of slot."""
    for place, life in txn.lives(segment):
        extent = txn.extent(life.first)
        if extent is not None and extent.place == place:
            for offset in range(life.n):
                yield _Wanted(extent.first_slot + offset, extent, offset)


def _bad(name: str, number: int, block: _Wanted, fault: str) -> BadBlock:
    return BadBlock(
        block.prefix.hex(), name, number, block.slot, block.extent.first_slot, fault, is_unreadable(fault)
    )  # fmt: skip
