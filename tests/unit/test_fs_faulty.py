"""Each fault does what it says, to the operation it names and to no other."""

from __future__ import annotations

import errno
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from duokv.connectors.fs_faulty import (
    Corrupt,
    Delay,
    Fail,
    Fault,
    FaultyBackend,
    Misdirect,
    Shorten,
    Stall,
    fail_each,
)
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.backend import Backend, ReadOp


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def filled(*faults: Fault, time: Time | None = None) -> FaultyBackend:
    """Files a and b of 16 bytes of their own letter; the faults count from here on."""
    clock = time or Time()
    backend = FaultyBackend(MemoryBackend(clock=clock), sleep=clock.sleep, clock=clock)
    for name in ("a", "b"):
        put(backend, name)
    backend.log.clear()
    backend.inject(*faults)
    return backend


def put(backend: Backend, name: str) -> None:
    writer = backend.create(name, 16)
    writer.write(0, [memoryview(name[-1].encode() * 16)])
    writer.sync()
    writer.seal(16)


def read(backend: Backend, name: str, *, deadline_s: float = 10) -> tuple[int, bytes]:
    view = memoryview(bytearray(b"." * 16))
    (got,) = backend.read_many([ReadOp(name, 0, (view,))], deadline_s=deadline_s)
    return got, bytes(view)


def test_the_log_pins_the_order_of_operations() -> None:
    backend = FaultyBackend(MemoryBackend())
    put(backend, "seg/a")
    backend.write_file("meta", b"abc")
    read(backend, "seg/a")
    backend.punch("seg/a", [(0, 4), (8, 4)])
    backend.read_file("meta")
    backend.list("seg/")
    backend.remove("seg/a")
    backend.resume("meta").abort()
    assert backend.lock("writer/1")
    assert backend.log_text().splitlines() == [
        "create seg/a 16",
        "write seg/a 0+16",
        "sync seg/a",
        "seal seg/a 16",
        "write_file meta 3",
        "read seg/a 0+16",
        "punch seg/a 0+8",
        "read_file meta",
        "list seg/",
        "remove seg/a",
        "resume meta",
        "abort meta",
        "lock writer/1",
    ]


def test_the_nth_operation_of_the_kind_fails_once() -> None:
    backend = filled(Fail(kind="read", nth=2, errno=errno.ENXIO))
    backend.list("")
    assert [read(backend, "a")[0] for _ in range(3)] == [16, -errno.ENXIO, 16]
    assert backend.fired == 1


def test_a_lasting_fault_fails_from_then_on_until_healed() -> None:
    backend = filled(Fail(kind=None, nth=2, lasting=True))
    assert read(backend, "a")[0] == 16
    assert read(backend, "a")[0] == -errno.EIO
    with pytest.raises(OSError, match="injected"):
        backend.list("")
    backend.heal()
    assert read(backend, "a")[0] == 16


def test_what_stalls_goes_on_when_healed() -> None:
    backend = filled(Stall(kind="read", until=threading.Event()))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(read, backend, "a")
        while not backend.fired:
            pass
        assert not waiting.done()
        backend.heal()
        assert waiting.result()[0] == 16


@pytest.mark.parametrize("kind", ["create", "reserve", "write", "sync", "seal"])
def test_a_writers_operations_fail(kind: str) -> None:
    backend = FaultyBackend(MemoryBackend(), [Fail(kind=kind, errno=errno.ENOSPC)])  # type: ignore[arg-type]

    def write() -> None:
        writer = backend.create("c", 4)
        writer.reserve(8)
        writer.write(0, [memoryview(b"data")])
        writer.sync()
        writer.seal(4)

    with pytest.raises(OSError, match="injected") as caught:
        write()
    assert caught.value.errno == errno.ENOSPC
    assert backend.log[-1].kind == kind


def test_a_failed_abort_leaves_the_file_and_is_quiet() -> None:
    backend = FaultyBackend(MemoryBackend(), [Fail(kind="abort")])
    backend.create("c", 4).abort()
    assert [info.name for info in backend.list("")] == ["c"]


def test_a_torn_write_stores_its_beginning() -> None:
    backend = FaultyBackend(MemoryBackend(), [Fail(kind="write", torn_bytes=3)])
    writer = backend.create("a", 16)
    with pytest.raises(OSError, match="injected"):
        writer.write(4, [memoryview(b"ab"), memoryview(b"cdef")])
    assert read(backend, "a") == (16, bytes(4) + b"abc" + bytes(9))


def test_faults_of_one_read_leave_its_neighbours_alone() -> None:
    backend = filled(Fail(kind="read", nth=2))
    views = [memoryview(bytearray(16)) for _ in range(3)]
    results = backend.read_many(
        [ReadOp(name, 0, (view,)) for name, view in zip("aba", views, strict=True)], deadline_s=1
    )
    assert results == [16, -errno.EIO, 16]
    assert [bytes(view) for view in views] == [b"a" * 16, bytes(16), b"a" * 16]


@pytest.mark.parametrize("bit", [0, 9, 127, 128 + 9])
def test_a_corrupt_read_differs_in_one_bit(bit: int) -> None:
    backend = filled(Corrupt(bit=bit))
    got, data = read(backend, "a")
    wrong = int.from_bytes(data, "little") ^ int.from_bytes(b"a" * 16, "little")
    assert got == 16
    assert wrong == 1 << bit % 128
    assert read(backend, "a")[1] == b"a" * 16


def test_a_corrupt_write_stores_one_wrong_bit_and_spares_the_callers_memory() -> None:
    backend = FaultyBackend(MemoryBackend(), [Corrupt(kind="write", bit=8)])
    data = bytearray(b"abcd")
    backend.create("a", 4).write(0, [memoryview(data)])
    assert read(backend, "a")[1][:4] == b"accd"
    assert data == b"abcd"


def test_a_shortened_read() -> None:
    assert read(filled(Shorten(nbytes=5)), "a")[0] == 5


def test_a_misdirected_read_returns_another_places_bytes() -> None:
    assert read(filled(Misdirect(name="b", offset=4)), "a") == (12, b"b" * 12 + b"....")
    assert read(filled(Misdirect(offset=15)), "a") == (1, b"a" + b"." * 15)


def test_a_delayed_read_ends_at_its_deadline() -> None:
    time = Time()
    backend = filled(Delay(kind="read", seconds=60), time=time)
    assert read(backend, "a", deadline_s=1) == (-errno.ETIMEDOUT, b"." * 16)
    assert time.now == 1
    assert read(backend, "a", deadline_s=1)[0] == 16


def test_a_delay_takes_time_from_the_reads_after_it() -> None:
    time = Time()
    backend = filled(Delay(kind="read", seconds=3), Delay(kind="list", seconds=4), time=time)
    views = [memoryview(bytearray(16)) for _ in range(2)]
    ops = [ReadOp("a", 0, (view,)) for view in views]
    assert backend.read_many(ops, deadline_s=4) == [16, 16]
    backend.list("")
    assert time.now == 7
    backend.inject(Delay(kind="read", seconds=5))
    assert backend.read_many(ops, deadline_s=4) == [-errno.ETIMEDOUT] * 2


class Gate(threading.Event):
    """Tells when somebody waits at it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


def test_a_stalled_read_fills_its_memory_late() -> None:
    gate = Gate()
    time = Time()
    backend = filled(Stall(kind="read", until=gate), time=time)
    view = memoryview(bytearray(16))
    with ThreadPoolExecutor(1) as pool:
        stalled = pool.submit(backend.read_many, [ReadOp("a", 0, (view,))], deadline_s=1)
        assert gate.reached.wait(60)
        assert read(backend, "b") == (16, b"b" * 16)
        assert bytes(view) == bytes(16)
        time.sleep(60)
        gate.set()
        assert stalled.result() == [16]
    assert bytes(view) == b"a" * 16


def test_injected_faults_count_from_their_injection() -> None:
    backend = filled()
    read(backend, "a")
    backend.inject(Fail(kind="read", nth=1))
    assert [read(backend, "a")[0] for _ in range(2)] == [-errno.EIO, 16]


def test_fail_each_visits_every_operation_and_ends_with_a_clean_round() -> None:
    failed = []
    for backend in fail_each(MemoryBackend, None):
        try:
            put(backend, "a")
        except OSError:
            failed.append(str(backend.log[-1]))
        else:
            assert read(backend, "a", deadline_s=math.inf)[0] in {16, -errno.EIO}
    assert failed == ["create a 16", "write a 0+16", "sync a", "seal a 16"]
    assert backend.fired == 0


def test_fail_each_of_one_kind_gives_up_on_a_body_that_never_ends() -> None:
    rounds = fail_each(MemoryBackend, "list", limit=3)
    for _ in range(3):
        backend = next(rounds)
        for _ in range(3):
            with suppress(OSError):
                backend.list("")
    with pytest.raises(AssertionError, match="still fails"):
        next(rounds)
