"""A commit's slots are written in order, one chunk at a time, beside the filling of the next, and from whole rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import pytest

from duokv.kvstore import staging
from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.reader import Rows
from duokv.kvstore.segment import Piece, SegmentWriter
from duokv.kvstore.staging import WRITE_BYTES, Chunk, SlotsNotWritten, plan_chunks, write_chunks

MOST = 32
SLOT = WRITE_BYTES // MOST
WRITER = cast("SegmentWriter", None)


class Disk:
    """What was written: (slot, the block number in each of its rows)."""

    def __init__(self) -> None:
        self.written: list[tuple[int, list[int]]] = []
        self.threads: set[str] = set()
        self.under_way = 0

    def fill(self, chunk: Chunk, rows: Rows) -> None:
        for i, row in enumerate(rows):
            row[:] = chunk.block + i

    def write(self, chunk: Chunk, rows: Rows) -> None:
        self.under_way += 1
        assert self.under_way == 1
        self.threads.add(threading.current_thread().name)
        self.written.append((chunk.slot, [int(row[0]) for row in rows if (row == row[0]).all()]))
        self.under_way -= 1


def run(disk: Disk, chunks: list[Chunk], write: Callable[[Chunk, Rows], None] | None = None) -> BufferPool:
    pool = BufferPool(1 << 24)
    write_chunks(chunks, pool, SLOT, fill=disk.fill, write=write or disk.write)
    return pool


def cut(*pieces: tuple[int, int, int], slot_bytes: int = SLOT) -> list[Chunk]:
    """Chunks of (slot, block, count)."""
    return plan_chunks([Piece(WRITER, *piece) for piece in pieces], slot_bytes=slot_bytes)


def placed(chunks: list[Chunk]) -> list[tuple[int, int, int, bool]]:
    return [(chunk.slot, chunk.block, chunk.count, chunk.last) for chunk in chunks]


def test_pieces_are_cut_into_chunks_and_the_first_of_many_is_small() -> None:
    assert placed(cut((10, 3, 2 * MOST), (0, 3 + 2 * MOST, 5))) == [
        (10, 3, MOST // 4, False),
        (10 + MOST // 4, 3 + MOST // 4, MOST, False),
        (10 + MOST // 4 + MOST, 3 + MOST // 4 + MOST, MOST - MOST // 4, True),
        (0, 3 + 2 * MOST, 5, True),
    ]
    assert placed(cut((0, 0, MOST))) == [(0, 0, MOST, True)]
    assert placed(cut((5, 0, 2), (0, 2, MOST - 2))) == [(5, 0, 2, True), (0, 2, MOST - 2, True)]
    assert cut() == []


@pytest.mark.parametrize(("slot_bytes", "most"), [(SLOT, MOST), (SLOT + 1, MOST - 1), (2 * WRITE_BYTES, 1)])
def test_a_chunk_is_of_whole_slots_and_at_least_one(slot_bytes: int, most: int) -> None:
    chunks = cut((0, 0, 200), slot_bytes=slot_bytes)
    assert {chunk.count for chunk in chunks[1:-1]} == {most}
    assert [at for chunk in chunks for at in range(chunk.slot, chunk.slot + chunk.count)] == list(range(200))


def test_many_slots_are_written_whole_and_in_order_by_another_thread() -> None:
    disk = Disk()
    run(disk, cut((0, 0, 100), (500, 100, 7)))
    assert [slot for slot, _ in disk.written] == [0, 8, 40, 72, 500]
    assert [block for _, blocks in disk.written for block in blocks] == list(range(107))
    assert disk.threads == {"duokv-write"}


def test_a_few_slots_are_written_by_the_caller() -> None:
    disk = Disk()
    run(disk, cut((0, 0, 20), (50, 20, 12)))
    assert disk.threads == {threading.current_thread().name}
    assert [block for _, blocks in disk.written for block in blocks] == list(range(32))


def test_the_next_rows_are_filled_while_the_last_are_written() -> None:
    disk = Disk()
    filled = threading.Event()

    def fill(chunk: Chunk, rows: Rows) -> None:
        disk.fill(chunk, rows)
        if chunk.slot == 8:
            filled.set()

    def write(chunk: Chunk, rows: Rows) -> None:
        assert filled.wait(60)
        disk.write(chunk, rows)

    write_chunks(cut((0, 0, 96)), BufferPool(1 << 24), SLOT, fill=fill, write=write)
    assert [block for _, blocks in disk.written for block in blocks] == list(range(96))


@pytest.mark.parametrize(("blocks", "failing"), [(32, [0]), (128, [0, 8])])
def test_a_write_that_fails_ends_it(blocks: int, failing: list[int]) -> None:
    disk = Disk()

    def write(chunk: Chunk, rows: Rows) -> None:
        disk.write(chunk, rows)
        if chunk.slot == failing[-1]:
            raise OSError(28, "no space")

    with pytest.raises(SlotsNotWritten, match="no space") as caught:
        run(disk, cut((0, 0, blocks)), write)
    assert caught.value.chunk.slot == failing[-1]
    assert [slot for slot, _ in disk.written] == failing


def test_a_source_that_raises_leaves_no_write_under_way() -> None:
    disk = Disk()
    waiting, going_on = threading.Event(), threading.Event()

    def fill(chunk: Chunk, rows: Rows) -> None:
        if chunk.slot == 8:
            assert waiting.wait(60)
            going_on.set()
            raise ValueError("a source of another size")
        disk.fill(chunk, rows)

    def write(chunk: Chunk, rows: Rows) -> None:
        waiting.set()
        assert going_on.wait(60)
        disk.write(chunk, rows)

    with pytest.raises(ValueError, match="another size"):
        write_chunks(cut((0, 0, 96)), BufferPool(1 << 24), SLOT, fill=fill, write=write)
    assert [slot for slot, _ in disk.written] == [0]


def test_another_error_of_a_write_is_its_own() -> None:
    def write(chunk: Chunk, rows: Rows) -> None:
        raise KeyError(chunk.slot)

    with pytest.raises(KeyError):
        run(Disk(), cut((0, 0, 64)), write)


def test_an_interrupt_between_a_write_and_its_notice_hangs_nothing() -> None:
    """What the thread has told and nobody noted must not be waited for."""
    disk = Disk()
    writing = staging._Writing(disk.write)
    pool = BufferPool(1 << 20)
    with pool.lend(2, SLOT) as lent:
        for chunk in cut((0, 0, 1), (1, 1, 1)):
            writing.begin(chunk, lent.rows[chunk.block : chunk.block + 1])
        writing._done.get()
        writing.end()
    assert not writing._thread.is_alive()
