"""Copies from memory beside reads: one lead over both, helped by idle threads, and none once the caller has left."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

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

from duokv.connectors.fs_faulty import Fail, Stall
from duokv.kvstore.buffers import Lent
from duokv.kvstore.reader import LATE, Copies, Rows
from duokv.kvstore.spans import Span


def copied(
    world: World, lent: Lent, copies: Copies, reads: Sequence[Span] = (), deadline_s: float = LONG_S
) -> Iterator[tuple[int, str | None]]:
    """Fetch from memory and from the file; whatever was read is right."""
    until = world.reader.after(deadline_s)
    return world.reader.fetch(
        reads, lent.rows, name_of=lambda _: "seg/a", check=all_right, lent=lent, until=until, copies=copies
    )


def put(first: int, rows: Rows) -> None:
    rows[:] = np.arange(100 + first, 100 + first + len(rows), dtype=np.uint8)[:, None]


def test_copies_and_reads_fill_their_rows_and_the_lead_is_of_both(world: World) -> None:
    with world.pool.lend(8, SLOT) as lent:
        told = list(copied(world, lent, Copies([(0, 2), (4, 1), (7, 1)], put), (Span(1, 2, 2, 2), Span(1, 0, 5, 2))))
        assert (lent.rows == np.array([100, 101, 3, 4, 104, 1, 2, 107], np.uint8)[:, None]).all()
    leads = [lead for lead, _ in told]
    assert leads == sorted(set(leads))
    assert told[-1] == (8, None)


def test_what_cannot_be_read_ends_the_lead_before_later_copies(world: World) -> None:
    world.backend.inject(Fail(kind="read"))
    with world.pool.lend(4, SLOT) as lent:
        told = list(copied(world, lent, Copies([(0, 1), (2, 2)], put), (Span(1, 2, 1, 1),)))
    assert told[-1] == (1, "EIO")


def test_idle_threads_help_to_copy(world: World) -> None:
    """Two copies are under way at once, on two threads."""
    both = threading.Barrier(2)
    threads = set()

    def together(first: int, rows: Rows) -> None:
        both.wait(LONG_S)
        threads.add(threading.current_thread())
        put(first, rows)

    with world.pool.lend(4, SLOT) as lent:
        assert list(copied(world, lent, Copies([(0, 2), (2, 2)], together)))[-1] == (4, None)
        assert (lent.rows == np.arange(100, 104, dtype=np.uint8)[:, None]).all()
    assert len(threads) == 2
    assert threading.current_thread() in threads


def test_threads_held_up_by_a_backend_are_not_waited_for(world: World) -> None:
    world.backend.inject(Stall(kind="read", until=world.gate, lasting=True))
    with world.pool.lend(4, SLOT) as stuck, world.pool.lend(4, SLOT) as lent:
        assert world.fetch(stuck, TWO, deadline_s=SHORT_S) == [(0, LATE)]
        waiting = []
        for _ in range(20):
            assert list(copied(world, lent, Copies([(0, 2), (2, 1), (3, 1)], put)))[-1] == (4, None)
            waiting.append(world.reader._queue.qsize())
        assert waiting[-1] == waiting[0], "nor is help asked for again and again"


def test_no_copy_is_under_way_once_the_caller_has_left(world: World) -> None:
    """Its rows, and the memory it copies from, are someone else's then."""
    begun, go_on = threading.Event(), threading.Event()
    caller = threading.current_thread()
    under_way = []

    def slow(first: int, _: Rows) -> None:
        if threading.current_thread() is caller:
            begun.wait(LONG_S)
            threading.Timer(SHORT_S, go_on.set).start()
            raise RuntimeError("the caller leaves")
        under_way.append(first)
        begun.set()
        go_on.wait(LONG_S)
        under_way.remove(first)

    with world.pool.lend(3, SLOT) as lent:
        with pytest.raises(RuntimeError, match="leaves"):
            list(copied(world, lent, Copies([(0, 1), (1, 1), (2, 1)], slow)))
        assert under_way == []


def test_copies_keep_to_the_deadline(world: World) -> None:
    with world.pool.lend(4, SLOT) as lent:
        assert list(copied(world, lent, Copies([(0, 4)], put), deadline_s=-1.0)) == [(0, LATE)]
    assert world.pool.idle_bytes > 0, "and no memory is held"
