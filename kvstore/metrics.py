"""Counters: a subscriber that adds events up. Names and labels follow Prometheus; an exporter needs only `snapshot`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

from duokv.kvstore import events as ev

_PLAIN: Mapping[type[ev.Event], str] = {
    ev.StoreFailed: "store_failures",
    ev.BlockQuarantined: "blocks_quarantined",
    ev.ClockJumped: "clock_jumps",
    ev.WindowStored: "windows_stored",
}


class Counters:
    """Adds up what happened, per class and reason. Hits + misses = queries, in tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = defaultdict(int)

    def __call__(self, event: ev.Event) -> None:
        """Count one event."""
        with self._lock:
            for name, amount in _counted(event):
                self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts so far by `name` or `name{label="value"}`."""
        with self._lock:
            return dict(self._counts)


def _counted(event: ev.Event) -> list[tuple[str, int]]:
    match event:
        case ev.PrefixLookedUp(retry=True) | ev.RequestServed(retry=True):
            return []
        case ev.PrefixLookedUp() | ev.RequestServed() | ev.BlocksStored() | ev.BlocksLoaded():
            return _tokens_and_blocks(event)
        case ev.BlocksEvicted():
            return [(f'blocks_evicted{{reason="{event.reason}"}}', event.blocks)]
        case ev.WindowEvicted():
            return [(f'windows_evicted{{reason="{event.reason}"}}', 1)]
        case ev.WindowLeased():
            return [("window_hits" if event.hit else "window_misses", 1)]
        case ev.SpaceFreed():
            return [("bytes_freed", event.bytes)]
        case _:
            return [(name, 1)] if (name := _PLAIN.get(type(event))) else []


def _tokens_and_blocks(
    event: ev.PrefixLookedUp | ev.RequestServed | ev.BlocksStored | ev.BlocksLoaded,
) -> list[tuple[str, int]]:
    if isinstance(event, ev.BlocksLoaded):
        missed = [(f'load_misses{{reason="{event.reason}"}}', event.wanted - event.loaded)] if event.reason else []
        cached = [("blocks_cached", event.cached), ("bytes_cached", event.bytes_cached)] if event.cached else []
        return [("blocks_loaded", event.loaded), ("bytes_read", event.bytes_read), *cached, *missed]
    label = f'class="{event.traffic}"'
    if isinstance(event, ev.RequestServed):
        parts = ("swa_hit", "block_hit", "replayed", "computed")
        return [(f'request_tokens{{{label},by="{part}"}}', getattr(event, part)) for part in parts]
    if isinstance(event, ev.BlocksStored):
        counts = {"stored": event.new, "present": event.present, "dropped": event.dropped}
        return [
            *((f"blocks_{what}{{{label}}}", n) for what, n in counts.items()),
            ("bytes_written", event.bytes_written),
        ]
    return [
        (f"lookups{{{label}}}", 1),
        (f"query_tokens{{{label}}}", event.hit_tokens + event.miss_tokens),
        (f"hit_tokens{{{label}}}", event.hit_tokens),
        (f"miss_tokens{{{label}}}", event.miss_tokens),
    ]
