"""Counters: a subscriber that adds events up. Names and labels follow Prometheus; an exporter needs only `snapshot`."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import TypeAlias

from duokv.kvstore import events as ev

_MOST_IDS = 65_536
_Counts: TypeAlias = defaultdict[tuple[str, ...], defaultdict[str, int]]
"""By (label, value, label, value, ...), then by name."""


class Counters:
    """Adds up what happened, per class and reason. Hits + misses = queries, in tokens. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: _Counts = defaultdict(lambda: defaultdict(int))

    def __call__(self, event: ev.Event) -> None:
        """Count one event."""
        count = _COUNTED.get(type(event))
        if count is not None:
            with self._lock:
                count(self._counts, event)

    def snapshot(self) -> dict[str, int]:
        """All counts so far by `name` or `name{label="value"}`."""
        with self._lock:
            return {_named(name, *labels): n for labels, of in self._counts.items() for name, n in of.items()}


class RequestIds:
    """The latest request ids, to tell a retry. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: OrderedDict[str, None] = OrderedDict()

    def seen(self, request_id: str | None) -> bool:
        """Note an id and return whether it was noted before; a request without one never was."""
        if request_id is None:
            return False
        with self._lock:
            known = request_id in self._ids
            self._ids[request_id] = None
            self._ids.move_to_end(request_id)
            if len(self._ids) > _MOST_IDS:
                self._ids.popitem(last=False)
        return known


def _named(name: str, *labels: str) -> str:
    pairs = [f'{label}="{value}"' for label, value in zip(labels[::2], labels[1::2], strict=True)]
    return f"{name}{{{','.join(pairs)}}}" if pairs else name


def _add(counts: _Counts, name: str, amount: int, *labels: str) -> None:
    counts[labels][name] += amount


def _looked_up(counts: _Counts, event: ev.PrefixLookedUp) -> None:
    if not event.retry:
        of = counts["class", event.traffic]
        of["lookups"] += 1
        of["query_tokens"] += event.hit_tokens + event.miss_tokens
        of["hit_tokens"] += event.hit_tokens
        of["miss_tokens"] += event.miss_tokens


def _served(counts: _Counts, event: ev.RequestServed) -> None:
    for part in () if event.retry else ("swa_hit", "block_hit", "replayed", "computed"):
        _add(counts, "request_tokens", getattr(event, part), "class", event.traffic, "by", part)


def _stored(counts: _Counts, event: ev.BlocksStored) -> None:
    of = counts["class", event.traffic]
    of["blocks_stored"] += event.new
    of["blocks_present"] += event.present
    of["blocks_dropped"] += event.dropped
    _add(counts, "bytes_written", event.bytes_written)


def _loaded(counts: _Counts, event: ev.BlocksLoaded) -> None:
    _add(counts, "blocks_loaded", event.loaded)
    _add(counts, "bytes_read", event.bytes_read)
    if event.cached:
        _add(counts, "blocks_cached", event.cached)
        _add(counts, "bytes_cached", event.bytes_cached)
    if event.reason:
        _add(counts, "load_misses", event.wanted - event.loaded, "reason", event.reason)


_COUNTED: Mapping[type[ev.Event], Callable[..., None]] = {
    ev.PrefixLookedUp: _looked_up,
    ev.RequestServed: _served,
    ev.BlocksStored: _stored,
    ev.BlocksLoaded: _loaded,
    ev.BlocksEvicted: lambda counts, event: _add(counts, "blocks_evicted", event.blocks, "reason", event.reason),
    ev.WindowEvicted: lambda counts, event: _add(counts, "windows_evicted", 1, "reason", event.reason),
    ev.WindowLeased: lambda counts, event: _add(counts, "window_hits" if event.hit else "window_misses", 1),
    ev.WindowStored: lambda counts, _: _add(counts, "windows_stored", 1),
    ev.SpaceFreed: lambda counts, event: _add(counts, "bytes_freed", event.bytes),
    ev.StoreFailed: lambda counts, _: _add(counts, "store_failures", 1),
    ev.BlockQuarantined: lambda counts, _: _add(counts, "blocks_quarantined", 1),
    ev.ClockJumped: lambda counts, _: _add(counts, "clock_jumps", 1),
}
