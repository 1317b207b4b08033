"""Counters: a subscriber that adds events up. Names and labels follow Prometheus; an exporter needs only `snapshot`."""

from __future__ import annotations

import threading
from collections import defaultdict

from duokv.kvstore import events as ev


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


def _counted(event: ev.Event) -> list[tuple[str, int]]:  # noqa: PLR0911  one return a kind of event
    match event:
        case ev.PrefixLookedUp(retry=True) | ev.RequestServed(retry=True):
            return []
        case ev.PrefixLookedUp():
            label = f'{{class="{event.traffic}"}}'
            return [
                (f"lookups{label}", 1),
                (f"query_tokens{label}", event.hit_tokens + event.miss_tokens),
                (f"hit_tokens{label}", event.hit_tokens),
                (f"miss_tokens{label}", event.miss_tokens),
            ]
        case ev.RequestServed():
            parts = ("swa_hit", "block_hit", "replayed", "computed")
            return [(f'request_tokens{{class="{event.traffic}",by="{part}"}}', getattr(event, part)) for part in parts]
        case ev.BlocksStored():
            label = f'{{class="{event.traffic}"}}'
            return [
                (f"blocks_stored{label}", event.new),
                (f"blocks_present{label}", event.present),
                (f"blocks_dropped{label}", event.dropped),
                ("bytes_written", event.bytes_written),
            ]
        case ev.BlocksLoaded():
            missed = [(f'load_misses{{reason="{event.reason}"}}', event.wanted - event.loaded)] if event.reason else []
            return [("blocks_loaded", event.loaded), ("bytes_read", event.bytes_read), *missed]
        case ev.StoreFailed():
            return [("store_failures", 1)]
        case ev.BlockQuarantined():
            return [("blocks_quarantined", 1)]
        case ev.BlocksEvicted():
            return [(f'blocks_evicted{{reason="{event.reason}"}}', event.blocks)]
        case ev.SpaceFreed():
            return [("bytes_freed", event.bytes)]
        case ev.ClockJumped():
            return [("clock_jumps", 1)]
        case ev.WindowStored():
            return [("windows_stored", 1)]
        case ev.WindowEvicted():
            return [(f'windows_evicted{{reason="{event.reason}"}}', 1)]
        case ev.WindowLeased():
            return [("window_hits" if event.hit else "window_misses", 1)]
        case _:
            return []
