"""Verification names each kind of damage and nothing that is sound, and repairs take out what is lost, not more."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

from inspection_kit import (
    SLOT,
    Place,
    block_count,
    block_of,
    check,
    flip,
    held,
    key_of,
    place_fixture,  # noqa: F401
    segment_files,
)

from duokv.kvstore.backend import Backend, ReadOp
from duokv.kvstore.inspection import StoreView
from duokv.kvstore.operation import evict, plan_key
from duokv.kvstore.verification import clear_noted, repair, verify


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
