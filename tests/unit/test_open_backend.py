"""The URL picks the backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duokv.connectors import open_backend
from duokv.connectors.fs_memory import MemoryBackend
from duokv.connectors.fs_posix import PosixBackend
from duokv.kvstore.errors import StoreError, UsageError


def test_a_file_url_and_a_plain_path_are_the_same_place(tmp_path: Path) -> None:
    by_url = open_backend(f"file://{tmp_path}/a%20store", direct="off")
    by_url.write_file("meta", b"x")
    by_path = open_backend(str(tmp_path / "a store"), direct="off")
    assert isinstance(by_path, PosixBackend)
    assert by_path.read_file("meta") == b"x"
    by_url.close()
    by_path.close()


def test_options_reach_the_folder(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        open_backend(f"file://{tmp_path}/none", create=False)
    with pytest.raises(UsageError, match="'require'"):
        open_backend(f"file://{tmp_path}", direct="requires")  # type: ignore[arg-type]
    now = [0.0]
    backend = open_backend(f"file://{tmp_path}", direct="off", clock=lambda: now[0])
    assert backend.alignment == 1
    backend.close()


def test_memory_is_fresh_each_time() -> None:
    one, two = open_backend("memory://name"), open_backend("memory://name")
    assert isinstance(one, MemoryBackend)
    one.write_file("meta", b"x")
    assert two.read_file("meta") is None


@pytest.mark.parametrize(
    "url", ["file://host/path", "file://relative", "file://", "file:///a?direct=off", "file:///a#b"]
)
def test_a_file_url_that_names_no_folder_here(url: str) -> None:
    with pytest.raises(UsageError, match="file:///absolute/path"):
        open_backend(url)


@pytest.mark.parametrize("url", ["hf3fs://mount/path", "s3://bucket/prefix"])
def test_planned_schemes_say_so(url: str) -> None:
    with pytest.raises(UsageError, match="not included yet") as caught:
        open_backend(url)
    assert "\n" not in str(caught.value)


def test_an_unknown_scheme_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'memory'"):
        open_backend("memroy://x")
    with pytest.raises(UsageError, match=r"valid: .*file"):
        open_backend("zzz://x")


def test_a_backend_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; from duokv.connectors import open_backend; open_backend('memory://');"
        "print('duokv.connectors.fs_posix' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
