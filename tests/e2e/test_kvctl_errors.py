"""What kvctl refuses, and what fails under it: one line, the exit code that was promised, and nothing changed."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kvctl_kit import (
    AGENT,
    NAMED,
    SLOT,
    Run,
    bare_environment,  # noqa: F401
    one_line,
    prompt_file,
    run_fixture,  # noqa: F401
    store_fixture,  # noqa: F401
    trace_fixture,  # noqa: F401
    tree,
)

from duokv.tools import commands_view


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "Missing command"),
        (("stta",), "Did you mean 'stat'?"),
        (("ttl", "sett"), "Did you mean 'set'?"),
        (("verify", "--limt", "3"), "--limit"),
        (("explain",), "Missing argument 'KEY'"),
        (("stat", "STORE", "extra"), "extra"),
        (("stat",), "--store, or set DUOKV_STORE"),
        (("simulate", "none.jsonl"), "none.jsonl: No such file"),
    ],
)
def test_misuse_of_the_command_line(run: Run, args: tuple[str, ...], words: str) -> None:
    assert words in one_line(run(*args))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("explain", "xyz"), "4 to 64 hex digits"),
        (("evict",), "evict takes one of --expired"),
        (("evict", "--all", "--expired"), "2 were given"),
        (("evict", "--class", "agnet"), "did you mean 'agent'?"),
        (("evict", "--key", "0" * 64), "not in the store; kvctl explain"),
        (("evict", "--older-than", "3x"), "unknown unit 'x'; accepted: ms, s, m, h, d"),
        (("evict", "--older-than", "unbounded"), "give a duration"),
        (("evict", "--blocks", "-1"), "whole number"),
        (("ls", "--state", "alove"), "did you mean 'alive'?"),
        (("ls", "--class", "chta"), "did you mean 'chat'?"),
        (("ttl", "set", "agnet", "3d"), "did you mean 'agent'?; --add makes a new one"),
        (("ttl", "set", "agent", "3"), "has no unit; write it as in '180s'"),
        (("ttl", "set", "agent", "3d", "--mode", "fixd"), "did you mean 'fixed'?"),
        (("ttl", "set", "a class", "3d", "--add"), "is not letters, digits"),
        (("verify", "--deadline", "unbounded"), "could hang"),
        (("stat", "--geometry", "tiny"), "store of geometry 'test'"),
        (("stat", "--geometry", "tinny"), "did you mean 'tiny'?"),
        (("rebuild", "--geometry", "tiny"), "store of geometry 'test'"),
        (("prefix", "missing.json", *NAMED), "missing.json: cannot be read"),
        (("prefix", "missing.json", "--model", "m"), "give --weights --tokenizer --kv-format"),
        (("stat", "--config", "missing.toml"), "missing.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(run: Run, store: Path, args: tuple[str, ...], words: str) -> None:
    before = tree(store)
    assert words in one_line(run(*args, "--store", store))
    assert tree(store) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [("[1, -2]", "no token ids"), ("1 2 x", "no token ids"), ('{"tokns": []}', "no token ids"), ("", "no token ids")],
)
def test_a_prompt_that_is_none(run: Run, store: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p").write_text(text)
    assert words in one_line(run("prefix", tmp_path / "p", "--store", store, *NAMED))


@pytest.mark.parametrize(
    ("text", "words"),
    [('modle = "m"', "did you mean 'model'?"), ("model = 3", "give it as text"), ("model =", "not TOML")],
)
def test_a_namespace_that_is_none(run: Run, store: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "ns.toml").write_text(text)
    file = prompt_file(tmp_path, AGENT)
    assert words in one_line(run("prefix", file, "--store", store, "--namespace", tmp_path / "ns.toml"))
    assert "salt is not hex" in one_line(run("prefix", file, "--store", store, *NAMED, "--salt", "xy"))


def cut_segment(store: Path) -> str:
    file = sorted(store.glob("seg/*/*.seg"))[0]
    os.truncate(file, SLOT)
    return f"{file.name}: cut short"


def foreign_segment(store: Path) -> str:
    file = sorted(store.glob("seg/*/*.seg"))[0]
    file.write_bytes(os.urandom(2 * SLOT))
    return file.name


def foreign_manifest(store: Path) -> str:
    (store / "duokv.json").write_text('{"name": "something else"}')
    return "duokv.json is not a store's manifest"


@pytest.mark.parametrize("damage", [cut_segment, foreign_segment, foreign_manifest])
def test_rebuild_refuses_what_it_would_lose(run: Run, store: Path, damage: Callable[[Path], str]) -> None:
    words = damage(store)
    before = tree(store)
    assert words in one_line(run("rebuild", store))
    assert tree(store) == before


@pytest.mark.parametrize("command", [("stat",), ("verify",), ("evict", "--all"), ("rebuild",), ("ttl", "show")])
def test_a_folder_without_a_store_stays_as_it_is(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "no store here" in one_line(run(*command, "--store", tmp_path))
    assert "ENOENT" in one_line(run(*command, "--store", tmp_path / "nowhere"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_trace_line_that_does_not_parse(run: Run, trace: Path) -> None:
    trace.write_text(trace.read_text() + '{"t": 5000, "i": "many"}\n')
    assert "trace.jsonl line 4" in one_line(run("simulate", trace))
    assert run("simulate", trace, "--limit", "3").code == 0
    packed = trace.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(trace.read_bytes())[:-20])
    assert "trace.jsonl.gz" in one_line(run("simulate", packed))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--class", "agnet"), "did you mean 'agent'?; --ttl agnet=3d gives it one"),
        (("--ttl", "agent"), "names no duration"),
        (("--ttl", "agent=3"), "has no unit"),
        (("--swa-keep", "prompt-edn"), "did you mean 'prompt-end'?"),
        (("--geometry", "tny"), "did you mean 'tiny'?"),
        (("--capacity", "10GBB"), "unknown unit 'GBB'; accepted"),
        (("--capacity-blocks", "many"), "whole number"),
        (("--payload", "reel"), "did you mean 'real'?"),
        (("--keep-rows", "0"), "--keep-rows"),
        (("--limit", "-1"), "whole number"),
    ],
)
def test_bad_options_of_simulate(run: Run, trace: Path, options: tuple[str, ...], words: str) -> None:
    assert words in one_line(run("simulate", trace, *options))


def test_a_traceback_only_on_demand(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for args in (("--debug", "explain", "xyz"), ("explain", "xyz", "--debug")):
        shown = run(*args, "--store", store)
        assert shown.code == 2
        assert "Traceback" in shown.err
        assert shown.err.splitlines()[-1].startswith("kvctl: key 'xyz'")
    monkeypatch.setenv("DUOKV_DEBUG", "1")
    assert "Traceback" in run("explain", "xyz", "--store", store).err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("a\nb"), 2, "internal error: ZeroDivisionError: a b; run it with --debug"),
        (OSError(5, "Input/output error", "seg/a"), 2, "seg/a: Input/output error"),
    ],
)
def test_whatever_happens_is_one_line(
    run: Run, store: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, words: str
) -> None:
    def fail(view: object) -> None:
        raise error

    monkeypatch.setattr(commands_view, "read_stat", fail)
    result = run("stat", store)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert words in result.err
