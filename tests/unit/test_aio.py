"""The async front gives what the store gives, and leaves the loop free while it does."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
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


def test_a_cancelled_task_waits_for_what_uses_its_memory(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets the rows next must not fill them while a commit still copies from them."""
    begun, gate = threading.Event(), threading.Event()
    commit = store.commit

    def slow(*args: object, **options: object) -> object:
        begun.set()
        assert gate.wait(30)
        return commit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "commit", slow)

    async def walk() -> int:
        aio = AsyncKVStore(store)
        rows = np.ones((5, 1000), np.uint8)
        task = asyncio.create_task(aio.commit(NS, TOKENS, rows))
        assert await asyncio.to_thread(begun.wait, 30)
        for _ in range(3):
            task.cancel()
            await asyncio.wait([task], timeout=0)
            assert not task.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        rows[:] = 2
        hit = await aio.lookup(NS, TOKENS)
        assert await aio.load(hit, rows) == 5
        await aio.close()
        return int(rows.max())

    assert run(walk()) == 1


def test_a_call_that_has_not_begun_is_not_made(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()
    asked: list[int] = []

    def slow(_: Namespace, tokens: np.ndarray) -> None:
        asked.append(len(tokens))
        begun.set()
        assert gate.wait(30)

    monkeypatch.setattr(store, "lookup", lambda ns, tokens, *_, **__: slow(ns, tokens))

    async def walk() -> None:
        aio = AsyncKVStore(store, threads=1)
        first = asyncio.create_task(aio.lookup(NS, TOKENS))
        assert await asyncio.to_thread(begun.wait, 30)
        second = asyncio.create_task(aio.lookup(NS, TOKENS[:1]))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.set()
        await first
        await aio.close()

    run(walk())
    assert asked == [700]


def test_a_stream_that_is_left_writes_no_more(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    def leads() -> Iterator[int]:
        try:
            yield from range(1, 9)
        finally:
            closed.append(True)

    # Kept alive, as a traceback would.
    steps = leads()
    monkeypatch.setattr(store, "load_iter", lambda *_, **__: steps)

    async def walk() -> None:
        aio = AsyncKVStore(store)
        hit = await aio.lookup(NS, TOKENS)
        async with aclosing(aio.load_iter(hit, np.zeros((5, 1000), np.uint8))) as found:
            async for lead in found:
                if lead == 2:
                    break
        assert closed == [True]
        await aio.close()

    run(walk())
