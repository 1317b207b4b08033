"""Counters: a subscriber that adds events up. Names and labels follow Prometheus; an exporter needs only `snapshot`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeAlias

from duokv.kvstore import events as ev

_Count: TypeAlias = tuple[tuple[str, ...], int]
"""((name, label, value, label, value, ...), amount)."""


class Counters:
    """Adds up what happened, per class and reason. Hits + misses = queries, in tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = defaultdict(int)

    def __call__(self, event: ev.Event) -> None:
        """Count one event."""
        counted = _COUNTED.get(type(event))
        if counted is None:
            return
        counts = counted(event)
        with self._lock:
            for name, amount in counts:
                self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts so far by `name` or `name{label="value"}`."""
        with self._lock:
            counts = dict(self._counts)
        return {_named(*name): amount for name, amount in counts.items()}


def _named(name: str, *labels: str) -> str:
    pairs = [f'{label}="{value}"' for label, value in zip(labels[::2], labels[1::2], strict=True)]
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def _looked_up(event: ev.PrefixLookedUp) -> list[_Count]:
    if event.retry:
        return []
    traffic, hit, miss = event.traffic, event.hit_tokens, event.miss_tokens
    return [
        (("lookups", "class", traffic), 1),
        (("query_tokens", "class", traffic), hit + miss),
        (("hit_tokens", "class", traffic), hit),
        (("miss_tokens", "class", traffic), miss),
    ]


def _served(event: ev.RequestServed) -> list[_Count]:
    parts = () if event.retry else ("swa_hit", "block_hit", "replayed", "computed")
    return [(("request_tokens", "class", event.traffic, "by", part), getattr(event, part)) for part in parts]


def _stored(event: ev.BlocksStored) -> list[_Count]:
    traffic = event.traffic
    return [
        (("blocks_stored", "class", traffic), event.new),
        (("blocks_present", "class", traffic), event.present),
        (("blocks_dropped", "class", traffic), event.dropped),
        (("bytes_written",), event.bytes_written),
    ]


def _loaded(event: ev.BlocksLoaded) -> list[_Count]:
    counts: list[_Count] = [(("blocks_loaded",), event.loaded), (("bytes_read",), event.bytes_read)]
    if event.cached:
        counts += [(("blocks_cached",), event.cached), (("bytes_cached",), event.bytes_cached)]
    if event.reason:
        counts.append((("load_misses", "reason", event.reason), event.wanted - event.loaded))
    return counts


_COUNTED: Mapping[type[ev.Event], Callable[..., list[_Count]]] = {
    ev.PrefixLookedUp: _looked_up,
    ev.RequestServed: _served,
    ev.BlocksStored: _stored,
    ev.BlocksLoaded: _loaded,
    ev.BlocksEvicted: lambda event: [(("blocks_evicted", "reason", event.reason), event.blocks)],
    ev.WindowEvicted: lambda event: [(("windows_evicted", "reason", event.reason), 1)],
    ev.WindowLeased: lambda event: [(("window_hits" if event.hit else "window_misses",), 1)],
    ev.WindowStored: lambda _: [(("windows_stored",), 1)],
    ev.SpaceFreed: lambda event: [(("bytes_freed",), event.bytes)],
    ev.StoreFailed: lambda _: [(("store_failures",), 1)],
    ev.BlockQuarantined: lambda _: [(("blocks_quarantined",), 1)],
    ev.ClockJumped: lambda _: [(("clock_jumps",), 1)],
}
