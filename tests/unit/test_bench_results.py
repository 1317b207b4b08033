"""The run of all speed benchmarks: what its page and its values say, at sizes small enough for a test."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

import pytest
from pyarrow import parquet

from duokv.bench import io, peers, results, scale, serving
from duokv.bench.io_report import Machine
from duokv.bench.peers import FOREIGN, LOCAL
from duokv.bench.results import Results, main, write
from duokv.bench.scale_size import OPERATIONS


def measured(folder: Path) -> Results:
    folder.mkdir()
    at = ["--folder", str(folder)]
    sizes = ["--slots", "4096", "--batches", "2", "--threads", "1", "--index", "0", "--processes", "1", "--pairs", "2"]
    served = ["--quick", "--rounds", "1", "--blocks", "3", "--steps", "8", "--windows", "10,20"]
    return Results(
        Machine.here(folder),
        io.measured(io.arguments([*at, *sizes]), shown=False),
        peers.measured(peers.arguments([*at, "--blocks", "2", "--pairs", "2", "--threads", "1"]), shown=False),
        scale.measured([340, 680], 2, progress=False),
        serving.measured(serving.arguments([*at, *served]), shown=False)[1],
    )


def test_the_page_its_plots_and_its_values(disk: Path) -> None:
    found = measured(disk / "here")
    write(disk / "SPEED.md", found)
    assert not list((disk / "here").iterdir())
    text = (disk / "SPEED.md").read_text()
    assert all(f"### {title}" in text for title in found.io.groups)
    assert "| first blocks ms |" in text
    assert "| files* |" in text
    assert all(f"| {name}" in text for name in (*LOCAL, *FOREIGN))
    assert "lmdb: takes keys" in text
    assert "no environment; name one with --env vllm=PYTHON" in text
    assert all(f"| {name} |" in text for name in OPERATIONS)
    assert "| bookkeeping_share |" in text
    for part in ("io", "peers", "scale"):
        assert f"](SPEED-{part}.svg)" in text
        assert (disk / f"SPEED-{part}.svg").read_bytes().startswith(b"<?xml")
    rows = parquet.read_table(disk / "SPEED.parquet").to_pylist()
    assert {row["benchmark"] for row in rows} == {"io", "peers", "scale", "serving"}
    for title, group in found.io.groups.items():
        ratios = [row["limit"] / row["found"] for row in rows if (row["benchmark"], row["table"]) == ("io", title)]
        assert len(ratios) == 2 * len(group)
        assert median(ratios[:2]) == pytest.approx(group[0].ratio)
    named = {row["case"] for row in rows if row["benchmark"] == "peers"}
    assert named == set(LOCAL)


@pytest.mark.parametrize("quick", [True, False])
def test_each_part_is_asked_for_what_the_whole_was(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick: bool
) -> None:
    found = measured(disk / "here")
    asked: dict[str, argparse.Namespace] = {}
    sizes: list[int] = []

    def io_measured(given: argparse.Namespace, *, shown: bool) -> object:
        asked["io"] = given
        return found.io

    def peers_measured(given: argparse.Namespace, *, shown: bool) -> object:
        asked["peers"] = given
        return found.peers

    def serving_measured(given: argparse.Namespace, *, shown: bool) -> object:
        asked["serving"] = given
        return found.machine, found.serving

    def scale_measured(most: list[int], *, progress: bool) -> object:
        sizes.extend(most)
        return found.scales

    monkeypatch.setattr(io, "measured", io_measured)
    monkeypatch.setattr(peers, "measured", peers_measured)
    monkeypatch.setattr(serving, "measured", serving_measured)
    monkeypatch.setattr(scale, "measured", scale_measured)
    arguments = ["--folder", str(disk / "here"), "--env", "vllm=/python", "--pairs", "3", "--blocks", "20000"]
    assert main([str(disk / "SPEED.md"), *arguments, *(["--quick"] if quick else [])]) == 0
    assert "SPEED.md" in capsys.readouterr().out
    assert {given.folder for given in asked.values()} == {disk / "here"}
    assert asked["peers"].env == {"vllm": Path("/python")}
    assert (asked["io"].pairs, asked["peers"].pairs) == (3, 3)
    assert [asked[part].quick for part in ("peers", "serving", "io")] == [quick, quick, False]
    assert sizes == ([10_000, 100_000] if quick else [10_000, 20_000])


@pytest.mark.parametrize(("page", "reason"), [("SPEED.txt", "ends in .md"), ("absent/SPEED.md", "there is no folder")])
def test_a_page_that_cannot_be_written_is_refused_before_measuring(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: str, reason: str
) -> None:
    monkeypatch.setattr(results, "_measure", lambda _: pytest.fail("measured"))
    assert main([str(disk / page)]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
