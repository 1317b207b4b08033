"""Views over a store in a folder: they change nothing, refuse what is no store, and tell when a writer interferes."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inspection_kit import (
    NS,
    Place,
    key_of,
    place_fixture,  # noqa: F401
    prompt,
    writer_alive,
)

from duokv.kvstore import inspection
from duokv.kvstore.census import list_extents, list_segments, read_stat
from duokv.kvstore.errors import StoreError
from duokv.kvstore.explain import explain, find_prefix
from duokv.kvstore.hostlocks import HostLocks
from duokv.kvstore.index import Index
from duokv.kvstore.inspection import StoreView, inspect_store, operate_store
from duokv.kvstore.operation import change_ttl, evict, plan_all
from duokv.kvstore.verification import clear_noted, verify


def test_looking_writes_nothing(place: Place) -> None:
    place.store(([1, 2, 3], "brief"), ([4, 5], "long"))
    before = place.tree()
    with place.inspect() as view:
        read_stat(view)
        list_extents(view)
        list_segments(view)
        explain(view, key_of([1]))
        find_prefix(view, NS, prompt([1, 2]))
        change_ttl(view, "brief", 1.0, dry_run=True)
        with view.snapshot() as txn:
            evict(view, plan_all(txn), dry_run=True)
        assert verify(view).clean
    assert place.tree() == before


def test_a_view_cannot_change_anything(place: Place) -> None:
    place.store(([1], "brief"))
    with place.inspect() as view, pytest.raises(StoreError, match="inspection only"):
        clear_noted(view)


@pytest.mark.parametrize("opened", [inspect_store, operate_store])
def test_no_store_is_no_store_and_stays_so(tmp_path: Path, opened: Callable[..., Iterator[StoreView]]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, reason in ((empty, "no store here"), (tmp_path / "nowhere", "ENOENT")):
        with pytest.raises(StoreError, match=reason), opened(str(folder)):  # type: ignore[attr-defined]
            pass
    assert list(tmp_path.rglob("*")) == [empty]


def test_another_geometry_is_refused(place: Place) -> None:
    place.store(([1], "brief"))
    with pytest.raises(StoreError, match="geometry 'test'"), inspect_store(str(place.folder), geometry="tiny"):
        pass


@pytest.mark.parametrize("size", [0, 100, 4096, 8192])
def test_a_cut_index_is_an_error_and_not_a_crash(place: Place, size: int) -> None:
    place.store(([1, 2], "brief"))
    os.truncate(place.folder / "index" / "data.mdb", size)
    with place.inspect() as view, pytest.raises(StoreError, match="cut short; build it anew with kvctl rebuild"):
        read_stat(view)


def test_an_index_in_doubt_is_shown_and_not_changed(place: Place) -> None:
    place.store(([1], "brief"))
    with place.operate() as view, view.writable.write() as txn:
        txn.put_meta(b"boot", b"another")
        txn.put_meta(b"writer:gone", b"")
    with place.inspect() as view:
        found = read_stat(view)
    assert found.doubtful == "the machine went down under a running writer"
    assert [(writer.name, writer.alive) for writer in found.writers] == [("gone", False)]
    with pytest.raises(StoreError, match=r"in doubt.*kvctl rebuild"), place.operate():
        pass


def test_locks_say_who_lives_and_keep_engines_out(place: Place) -> None:
    place.store(([1], "brief"))
    locks = HostLocks(place.folder)
    with locks.keep_out() as quiet:
        assert quiet
        fd = os.open(place.folder / "locks" / "open", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    with writer_alive(place, "mine"):
        assert locks.writers() == ["mine"]
        assert locks.alive("mine")
        with locks.keep_out() as quiet:
            assert not quiet
    assert locks.writers() == []
    assert HostLocks(None).alive("mine") is None


def test_a_change_under_a_reader_without_a_lock_is_an_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.store(([1], "brief"))

    versions = itertools.count()

    class Restless(Index):
        def version(self) -> int:
            return next(versions)

    monkeypatch.setattr(inspection, "Index", Restless)
    with writer_alive(place, "mine"), place.inspect() as view:
        read_stat(view)  # under LMDB's lock a writer does no harm
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(StoreError, match="changed while it was read without a lock"):
            read_stat(view)
