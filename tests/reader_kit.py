"""What the reader's tests share: a reader over a file of numbered slots, whose reads a test can stall and break."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from duokv.connectors.fs_faulty import FaultyBackend
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.buffers import BufferPool, Lent
from duokv.kvstore.reader import BlockReader, Check, Rows
from duokv.kvstore.spans import Span

SLOT = 4096
LONG_S = 600.0
"""A deadline nobody waits for."""
SHORT_S = 0.05


def all_right(_: int, rows: Rows) -> list[str | None]:
    """Accept every row."""
    return [None] * len(rows)


TWO = (Span(1, 4, 0, 2), Span(1, 0, 2, 2))


class TwoAtOnce(FaultyBackend):
    """Memory that is read by two threads."""

    @property
    def concurrency(self) -> int:
        return 2


class World:
    """A reader, and a file whose slot i is filled with i + 1."""

    def __init__(self) -> None:
        self.backend = TwoAtOnce(MemoryBackend())
        writer = self.backend.create("seg/a", 8 * SLOT)
        writer.write(0, [memoryview(bytes([i + 1]) * SLOT) for i in range(8)])
        writer.seal(8 * SLOT)
        self.gate = threading.Event()
        """What stalled reads wait for."""
        self.pool = BufferPool(1 << 20)
        self.reader = BlockReader(self.backend, threads=4, slot_bytes=SLOT, monotonic=time.monotonic)

    def close(self) -> None:
        """Return once all that was asked for has been read."""
        self.gate.set()
        self.reader.close()
        for thread in self.reader._started:
            thread.join()

    def fetch(
        self, rows: Lent | Rows, reads: Sequence[Span], *, deadline_s: float = LONG_S, name: str = "seg/a"
    ) -> list[tuple[int, str | None]]:
        """Read and check that row i holds the slot that the plan says."""
        slots = {span.block + i: span.slot + i for span in reads for i in range(span.count)}

        def check(first: int, rows: Rows) -> list[str | None]:
            return [None if (row == slots[first + i] + 1).all() else "another block" for i, row in enumerate(rows)]

        return list(self.stream(rows, reads, check, deadline_s, name))

    def stream(
        self, into: Lent | Rows, reads: Sequence[Span], check: Check, deadline_s: float, name: str
    ) -> Iterator[tuple[int, str | None]]:
        rows, lent = (into.rows, into) if isinstance(into, Lent) else (into, None)
        until = self.reader.after(deadline_s)
        return self.reader.fetch(reads, rows, name_of=lambda _: name, check=check, lent=lent, until=until)


# Fixtures have a second name, since a test's argument would redefine an import of the same name.
@pytest.fixture(name="world")
def world_fixture() -> Iterator[World]:
    world = World()
    yield world
    world.close()
