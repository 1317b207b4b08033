"""Reading stored slots to see whether they are whole, however the backend behaves."""

from __future__ import annotations

from collections.abc import Sequence

from duokv.kvstore.backend import Backend
from duokv.kvstore.buffers import BufferPool
from duokv.kvstore.clock import Clock
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.reader import LATE, BlockReader, Rows
from duokv.kvstore.record import BlockCodec, Trailer
from duokv.kvstore.spans import Span

MAX_SLOTS = 32
"""Slots of one read."""


class SlotChecker:
    """Reads slots on threads of its own, so that a backend that hangs costs a deadline. Not thread-safe; close it."""

    def __init__(self, backend: Backend, geometry: CacheGeometry, *, threads: int) -> None:
        self._slot_bytes = geometry.slot_bytes
        self._codec = BlockCodec(geometry)
        self._pool = BufferPool(MAX_SLOTS * geometry.slot_bytes)
        self._reader = BlockReader(
            backend, threads=threads, slot_bytes=geometry.slot_bytes, monotonic=Clock().monotonic
        )

    def check(self, name: str, slots: Sequence[int], *, deadline_s: float) -> list[Trailer | str]:
        """Read slots of one file: per slot its trailer if checksum and geometry hold, else why not.

        `reader.LATE` and errno names say that a slot was not read at all. Each try has `deadline_s` real seconds; after
        one that was late nothing more is tried.
        """
        found: list[Trailer | str] = []
        for at in range(0, len(slots), MAX_SLOTS):
            part = slots[at : at + MAX_SLOTS]
            got, failed = self._read(name, part, deadline_s)
            if failed not in (None, LATE) and len(part) > 1:
                got = self._one_by_one(name, part, deadline_s)
            found += got
            if LATE in got:
                break
        return found + [LATE] * (len(slots) - len(found))

    def close(self) -> None:
        """Let the threads end."""
        self._reader.close()

    def _one_by_one(self, name: str, slots: Sequence[int], deadline_s: float) -> list[Trailer | str]:
        """One slot that cannot be read fails the whole read it is in: find out which it is."""
        found: list[Trailer | str] = []
        for slot in slots:
            found += [LATE] if LATE in found else self._read(name, [slot], deadline_s)[0]
        return found

    def _read(self, name: str, slots: Sequence[int], deadline_s: float) -> tuple[list[Trailer | str], str | None]:
        """What was found in each slot, and why some could not be read."""
        runs: list[Span] = []
        for i, slot in enumerate(slots):
            last = runs[-1] if runs else None
            if last is not None and last.slot + last.count == slot:
                runs[-1] = Span(0, last.slot, last.block, last.count + 1)
            else:
                runs.append(Span(0, slot, i, 1))
        found: dict[int, Trailer | str] = {}

        def note(first: int, rows: Rows) -> list[str | None]:
            found.update({first + i: self._codec.decode(row) for i, row in enumerate(rows)})
            return [None] * len(rows)

        failed: str | None = None
        until = self._reader.after(deadline_s)
        with self._pool.lend(len(slots), self._slot_bytes) as lent:
            for step in self._reader.fetch(runs, lent.rows, name_of=lambda _: name, check=note, lent=lent, until=until):
                failed = step[1]
        # A read that was late may still note rows; what this call returns is settled now.
        settled = dict(found)
        return [settled.get(i, failed or LATE) for i in range(len(slots))], failed
