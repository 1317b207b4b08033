"""The laws of `duokv.kvstore.backend.Backend` as tests.

A backend of your own is held to them by a subclass that provides `make_backend`:

    class TestMine(BackendContract):
        @pytest.fixture
        def make_backend(self, tmp_path):
            return lambda: MyBackend(tmp_path)
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from backend_kit import PAGE, MakeBackend, get, pattern, put, room
from punch_contract import PunchContract

from duokv.kvstore.backend import Backend, ReadOp
from duokv.kvstore.errors import UsageError

__all__ = ["BackendContract", "MakeBackend"]


class BackendContract(PunchContract):
    """Tests that every backend passes."""

    @pytest.fixture
    def make_backend(self) -> MakeBackend:
        """Override: each call opens the same, at first empty, place anew."""
        raise NotImplementedError("give the subclass a make_backend fixture")

    @pytest.fixture
    def backend(self, make_backend: MakeBackend) -> Iterator[Backend]:
        backend = make_backend()
        yield backend
        backend.close()

    # What it says of itself

    def test_alignment_is_a_power_of_two_up_to_a_page(self, backend: Backend) -> None:
        assert backend.alignment in {1 << n for n in range(13)}

    def test_concurrency_and_notes_are_usable(self, backend: Backend) -> None:
        assert backend.concurrency >= 1
        assert all(note and "\n" not in note for note in backend.notes)

    @pytest.mark.parametrize(
        "name", ["", "/abs", "../up", "a/../b", "a//b", "a/", ".hidden", "a/.b", "n\0l", "locks/x"]
    )
    def test_names_never_leave_the_root(self, backend: Backend, name: str) -> None:
        for call in (
            lambda: backend.create(name, PAGE),
            lambda: backend.resume(name),
            lambda: backend.remove(name),
            lambda: backend.write_file(name, b""),
            lambda: backend.read_file(name),
            lambda: backend.lock(name),
        ):
            with pytest.raises(UsageError):
                call()
        assert backend.read_many([ReadOp(name, 0, (room(PAGE),))], deadline_s=60)[0] in {-errno.EINVAL, -errno.ENOENT}

    # Writers

    def test_written_bytes_are_read_before_seal_and_after(self, backend: Backend) -> None:
        data = pattern(8 * PAGE, seed=1)
        writer = backend.create("seg/w1/a", 8 * PAGE)
        writer.write(4 * PAGE, [data[4 * PAGE :]])
        writer.write(0, [data[: 4 * PAGE]])
        assert get(backend, "seg/w1/a", 8 * PAGE) == data
        writer.sync()
        writer.seal(8 * PAGE)
        assert get(backend, "seg/w1/a", 8 * PAGE) == data

    def test_parts_of_any_length_and_place_are_written_in_order(self, backend: Backend) -> None:
        lengths = [2 * PAGE, 1, 640, PAGE - 641, PAGE, 0, 4 * PAGE + 5, PAGE - 5, 3 * PAGE]
        data = pattern(sum(lengths), seed=2)
        parts, at = [], 0
        for n in lengths:
            parts.append(data[at : at + n])
            at += n
        writer = backend.create("a", PAGE + data.nbytes)
        writer.write(PAGE, parts)
        writer.seal(PAGE + data.nbytes)
        assert get(backend, "a", data.nbytes, offset=PAGE) == data

    def test_more_parts_and_views_than_one_system_call_takes(self, backend: Backend) -> None:
        pages = 1500
        data = pattern(pages * PAGE, seed=3)
        pieces = [data[i * PAGE : (i + 1) * PAGE] for i in range(pages)]
        writer = backend.create("a", data.nbytes)
        writer.write(0, pieces)
        writer.seal(data.nbytes)
        back = room(data.nbytes)
        views = tuple(back[i * PAGE : (i + 1) * PAGE] for i in range(pages))
        assert backend.read_many([ReadOp("a", 0, views)], deadline_s=60) == [data.nbytes]
        assert back == data

    def test_a_write_larger_than_any_staging_buffer(self, backend: Backend) -> None:
        data = pattern(9 * 1024 * 1024 + PAGE, seed=4)
        writer = backend.create("a", data.nbytes)
        writer.write(0, [data[:1000], data[1000:]])
        writer.seal(data.nbytes)
        assert get(backend, "a", data.nbytes) == data

    def test_parts_may_change_once_write_has_returned(self, backend: Backend) -> None:
        data = pattern(2 * PAGE, seed=5)
        before = bytes(data)
        writer = backend.create("a", 2 * PAGE)
        writer.write(0, [data])
        data[:] = bytes(2 * PAGE)
        writer.seal(2 * PAGE)
        assert get(backend, "a", 2 * PAGE) == before

    def test_create_is_exclusive(self, backend: Backend) -> None:
        writer = backend.create("a", PAGE)
        with pytest.raises(FileExistsError):
            backend.create("a", PAGE)
        writer.seal(PAGE)
        with pytest.raises(FileExistsError):
            backend.create("a", PAGE)
        backend.write_file("b", b"small")
        with pytest.raises(FileExistsError):
            backend.create("b", PAGE)

    def test_reserve_grows_and_never_shrinks(self, backend: Backend) -> None:
        writer = backend.create("a", 2 * PAGE)
        writer.write(0, [pattern(2 * PAGE, seed=6)])
        writer.reserve(8 * PAGE)
        large = backend.list("a")[0]
        writer.reserve(PAGE)
        assert backend.list("a") == [large]
        assert get(backend, "a", 2 * PAGE) == pattern(2 * PAGE, seed=6)
        assert not any(get(backend, "a", 6 * PAGE, offset=2 * PAGE))
        writer.abort()

    def test_resume_goes_on_where_a_lost_writer_stopped(self, make_backend: MakeBackend) -> None:
        first = make_backend()
        writer = first.create("seg/a", 8 * PAGE)
        writer.write(0, [pattern(2 * PAGE, seed=7)])
        first.close()
        second = make_backend()
        writer = second.resume("seg/a")
        writer.write(2 * PAGE, [pattern(PAGE, seed=8)])
        writer.reserve(16 * PAGE)
        writer.sync()
        writer.seal(3 * PAGE)
        assert get(second, "seg/a", 4 * PAGE) == bytes(pattern(2 * PAGE, seed=7)) + bytes(pattern(PAGE, seed=8))
        second.close()

    def test_resume_of_nothing(self, backend: Backend) -> None:
        with pytest.raises(FileNotFoundError):
            backend.resume("seg/none")

    def test_seal_cuts_and_ends_writing(self, backend: Backend) -> None:
        writer = backend.create("a", 16 * PAGE)
        writer.write(0, [pattern(4 * PAGE, seed=9)])
        writer.seal(3 * PAGE)
        (info,) = backend.list("")
        assert info.size == 3 * PAGE
        assert info.allocated <= 4 * PAGE
        with pytest.raises(OSError, match=r"."):
            writer.write(0, [pattern(PAGE, seed=9)])
        with pytest.raises(OSError, match=r"."):
            writer.reserve(PAGE)
        with pytest.raises(OSError, match=r"."):
            writer.sync()
        with pytest.raises(OSError, match=r"."):
            writer.seal(PAGE)
        assert get(backend, "a", 4 * PAGE) == pattern(3 * PAGE, seed=9)

    def test_abort_removes_and_may_be_repeated(self, backend: Backend) -> None:
        writer = backend.create("seg/a", PAGE)
        writer.write(0, [pattern(PAGE, seed=1)])
        assert get(backend, "seg/a", PAGE)
        writer.abort()
        writer.abort()
        assert backend.list("") == []
        with pytest.raises(FileNotFoundError):
            get(backend, "seg/a", PAGE)
        put(backend, "seg/a", pattern(PAGE, seed=2))
        writer.abort()
        assert get(backend, "seg/a", PAGE) == pattern(PAGE, seed=2)

    def test_abort_after_seal_or_by_hand_removed_file_does_nothing(self, backend: Backend) -> None:
        writer = backend.create("a", PAGE)
        writer.write(0, [pattern(PAGE, seed=1)])
        writer.seal(PAGE)
        writer.abort()
        assert get(backend, "a", PAGE) == pattern(PAGE, seed=1)
        lost = backend.create("b", PAGE)
        backend.remove("b")
        lost.abort()
        assert [info.name for info in backend.list("")] == ["a"]

    # Reads

    def test_results_belong_to_their_ops(self, backend: Backend) -> None:
        put(backend, "a", pattern(4 * PAGE, seed=1))
        put(backend, "b", pattern(2 * PAGE, seed=2))
        views = [room(2 * PAGE) for _ in range(6)]
        ops = [
            ReadOp("b", 0, (views[0],)),
            ReadOp("missing", 0, (views[1],)),
            ReadOp("a", 2 * PAGE, (views[2][PAGE:], views[2][:PAGE])),
            ReadOp("b", PAGE, (views[3],)),
            ReadOp("a", 4 * PAGE, (views[4],)),
            ReadOp("a", 400 * PAGE, (views[5],)),
        ]
        assert backend.read_many(ops, deadline_s=60) == [2 * PAGE, -errno.ENOENT, 2 * PAGE, PAGE, 0, 0]
        a, b = pattern(4 * PAGE, seed=1), pattern(2 * PAGE, seed=2)
        assert views[0] == b
        assert bytes(views[2]) == bytes(a[3 * PAGE :]) + bytes(a[2 * PAGE : 3 * PAGE])
        assert views[3][:PAGE] == b[PAGE:]

    def test_no_ops(self, backend: Backend) -> None:
        assert backend.read_many([], deadline_s=60) == []

    def test_a_file_with_an_odd_end_is_read_to_it(self, backend: Backend) -> None:
        writer = backend.create("a", 2 * PAGE)
        writer.write(0, [pattern(2 * PAGE, seed=3)])
        writer.seal(PAGE + 100)
        assert get(backend, "a", 4 * PAGE) == pattern(2 * PAGE, seed=3)[: PAGE + 100]
        views = (room(PAGE), room(PAGE), room(PAGE))
        assert backend.read_many([ReadOp("a", 0, views)], deadline_s=60) == [PAGE + 100]

    def test_a_deadline_in_the_past_reads_nothing(self, backend: Backend) -> None:
        put(backend, "a", pattern(PAGE, seed=1))
        view = room(PAGE)
        ops = [ReadOp("a", 0, (view,)), ReadOp("missing", 0, (view,))]
        assert backend.read_many(ops, deadline_s=-1) == [-errno.ETIMEDOUT] * 2
        assert view == room(PAGE)
        assert backend.read_many(ops, deadline_s=math.inf) == [PAGE, -errno.ENOENT]

    def test_reads_from_several_threads(self, backend: Backend) -> None:
        files = {f"seg/{i}": pattern(16 * PAGE, seed=i) for i in range(8)}
        for name, data in files.items():
            put(backend, name, data)

        def read_all(_: int) -> bool:
            views = {name: room(16 * PAGE) for name in files}
            got = backend.read_many([ReadOp(name, 0, (view,)) for name, view in views.items()], deadline_s=60)
            return got == [16 * PAGE] * 8 and all(views[name] == files[name] for name in files)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read_all, range(32)))

    def test_a_file_replaced_under_its_readers_gives_old_bytes_new_ones_or_none(self, backend: Backend) -> None:
        versions = [pattern(4 * PAGE, seed) for seed in range(1, 40)]
        stop = threading.Event()

        def read() -> list[bytes]:
            seen = []
            while not stop.is_set():
                view = room(4 * PAGE)
                (got,) = backend.read_many([ReadOp("a", 0, (view,))], deadline_s=60)
                assert got >= 0 or got == -errno.ENOENT
                seen.append(bytes(view[: max(got, 0)]))
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for version in versions:
                    backend.remove("a")
                    writer = backend.create("a", 0)
                    writer.write(0, [version])
                    writer.seal(4 * PAGE)
            finally:
                stop.set()
            # A reader may come between create and write, so it sees the beginning of one version.
            allowed = {bytes(version[:n]) for version in versions for n in range(0, 4 * PAGE + 1, PAGE)}
            assert all(set(reader.result()) <= allowed for reader in readers)
        assert get(backend, "a", 4 * PAGE) == versions[-1]

    # Names and space

    def test_list_by_prefix_in_order_with_sizes(self, backend: Backend) -> None:
        assert backend.list("") == []
        assert backend.list("seg/none/") == []
        for name in ("seg/w2/a", "seg/w1/b", "seg/w10/c", "seg.old", "other"):
            put(backend, name, pattern(3 * PAGE, seed=1))
        backend.write_file("seg/note", b"abc")
        everything = ["other", "seg.old", "seg/note", "seg/w1/b", "seg/w10/c", "seg/w2/a"]
        assert [info.name for info in backend.list("")] == everything
        assert [info.name for info in backend.list("seg/w1")] == ["seg/w1/b", "seg/w10/c"]
        assert [info.name for info in backend.list("seg/w1/")] == ["seg/w1/b"]
        assert [info.name for info in backend.list("seg/w1/b")] == ["seg/w1/b"]
        assert [info.name for info in backend.list("se")] == everything[1:]
        assert [(info.size, info.allocated >= 3 * PAGE) for info in backend.list("other")] == [(3 * PAGE, True)]
        assert backend.list("seg/note")[0].size == 3
        with pytest.raises(UsageError):
            backend.list("../")

    def test_remove_is_idempotent_and_frees_the_name(self, backend: Backend) -> None:
        put(backend, "seg/a", pattern(2 * PAGE, seed=1))
        assert get(backend, "seg/a", 2 * PAGE) == pattern(2 * PAGE, seed=1)
        backend.remove("seg/a")
        backend.remove("seg/a")
        backend.remove("never/was")
        assert backend.list("") == []
        with pytest.raises(FileNotFoundError):
            get(backend, "seg/a", PAGE)
        put(backend, "seg/a", pattern(2 * PAGE, seed=2))
        assert get(backend, "seg/a", 2 * PAGE) == pattern(2 * PAGE, seed=2)

    def test_small_files_are_replaced_as_a_whole(self, backend: Backend) -> None:
        assert backend.read_file("meta/policy") is None
        backend.write_file("meta/policy", b"first, and longer")
        assert backend.read_file("meta/policy") == b"first, and longer"
        assert get(backend, "meta/policy", PAGE) == b"first, and longer"
        backend.write_file("meta/policy", b"second")
        assert backend.read_file("meta/policy") == b"second"
        assert get(backend, "meta/policy", PAGE) == b"second"
        backend.write_file("meta/policy", b"")
        assert backend.read_file("meta/policy") == b""
        assert [info.name for info in backend.list("")] == ["meta/policy"]
        backend.remove("meta/policy")
        assert backend.read_file("meta/policy") is None

    def test_small_files_written_at_once_do_not_mix(self, backend: Backend) -> None:
        contents = [bytes([i]) * (1000 + i) for i in range(16)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda data: backend.write_file("meta", data), contents))
        assert backend.read_file("meta") in contents
        assert [info.name for info in backend.list("")] == ["meta"]

    def test_lock_excludes_within_a_handle_and_between_handles(self, make_backend: MakeBackend) -> None:
        one, two = make_backend(), make_backend()
        held = one.lock("writer/1")
        assert held is not None
        assert one.lock("writer/1") is None
        assert two.lock("writer/1") is None
        other = two.lock("writer/2")
        assert other is not None
        assert one.list("") == []
        held.release()
        held.release()
        again = two.lock("writer/1")
        assert again is not None
        held.release()
        assert one.lock("writer/1") is None, "a second release of an old lock must not free the new one"
        again.release()
        other.release()
        one.close()
        two.close()

    def test_files_outlive_the_handle(self, make_backend: MakeBackend) -> None:
        first = make_backend()
        put(first, "seg/a", pattern(4 * PAGE, seed=1))
        first.write_file("meta", b"kept")
        assert get(first, "seg/a", 4 * PAGE)
        first.close()
        first.close()
        second = make_backend()
        assert get(second, "seg/a", 4 * PAGE) == pattern(4 * PAGE, seed=1)
        assert second.read_file("meta") == b"kept"
        assert [info.name for info in second.list("")] == ["meta", "seg/a"]
        second.close()

    def test_handles_see_each_others_changes(self, make_backend: MakeBackend) -> None:
        one, two = make_backend(), make_backend()
        put(one, "a", pattern(PAGE, seed=1))
        assert get(two, "a", PAGE) == pattern(PAGE, seed=1)
        one.remove("a")
        with pytest.raises(FileNotFoundError):
            get(two, "a", PAGE)
        put(one, "a", pattern(PAGE, seed=2))
        assert get(two, "a", PAGE) == pattern(PAGE, seed=2)
        one.close()
        two.close()
