"""The async front gives what the store gives, and leaves the loop free while it does."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import CacheGeometry, KVStore, Namespace, StoreConfig, open_store
from duokv.kvstore.aio import AsyncKVStore, run

NS = Namespace(model="m", weights="w", tokenizer="t", kv_format="f")
TOKENS = np.arange(700, dtype=np.int32)


@pytest.fixture
def store(tmp_path: Path) -> KVStore:
    geometry = CacheGeometry.opaque("aio", payload_bytes=1000, swa_bytes=64)
    config = StoreConfig(maintenance_interval_s=0, swa_bytes=1 << 16, index_path=str(tmp_path))
    return open_store("memory://", geometry=geometry, config=config, backend=MemoryBackend())


def test_a_request_walks_on_the_loop(store: KVStore) -> None:
    blocks = np.arange(5 * 1000, dtype=np.uint64).astype(np.uint8).reshape(5, 1000)

    async def walk() -> tuple[int, list[int], np.ndarray]:
        aio = AsyncKVStore(store)
        commit = await aio.commit(NS, TOKENS, blocks, traffic="agent")
        hit = await aio.lookup(NS, TOKENS, "agent")
        out = np.zeros((5, 1000), np.uint8)
        leads = [lead async for lead in aio.load_iter(hit, out)]
        again = np.zeros((5, 1000), np.uint8)
        assert await aio.load(hit, again) == 5
        assert np.array_equal(again, out)
        await aio.flush()
        await aio.close()
        return commit.new, leads, out

    new, leads, out = run(walk())
    assert new == 5
    assert leads[-1] == 5
    assert np.array_equal(out, blocks)


def test_the_loop_runs_while_the_store_waits(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    lookup = store.lookup

    def slow(*args: object, **options: object) -> object:
        assert gate.wait(30)
        return lookup(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "lookup", slow)

    async def walk() -> int:
        aio = AsyncKVStore(store)
        task = asyncio.create_task(aio.lookup(NS, TOKENS))
        await asyncio.sleep(0)
        assert not task.done()
        gate.set()
        hit = await task
        await aio.close()
        return hit.tokens

    assert run(walk()) == 0
