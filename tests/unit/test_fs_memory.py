"""What a crash leaves of files in memory, and how their space is counted."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.backend import FileInfo, ReadOp, Writer
from duokv.kvstore.buffers import aligned
from duokv.kvstore.errors import UsageError

PAGE = 4096
NAMES = ("seg/a", "seg/b", "c")


def content(backend: MemoryBackend, name: str) -> bytes:
    data = backend.read_file(name)
    assert data is not None
    return data


def everything(backend: MemoryBackend) -> dict[FileInfo, bytes]:
    return {info: content(backend, info.name) for info in backend.list("")}


def new_file(backend: MemoryBackend, name: str, data: bytes, *, sync: bool) -> Writer:
    writer = backend.create(name, len(data))
    writer.write(0, [memoryview(data)])
    if sync:
        writer.sync()
    return writer


def outcomes(backend: MemoryBackend, look: Callable[[MemoryBackend], object], p: float = 0.5) -> set[object]:
    """What a look at crash clones of several seeds finds."""
    return {look(backend.crash_clone(p, random.Random(seed))) for seed in range(40)}


# What one kind of change comes to


def test_synced_bytes_survive_and_later_ones_tear_at_pages() -> None:
    backend = MemoryBackend()
    old, new = b"o" * (16 * PAGE), b"n" * (16 * PAGE)
    writer = new_file(backend, "a", old, sync=True)
    writer.write(0, [memoryview(new)])
    survivors = set()
    for seed in range(5):
        data = content(backend.crash_clone(0.5, random.Random(seed)), "a")
        pages = [data[i : i + PAGE] for i in range(0, len(data), PAGE)]
        assert set(pages) == {old[:PAGE], new[:PAGE]}
        survivors.add(tuple(page == new[:PAGE] for page in pages))
    assert len(survivors) == 5
    assert content(backend.crash_clone(0.0, random.Random(0)), "a") == old
    assert content(backend.crash_clone(1.0, random.Random(0)), "a") == new
    assert content(backend, "a") == new


def test_writes_of_one_page_survive_in_any_combination() -> None:
    backend = MemoryBackend()
    writer = new_file(backend, "a", b"0000", sync=True)
    writer.write(0, [memoryview(b"11")])
    writer.write(1, [memoryview(b"22")])
    assert outcomes(backend, lambda clone: content(clone, "a")) == {b"0000", b"1100", b"0220", b"1220"}


def test_a_file_that_was_never_synced_may_be_gone() -> None:
    backend = MemoryBackend()
    new_file(backend, "a", b"x" * PAGE, sync=False)
    assert outcomes(backend, lambda clone: "a" in {info.name for info in clone.list("")}) == {True, False}


def test_a_removal_may_be_undone_until_a_name_beside_it_is_synced() -> None:
    backend = MemoryBackend()
    new_file(backend, "seg/a", b"old", sync=True)
    backend.remove("seg/a")
    assert outcomes(backend, lambda clone: clone.read_file("seg/a")) == {None, b"old"}
    new_file(backend, "other", b"x", sync=True)
    assert outcomes(backend, lambda clone: clone.read_file("seg/a")) == {None, b"old"}
    new_file(backend, "seg/w/b", b"x", sync=True)
    assert outcomes(backend, lambda clone: clone.read_file("seg/a")) == {None}


def test_a_name_may_mean_the_old_file_the_new_one_or_none() -> None:
    backend = MemoryBackend()
    new_file(backend, "a", b"old", sync=True)
    backend.remove("a")
    new_file(backend, "a", b"new", sync=False)
    found = outcomes(backend, lambda clone: clone.read_file("a"))
    assert {None, b"old", b"new"} <= found
    assert found <= {None, b"old", b"new", b"", bytes(3)}
    backend.resume("a").sync()
    assert outcomes(backend, lambda clone: clone.read_file("a")) == {b"new"}


def test_a_settled_removal_is_not_undone_by_an_older_creation() -> None:
    backend = MemoryBackend()
    new_file(backend, "a", b"old", sync=False)
    backend.remove("a")
    backend.write_file("b", b"")
    assert outcomes(backend, lambda clone: clone.read_file("a")) == {None}


def test_syncing_a_removed_file_does_not_bring_it_back() -> None:
    backend = MemoryBackend()
    writer = new_file(backend, "a", b"old", sync=True)
    backend.remove("a")
    backend.write_file("b", b"")
    writer.sync()
    assert outcomes(backend, lambda clone: clone.read_file("a")) == {None}


def test_a_punch_may_be_undone_page_by_page() -> None:
    backend = MemoryBackend()
    new_file(backend, "a", b"x" * (8 * PAGE), sync=True)
    assert backend.punch("a", [(PAGE, 4 * PAGE)]) == 4 * PAGE
    allocated = set()
    for seed in range(40):
        clone = backend.crash_clone(0.5, random.Random(seed))
        zero_pages = content(clone, "a").count(bytes(PAGE))
        assert clone.list("a")[0].allocated == (8 - zero_pages) * PAGE
        allocated.add(zero_pages)
    assert {0, 4} < allocated <= {0, 1, 2, 3, 4}


def test_a_cut_may_be_undone_and_growth_lost() -> None:
    backend = MemoryBackend()
    writer = new_file(backend, "a", b"x" * PAGE + b"y" * PAGE, sync=True)
    writer.seal(PAGE)
    assert outcomes(backend, lambda clone: content(clone, "a")) == {b"x" * PAGE, b"x" * PAGE + b"y" * PAGE}
    grown = new_file(backend, "b", b"z", sync=True)
    grown.reserve(4 * PAGE)
    assert outcomes(backend, lambda clone: len(content(clone, "b"))) == {1, 4 * PAGE}


def test_a_lost_write_gives_back_its_space_and_length() -> None:
    backend = MemoryBackend()
    writer = new_file(backend, "a", b"x" * (4 * PAGE), sync=True)
    backend.punch("a", [(0, 2 * PAGE)])
    writer.sync()
    synced = everything(backend)
    writer.write(PAGE, [memoryview(b"y" * PAGE)])
    writer.write(9 * PAGE, [memoryview(b"z")])
    assert backend.list("a")[0].allocated == 4 * PAGE
    assert everything(backend.crash_clone(0.0, random.Random(0))) == synced


def test_bytes_lost_behind_the_end_do_not_come_back_when_the_file_grows() -> None:
    backend = MemoryBackend()
    writer = new_file(backend, "a", b"x" * 100, sync=True)
    writer.write(50, [memoryview(b"y" * 100)])
    writer.write(60, [memoryview(b"z" * 100)])
    clone = backend.crash_clone(0.0, random.Random(0))
    clone.resume("a").reserve(200)
    assert content(clone, "a") == b"x" * 100 + bytes(100)


def test_write_file_is_whole_and_durable() -> None:
    backend = MemoryBackend()
    for data in (b"old" * PAGE, b"new" * PAGE):
        backend.write_file("meta", data)
        assert outcomes(backend, lambda clone: clone.read_file("meta"), 0.0) == {data}


def test_a_clone_holds_no_lock_and_goes_its_own_way() -> None:
    backend = MemoryBackend(alignment=512, can_punch=False)
    backend.write_file("meta", b"x")
    assert backend.lock("writer") is not None
    clone = backend.crash_clone(1.0, random.Random(0))
    assert (clone.alignment, clone.can_punch) == (512, False)
    assert clone.lock("writer") is not None
    clone.write_file("meta", b"clone")
    clone.resume("meta").write(0, [memoryview(b"y" * 512)])
    assert backend.read_file("meta") == b"x"


def test_the_same_seed_loses_the_same() -> None:
    backend = MemoryBackend()
    for name in NAMES:
        new_file(backend, name, random.Random(name).randbytes(9 * PAGE), sync=False)
    one, two = (everything(backend.crash_clone(0.5, random.Random(7))) for _ in range(2))
    assert one == two


# Any changes


@dataclass
class Script:
    """Random changes of a few files, and beside them each one's last synced state.

    `touched` names the files changed since: their synced state is what remains when all the rest is lost.
    """

    backend: MemoryBackend = field(default_factory=MemoryBackend)
    writers: dict[str, Writer] = field(default_factory=dict)
    synced: dict[str, tuple[FileInfo, bytes]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)

    def run(self, steps: list[tuple[str, str, int, int]]) -> list[object]:
        return [getattr(self, step)(name, at, n) for step, name, at, n in steps]

    def create(self, name: str, at: int, n: int) -> None:
        if self.backend.read_file(name) is None:
            self.writers[name] = self.backend.create(name, n)

    def write(self, name: str, at: int, n: int) -> None:
        if writer := self.writers.get(name):
            writer.write(at, [memoryview(random.Random(at * 31 + n).randbytes(n))])
            self.touched.add(name)

    def reserve(self, name: str, at: int, n: int) -> None:
        if writer := self.writers.get(name):
            writer.reserve(at)
            self.touched.add(name)

    def punch(self, name: str, at: int, n: int) -> int:
        self.touched.add(name)
        return self.backend.punch(name, [(at, n)])

    def sync(self, name: str, at: int, n: int) -> None:
        if writer := self.writers.get(name):
            writer.sync()
            self._settle(name)

    def cut(self, name: str, at: int, n: int) -> None:
        if writer := self.writers.get(name):
            writer.seal(n)
            self.writers[name] = self.backend.resume(name)
            self.touched.add(name)

    def remove(self, name: str, at: int, n: int) -> None:
        self.backend.remove(name)
        self.writers.pop(name, None)
        self.synced.pop(name, None)

    def replace(self, name: str, at: int, n: int) -> None:
        self.backend.write_file(name, bytes(n))
        self.writers[name] = self.backend.resume(name)
        self._settle(name)

    def _settle(self, name: str) -> None:
        self.synced[name] = state(self.backend, name)
        self.touched.discard(name)


def state(backend: MemoryBackend, name: str) -> tuple[FileInfo, bytes]:
    (info,) = (info for info in backend.list(name) if info.name == name)
    return info, content(backend, name)


KINDS = st.sampled_from(
    ("create", "create", "write", "write", "reserve", "punch", "sync", "sync", "cut", "remove", "replace")
)
PLACES = st.sampled_from((0, 1, 100, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 5 * PAGE, 5 * PAGE + 7))
STEPS = st.lists(st.tuples(KINDS, st.sampled_from(NAMES), PLACES, PLACES), max_size=40)


@given(STEPS, st.integers(0, 9))
def test_what_was_promised_survives_any_crash(steps: list[tuple[str, str, int, int]], seed: int) -> None:
    script = Script()
    script.run(steps)
    promised = {name: script.synced[name] for name in script.synced.keys() - script.touched}
    for unsynced in (0.0, 0.5, 1.0):
        clone = script.backend.crash_clone(unsynced, random.Random(seed))
        assert {name: state(clone, name) for name in promised} == promised


@given(STEPS)
def test_the_worst_crash_leaves_each_file_as_last_synced(steps: list[tuple[str, str, int, int]]) -> None:
    script = Script()
    script.run(steps)
    clone = script.backend.crash_clone(0.0, random.Random(0))
    assert {name: state(clone, name) for name in script.synced} == script.synced


@given(STEPS)
def test_a_crash_of_the_process_loses_nothing(steps: list[tuple[str, str, int, int]]) -> None:
    script = Script()
    script.run(steps)
    assert everything(script.backend.crash_clone(1.0, random.Random(0))) == everything(script.backend)


@given(STEPS, st.integers(0, 9))
def test_a_clone_has_nothing_more_to_lose(steps: list[tuple[str, str, int, int]], seed: int) -> None:
    script = Script()
    script.run(steps)
    clone = script.backend.crash_clone(0.5, random.Random(seed))
    assert everything(clone.crash_clone(0.0, random.Random(0))) == everything(clone)


@given(STEPS)
def test_space_is_counted_page_by_page_with_bytes_and_without(steps: list[tuple[str, str, int, int]]) -> None:
    script, counted = Script(), Script(MemoryBackend(metadata_only=True))
    assert script.run(steps) == counted.run(steps)
    assert counted.backend.list("") == script.backend.list("")


def test_space_of_reserved_written_punched_and_skipped_pages() -> None:
    backend = MemoryBackend(metadata_only=True)
    writer = backend.create("a", 10 * PAGE)

    def pages() -> float:
        return backend.list("a")[0].allocated / PAGE

    assert pages() == 10
    writer.write(0, [memoryview(bytes(4 * PAGE))])
    assert pages() == 10
    assert backend.punch("a", [(PAGE, 2 * PAGE), (PAGE // 2, PAGE)]) == 2 * PAGE
    assert pages() == 8
    assert backend.punch("a", [(0, 5 * PAGE)]) == 3 * PAGE
    writer.reserve(12 * PAGE)
    assert pages() == 7
    writer.write(2 * PAGE, [memoryview(bytes(1))])
    assert pages() == 8
    writer.write(20 * PAGE, [memoryview(bytes(PAGE + 1))])
    assert pages() == 10
    assert backend.punch("a", [(20 * PAGE, 99 * PAGE)]) == 2 * PAGE
    writer.seal(6 * PAGE)
    assert pages() == 2
    backend.remove("a")
    assert backend.list("") == []


# Its options


def test_a_metadata_only_backend_reads_zeros_and_keeps_small_files() -> None:
    backend = MemoryBackend(metadata_only=True)
    new_file(backend, "a", b"x" * PAGE, sync=True).seal(PAGE)
    view = memoryview(bytearray(b"." * (PAGE + 1)))
    assert backend.read_many([ReadOp("a", 0, (view,))], deadline_s=1) == [PAGE]
    assert bytes(view) == bytes(PAGE) + b"."
    backend.write_file("meta", b"kept")
    assert backend.read_file("meta") == b"kept"
    with pytest.raises(UsageError):
        backend.crash_clone(1.0, random.Random(0))


def test_an_aligned_backend_refuses_what_direct_io_would() -> None:
    backend = MemoryBackend(alignment=PAGE)
    writer = backend.create("a", 2 * PAGE)
    for offset, n in ((1, PAGE), (0, PAGE - 1)):
        with pytest.raises(OSError, match="Invalid") as caught:
            writer.write(offset, [memoryview(bytes(n))])
        assert caught.value.errno == errno.EINVAL
    writer.write(0, [memoryview(bytes(PAGE - 1)), memoryview(b"x")])
    view = aligned(2 * PAGE)
    ops = [
        ReadOp("a", 0, (view[:PAGE],)),
        ReadOp("a", 1, (view[:PAGE],)),
        ReadOp("a", 0, (view[: PAGE - 1],)),
        ReadOp("a", 0, (view[1 : PAGE + 1],)),
    ]
    assert backend.read_many(ops, deadline_s=1) == [PAGE, -errno.EINVAL, -errno.EINVAL, -errno.EINVAL]


def test_punching_can_be_left_out() -> None:
    backend = MemoryBackend(can_punch=False)
    new_file(backend, "a", b"x" * PAGE, sync=True)
    assert not backend.can_punch
    with pytest.raises(OSError, match="not supported"):
        backend.punch("a", [(0, PAGE)])


def test_a_clock_that_passes_the_deadline_ends_the_reads() -> None:
    ticks = iter([0.0, 0.5, 1.5])
    backend = MemoryBackend(clock=lambda: next(ticks))
    backend.write_file("a", b"x")
    ops = [ReadOp("a", 0, (memoryview(bytearray(1)),))] * 2
    assert backend.read_many(ops, deadline_s=1) == [1, -errno.ETIMEDOUT]
