"""Reading: verified rows in time or not at all."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from reader_kit import (
    LONG_S,
    SHORT_S,
    SLOT,
    TWO,
    World,
    all_right,
    world_fixture,  # noqa: F401
)

from duokv.connectors.fs_faulty import Fail, Fault, Shorten, Stall
from duokv.kvstore.backend import ReadOp
from duokv.kvstore.reader import LATE, BlockReader, Rows, is_unreadable
from duokv.kvstore.spans import Span, plan_reads


def test_every_read_lands_in_its_rows(world: World) -> None:
    with world.pool.lend(4, SLOT) as lent:
        told = world.fetch(lent, TWO)
        assert [int(row[0]) for row in lent.rows] == [5, 6, 1, 2]
    assert told[-1] == (4, None)
    assert all(reason is None for _, reason in told)
    assert [lead for lead, _ in told] == sorted({lead for lead, _ in told})


def test_the_lead_waits_for_the_first_read_whatever_ends_first(world: World) -> None:
    second_checked = threading.Event()

    def check(first: int, rows: Rows) -> list[str | None]:
        if first == 0:
            second_checked.wait()
        else:
            second_checked.set()
        return all_right(first, rows)

    with world.pool.lend(4, SLOT) as lent:
        told = list(world.stream(lent, TWO, check, LONG_S, "seg/a"))
    assert told[-1] == (4, None)
    assert told[0][0] >= 2


@pytest.mark.parametrize(
    ("fault", "reason", "lead"),
    [
        (Fail(kind="read", nth=2), "EIO", 2),
        (Fail(kind="read", nth=2, errno=errno.ESTALE), "ESTALE", 2),
        (Fail(kind="read", nth=2, errno=errno.ETIMEDOUT), LATE, 2),
        (Shorten(kind="read", nth=2, nbytes=2 * SLOT - 1), "short read", 3),
        (Shorten(kind="read", nth=1, nbytes=0), "short read", 0),
    ],
)
def test_a_failed_read_ends_the_lead_and_says_why(world: World, fault: Fault, reason: str, lead: int) -> None:
    world.backend.inject(fault)
    # One thread after the other, so that the second read is the second.
    reader = BlockReader(world.backend, threads=1, slot_bytes=SLOT, monotonic=time.monotonic)
    world.reader, other = reader, world.reader
    other.close()
    with world.pool.lend(4, SLOT) as lent:
        assert world.fetch(lent, TWO)[-1] == (lead, reason)


def test_a_row_that_does_not_verify_ends_the_lead(world: World) -> None:
    with world.pool.lend(4, SLOT) as lent:
        told = list(world.stream(lent, (Span(1, 0, 0, 4),), lambda *_: [None, None, "bad", None], 9, "seg/a"))
    assert told == [(2, None), (2, "bad")]


def test_a_missing_file_is_a_reason(world: World) -> None:
    with world.pool.lend(4, SLOT) as lent:
        assert world.fetch(lent, TWO, name="seg/b") == [(0, "ENOENT")]


def test_a_backend_that_raises_is_a_miss_and_the_thread_lives(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(ops: Sequence[ReadOp], *, deadline_s: float) -> list[int]:
        raise ZeroDivisionError

    with world.pool.lend(4, SLOT) as lent:
        with monkeypatch.context() as patched:
            patched.setattr(world.backend, "read_many", broken)
            for _ in range(4):
                ((lead, reason),) = world.fetch(lent, TWO)
                assert lead == 0
                assert reason is not None
                assert is_unreadable(reason)
        assert world.fetch(lent, TWO)[-1] == (4, None)


@pytest.mark.parametrize(
    ("reason", "unreadable"),
    [("EIO", True), ("ENOENT", True), ("ESTALE", True), ("checksum", False), ("short read", False), (LATE, False)],
)
def test_no_bytes_are_told_from_wrong_bytes(reason: str, unreadable: bool) -> None:
    assert is_unreadable(reason) is unreadable


# Deadlines


def test_a_blocked_backend_is_late_and_its_memory_waits_for_it(world: World) -> None:
    world.backend.inject(Stall(kind="read", until=world.gate, lasting=True))
    lent = world.pool.lend(4, SLOT)
    rows = lent.rows
    rows[:] = 0xEE
    assert world.fetch(lent, TWO, deadline_s=SHORT_S) == [(0, LATE)]
    lent.release()
    assert world.pool.idle_bytes == 0, "a read that may still write into it holds the memory"
    with world.pool.lend(4, SLOT) as other:
        assert not np.may_share_memory(other.rows, rows)
        world.backend.heal()
        world.gate.set()
        assert world.fetch(other, TWO)[-1] == (4, None)
    world.close()
    assert [int(row[0]) for row in rows] == [5, 6, 1, 2], "late reads land in their own memory"
    assert world.pool.idle_bytes > 0


def test_rows_a_late_read_may_still_write_into_are_not_read_into(world: World) -> None:
    """A second load into the same rows would verify, and then be overwritten."""
    world.backend.inject(Stall(kind="read", until=world.gate))
    with world.pool.lend(4, SLOT) as lent:
        old, new = (Span(1, 0, 0, 1),), (Span(1, 7, 0, 1),)
        assert world.fetch(lent, old, deadline_s=SHORT_S) == [(0, LATE)]
        assert world.fetch(lent, new, deadline_s=SHORT_S) == [(0, LATE)], "rows that may change are no hit"
        world.gate.set()
        assert world.fetch(lent, new) == [(1, None)]
        assert (lent.rows[0] == 8).all()


def test_disjoint_rows_of_one_buffer_do_not_wait_for_each_other(world: World) -> None:
    world.backend.inject(Stall(kind="read", until=world.gate))
    with world.pool.lend(2, SLOT) as lent:
        for row, slot, told in ((0, 3, (0, LATE)), (1, 5, (1, None))):
            rows, until = lent.rows[row : row + 1], world.reader.after(SHORT_S if row == 0 else LONG_S)
            reads = (Span(1, slot, 0, 1),)
            assert [told] == list(
                world.reader.fetch(reads, rows, name_of=lambda _: "seg/a", check=all_right, lent=lent, until=until)
            )
        world.gate.set()


def test_reads_that_were_not_begun_when_the_caller_left_are_not_made(world: World) -> None:
    world.backend.inject(Stall(kind="read", until=world.gate, lasting=True))
    with world.pool.lend(8, SLOT) as lent:
        assert world.fetch(lent, plan_reads((Span(1, 0, 0, 8),), ramp=(), max_slots=1), deadline_s=SHORT_S) == [
            (0, LATE)
        ]
        world.gate.set()
        world.backend.heal()
        assert world.fetch(lent, (Span(1, 0, 0, 1),)) == [(1, None)]
    assert sum(operation.kind == "read" for operation in world.backend.log) <= 2 + 1


def test_an_empty_plan_says_nothing_and_keeps_no_memory(world: World) -> None:
    lent = world.pool.lend(4, SLOT)
    assert world.fetch(lent, ()) == []
    lent.release()
    assert world.pool.idle_bytes > 0


def test_closing_ends_the_threads(world: World) -> None:
    before = set(threading.enumerate())
    with world.pool.lend(4, SLOT) as lent:
        world.fetch(lent, TWO)
    reading = [thread for thread in set(threading.enumerate()) - before if thread.name == "duokv-read"]
    assert len(reading) == 2, "no more threads than the backend can use"
    world.close()
    assert set(threading.enumerate()) <= before


def test_a_read_after_the_end_is_late_and_keeps_no_memory(world: World) -> None:
    lent = world.pool.lend(4, SLOT)
    world.fetch(lent, TWO)
    world.close()
    assert world.fetch(lent, TWO, deadline_s=SHORT_S) == [(0, LATE)]
    lent.release()
    assert world.pool.idle_bytes > 0


def test_a_deadline_may_be_as_long_as_numbers_go(world: World) -> None:
    with world.pool.lend(4, SLOT) as lent:
        assert world.fetch(lent, TWO, deadline_s=float("inf"))[-1] == (4, None)


def test_lent_rows_are_not_given_back_while_they_are_verified(world: World) -> None:
    """What verifies may be kept, so the caller must not write to it meanwhile, however late it is."""
    verifying, verified = threading.Event(), threading.Event()
    ended: list[bool] = []

    def check(_: int, found: Rows) -> list[str | None]:
        verifying.set()
        assert verified.wait(LONG_S)
        return [None] * len(found)

    def load() -> None:
        list(world.stream(lent, (Span(1, 0, 0, 4),), check, SHORT_S, "seg/a"))
        ended.append(verified.is_set())

    with world.pool.lend(4, SLOT) as lent:
        loading = threading.Thread(target=load)
        loading.start()
        assert verifying.wait(LONG_S)
        loading.join(4 * SHORT_S)
        verified.set()
        loading.join()
    assert ended == [True]


# Rows of others


@pytest.mark.parametrize("width", [SLOT, SLOT - 1000, SLOT + 5])
def test_rows_of_others_get_what_fits(world: World, width: int) -> None:
    whole = np.full((4, SLOT + 50), 0xEE, np.uint8)
    told = world.fetch(whole[:, :width], TWO)
    assert told[-1] == (4, None)
    copied = min(width, SLOT)
    assert (whole[:, :copied] == np.array([5, 6, 1, 2], np.uint8)[:, None]).all()
    assert (whole[:, copied:] == 0xEE).all()


def test_only_blocks_that_verify_reach_rows_of_others(world: World) -> None:
    rows = np.full((4, SLOT), 0xEE, np.uint8)

    def check(first: int, found: Rows) -> list[str | None]:
        return ["checksum" if first + i == 1 else None for i in range(len(found))]

    told = list(world.stream(rows, (Span(1, 0, 0, 4),), check, LONG_S, "seg/a"))
    assert told[-1] == (1, "checksum")
    assert [int(row[0]) for row in rows] == [1, 0xEE, 0xEE, 0xEE]


def test_a_late_read_never_writes_into_rows_of_others(world: World) -> None:
    world.backend.inject(Stall(kind="read", until=world.gate, lasting=True))
    rows = np.full((4, SLOT), 0xEE, np.uint8)
    assert world.fetch(rows, TWO, deadline_s=SHORT_S) == [(0, LATE)]
    world.close()
    assert (rows == 0xEE).all()


def test_blocks_verified_after_the_caller_left_are_not_copied(world: World) -> None:
    checking = threading.Event()
    rows = np.full((4, SLOT), 0xEE, np.uint8)

    def check(first: int, found: Rows) -> list[str | None]:
        checking.set()
        world.gate.wait(LONG_S)
        return all_right(first, found)

    assert list(world.stream(rows, TWO, check, SHORT_S, "seg/a")) == [(0, LATE)]
    assert checking.wait(LONG_S), "else this tests nothing"
    world.close()
    assert (rows == 0xEE).all()
