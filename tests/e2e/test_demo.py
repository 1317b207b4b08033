"""`python -m duokv.tools.demo` as a newcomer runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def demo(tmp_path: Path, *arguments: str, data: str | None = None) -> subprocess.CompletedProcess[str]:
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DUOKV_")}
    environ |= {"TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}
    if data is not None:
        environ["DUOKV_DATA"] = data
    command = [sys.executable, "-m", "duokv.tools.demo", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True, timeout=120)


def test_demo_without_traces(tmp_path: Path) -> None:
    done = demo(tmp_path, "--limit", "50", "--blocks", "40")
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "generated agent traffic" in shown
    assert "50 requests" in shown
    assert "5,120 of 5,192 tokens found" in shown
    assert "all 40 blocks equal what was written" in shown
    assert "host memory only (there before, gone after)" in shown
    assert "of 5,192 tokens 4,992 need no work, 128 are replayed, 72 are new" in shown
    assert "40 alive" in shown.partition("$ kvctl stat")[2]
    assert "class agent keeps it 3d after its last use" in shown.partition("$ kvctl explain")[2]
    assert "50/50" in done.stderr
    assert "<svg" in (tmp_path / "out/report.html").read_text()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_demo_of_a_trace(tmp_path: Path, data_dir: Path) -> None:
    trace = data_dir / "traces/ragpulse.jsonl.gz"
    arguments = ("--trace", str(trace), "--limit", "50", "--blocks", "2", "--out", "elsewhere")
    done = demo(tmp_path, *arguments, data=str(data_dir))
    assert done.returncode == 0, done.stderr
    assert "ragpulse" in done.stdout
    assert "class chat" in done.stdout
    assert "31.4 % (whole trace)" in done.stdout
    assert (tmp_path / "elsewhere/report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--trace", "missing.jsonl"), "missing.jsonl: No such file"),
        (("--limit", "0"), "--limit 0"),
        (("--blocks", "1"), "--blocks 1"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    done = demo(tmp_path, *arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"demo: {reason}")
    assert "; " in line
