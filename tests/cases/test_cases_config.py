"""What a start refuses, and what it only says: cases 17 and 19."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_kit import GEOMETRY, NS, config, prompt

from duokv.connectors.fs_posix import PosixBackend
from duokv.kvstore import StoreError, UsageError, load_config, open_store

if TYPE_CHECKING:
    from cases.conftest import World

TOKENS = prompt(range(4))


@pytest.fixture(params=["at open", "at the first read or write"])
def no_direct_io(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older tmpfs and overlay refuse O_DIRECT in open(2); other file systems take the flag and refuse the I/O."""
    real_open, real_read, real_write = os.open, os.preadv, os.pwritev

    def refuse() -> OSError:
        return OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def opened(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise refuse()
        return real_open(path, flags, mode)

    def is_direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        if is_direct(fd):
            raise refuse()
        return real_read(fd, views, offset)

    def write(fd: int, views: list[memoryview], offset: int) -> int:
        if is_direct(fd):
            raise refuse()
        return real_write(fd, views, offset)

    if request.param == "at open":
        monkeypatch.setattr(os, "open", opened)
    else:
        monkeypatch.setattr(os, "preadv", read)
        monkeypatch.setattr(os, "pwritev", write)


@pytest.mark.usefixtures("no_direct_io")
def test_case_17_refused_direct_io_is_one_warning(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Where the file system has no O_DIRECT, the cache stopped at its first write in the middle of serving.

    With "auto" it goes through the page cache from the start, and says so once, with the kernel's reason.
    """
    store = world.on_files(config(direct="auto"))
    (warning,) = [record for record in caplog.records if "O_DIRECT" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "EINVAL" in warning.getMessage()
    assert "\n" not in warning.getMessage()
    assert world.put(store, TOKENS) == 4
    assert world.get(store, TOKENS) == 4
    store.close()
    caplog.clear()
    assert world.get(world.on_files(config(direct="auto")), TOKENS) == 4
    assert sum("O_DIRECT" in message for message in caplog.messages) == 1


@pytest.mark.usefixtures("no_direct_io")
def test_case_17_required_direct_io_that_is_refused_stops_the_start(world: World) -> None:
    """With "require" nothing starts; the message has the reason and the way out, and nothing is left locked."""
    for _ in range(2):
        with pytest.raises(StoreError, match=r'O_DIRECT refused under .*: EINVAL; .*direct = "auto"') as caught:
            world.on_files(config(direct="require"))
        assert "\n" not in str(caught.value)
    assert world.put(world.on_files(config(direct="auto")), TOKENS) == 4


@pytest.mark.usefixtures("no_direct_io")
def test_case_17_direct_io_that_is_off_is_not_missed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """With "off" there is nothing to say."""
    assert world.put(world.on_files(config(direct="off")), TOKENS) == 4
    assert "O_DIRECT" not in caplog.text


@pytest.mark.parametrize("written", ["off", "auto"])
def test_case_17_a_store_moves_between_file_systems_with_and_without_it(world: World, written: str) -> None:
    """What one way has written the other reads: the bytes are the same."""
    store = world.on_files(backend=PosixBackend(world.root, direct=written))  # type: ignore[arg-type]
    world.put(store, TOKENS)
    store.close()
    read = "auto" if written == "off" else "off"
    store = world.on_files(backend=PosixBackend(world.root, direct=read))  # type: ignore[arg-type]
    assert world.get(store, TOKENS) == 4
    assert world.put(store, prompt([9, 9])) == 2


@pytest.mark.parametrize(
    ("text", "environ", "words"),
    [
        ('ttl_agnet = "3d"', {}, ["ttl_agnet", "classes.agent.ttl"]),
        ("", {"DUOKV_TTL_AGNET": "3d"}, ["DUOKV_TTL_AGNET", "DUOKV_CLASSES__AGENT__TTL"]),
        ('capacity = "10GBB"', {}, ["capacity", "10GBB", "GiB, TiB", "GB, TB"]),
        ("", {"DUOKV_CAPACITY": "10GBB"}, ["DUOKV_CAPACITY", "10GBB", "GiB, TiB"]),
        ("capacity = 10", {}, ["capacity", "10GiB"]),
        ('capacity = "10"', {}, ["capacity", "no unit", "GiB"]),
        ('read_deadline_s = "1sec"', {}, ["read_deadline_s", "'sec'", "ms, s, m, h, d"]),
        ('[classes.agent]\nttl = "3days"', {}, ["classes.agent.ttl", "'days'", "ms, s, m, h, d"]),
        ('[classes.agent]\ntll = "3d"', {}, ["classes.agent.tll", "classes.agent.ttl"]),
        ('[classes.agent]\nttl = "3d"\nmode = "slidng"', {}, ["classes.agent.mode", "'sliding'"]),
        ('direct = "requier"', {}, ["direct", "'require'"]),
        ('default_class = "chta"', {}, ["chta", "'chat'"]),
        ("", {"DUOKV_READ_THREDS": "4"}, ["DUOKV_READ_THREDS", "DUOKV_READ_THREADS"]),
    ],
)
def test_case_19_a_misspelt_setting_is_refused_with_the_right_one(
    tmp_path: Path, text: str, environ: dict[str, str], words: list[str]
) -> None:
    """A misspelt name was ignored and the default ran in production for weeks.

    Here it stops the start, wherever it stands; the message names it and the nearest valid name or the units.
    """
    path = tmp_path / "duokv.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(path, environ=environ)
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


@pytest.mark.parametrize(
    ("url", "geometry", "words"),
    [
        ("fiel:///tmp/x", "tiny", ["'fiel'", "'file'"]),
        ("memory://", "tinny", ["'tinny'", "'tiny'"]),
        ("memory://", None, ["needs a geometry"]),
    ],
)
def test_case_19_the_same_for_what_is_given_in_code(url: str, geometry: str | None, words: list[str]) -> None:
    """Schemes, geometries and classes are refused in the same way."""
    with pytest.raises(UsageError) as caught:
        open_store(url, geometry=geometry, config=config())
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)


def test_case_19_an_unknown_traffic_class_is_refused(world: World) -> None:
    """A class that is misspelt in a call would live by another's rule."""
    store = world.on_files()
    for call in (
        lambda: store.lookup(NS, TOKENS, "brieff"),
        lambda: store.commit(NS, TOKENS, [bytes(GEOMETRY.payload_bytes)] * 4, traffic="brieff"),
    ):
        with pytest.raises(UsageError, match="'brieff' is not in the store's policy; did you mean 'brief'"):
            call()
