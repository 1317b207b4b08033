"""The README does what it says: its example runs, and so does every command in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from duokv.bench.generator import generate

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
EXAMPLE, ENGINE_EXAMPLE = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line.partition("#")[0].strip()
    for language, text in BLOCKS
    if not language
    for line in text.splitlines()
    if line.startswith(("make ", "kvctl "))
]


def run(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "100"}
    return subprocess.run(argv, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The store that the example leaves, and one key of it."""
    folder = tmp_path_factory.mktemp("readme")
    code = EXAMPLE.replace("/tmp/duokv-example", str(folder / "store"))
    code += "\nprint(key.hex())\n"
    done = run(sys.executable, "-c", code, cwd=folder)
    assert done.returncode == 0, done.stderr
    first, window, key = done.stdout.splitlines()
    assert first == "0 tokens indexed, 0 blocks loaded"
    assert window == "SWA hit"
    return folder / "store", key


def test_the_example_is_short_and_hits_the_second_time(store: tuple[Path, str]) -> None:
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 20
    code = EXAMPLE.replace("/tmp/duokv-example", str(store[0]))
    assert run(sys.executable, "-c", code, cwd=store[0]).stdout.startswith("896 tokens indexed, 7 blocks loaded\n")


def test_the_two_commands_come_first_and_are_targets() -> None:
    assert [command for command in COMMANDS if command.startswith("make")] == ["make demo", "make test"]
    listed = run("make", cwd=ROOT).stdout
    assert "make demo" in listed
    assert "make test" in listed


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("kvctl")])
def test_every_kvctl_command_runs(command: str, store: tuple[Path, str], tmp_path: Path) -> None:
    folder, key = store
    trace = tmp_path / "trace.jsonl"
    lines = []
    for request in generate("agent", seed=1, days=0.02, requests_per_day=1000):
        row = {"t": request.t, "s": request.session, "i": request.input_tokens, "o": request.output_tokens}
        lines.append(json.dumps({**row, "b": request.runs}))
    trace.write_text("\n".join(lines))
    words = shlex.split(command.replace("/var/lib/duokv", str(folder)).replace("KEY", key).replace("TRACE", str(trace)))
    done = run(sys.executable, "-m", "duokv.tools.kvctl", *words[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_engine_example_hits_its_own_first_turn() -> None:
    done = run(sys.executable, "-c", ENGINE_EXAMPLE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^[A-Z_]+(?= TokenPartition)", done.stdout, re.MULTILINE) == ["NO_HIT", "SWA_HIT"]


@pytest.mark.parametrize("command", re.findall(r"`python -m (duokv[^`]+)`", README))
def test_every_python_command_is_one(command: str) -> None:
    module, *options = shlex.split(command)
    usage = run(sys.executable, "-m", module, "--help", cwd=ROOT)
    assert usage.returncode == 0, usage.stderr
    assert [option for option in options if option.startswith("--") and option not in usage.stdout] == []


def test_every_linked_file_and_folder_is_there() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", README)
    folders = re.findall(r"`(\w+/)`", README)
    assert targets
    assert [name for name in (*targets, *folders) if not (ROOT / name).exists()] == []
