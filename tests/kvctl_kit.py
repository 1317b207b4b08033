"""What the tests of kvctl share: a run of it and what it came to, a small store, a trace, and the form of an error."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from duokv.kvstore.config import StoreConfig
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import Namespace, chain_keys
from duokv.kvstore.opening import open_store
from duokv.tools import kvctl

NS = Namespace("m", "w", "t", "fp4")
NAMED = ("--model", "m", "--weights", "w", "--tokenizer", "t", "--kv-format", "fp4")
GEOMETRY = CacheGeometry.opaque("test", payload_bytes=3000)
SLOT = GEOMETRY.slot_bytes
CONFIG = StoreConfig(swa_bytes=0, maintenance_interval_s=0.0, segment_bytes=8 * SLOT, fsync="none")
AGENT, CHAT = (1, 2, 3), (4, 5)


@dataclass(frozen=True)
class Result:
    """What a run of kvctl came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, object]:
        return cast("dict[str, object]", json.loads(self.out))


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("DUOKV_", "COLUMNS", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)


# Fixtures have a second name, since a test's argument would redefine an import of the same name.
@pytest.fixture(name="run")
def run_fixture(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*args: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            kvctl.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(name="store")
def store_fixture(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    with open_store(str(folder), geometry=GEOMETRY, config=CONFIG) as engine:
        for path, traffic in ((AGENT, "agent"), (CHAT, "chat")):
            engine.commit(NS, prompt(path), [bytes([number]) * 3000 for number in path], traffic=traffic)
    return folder


def prompt(path: Sequence[int]) -> list[int]:
    """A prompt of one block per number, and a token more."""
    return [number for number in path for _ in range(128)] + [9]


def key_of(path: Sequence[int]) -> str:
    """The key of the last block of `path` in hex."""
    return chain_keys(NS, prompt(path))[-1].hex()


def prompt_file(folder: Path, path: Sequence[int]) -> Path:
    """The prompt of `path` as a file."""
    file = folder / "prompt.json"
    file.write_text(json.dumps(prompt(path)))
    return file


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with a digest of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(name="trace")
def trace_fixture(tmp_path: Path) -> Path:
    """A session that grows by four blocks a request, then comes back after an hour."""
    lines = [
        {"t": t, "s": "a", "i": blocks * 128 + 10, "o": 20, "b": [[0, blocks]]}
        for t, blocks in ((0.0, 4), (60.0, 8), (4000.0, 12))
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def one_line(result: Result) -> str:
    """The error of a refused run: exactly one line on stderr, nothing on stdout, exit code 2."""
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("kvctl: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    return result.err
