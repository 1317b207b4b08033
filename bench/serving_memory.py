"""The memory's part of `duokv.bench.serving`: the SWA arena, and the copies between host and slots."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean, median

import numpy as np
import torch
from torch import Tensor

from duokv.bench.io_limits import Bytes
from duokv.engine.slots import BlockSlots
from duokv.kernels.transfer import transfer_for
from duokv.kvstore import CacheGeometry, Origin, SwaWindow
from duokv.kvstore.buffers import aligned
from duokv.kvstore.errors import StoreError
from duokv.kvstore.geometry import PAGE_BYTES
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.kvstore.swa import SwaArena


@dataclass(frozen=True, slots=True)
class ArenaCost:
    """By slice of an arena's life: microseconds per window while it is full of `windows`, and page faults.

    A window's life: put, which expires the oldest one, and leased once. Once in a few times as many lives as there are
    windows Python rebuilds the arena's table in new memory: a slice that meets that has faults, and a long put.
    """

    windows: int
    put_us: tuple[float, ...]
    lease_us: tuple[float, ...]
    faults: tuple[int, ...]
    lives: int

    @property
    def life_us(self) -> float:
        """Median of both together."""
        return median(put + lease for put, lease in zip(self.put_us, self.lease_us, strict=True))


def measure_arenas(sizes: Sequence[int], *, lives: int, slices: int, done: Callable[[], None]) -> list[ArenaCost]:
    """Measure arenas of `sizes` windows of a page, in turn, each in `slices` slices of `lives` lives."""
    arenas = [_RollingArena(size) for size in sizes]
    for arena in arenas:
        arena.warm_up()
        done()
    for _ in range(slices):
        for arena in arenas:
            arena.live(lives)
        done()
    return [arena.cost() for arena in arenas]


class _RollingArena:
    """A full arena in which each put expires the oldest window: a put a second, lives of as many seconds as windows."""

    def __init__(self, windows: int) -> None:
        self._windows = windows
        self._now = 0.0
        self._arena = SwaArena(
            PAGE_BYTES, capacity_bytes=windows * PAGE_BYTES, expiry_s=windows - 1.5, monotonic=lambda: self._now,
            emit=lambda _: None,
        )  # fmt: skip
        # Twice as many keys as windows: one that comes again is long gone.
        self._keys = [number.to_bytes(32, "big") for number in range(2 * windows)]
        self._at = 0
        self._window = SwaWindow(BLOCK_TOKENS, memoryview(bytes(PAGE_BYTES)), 0, Origin.EXACT)
        self._put_us: list[float] = []
        self._lease_us: list[float] = []
        self._lives = 0
        self._faults: list[int] = []

    def warm_up(self) -> None:
        """Fill it, and let its tables reach the size they keep."""
        for _ in range(4 * self._windows):
            self._put_next()
        self.live(1)
        self.live(min(self._windows, 1000))
        self._put_us, self._lease_us, self._faults, self._lives = [], [], [], 0

    def live(self, count: int) -> None:
        before = _faults()
        put = lease = 0.0
        clock = time.perf_counter
        for _ in range(count):
            started = clock()
            key = self._put_next()
            between = clock()
            with self._arena.lease(key) as window:
                found = window is not None
            lease += clock() - between
            put += between - started
            if not found:
                raise StoreError("a window that was just put is gone")
        self._faults.append(_faults() - before)
        stats = self._arena.stats()
        if stats.windows != self._windows - 1:
            raise StoreError(f"{stats.windows} windows in an arena that should hold {self._windows - 1}")
        self._put_us.append(1e6 * put / count)
        self._lease_us.append(1e6 * lease / count)
        self._lives += count

    def cost(self) -> ArenaCost:
        return ArenaCost(
            self._windows, tuple(self._put_us), tuple(self._lease_us), tuple(self._faults), self._lives
        )  # fmt: skip

    def _put_next(self) -> bytes:
        self._now += 1.0
        key = self._keys[self._at]
        self._at = (self._at + 1) % len(self._keys)
        self._arena.put(key, self._window)
        return key


def _faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


@dataclass(frozen=True, slots=True)
class CopySpeed:
    """Blocks between lent rows and slots, as shares of the rate of one copy of the same bytes before and after.

    That is a memcpy, or a copy from pinned memory to the device where the slots lie.
    """

    geometry: str
    device: str
    blocks: int
    gigabytes_s: float
    to_slots: tuple[float, ...]
    from_slots: tuple[float, ...]


def copy_devices() -> list[torch.device]:
    """Where slots may lie: the host, and a GPU if there is one."""
    return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]


def measure_copies(geometry: CacheGeometry, blocks: int, pairs: int, device: torch.device) -> CopySpeed:
    """Copy `blocks` payloads into slots and back, `pairs` times each way; slots are not in the order of the rows."""
    nbytes = blocks * geometry.payload_bytes
    on_host = device.type == "cpu"
    slots = BlockSlots(geometry, blocks).memory.to(device)
    lent, source = (torch.from_numpy(_filled(blocks * row)) for row in (geometry.slot_bytes, geometry.payload_bytes))
    if not on_host:
        lent, source = lent.pin_memory(), source.pin_memory()
    lent = lent.view(blocks, -1)
    rows = lent[:, : geometry.payload_bytes]
    index = torch.from_numpy(np.random.default_rng(0).permutation(blocks))
    transfer = transfer_for(slots)
    target = torch.from_numpy(_filled(nbytes)) if on_host else source.to(device)
    there = partial(_finished, device, partial(transfer.put, index, lent))
    back = partial(_finished, device, partial(transfer.get, index, lent))
    # Of one thread, as moving rows is; torch takes several.
    memcpy = partial(np.copyto, target.numpy(), source.numpy()) if on_host else partial(target.copy_, source)
    limit = partial(_finished, device, memcpy)
    times = max(1, (32 << 20) // nbytes)
    before = rows.clone()
    there()
    rows.zero_()
    back()
    _check_equal(rows, before)
    limit_s = [_seconds(limit, times)]
    found: tuple[list[float], list[float]] = [], []
    for _ in range(pairs):
        for call, ratios in zip((there, back), found, strict=True):
            seconds = _seconds(call, times)
            limit_s.append(_seconds(limit, times))
            ratios.append(mean(limit_s[-2:]) / seconds)
    _check_equal(rows, before)
    return CopySpeed(
        geometry.name, device.type, blocks, nbytes / median(limit_s) / 1e9, tuple(found[0]), tuple(found[1])
    )


def _finished(device: torch.device, call: Callable[[], object]) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_equal(rows: Tensor, before: Tensor) -> None:
    if not torch.equal(rows, before):
        raise StoreError("rows came back from the slots with other bytes")


def _filled(nbytes: int) -> Bytes:
    memory = np.frombuffer(aligned(nbytes), np.uint8)
    memory[:] = (np.arange(nbytes, dtype=np.uint32) * np.uint32(2_654_435_761) >> 20).astype(np.uint8)
    return memory


def _seconds(call: Callable[[], object], times: int) -> float:
    """Seconds of one call, of the fastest in `times`."""
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best
