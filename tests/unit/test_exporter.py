"""What Prometheus scrapes is what the store counted."""

import urllib.request
from pathlib import Path

import numpy as np

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import CacheGeometry, Namespace, StoreConfig, open_store
from duokv.tools.exporter import serve


def test_a_scrape_shows_sizes_and_counts(tmp_path: Path) -> None:
    geometry = CacheGeometry.opaque("exported", payload_bytes=500, swa_bytes=64)
    config = StoreConfig(maintenance_interval_s=0, swa_bytes=1 << 14, cache_bytes=1 << 14, index_path=str(tmp_path))
    ns = Namespace(model="m", weights="w", tokenizer="t", kv_format="f")
    with open_store("memory://", geometry=geometry, config=config, backend=MemoryBackend()) as store:
        tokens = np.arange(400, dtype=np.int32)
        store.commit(ns, tokens, np.zeros((3, 500), np.uint8), traffic="agent")
        hit = store.lookup(ns, tokens, "chat")
        store.load(hit, np.zeros((2, 500), np.uint8))
        server = serve(store, 0)
        try:
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with urllib.request.urlopen(url, timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        finally:
            server.shutdown()
            server.server_close()
    assert "duokv_blocks 3.0" in lines
    assert "duokv_cached_blocks 3.0" in lines
    assert "duokv_cache_bytes 12288.0" in lines
    assert "duokv_blocks_cached_total 2.0" in lines
    assert "duokv_bytes_cached_total 8192.0" in lines
    assert "duokv_bytes_read_total 0.0" in lines
    assert 'duokv_blocks_stored_total{class="agent"} 3.0' in lines
    assert 'duokv_hit_tokens_total{class="chat"} 384.0' in lines
    assert 'duokv_miss_tokens_total{class="chat"} 16.0' in lines
