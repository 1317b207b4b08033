"""Loading: from places in the index to verified rows, and what to make of a row that does not verify."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass

import lmdb

from duokv.kvstore.blockcache import BlockCache
from duokv.kvstore.blockstore import BlockStore
from duokv.kvstore.buffers import Lent
from duokv.kvstore.events import BlockQuarantined, BlocksLoaded, Degraded, Event
from duokv.kvstore.extent import place_of
from duokv.kvstore.index import Index
from duokv.kvstore.keys import KEY_BYTES
from duokv.kvstore.reader import LATE, MAX_READ_BYTES, BlockReader, Copies, Rows, is_unreadable
from duokv.kvstore.record import BlockCodec, Chain
from duokv.kvstore.spans import Span, plan_reads

_FIRST_READ_BYTES = 256 << 10
"""Bytes of a load's first read, so that who streams it can begin."""
_EARLY_READ_BYTES = 512 << 10
"""Bytes of the reads that go out with it."""
_MAX_COPY_BYTES = 4 << 20
"""Bytes of one copy from memory: enough that what it costs beside them (10 us) is little, and so few that no thread
waits long for the last one, nor is a load late by more than one takes."""
_CUT = "cut"
"""Why a block is missed that has left the index since it was looked up."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks `first`.. of a prompt whose places a lookup found. `chain` has the keys of all its `blocks` blocks.

    exact: the first so many were exact then; if they have moved since, approximate ones do not take their place.
    """

    chain: Chain
    blocks: int
    first: int
    spans: tuple[Span, ...]
    exact: int


class BlockLoader:
    """Loads blocks whose places a lookup found, and deals with those that fail. Thread-safe."""

    def __init__(
        self, *, index: Index, blocks: BlockStore, reader: BlockReader, cache: BlockCache, codec: BlockCodec,
        emit: Callable[[Event], None],
    ) -> None:  # fmt: skip
        self._index = index
        self._blocks = blocks
        self._reader = reader
        self._cache = cache
        self._codec = codec
        self._emit = emit
        self._max_slots = max(1, MAX_READ_BYTES // codec.slot_bytes)
        first, early = (max(1, nbytes // codec.slot_bytes) for nbytes in (_FIRST_READ_BYTES, _EARLY_READ_BYTES))
        self._ramp = (first, *[early] * (reader.threads - 1))
        self._files: dict[int, str] = {}
        """Of the segments met so far; a number is never used again."""
        self._max_copied = max(1, _MAX_COPY_BYTES // codec.slot_bytes)

    def stream(self, wanted: Wanted, rows: Rows, lent: Lent | None, deadline_s: float) -> Generator[int, None, None]:
        """Yield how many leading rows hold verified blocks, each time that grows. Row 0 is block `wanted.first`.

        lent: see `BlockReader.fetch`. Held from now on until the iterator ends or is closed, since copies go on while
        it does neither, whatever its caller does with the rows.
        """
        return self._stream(wanted, rows, None if lent is None else lent.retain(), deadline_s)

    def _stream(self, wanted: Wanted, rows: Rows, held: Lent | None, deadline_s: float) -> Generator[int, None, None]:
        with held or nullcontext():
            yield from self._leads(wanted, rows, held, deadline_s)

    def _leads(self, wanted: Wanted, rows: Rows, lent: Lent | None, deadline_s: float) -> Iterator[int]:
        total = wanted.blocks - wanted.first
        if total <= 0:
            return
        until = self._reader.after(deadline_s)
        lead, cached, reason, spans = 0, 0, None, wanted.spans
        try:
            for attempt in range(2):
                before, warm = lead, cached
                for grown, held, reason in self._pass(wanted, spans, rows, before, lent, until):
                    if reason is None:
                        yield grown
                    lead, cached = grown, warm + held
                if reason is None or reason == LATE:
                    break
                spans, reason = self._settle(wanted, spans, wanted.first + lead, reason, until)
                if not spans or attempt:
                    break
        except lmdb.Error as error:
            reason = "index"
            self._emit(Degraded("index", f"load failed: {error}"))
        if reason is None and lead < total:
            reason = _CUT
        slot_bytes = self._codec.slot_bytes
        self._emit(BlocksLoaded(lead, total, (lead - cached) * slot_bytes, reason, cached, cached * slot_bytes))

    def _pass(
        self, wanted: Wanted, spans: tuple[Span, ...], rows: Rows, lead: int, lent: Lent | None, until: float
    ) -> Iterator[tuple[int, int, str | None]]:
        """Yield (leading rows, how many of them beyond `lead` came from the cache, why the next one failed or None)."""
        base = wanted.first + lead
        rest = _from(spans, base)
        with self._cache.borrow(wanted.chain.blob[base * KEY_BYTES :], rest) as loan:
            reads = plan_reads(loan.missing(rest), ramp=self._ramp, max_slots=self._max_slots)
            names = self._names(reads) if reads else {}
            # A segment the index no longer knows ends the lead there.
            known = tuple(itertools.takewhile(lambda span: span.segment in names, reads))
            end = reads[len(known)].block if len(known) < len(reads) else sum(span.count for span in rest)

            def check(first: int, found: Rows) -> list[str | None]:
                expected = self._codec.expected_trailers(wanted.chain, base + first, len(found))
                reasons = self._codec.mismatches(found, expected)
                whole = next((i for i, reason in enumerate(reasons) if reason is not None), len(reasons))
                loan.keep(first, found[:whole])
                return reasons

            steps = self._reader.fetch(
                known, rows[lead:], name_of=names.__getitem__, check=check, lent=lent, until=until,
                copies=Copies(loan.runs(until=end, max_rows=self._rows_per_copy(end)), loan.copy),
            )  # fmt: skip
            with closing(steps):
                for grown, reason in steps:
                    yield lead + grown, loan.held(grown), reason
                    if reason is not None:
                        return
            if len(known) < len(reads):
                yield lead + end, loan.held(end), "ENOENT"

    def _rows_per_copy(self, rows: int) -> int:
        """As many as make a copy worth it, fewer if threads would be left without one."""
        return min(self._max_copied, max(self._max_slots, -(-rows // self._reader.threads)))

    def _names(self, reads: Sequence[Span]) -> Mapping[int, str]:
        """The files of those segments of a plan that the index knows, or knew: a file that is gone since says so."""
        numbers = {span.segment for span in reads}
        if not numbers <= self._files.keys():
            with self._index.read() as txn:
                known = {number: info.name(number) for number in numbers if (info := txn.segment(number)) is not None}
            self._files.update(known)
        return self._files

    def _settle(
        self, wanted: Wanted, spans: tuple[Span, ...], block: int, reason: str, until: float
    ) -> tuple[tuple[Span, ...], str]:
        """Decide what a failed row means: new places if the block moved, else none, and why it is a miss."""
        span = next(span for span in spans if span.block <= block < span.block + span.count)
        place, offset = place_of(span.segment, span.slot), block - span.block
        with self._index.read() as txn:
            life = txn.life(place)
            info = txn.segment(span.segment)
        if life is None or life.n <= offset or info is None:
            found = self._blocks.find(wanted.chain.blob, wanted.blocks, None, use=False)
            lead = found.lead(wanted.exact)
            return found.spans(lead) if lead > block else (), _CUT
        if is_unreadable(reason) and reason != "ENOENT":
            return (), reason
        with self._blocks.writing(self._reader.left(until)) as granted:
            if not granted:
                # A commit may wait for a device that hangs; the next load finds the same.
                return (), reason
            if reason == "ENOENT":
                self._blocks.lose_segment(span.segment)
            else:
                key = wanted.chain.blob[block * KEY_BYTES : (block + 1) * KEY_BYTES]
                self._blocks.quarantine(place, offset, key, reason)
                self._emit(BlockQuarantined(key, info.name(span.segment), span.slot + offset, reason))
        return (), reason


def _from(spans: tuple[Span, ...], base: int) -> list[Span]:
    """Spans from block `base` on, counted from there."""
    kept = []
    for span in spans:
        skip = max(0, base - span.block)
        if skip < span.count:
            kept.append(Span(span.segment, span.slot + skip, span.block + skip - base, span.count - skip))
    return kept
