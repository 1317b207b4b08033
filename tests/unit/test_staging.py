"""A commit's slots are written in order, one chunk at a time, beside the filling of the next, and from whole rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import pytest

from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.reader import Rows
from duokv.kvstore.segment import SegmentWriter
from duokv.kvstore.staging import STAGING_BLOCKS, Chunk, SlotsNotWritten, chunks_of, write_chunks

SLOT = 4096
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


def test_allocations_are_cut_into_chunks() -> None:
    chunks = chunks_of(WRITER, 10, 3, 2 * STAGING_BLOCKS + 1)
    assert [(chunk.slot, chunk.block, chunk.count, chunk.last) for chunk in chunks] == [
        (10, 3, STAGING_BLOCKS, False),
        (10 + STAGING_BLOCKS, 3 + STAGING_BLOCKS, STAGING_BLOCKS, False),
        (10 + 2 * STAGING_BLOCKS, 3 + 2 * STAGING_BLOCKS, 1, True),
    ]
    assert [chunk.last for chunk in chunks_of(WRITER, 0, 0, STAGING_BLOCKS)] == [True]


def test_many_slots_are_written_whole_and_in_order_by_another_thread() -> None:
    disk = Disk()
    chunks = [*chunks_of(WRITER, 0, 0, 100), *chunks_of(WRITER, 500, 100, 7)]
    run(disk, chunks)
    assert [slot for slot, _ in disk.written] == [0, 32, 64, 96, 500]
    assert [block for _, blocks in disk.written for block in blocks] == list(range(107))
    assert disk.threads == {"duokv-write"}


def test_a_few_slots_are_written_by_the_caller() -> None:
    disk = Disk()
    run(disk, [*chunks_of(WRITER, 0, 0, 20), *chunks_of(WRITER, 50, 20, 12)])
    assert disk.threads == {threading.current_thread().name}
    assert [block for _, blocks in disk.written for block in blocks] == list(range(32))


def test_the_next_rows_are_filled_while_the_last_are_written() -> None:
    disk = Disk()
    filled = threading.Event()

    def fill(chunk: Chunk, rows: Rows) -> None:
        disk.fill(chunk, rows)
        if chunk.slot == 32:
            filled.set()

    def write(chunk: Chunk, rows: Rows) -> None:
        assert filled.wait(60)
        disk.write(chunk, rows)

    write_chunks(chunks_of(WRITER, 0, 0, 96), BufferPool(1 << 24), SLOT, fill=fill, write=write)
    assert [block for _, blocks in disk.written for block in blocks] == list(range(96))


@pytest.mark.parametrize("blocks", [32, 128])
def test_a_write_that_fails_ends_it(blocks: int) -> None:
    disk = Disk()

    def write(chunk: Chunk, rows: Rows) -> None:
        disk.write(chunk, rows)
        if chunk.slot + chunk.count == min(blocks, 64):
            raise OSError(28, "no space")

    with pytest.raises(SlotsNotWritten, match="no space") as caught:
        run(disk, chunks_of(WRITER, 0, 0, blocks), write)
    assert caught.value.chunk.slot + caught.value.chunk.count == min(blocks, 64)
    assert len(disk.written) == min(blocks, 64) // 32


def test_a_source_that_raises_leaves_no_write_under_way() -> None:
    disk = Disk()
    waiting, going_on = threading.Event(), threading.Event()

    def fill(chunk: Chunk, rows: Rows) -> None:
        if chunk.slot == 32:
            assert waiting.wait(60)
            going_on.set()
            raise ValueError("a source of another size")
        disk.fill(chunk, rows)

    def write(chunk: Chunk, rows: Rows) -> None:
        waiting.set()
        assert going_on.wait(60)
        disk.write(chunk, rows)

    with pytest.raises(ValueError, match="another size"):
        write_chunks(chunks_of(WRITER, 0, 0, 96), BufferPool(1 << 24), SLOT, fill=fill, write=write)
    assert [slot for slot, _ in disk.written] == [0]


def test_another_error_of_a_write_is_its_own() -> None:
    def write(chunk: Chunk, rows: Rows) -> None:
        raise KeyError(chunk.slot)

    with pytest.raises(KeyError):
        run(Disk(), chunks_of(WRITER, 0, 0, 64), write)
