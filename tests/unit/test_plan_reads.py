"""Plans of large reads: each block once, in as few reads as may be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore.spans import Span, plan_reads

SPANS = st.lists(st.builds(Span, st.integers(1, 2), st.integers(0, 20), st.just(0), st.integers(1, 6)), max_size=6)


def placed(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    """(segment, slot, block) of every block."""
    return [(span.segment, span.slot + i, span.block + i) for span in spans for i in range(span.count)]


def continues(one: Span, other: Span) -> bool:
    return (one.segment, one.slot + one.count, one.block + one.count) == (other.segment, other.slot, other.block)


@given(SPANS, st.lists(st.integers(1, 8), max_size=4), st.integers(1, 8))
def test_a_plan_reads_each_block_once_in_as_few_reads_as_it_may(
    spans: list[Span], ramp: list[int], max_slots: int
) -> None:
    at = 0
    for i, span in enumerate(spans):
        spans[i] = Span(span.segment, span.slot, at, span.count)
        at += span.count
    reads = plan_reads(spans, ramp=ramp, max_slots=max_slots)
    assert placed(reads) == placed(spans)
    most = ramp + [max_slots] * len(reads)
    assert all(1 <= read.count <= limit for read, limit in zip(reads, most, strict=False))
    full = zip(itertools.pairwise(reads), most, strict=False)
    assert all(one.count == limit for (one, other), limit in full if continues(one, other))


def test_neighbours_in_the_file_but_not_in_the_prompt_are_read_apart() -> None:
    apart = (Span(1, 0, 0, 2), Span(1, 2, 4, 2))
    assert plan_reads(apart, ramp=(), max_slots=9) == apart
    assert plan_reads((Span(1, 0, 0, 2), Span(1, 2, 2, 2)), ramp=(), max_slots=9) == (Span(1, 0, 0, 4),)
