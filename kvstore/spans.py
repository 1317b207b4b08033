"""Where blocks of a prompt lie, and in which pieces to read them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Span(msgspec.Struct, frozen=True):
    """`count` blocks of a prompt from block `block` on, in consecutive slots of a segment from `slot` on."""

    segment: int
    slot: int
    block: int
    count: int


def plan_reads(spans: Sequence[Span], *, ramp: Sequence[int], max_slots: int) -> tuple[Span, ...]:
    """Join spans that continue each other in the file and in the prompt, then cut them to `max_slots` each.

    ramp: the most slots of the first reads, small ones: who streams a load can begin with the first, and a device may
    answer none of several reads before all of them are done.

    Holes are not read over: on a local disk four reads in flight hide what a call costs (0.02 ms), and the bytes of one
    large slot take longer than that.
    """
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.segment, last.slot + last.count, last.block + last.count) == (span.segment, span.slot, span.block)
        ):  # fmt: skip
            joined[-1] = Span(last.segment, last.slot, last.block, last.count + span.count)
        else:
            joined.append(span)
    reads: list[Span] = []
    for span in joined:
        at = 0
        while at < span.count:
            most = ramp[len(reads)] if len(reads) < len(ramp) else max_slots
            count = min(most, span.count - at)
            reads.append(Span(span.segment, span.slot + at, span.block + at, count))
            at += count
    return tuple(reads)
