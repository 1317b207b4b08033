"""The table of cache hit rates: the harness gives the published figures, and says so when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duokv.bench import table
from duokv.bench.table import FIGURES, PUBLISHED, Cell, found_traces, main
from duokv.kvstore.errors import UsageError

TRACE = "\n".join(f'{{"t":{t},"s":"a","i":300,"o":1,"b":[[0,2]]}}' for t in (0, 10, 400))


def test_harness_gives_the_published_figures(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(data_dir / "traces/lmcache_miniswe.jsonl.gz"), "--json", "--workers", "2"]) == 0
    cells = json.loads(capsys.readouterr().out)
    assert [cell["figure"] for cell in cells] == list(FIGURES)
    assert [cell["published"] for cell in cells] == list(PUBLISHED["lmcache_miniswe"])
    assert {cell["verdict"] for cell in cells} == {"OK"}


def test_a_figure_that_is_off_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lmcache_miniswe.jsonl"
    path.write_text(TRACE)
    assert main([str(path), "--workers", "1"]) == 1
    shown = capsys.readouterr().out
    # Two of three prompts of 300 tokens hit 256 of them; one within 180 s.
    assert "56.9 | 92.6 off by -35.71" in shown
    assert "28.4 | 92.5 off by -64.06" in shown
    assert "of 12 figures equal the published ones" in shown
    assert main([str(path), "--limit", "3"]) == 0
    shown = capsys.readouterr().out
    assert "56.9" in shown
    assert "off by" not in shown


def test_verdict_is_to_the_printed_digit() -> None:
    def verdict(percent: float, published: float | None) -> str:
        return Cell("trace", "unbounded", percent, published, 1, 0.0).verdict

    assert [verdict(p, 96.4) for p in (96.351, 96.449, 96.349, 96.451)] == ["OK", "OK", "off", "off"]
    assert verdict(1.0, None) == ""


def test_traces_are_found_known_ones_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOKV_DATA", str(tmp_path))
    with pytest.raises(UsageError, match="holds no"):
        found_traces()
    (tmp_path / "traces").mkdir()
    for name in ("a.jsonl", "ragpulse.jsonl.gz", "weka_agent.jsonl.gz", "notes.txt"):
        (tmp_path / "traces" / name).touch()
    assert [path.name for path in found_traces()] == ["weka_agent.jsonl.gz", "ragpulse.jsonl.gz", "a.jsonl"]


def test_what_cannot_be_done_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("DUOKV_DATA", raising=False)
    assert main([]) == 2
    assert main(["missing.jsonl"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["bench", "bench"]
    assert "DUOKV_DATA is not set" in lines[0]


def test_published_rows_fit_the_figures() -> None:
    assert {len(row) for row in PUBLISHED.values()} == {len(FIGURES)}
    assert table.published(Path("x/ragpulse.jsonl.gz"), "T = 180 s") == 23.4
    assert table.published(Path("x/other.jsonl.gz"), "T = 180 s") is None
