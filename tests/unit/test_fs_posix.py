"""What only a backend on a file system can get wrong: refusals, full devices, left-overs, the order of flushes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fs_posix_kit import (
    backend_fixture,  # noqa: F401
    descriptors,
    files_under,
    get,
    put,
    root_fixture,  # noqa: F401
)

from duokv.connectors import posix_io
from duokv.connectors.fs_posix import PosixBackend
from duokv.kvstore.backend import ReadOp
from duokv.kvstore.buffers import PAGE, aligned
from duokv.kvstore.errors import StoreError

# Opening


def test_missing_folders_are_made(tmp_path: Path) -> None:
    PosixBackend(tmp_path / "a" / "b").close()
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("create", [True, False])
def test_a_file_where_the_folder_should_be_is_refused_in_one_line(tmp_path: Path, create: bool) -> None:
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(StoreError) as caught:
        PosixBackend(place, create=create)
    message = str(caught.value)
    assert str(place) in message
    assert "give another one" in message
    assert "\n" not in message


def test_a_folder_nobody_may_write_is_refused_in_one_line() -> None:
    # sysfs refuses new folders to root too.
    with pytest.raises(StoreError, match=r"^folder /sys/duokv cannot hold a store: E[A-Z]+ on .*writable.*$"):
        PosixBackend(Path("/sys/duokv"))


def test_an_unreadable_folder_is_refused(root: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("permissions do not bind root")
    root.mkdir(mode=0o300)
    with pytest.raises(StoreError, match="EACCES"):
        PosixBackend(root)


def test_a_read_only_opening_reads_and_leaves_no_trace(root: Path) -> None:
    with pytest.raises(StoreError, match="ENOENT"):
        PosixBackend(root, create=False)
    root.mkdir()
    (root / "seg").mkdir()
    (root / "seg" / "a").write_bytes(b"x" * PAGE)
    before = files_under(root)
    backend = PosixBackend(root, create=False)
    assert get(backend, "seg/a") == b"x" * PAGE
    assert [info.name for info in backend.list("")] == ["seg/a"]
    assert backend.read_file("none") is None
    assert not backend.can_punch
    calls: list[Callable[[], object]] = [
        lambda: backend.create("b", PAGE),
        lambda: backend.resume("seg/a"),
        lambda: backend.remove("seg/a"),
        lambda: backend.punch("seg/a", [(0, PAGE)]),
        lambda: backend.write_file("meta", b""),
        lambda: backend.lock("writer"),
    ]
    for call in calls:
        with pytest.raises(OSError, match="reading only") as caught:
            call()
        assert caught.value.errno == errno.EROFS
    backend.close()
    assert files_under(root) == before


# Space


def test_a_full_device_leaves_no_file(backend: PosixBackend, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, mode: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(posix_io, "_fallocate", full)
    with pytest.raises(OSError, match="No space") as caught:
        backend.create("seg/a", PAGE)
    assert caught.value.errno == errno.ENOSPC
    assert backend.list("") == []
    assert descriptors(of=f"{root}/seg/a") == []


def test_a_full_device_still_opens_for_reads_and_reclaim(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = posix_io._fallocate

    def full(fd: int, mode: int, offset: int, length: int) -> None:
        if mode == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, mode, offset, length)

    usual = PosixBackend(root)
    usual.close()
    monkeypatch.setattr(posix_io, "_fallocate", full)
    backend = PosixBackend(root)
    assert (backend.alignment, backend.can_punch, backend.notes) == (usual.alignment, usual.can_punch, usual.notes)
    backend.close()


def test_refused_preallocation_and_punching_are_noted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, mode: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(posix_io, "_fallocate", refuse)
    backend = PosixBackend(root, direct="off")
    assert not backend.can_punch
    assert sum(": ENOTSUP;" in note for note in backend.notes) == 2
    flushed = record_flushes(root, monkeypatch)
    writer = backend.create("a", 100 * PAGE)
    assert backend.list("a")[0].size == 0
    writer.write(0, [memoryview(b"x" * PAGE)])
    writer.sync()
    # Only fsync carries the new length on a file system such as 3FS.
    assert flushed == ["fsync a", "fsync ."]
    writer.seal(PAGE)
    assert get(backend, "a") == b"x" * PAGE
    backend.close()


def test_growing_a_file_leaves_its_holes(backend: PosixBackend) -> None:
    if not backend.can_punch:
        pytest.skip(f"no holes here: {backend.notes}")
    writer = backend.create("a", 64 * PAGE)
    freed = backend.punch("a", [(0, 32 * PAGE)])
    assert freed == 32 * PAGE
    writer.reserve(65 * PAGE)
    assert backend.list("a")[0].allocated < 64 * PAGE
    resumed = backend.resume("a")
    resumed.reserve(66 * PAGE)
    assert backend.list("a")[0].allocated < 64 * PAGE
    writer.abort()
    resumed.abort()


# Durability


def record_flushes(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log each flush and rename as a line, with the path as seen from the root."""
    log: list[str] = []

    def watch(name: str) -> None:
        real: Callable[[int], None] = getattr(os, name)

        def flush(fd: int) -> None:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            log.append(f"{name} {path.relative_to(root) if path.is_relative_to(root) else path}")
            real(fd)

        monkeypatch.setattr(os, name, flush)

    watch("fsync")
    watch("fdatasync")
    return log


def test_the_first_sync_flushes_the_name_and_its_folders(
    backend: PosixBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = record_flushes(root, monkeypatch)
    writer = backend.create("seg/w1/a", PAGE)
    writer.write(0, [memoryview(b"x" * PAGE)])
    assert flushed == []
    writer.sync()
    first = "fdatasync" if backend._allocates else "fsync"
    assert flushed == [f"{first} seg/w1/a", "fsync seg/w1", "fsync seg", "fsync ."]
    writer.write(0, [memoryview(b"y" * PAGE)])
    writer.sync()
    assert flushed[4:] == [f"{first} seg/w1/a"]
    writer.seal(PAGE)


def test_a_small_file_is_flushed_before_it_gets_its_name(
    backend: PosixBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = record_flushes(root, monkeypatch)
    real = os.fsync

    def fsync(fd: int) -> None:
        flushed.append("named" if (root / "meta").exists() else "not named")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    backend.write_file("meta", b"x")
    assert flushed[0] == "not named"
    assert flushed[1].startswith("fsync .tmp/")
    assert flushed[2:] == ["named", "fsync ."]


def test_a_new_store_folder_is_flushed_into_its_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = record_flushes(tmp_path, monkeypatch)
    PosixBackend(tmp_path / "a" / "b").close()
    assert flushed == ["fsync a", "fsync ."]


def test_a_failed_replacement_keeps_the_old_file_and_no_temporary_one(
    backend: PosixBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.write_file("meta", b"old")
    before = files_under(root)

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            backend.write_file("meta", b"new")
    assert backend.read_file("meta") == b"old"
    assert files_under(root) == before


def test_whoever_opens_the_store_alone_sweeps_what_crashed_writers_left(root: Path) -> None:
    one = PosixBackend(root)
    leftover = root / ".tmp" / "left"
    leftover.write_bytes(b"half")
    assert one.list("") == []
    two = PosixBackend(root)
    assert leftover.exists(), "it could be a living writer's"
    one.close()
    PosixBackend(root).close()
    assert leftover.exists(), "the second one still lives"
    two.close()
    PosixBackend(root).close()
    assert not leftover.exists()


def test_foreign_and_hidden_files(backend: PosixBackend, root: Path) -> None:
    (root / ".hidden").touch()
    (root / "by-hand").write_bytes(b"abc")
    (root / "dangling").symlink_to(root / "nowhere")
    assert [(info.name, info.size) for info in backend.list("")] == [("by-hand", 3)]


# System calls that do less than asked


def test_short_reads_and_writes_go_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real_read(fd, [views[0][:PAGE]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: real_write(fd, [views[0][:PAGE]], offset))
    backend = PosixBackend(root)
    data = aligned(6 * PAGE)
    data[:] = os.urandom(6 * PAGE)
    writer = backend.create("a", 6 * PAGE)
    writer.write(0, [data[: 3 * PAGE], data[3 * PAGE :]])
    writer.seal(6 * PAGE)
    back = aligned(6 * PAGE)
    op = ReadOp("a", 0, (back[: 2 * PAGE], back[2 * PAGE :]))
    assert backend.read_many([op], deadline_s=60) == [6 * PAGE]
    assert back == data
    backend.close()


def test_an_odd_end_is_not_asked_on_from(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        asked.append(offset)
        return real(fd, views, offset)

    backend = PosixBackend(root)
    writer = backend.create("a", PAGE)
    writer.write(0, [memoryview(b"x" * PAGE)])
    writer.seal(100)
    monkeypatch.setattr(os, "preadv", preadv)
    assert get(backend, "a", pages=2) == b"x" * 100
    assert not any(offset % backend.alignment for offset in asked)
    backend.close()


def test_reads_stop_at_the_deadline(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    backend = PosixBackend(root, clock=lambda: now[0])
    put(backend, "a", pages=2)
    real = os.preadv

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        now[0] += 1
        return real(fd, [views[0][:PAGE]], offset)

    monkeypatch.setattr(os, "preadv", slow)
    one, two, three = (aligned(2 * PAGE) for _ in range(3))
    ops = [ReadOp("a", 0, (one,)), ReadOp("a", 0, (two,)), ReadOp("a", 0, (three,))]
    assert backend.read_many(ops, deadline_s=3) == [2 * PAGE, -errno.ETIMEDOUT, -errno.ETIMEDOUT]
    assert not any(three)
    backend.close()


def test_errors_of_the_device_are_values(backend: PosixBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    put(backend, "a")
    (backend._root / "folder").mkdir()

    def fail(fd: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert get(backend, "folder") in {-errno.EISDIR, -errno.EINVAL}
    monkeypatch.setattr(os, "preadv", fail)
    assert get(backend, "a") == -errno.EIO


# Locks


def test_a_lock_ends_with_its_process(backend: PosixBackend, root: Path) -> None:
    code = (
        "import sys, pathlib; from duokv.connectors.fs_posix import PosixBackend;"
        "lock = PosixBackend(pathlib.Path(sys.argv[1])).lock('writer'); print(lock is not None, flush=True);"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "True\n"
        assert backend.lock("writer") is None
        holder.kill()
        holder.wait()
    lock = backend.lock("writer")
    assert lock is not None
    lock.release()
    assert descriptors(of=f"{root}/locks/") == []
