"""Rows reach their slots and come back however late a device does what it was given, and through as little memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duokv.kernels import copy, transfer
from duokv.kernels.transfer import CudaQueue, DeviceTransfer, HostTransfer, Transfer, transfer_for
from duokv.kvstore.buffers import aligned

SLOTS, NBYTES, WIDTH = 12, 24, 40


class LazyQueue:
    """A device that does nothing until somebody waits for it: whatever may be late is."""

    def __init__(self, *, straight: bool = False) -> None:
        self.straight = straight
        self.staged: list[int] = []
        self.work: deque[Callable[[], object]] = deque()
        self.given = self.done = 0
        self.copies = self.broken_copy = 0
        self.joined = 0

    def stage(self, nbytes: int) -> tuple[Tensor, Tensor]:
        self.staged.append(nbytes)
        return torch.full((nbytes,), 0xAA, dtype=torch.uint8), torch.full((nbytes,), 0xBB, dtype=torch.uint8)

    def reaches(self, rows: Tensor) -> bool:
        return self.straight and rows.is_contiguous()

    def begin(self, index: Tensor) -> Tensor:
        return index.clone()

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.shape == source.shape
        self.copies += 1
        if self.copies == self.broken_copy:
            raise RuntimeError("the device is gone")
        self._give(partial(target.copy_, source))

    def scatter(self, slots: Tensor, index: Tensor, rows: Tensor) -> None:
        self._give(partial(copy.scatter_rows, slots, index, rows))

    def gather(self, slots: Tensor, index: Tensor, rows: Tensor) -> None:
        self._give(partial(copy.gather_rows, slots, index, rows))

    def mark(self) -> Callable[[], None]:
        return partial(self.run, self.given)

    def end(self) -> None:
        self.joined = self.given

    def run(self, until: int) -> None:
        while self.done < until:
            self.work.popleft()()
            self.done += 1

    def _give(self, work: Callable[[], object]) -> None:
        self.work.append(work)
        self.given += 1


def filled(n: int, width: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, width), dtype=np.uint8))


step = st.tuples(
    st.sampled_from(["put", "get"]), st.permutations(range(-3, SLOTS)), st.integers(0, SLOTS + 3), st.booleans()
)


@given(st.lists(step, max_size=8), st.integers(1, 5), st.booleans())
def test_a_device_holds_and_gives_what_host_memory_would(
    steps: list[tuple[str, list[int], int, bool]], stage_rows: int, straight: bool
) -> None:
    slots, held = filled(SLOTS, NBYTES, 0), filled(SLOTS, NBYTES, 0)
    queue = LazyQueue(straight=straight)
    device, host = DeviceTransfer(slots, queue, stage_bytes=stage_rows * WIDTH), HostTransfer(held)
    for seed, (what, order, count, wide) in enumerate(steps):
        index = torch.tensor([max(slot, -1) for slot in order[:count]], dtype=torch.int64)
        rows = filled(count, WIDTH if wide else NBYTES, seed)
        if what == "put":
            host.put(index, rows)
            device.put(index, rows)
            # From now on they are the caller's again.
            rows.fill_(0xCC)
        else:
            wanted = torch.zeros(count, NBYTES, dtype=torch.uint8)
            host.get(index, wanted)
            device.get(index, rows)
            assert torch.equal(rows[:, :NBYTES], wanted)
            kept = rows.clone()
            queue.run(queue.given)
            assert torch.equal(rows, kept)
    assert queue.joined == queue.given
    queue.run(queue.given)
    assert torch.equal(slots, held)
    assert len(queue.staged) in (0, 2)


def test_slots_wider_than_a_stage_still_fit() -> None:
    slots = filled(4, 100, 0)
    queue = LazyQueue()
    moves = DeviceTransfer(slots, queue, stage_bytes=10)
    rows = filled(3, 100, 1)
    moves.put(torch.tensor([3, 0, 1]), rows)
    back = torch.zeros(3, 100, dtype=torch.uint8)
    moves.get(torch.tensor([3, 0, 1]), back)
    assert torch.equal(back, rows)
    assert queue.staged == [100, 100]


@pytest.mark.parametrize("straight", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_after_a_failure_nothing_is_written_to_the_rows(nth: int, straight: bool) -> None:
    queue = LazyQueue(straight=straight)
    moves = DeviceTransfer(filled(SLOTS, NBYTES, 0), queue, stage_bytes=2 * NBYTES)
    queue.broken_copy = nth
    rows = filled(6, NBYTES, 1)
    with pytest.raises(RuntimeError, match="gone"):
        moves.get(torch.arange(6), rows)
    left = rows.clone()
    queue.run(queue.given)
    again = filled(6, NBYTES, 2)
    moves.get(torch.arange(6), again)
    assert torch.equal(rows, left)
    assert torch.equal(again, filled(SLOTS, NBYTES, 0)[:6])


def test_slots_in_host_memory_need_no_queue() -> None:
    slots = filled(4, NBYTES, 0)
    moves: Transfer = transfer_for(slots)
    assert isinstance(moves, HostTransfer)
    lent = filled(2, WIDTH, 1)
    moves.put(torch.tensor([2, -1]), lent)
    assert torch.equal(slots[2], lent[0, :NBYTES])
    moves.get(torch.tensor([-1, 2]), lent)
    assert not lent[0, :NBYTES].any()
    assert torch.equal(lent[1, :NBYTES], slots[2])


class Stream:
    """A CUDA stream that does at once what it is given, and notes whom it waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


class Event:
    def record(self, stream: Stream) -> None:
        self.recorded = stream

    def synchronize(self) -> None:
        assert self.recorded is not None


def test_a_cuda_queue_waits_for_the_current_stream_and_makes_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be seen of it without a GPU; tests/gpu has the rest."""
    current, entered = Stream(), []

    def inside(stream: Stream) -> nullcontext[None]:
        entered.append(stream)
        return nullcontext()

    empty = torch.empty

    def unpinned(nbytes: int, *, dtype: torch.dtype, device: str = "cpu", pin_memory: bool = False) -> Tensor:
        del pin_memory
        return empty(nbytes, dtype=dtype, device=device)

    for name, stand_in in (
        ("Stream", Stream), ("Event", Event), ("stream", inside), ("current_stream", lambda device: current),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(Tensor, "pin_memory", lambda index: index)
    slots = filled(SLOTS, NBYTES, 0)
    queue = CudaQueue(torch.device("cpu"))
    moves = DeviceTransfer(slots, queue, stage_bytes=2 * NBYTES)
    rows, back = filled(5, WIDTH, 1), filled(5, WIDTH, 2)
    moves.put(torch.tensor([4, 0, -1, 7, 2]), rows)
    (own,) = set(entered)
    assert (own.waited, current.waited) == ([current], [own])
    moves.get(torch.tensor([4, 0, -1, 7, 2]), back)
    assert torch.equal(back[[0, 1, 3, 4], :NBYTES], rows[[0, 1, 3, 4], :NBYTES])
    assert (own.waited, current.waited) == ([current] * 2, [own] * 2)
    assert not queue.reaches(rows)


class Runtime:
    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_memory_is_pinned_until_that_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = aligned(3 * 4096)
    undo = transfer.pin_memory(memory)
    assert runtime.pinned == {np.frombuffer(memory, np.uint8).ctypes.data: 3 * 4096}
    undo()
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_said_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched: list[str] = []

    def zeros(size: int, *, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: what came before")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    monkeypatch.setattr(torch, "zeros", zeros)
    transfer.pin_memory(aligned(4096))()
    assert caplog.messages == [
        "4096 bytes of host memory are not pinned, CUDA error 2; copies from and to them take longer"
    ]
    assert launched == ["cuda"]
