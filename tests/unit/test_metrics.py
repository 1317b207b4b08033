"""Counters: tokens add up by tier and class, and a retry adds none."""

from __future__ import annotations

import inspect
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore import events as ev
from duokv.kvstore.metrics import Counters

TOKENS = st.integers(0, 10_000)
CLASSES = st.sampled_from(["agent", "chat"])
LOOKUPS = st.builds(ev.PrefixLookedUp, CLASSES, TOKENS, TOKENS, st.none(), st.booleans())
SERVED = st.builds(ev.RequestServed, CLASSES, TOKENS, TOKENS, TOKENS, TOKENS, st.booleans())


def counted(*events: ev.Event) -> dict[str, int]:
    counters = Counters()
    for event in events:
        counters(event)
    return counters.snapshot()


@given(st.lists(LOOKUPS))
def test_hits_and_misses_are_queries(lookups: list[ev.PrefixLookedUp]) -> None:
    counts = counted(*lookups)
    for name in ("agent", "chat"):
        mine = [event for event in lookups if event.traffic == name and not event.retry]
        label = f'{{class="{name}"}}'
        hits, misses = counts.get(f"hit_tokens{label}", 0), counts.get(f"miss_tokens{label}", 0)
        assert counts.get(f"lookups{label}", 0) == len(mine)
        assert hits == sum(event.hit_tokens for event in mine)
        assert counts.get(f"query_tokens{label}", 0) == hits + misses


@given(st.lists(SERVED))
def test_each_token_of_a_request_is_counted_once_by_how_it_was_come_by(served: list[ev.RequestServed]) -> None:
    counts = counted(*served)
    for name in ("agent", "chat"):
        for part in ("swa_hit", "block_hit", "replayed", "computed"):
            expected = sum(getattr(event, part) for event in served if event.traffic == name and not event.retry)
            assert counts.get(f'request_tokens{{class="{name}",by="{part}"}}', 0) == expected


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        (
            ev.BlocksStored("chat", 3, 2, 1, 12_288),
            {
                'blocks_stored{class="chat"}': 3,
                'blocks_present{class="chat"}': 2,
                'blocks_dropped{class="chat"}': 1,
                "bytes_written": 12_288,
            },
        ),
        (ev.BlocksLoaded(4, 4, 16_384, None), {"blocks_loaded": 4, "bytes_read": 16_384}),
        (
            ev.BlocksLoaded(1, 4, 4_096, "deadline"),
            {"blocks_loaded": 1, "bytes_read": 4_096, 'load_misses{reason="deadline"}': 3},
        ),
        (
            ev.BlocksLoaded(4, 4, 4_096, None, 3, 12_288),
            {"blocks_loaded": 4, "bytes_read": 4_096, "blocks_cached": 3, "bytes_cached": 12_288},
        ),
        (ev.StoreFailed("seg/a", "EIO"), {"store_failures": 1}),
        (ev.BlockQuarantined(b"k", "seg/a", 0, "checksum"), {"blocks_quarantined": 1}),
        (ev.BlocksEvicted(5, "expired"), {'blocks_evicted{reason="expired"}': 5}),
        (ev.SpaceFreed("seg/a", 4096), {"bytes_freed": 4096}),
        (ev.ClockJumped(-90.0), {"clock_jumps": 1}),
        (ev.Degraded("seg/a", "punch refused"), {}),
        (ev.WindowStored(b"k"), {"windows_stored": 1}),
        (ev.WindowEvicted(b"k", "capacity"), {'windows_evicted{reason="capacity"}': 1}),
        (ev.WindowLeased(b"k", hit=True), {"window_hits": 1}),
        (ev.WindowLeased(b"k", hit=False), {"window_misses": 1}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ev.Event) else "",
)
def test_every_kind_of_event_has_its_counters(event: ev.Event, counts: dict[str, int]) -> None:
    assert counted(event) == counts
    assert counted(event, event) == {name: 2 * n for name, n in counts.items()}


def test_no_kind_of_event_is_forgotten_here() -> None:
    kinds = {kind for _, kind in inspect.getmembers(ev, inspect.isclass) if issubclass(kind, ev.Event)}
    marks = test_every_kind_of_event_has_its_counters.pytestmark  # type: ignore[attr-defined]
    tested = {type(event) for event, _ in marks[0].args[1]}
    assert kinds - tested == {ev.Event, ev.PrefixLookedUp, ev.RequestServed}


def test_a_snapshot_is_of_its_moment() -> None:
    counters = Counters()
    counters(ev.ClockJumped(90.0))
    before = counters.snapshot()
    counters(ev.ClockJumped(90.0))
    assert (before, counters.snapshot()) == ({"clock_jumps": 1}, {"clock_jumps": 2})


def test_threads_lose_no_count() -> None:
    counters = Counters()

    def add() -> None:
        for _ in range(2_000):
            counters(ev.SpaceFreed("seg/a", 1))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {"bytes_freed": 8_000}
