"""Write-back: what requests computed goes to the store on a thread of its own, so that no step waits for a disk."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from duokv.kernels.transfer import transfer_for
from duokv.kvstore import KVStore, Namespace, Origin, SwaWindow, chain_keys
from duokv.kvstore.buffers import Lent
from duokv.kvstore.events import Degraded
from duokv.kvstore.keys import BLOCK_TOKENS

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Leavings:
    """What a request leaves in the store: whole blocks `first_block`.. of `tokens` in `slots`, states at boundaries.

    All of it is of computed and accepted tokens. windows own their bytes.
    """

    namespace: Namespace
    tokens: Sequence[int]
    traffic: str | None
    first_block: int
    slots: tuple[int, ...]
    windows: tuple[SwaWindow, ...]
    origin: Origin


class WriteBack:
    """A queue of bounded size in front of the store, and the thread that empties it. Offered to by one thread.

    memory: uint8 `[num_slots, payload_bytes]`, where the slots lie. capacity_bytes: of copies waiting to be stored.
    dropped_blocks, dropped_windows: what was offered to a full queue; a request may offer it again.

    A store that refuses or fails loses what it was given, never a request: it says so by its own events, or by a
    `Degraded` one if it raises.
    """

    def __init__(self, store: KVStore, memory: Tensor, *, capacity_bytes: int) -> None:
        self.dropped_blocks = 0
        self.dropped_windows = 0
        self._store = store
        self._payload_bytes = memory.shape[1]
        self._transfer = transfer_for(memory)
        self._capacity = capacity_bytes
        # Nothing ever writes the padding after the last plane, so it still holds what its slot's memory held before.
        planes = store.geometry.planes
        self._used_bytes = planes[-1].offset + planes[-1].nbytes if planes else memory.shape[1]
        self._queue: queue.SimpleQueue[tuple[Leavings, Lent] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: deque[int] = deque()
        self._thread: threading.Thread | None = None

    def offer(self, leavings: Leavings) -> bool:
        """Copy a request's blocks and take them over to be stored; False, with nothing copied, if the queue is full.

        Never waits. An empty queue takes anything, so that no request is too large to be stored.
        """
        nbytes = sum(window.data.nbytes for window in leavings.windows if window.data is not None)
        nbytes += len(leavings.slots) * self._payload_bytes
        if not nbytes:
            return True
        with self._changed:
            if self._pending and sum(self._pending) + nbytes > self._capacity:
                self.dropped_blocks += len(leavings.slots)
                self.dropped_windows += len(leavings.windows)
                return False
            self._pending.append(nbytes)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="duokv-writeback", daemon=True)
            self._thread.start()
        # Lent, as first touch of new memory would take longer than the copy, and the step with it.
        try:
            lent = self._store.buffers(len(leavings.slots))
            blocks = torch.from_numpy(lent.rows)
            self._transfer.get(torch.tensor(leavings.slots, dtype=torch.int64), blocks)
            blocks[:, self._used_bytes : self._payload_bytes] = 0
        except BaseException:
            with self._changed:
                self._pending.remove(nbytes)
                self._changed.notify_all()
            raise
        self._queue.put((leavings, lent))
        return True

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was taken over has been handed to the store; False if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Drain and end the thread; one that is stuck in the store after `timeout_s` is left behind."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            leavings, lent = item
            try:
                with lent:
                    self._put(leavings, lent.rows)
            except Exception as error:  # noqa: BLE001  the cache must not take the engine down
                self._store.events.emit(Degraded("write-back", repr(error)))
            del item, leavings, lent
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def _put(self, leavings: Leavings, blocks: Bytes) -> None:
        if len(blocks):
            self._store.commit(
                leavings.namespace, leavings.tokens, blocks, first_block=leavings.first_block,
                traffic=leavings.traffic, origin=leavings.origin,
            )  # fmt: skip
        if leavings.windows:
            keys = chain_keys(leavings.namespace, leavings.tokens)
            for window in leavings.windows:
                self._store.put_window(keys[window.end // BLOCK_TOKENS - 1], window)
