"""The store for callers on an event loop. The only module that knows one; the core stays synchronous.

Each call runs on a small pool of threads, so the loop never waits for the index or a disk. A call that has begun uses
what it was given until its end, so a cancelled task waits for that: a load's comes at its deadline at the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from typing import TypeVar

from duokv.kvstore.answers import Commit, PrefixHit
from duokv.kvstore.keys import Media, Namespace, TokenIds
from duokv.kvstore.origin import Origin
from duokv.kvstore.reader import Rows
from duokv.kvstore.staging import Blocks
from duokv.kvstore.store import KVStore

T = TypeVar("T")


def run(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine to its end, on uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class AsyncKVStore:
    """A KVStore behind `await`. Same arguments, results and errors; SWA windows are host memory: use `store` for them.

    The wrapped store is closed by `close`. Usable from any task of one loop.
    """

    def __init__(self, store: KVStore, *, threads: int = 4) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="duokv-aio")

    async def lookup(
        self, ns: Namespace, tokens: TokenIds, traffic: str | None = None, *, media: Sequence[Media] = (),
        require: Origin | None = None, request_id: str | None = None,
    ) -> PrefixHit:  # fmt: skip
        """See `KVStore.lookup`."""
        return await self._call(
            partial(self.store.lookup, ns, tokens, traffic, media=media, require=require, request_id=request_id)
        )

    async def load(self, hit: PrefixHit, out: Rows, *, first_block: int = 0, deadline_s: float | None = None) -> int:
        """See `KVStore.load`."""
        return await self._call(partial(self.store.load, hit, out, first_block=first_block, deadline_s=deadline_s))

    async def load_iter(
        self, hit: PrefixHit, out: Rows, *, first_block: int = 0, deadline_s: float | None = None
    ) -> AsyncGenerator[int, None]:
        """See `KVStore.load_iter`. Leave it early only under `contextlib.aclosing`: a loop closes others some time."""
        leads = self.store.load_iter(hit, out, first_block=first_block, deadline_s=deadline_s)
        with closing(leads):
            while (lead := await self._call(partial(next, leads, None))) is not None:
                yield lead

    async def commit(
        self, ns: Namespace, tokens: TokenIds, blocks: Blocks, *, first_block: int = 0, traffic: str | None = None,
        origin: Origin = Origin.EXACT, media: Sequence[Media] = (),
    ) -> Commit:  # fmt: skip
        """See `KVStore.commit`. `blocks` must not change before this returns or raises."""
        work = partial(self.store.commit, ns, tokens, blocks, first_block=first_block, traffic=traffic, origin=origin)
        return await self._call(partial(work, media=media))

    async def flush(self) -> None:
        """See `KVStore.flush`."""
        await self._call(self.store.flush)

    async def close(self) -> None:
        """Close the store and end the threads."""
        await self._call(self.store.close)
        self._pool.shutdown(wait=False)

    async def _call(self, work: Callable[[], T]) -> T:
        call = self._pool.submit(work)
        ended = asyncio.wrap_future(call)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            while not call.done() and not call.cancel():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            raise
