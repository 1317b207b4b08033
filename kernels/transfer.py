"""Rows of bytes between host memory and slots, wherever these are.

A device reads and writes host memory beside other work only where that memory is pinned. Rows that are not go by two
pinned stages in turn: while one is on the bus, the host fills or empties the other.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from duokv.kernels import copy, pick

STAGE_BYTES = 4 << 20
"""Bytes of a stage: enough that what a copy costs beside its bytes (some 10 us on a device) is little."""
_logger = logging.getLogger("duokv")


class Transfer(Protocol):
    """Moves rows of bytes into slots and out of them. Thread-safe; one call at a time."""

    def put(self, index: Tensor, rows: Tensor) -> None:
        """Write row i's leading bytes into slot index[i], nowhere if that is -1.

        index: int32 or int64 [n] on the host, each slot at most once. rows: uint8 [n, at least a slot's bytes] on the
        host; they may change when this returns. What the caller's current stream is given after it finds the slots
        written.
        """

    def get(self, index: Tensor, rows: Tensor) -> None:
        """Read slot index[i] into row i, zeros for -1, as of what the caller's current stream was given before; it is
        there on return.

        index, rows: as in `put`. What rows have beyond a slot's bytes is undefined afterwards.
        """


def transfer_for(slots: Tensor) -> Transfer:
    """The transfer for slots uint8 [m, nbytes] on whatever device they are."""
    if slots.device.type == "cuda":
        return DeviceTransfer(slots, CudaQueue(slots.device))
    return HostTransfer(slots)


class HostTransfer:
    """Slots in host memory: one copy."""

    def __init__(self, slots: Tensor) -> None:
        self._slots = slots

    def put(self, index: Tensor, rows: Tensor) -> None:
        """See `Transfer.put`."""
        copy.scatter_rows(self._slots, index, rows[:, : self._slots.shape[1]])

    def get(self, index: Tensor, rows: Tensor) -> None:
        """See `Transfer.get`."""
        copy.gather_rows(self._slots, index, rows[:, : self._slots.shape[1]])


class Queue(Protocol):
    """Work on a device, done in the order in which it is given; what `mark` returns waits, all else returns at once."""

    def stage(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """New memory, uint8 [nbytes] each: pinned on the host, and on the device."""

    def reaches(self, rows: Tensor) -> bool:
        """Whether the device can copy straight from and to these rows on the host."""

    def begin(self, index: Tensor) -> Tensor:
        """Let what follows come after all that the current stream was given; return the index's copy on the device."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy between stages, or reached rows, of equal shape."""

    def scatter(self, slots: Tensor, index: Tensor, rows: Tensor) -> None:
        """`copy.scatter_rows` on the device."""

    def gather(self, slots: Tensor, index: Tensor, rows: Tensor) -> None:
        """`copy.gather_rows` on the device, into `rows`."""

    def mark(self) -> Callable[[], None]:
        """Return what waits until all that was given until now is done."""

    def end(self) -> None:
        """Let what the current stream is given from now on come after all that was given here."""


@dataclass(slots=True)
class _Stage:
    """host, device: uint8 [nbytes]. wait: until the last copy between them is done."""

    host: Tensor
    device: Tensor
    wait: Callable[[], None]


class DeviceTransfer:
    """Slots on a device behind a queue: rows are copied over the bus in pieces and moved to their slots there."""

    def __init__(self, slots: Tensor, queue: Queue, *, stage_bytes: int = STAGE_BYTES) -> None:
        self._slots = slots
        self._queue = queue
        self._nbytes = max(stage_bytes, slots.shape[1])
        self._lock = threading.Lock()
        self._stages: list[_Stage] = []

    def put(self, index: Tensor, rows: Tensor) -> None:
        """See `Transfer.put`."""
        queue, width = self._queue, self._slots.shape[1]
        with self._lock:
            straight = self._is_straight(rows)
            given = rows if straight else rows[:, :width]
            there = queue.begin(index)
            try:
                for stage, first, last in self._pieces(given):
                    piece = given[first:last]
                    # Until its last piece has left it.
                    stage.wait()
                    source = piece if straight else _shaped(stage.host, piece).copy_(piece)
                    target = _shaped(stage.device, piece)
                    queue.copy(target, source)
                    stage.wait = queue.mark()
                    queue.scatter(self._slots, there[first:last], target[:, :width])
            finally:
                queue.end()
                if straight:
                    self._wait()

    def get(self, index: Tensor, rows: Tensor) -> None:
        """See `Transfer.get`."""
        queue, width = self._queue, self._slots.shape[1]
        coming: deque[tuple[_Stage, Tensor]] = deque()

        def take_over() -> None:
            stage, piece = coming.popleft()
            stage.wait()
            if not straight:
                piece.copy_(_shaped(stage.host, piece))

        with self._lock:
            straight = self._is_straight(rows)
            wanted = rows if straight else rows[:, :width]
            there = queue.begin(index)
            try:
                for stage, first, last in self._pieces(wanted):
                    if len(coming) == len(self._stages):
                        take_over()
                    piece = wanted[first:last]
                    source = _shaped(stage.device, piece)
                    queue.gather(self._slots, there[first:last], source[:, :width])
                    queue.copy(piece if straight else _shaped(stage.host, piece), source)
                    stage.wait = queue.mark()
                    coming.append((stage, piece))
                while coming:
                    take_over()
            finally:
                queue.end()
                # Whatever went wrong, nothing is written to the caller's rows from now on.
                self._wait()

    def _is_straight(self, rows: Tensor) -> bool:
        return self._nbytes >= rows.shape[1] and self._queue.reaches(rows)

    def _pieces(self, rows: Tensor) -> list[tuple[_Stage, int, int]]:
        """Rows cut into (stage, first row, row after the last), the stages in turn."""
        while len(self._stages) < 2:
            self._stages.append(_Stage(*self._queue.stage(self._nbytes), _is_free))
        most = max(1, self._nbytes // rows.shape[1])
        starts = range(0, len(rows), most)
        return [(self._stages[turn % 2], at, min(at + most, len(rows))) for turn, at in enumerate(starts)]

    def _wait(self) -> None:
        for stage in self._stages:
            stage.wait()


def _is_free() -> None:
    """A stage that was never used."""


def _shaped(stage: Tensor, rows: Tensor) -> Tensor:
    return stage[: rows.numel()].view(rows.shape)


class CudaQueue:
    """A CUDA stream of its own, with the movers that `pick` chooses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        movers = "duokv.kernels.triton_kernels" if pick(device).movers == "triton" else "duokv.kernels.copy"
        self._movers = importlib.import_module(movers)

    def stage(self, nbytes: int) -> tuple[Tensor, Tensor]:
        """See `Queue.stage`."""
        with torch.cuda.stream(self._stream):
            device = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), device

    def reaches(self, rows: Tensor) -> bool:
        """See `Queue.reaches`. torch makes a copy of rows that lie apart before it copies them."""
        return rows.is_contiguous() and rows.is_pinned()

    def begin(self, index: Tensor) -> Tensor:
        """See `Queue.begin`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # From pageable memory it would wait for all that the stream waits for.
            return index.pin_memory().to(self._device, non_blocking=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `Queue.copy`."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def scatter(self, slots: Tensor, index: Tensor, rows: Tensor) -> None:
        """See `Queue.scatter`."""
        with torch.cuda.stream(self._stream):
            self._movers.scatter_rows(slots, index, rows)

    def gather(self, slots: Tensor, index: Tensor, rows: Tensor) -> None:
        """See `Queue.gather`."""
        with torch.cuda.stream(self._stream):
            self._movers.gather_rows(slots, index, rows)

    def mark(self) -> Callable[[], None]:
        """See `Queue.mark`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize

    def end(self) -> None:
        """See `Queue.end`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def pin_memory(memory: memoryview) -> Callable[[], None]:
    """Pin host memory for CUDA and return what undoes it; where CUDA refuses, say so and leave the memory as it is.

    For `open_store(pin_memory=...)`: rows that the store lends then need no stage. memory: contiguous, on page
    boundaries.
    """
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refused = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 1))  # 1: for all devices
    if refused:
        said = "%d bytes of host memory are not pinned, CUDA error %d; copies from and to them take longer"
        _logger.warning(said, memory.nbytes, refused)
        # The error waits for the next launch to be raised by it.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return lambda: None
    return partial(runtime.cudaHostUnregister, tensor.data_ptr())
