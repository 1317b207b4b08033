"""The I/O benchmark on sizes small enough for a test: what it prints, what it refuses, and that it cleans up."""

from __future__ import annotations

import json
from multiprocessing import Pipe
from pathlib import Path

import pytest
from bench_kit import refusal

from duokv.bench.io import main
from duokv.bench.io_case import Case, Result, run_case, serve
from duokv.bench.io_limits import physical_bytes
from duokv.kvstore import KVStore
from duokv.kvstore.errors import StoreError

QUICK = (
    "cold_read_vs_device", "warm_read_vs_memcpy", "commit_vs_device", "write_amplification", "lookup_ms_77k", "open_s",
    "bytes_per_indexed_block",
)  # fmt: skip


def test_the_main_figures(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batches", "2", "--threads", "1", "--index", "34", "--pairs", "1"]
    assert main(["--quick", "--json", "--folder", str(disk), *small]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(found) == QUICK
    assert all(value > 0 for value in found.values())
    assert found["write_amplification"] >= 1
    assert not list(disk.iterdir())


def test_the_sweeps(disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (disk / "here").mkdir()
    monkeypatch.chdir(disk / "here")
    swept = ["--slots", "8192,4096", "--batches", "1,2", "--threads", "1", "--index", "0,34", "--processes", "1"]
    assert main(["--json", "--pairs", "1", *swept]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(found["main"]) == QUICK
    rows = [row for group in found["groups"].values() for row in group]
    assert all(0 < row["low"] <= row["ratio"] <= row["high"] for row in rows)
    assert {row["blocks"] for row in rows if row["slot_bytes"] == 8192} == {1, 2}
    assert {row["direct"] for row in rows} == {True, False}
    assert {row["source"] for row in rows} == {"device", "cache", "page cache"}
    assert all((row["amplification"] is not None) == (row["action"] == "commit") for row in rows)
    assert {row["blocks"] for row in rows if row["action"] == "stream"} == {1, 2}
    assert not list((disk / "here").iterdir())


@pytest.mark.parametrize("action", ["load", "commit"])
def test_a_store_that_does_less_is_not_measured(disk: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    def idle(*_: object, **__: object) -> int:
        return 2

    case = Case("load", slot_bytes=4096, blocks=2, threads=1)
    if action == "commit":
        case = Case("commit", slot_bytes=4096, blocks=2, threads=1)
        monkeypatch.setattr(KVStore, "_wait_durable", idle)
        monkeypatch.setattr("duokv.kvstore.blockstore.BlockStore._store", lambda *_: (1, 0))
    else:
        monkeypatch.setattr(KVStore, "load", idle)
    with pytest.raises(StoreError, match="other bytes" if action == "load" else "commits stored"):
        run_case(disk, case, 1)
    assert not list(disk.iterdir())


def test_the_first_blocks_of_a_stream_are_timed_and_the_rest_must_come(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("stream", slot_bytes=4096, blocks=600, threads=1)
    result = run_case(disk, case, 1)
    assert case.nbytes == 4096
    assert all(seconds > 0 for seconds in (*result.store_s, *result.limit_s))
    monkeypatch.setattr(KVStore, "load_iter", lambda *_, **__: iter((1, 599)))
    with pytest.raises(StoreError, match="gave"):
        run_case(disk, case, 1)


def test_processes_share_a_store(disk: Path) -> None:
    result = run_case(disk, Case("commit", slot_bytes=4096, blocks=2, threads=1, processes=2), 1)
    assert result.case.nbytes == 2 * 8 * 2 * 4096
    assert result.ratio > 0
    assert result.amplification is not None
    assert result.amplification > 1
    assert not list(disk.iterdir())


def test_a_process_that_fails_says_why(disk: Path) -> None:
    ours, theirs = Pipe()
    (disk / "store").write_text("not a folder")
    serve(theirs, disk, Case("load", slot_bytes=4096, blocks=1), 0)
    assert str(disk / "store") in ours.recv()


def test_ratios_are_to_the_limits_around() -> None:
    result = Result(Case("load", blocks=1), store_s=(2.0, 1.0, 4.0), limit_s=(1.0, 3.0, 5.0, 7.0), amplification=None)
    assert result.ratios == (1.0, 4.0, 1.5)
    assert result.ratio == 1.5


def test_physical_bytes_are_what_is_on_the_device(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(bytes(range(256)) * 64)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(1 << 20)
    assert 16_384 <= physical_bytes(tmp_path) < 1 << 20


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--slots", "5000"], "multiples of 4096"),
        (["--batches", "many"], "is no list of whole numbers"),
        (["--threads", "0"], "at least 1"),
        (["--pairs", "3,4"], "more than one number"),
        (["--quik"], "unrecognized arguments"),
        (["--folder", "missing"], "no such folder"),
        (["--folder", "{disk}", "--batches", "1000000000"], "make room"),
    ],
)
def test_misuse_is_one_line(disk: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    line = refusal(main, [argument.format(disk=disk) for argument in arguments], capsys)
    assert line.startswith("io: ")
    assert reason in line
    assert not list(disk.iterdir())
