"""Prometheus metrics of a store in this process: register a StoreCollector, or serve it on a port."""

from __future__ import annotations

import re
from collections.abc import Iterator
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from duokv.kvstore.store import KVStore

_NAME = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})?")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class StoreCollector(Collector):
    """Reads the store's counts when scraped; nothing is kept twice. Thread-safe as the store is."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield every size as a gauge and every count as a counter, named `duokv_...`."""
        stats = self._store.stats()
        sizes = {
            "blocks": stats.blocks,
            "extents": stats.extents,
            "segments": stats.segments,
            "physical_bytes": stats.physical_bytes,
            "index_bytes": stats.index_bytes,
            "cached_blocks": stats.cache.blocks,
            "cache_bytes": stats.cache.used_bytes,
            "windows": stats.windows.windows,
            "window_bytes": stats.windows.used_bytes,
        }
        for name, value in sizes.items():
            yield GaugeMetricFamily(f"duokv_{name}", f"{name} now", value=value)
        families: dict[str, CounterMetricFamily] = {}
        for key, count in sorted(stats.counts.items()):
            match = _NAME.fullmatch(key)
            if match is None:
                continue
            labels = dict(_LABEL.findall(match["labels"] or ""))
            name = match["name"]
            if name not in families:
                families[name] = CounterMetricFamily(f"duokv_{name}", f"{name} since open", labels=tuple(labels))
            families[name].add_metric(list(labels.values()), count)
        yield from families.values()


def serve(store: KVStore, port: int, *, address: str = "127.0.0.1") -> WSGIServer:
    """Serve the store's metrics over HTTP from a thread; `shutdown()` the returned server to stop. Port 0 picks one."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))
    server, _ = start_http_server(port, addr=address, registry=registry)
    return server
