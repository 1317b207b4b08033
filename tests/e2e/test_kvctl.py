"""kvctl as operators run it: every command in text and JSON, every exit code, and bad input that changes nothing."""

from __future__ import annotations

import ctypes
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from duokv.kvstore.config import StoreConfig
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import Namespace, chain_keys
from duokv.kvstore.opening import open_store
from duokv.tools import commands_view, kvctl

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


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("DUOKV_", "COLUMNS", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*args: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            kvctl.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return call


Run = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    with open_store(str(folder), geometry=GEOMETRY, config=CONFIG) as engine:
        for path, traffic in ((AGENT, "agent"), (CHAT, "chat")):
            engine.commit(NS, prompt(path), [bytes([number]) * 3000 for number in path], traffic=traffic)
    return folder


def prompt(path: Sequence[int]) -> list[int]:
    return [number for number in path for _ in range(128)] + [9]


def key_of(path: Sequence[int]) -> str:
    return chain_keys(NS, prompt(path))[-1].hex()


def prompt_file(folder: Path, path: Sequence[int]) -> Path:
    file = folder / "prompt.json"
    file.write_text(json.dumps(prompt(path)))
    return file


def tree(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def flip(folder: Path, byte: int = 10) -> None:
    """Change one payload bit of the first slot of the first segment."""
    file = sorted(folder.glob("seg/*/*.seg"))[0]
    raw = bytearray(file.read_bytes())
    raw[byte] ^= 1
    file.write_bytes(raw)


# -- looking -----------------------------------------------------------------------------------------------------------


def test_stat(run: Run, store: Path) -> None:
    text = run("stat", store)
    assert (text.code, text.err) == (0, "")
    for words in ("5: 5 alive, 0 expired, 0 pinned", "test: 3,000 B blocks", "B per block", "default class chat",
                  "agent  3d after its last use             3", "none noted"):  # fmt: skip
        assert words in text.out
    found = run("stat", "--store", f"file://{store}", "--json").document
    assert (found["blocks"], found["extents"], found["segments"], found["damage"]) == (5, 2, 2, 0)
    assert found["writers"] == []


def test_counts_are_the_same_after_a_restart(run: Run, store: Path) -> None:
    before = run("stat", store, "--json").document
    open_store(str(store), config=CONFIG).close()
    after = run("stat", store, "--json").document
    assert {**after, "index_bytes": 0, "index_bytes_per_block": 0} == {
        **before, "index_bytes": 0, "index_bytes_per_block": 0,
    }  # fmt: skip


def test_ls(run: Run, store: Path) -> None:
    text = run("ls", store)
    assert "2 of 2 extents" in text.out
    assert key_of(AGENT[:1])[:12] in text.out
    found = run("ls", store, "--class", "chat", "--state", "alive", "--limit", "1", "--json").document
    assert found["total"] == 1
    (extent,) = cast("list[dict[str, object]]", found["extents"])
    assert (extent["key"], extent["blocks"], extent["keeper"]) == (key_of(CHAT[:1])[:32], 2, "chat")
    assert "2 of 2 segments" in run("ls", store, "--segments").out
    assert run("ls", store, "--segments", "--limit", "unbounded", "--json").document["total"] == 2
    assert run("ls", store, "--segments", "--class", "chat").code == 2


def test_explain(run: Run, store: Path) -> None:
    key = key_of(AGENT[:2])
    text = run("explain", key[:12], "--store", store)
    assert (text.code, text.err) == (0, "")
    for words in (
        key, "alive: class agent keeps it 3d after its last use", "UTC (in ", ".seg", "exact", "never",
        f"slot      1, at byte {SLOT:,}", "pin       none", "block 1 of its chain, from token 128",
    ):  # fmt: skip
        assert words in text.out
    found = run("explain", key[:32], "--store", store, "--json").document
    block = cast("dict[str, object]", found["block"])
    assert (found["present"], block["key"], block["keeper"], block["content"]) == (True, key, "agent", "whole")


def test_explain_a_key_that_is_not_there(run: Run, store: Path) -> None:
    text = run("explain", "0" * 64, "--store", store)
    assert (text.code, text.err) == (1, "")
    assert "is not in the store" in text.out
    found = run("explain", "0" * 64, "--store", store, "--json")
    assert (found.code, found.document["present"]) == (1, False)


def test_prefix(run: Run, store: Path, tmp_path: Path) -> None:
    file = prompt_file(tmp_path, (*AGENT, 7, 8))
    text = run("prefix", file, "--store", store, *NAMED)
    assert text.code == 0
    for words in ("384 tokens, 3 blocks", "absent at block 3, from token 384", key_of((*AGENT, 7)), "never stored"):
        assert words in text.out
    found = run("prefix", file, "--store", store, *NAMED, "--json").document
    prefix = cast("dict[str, object]", found["prefix"])
    assert (prefix["hit_tokens"], prefix["miss_block"], prefix["reason"]) == (384, 3, "absent")
    run("ttl", "set", "agent", "0s", "--store", store)
    expired = run("prefix", file, "--store", store, *NAMED)
    assert "expired at block 0" in expired.out
    assert "class agent kept it longest" in expired.out
    assert "3 more blocks of it are on disk" in expired.out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.txt", " ".join(map(str, prompt(AGENT)))),
        ("p.csv", ",\n".join(map(str, prompt(AGENT)))),
        ("p.json", json.dumps({"tokens": prompt(AGENT)})),
    ],
)
def test_prefix_reads_plain_numbers_and_json(run: Run, store: Path, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert "384 tokens, 3 blocks" in run("prefix", tmp_path / name, "--store", store, *NAMED).out


def test_prefix_of_a_prompt_with_media_on_stdin(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    media = [{"offset": 130, "length": 3, "digest": "abcd"}]
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"tokens": prompt(AGENT), "media": media})))
    assert "128 tokens, 1 blocks" in run("prefix", "-", "--store", store, *NAMED).out


def test_prefix_takes_a_namespace_from_a_file_and_options_win(run: Run, store: Path, tmp_path: Path) -> None:
    file = prompt_file(tmp_path, AGENT)
    toml, as_json = tmp_path / "ns.toml", tmp_path / "ns.json"
    toml.write_text('model = "m"\nweights = "w"\ntokenizer = "t"\nkv_format = "fp4"\n')
    as_json.write_text(json.dumps({"model": "m", "weights": "w", "tokenizer": "t", "kv_format": "bf16"}))
    assert "384 tokens" in run("prefix", file, "--store", store, "--namespace", toml).out
    assert "0 tokens, 0 blocks" in run("prefix", file, "--store", store, "--namespace", as_json).out
    assert "384 tokens" in run("prefix", file, "--store", store, "--namespace", as_json, "--kv-format", "fp4").out
    assert "0 tokens, 0 blocks" in run("prefix", file, "--store", store, "--namespace", toml, "--salt", "00ff").out


# -- changing ----------------------------------------------------------------------------------------------------------


def test_ttl(run: Run, store: Path) -> None:
    shown = run("ttl", "show", store)
    assert "agent  3d after its last use  sliding" in shown.out
    before = tree(store)
    planned = run("ttl", "set", "agent", "0s", "--store", store, "--dry-run")
    assert "would free 3 blocks, 12 KiB" in planned.out
    assert tree(store) == before
    done = run("ttl", "set", "agent", "0s", "--mode", "fixed", "--store", store)
    assert "frees 3 blocks, 12 KiB" in done.out
    change = run("ttl", "set", "agent", "unbounded", "--store", store, "--json").document
    assert (change["revived_blocks"], change["after"]) == (3, {"ttl_s": None, "mode": "fixed"})
    assert run("ttl", "set", "batch", "1h", "--add", "--store", store).code == 0
    found = run("ttl", "show", store, "--json").document
    assert set(cast("dict[str, object]", found["classes"])) == {"agent", "chat", "batch"}
    assert found["version"] == 4


@pytest.mark.parametrize(
    ("selection", "blocks"),
    [
        (("--expired",), 3), (("--class", "agent"), 3), (("--older-than", "0s"), 5), (("--blocks", "2"), 2),
        (("--key", key_of(CHAT)), 1), (("--all",), 5),
    ],
)  # fmt: skip
def test_evict(run: Run, store: Path, selection: tuple[str, ...], blocks: int) -> None:
    if selection == ("--expired",):
        run("ttl", "set", "agent", "0s", "--store", store)
    before = tree(store)
    planned = run("evict", store, *selection, "--dry-run", "--json").document
    assert (planned["blocks"], planned["bytes"], planned["applied"]) == (blocks, blocks * SLOT, False)
    assert tree(store) == before
    done = run("evict", store, *selection)
    assert (done.code, done.err) == (0, "")
    assert f"evicted {blocks} block" in done.out
    assert run("stat", store, "--json").document["blocks"] == 5 - blocks
    assert run("verify", store).code == 0


def test_verify(run: Run, store: Path) -> None:
    well = run("verify", store)
    assert (well.code, well.err) == (0, "")
    assert "5 of 5 blocks checked: all well" in well.out
    assert cast("dict[str, object]", run("verify", store, "--limit", "2", "--json").document["report"])["checked"] == 2
    flip(store)
    bad = run("verify", store)
    assert bad.code == 1
    for words in ("damaged: " + key_of(AGENT[:1])[:32], "00000001.seg, slot 0: checksum", "NOT well"):
        assert words in bad.out
    assert run("verify", store, "--json").document["clean"] is False
    mended = run("verify", store, "--repair")
    assert (mended.code, "repaired: 3 blocks taken out" in mended.out) == (1, True)
    noted = run("verify", store)
    assert (noted.code, "noted 20" in noted.out) == (1, True)
    assert "1 noted; kvctl verify names them" in run("stat", store).out
    assert "damaged: found on" in run("explain", key_of(AGENT[:1]), "--store", store).out
    assert run("verify", store, "--clear").code == 1
    assert run("verify", store).code == 0


def test_rebuild(run: Run, store: Path) -> None:
    for file in (store / "index").iterdir():
        file.unlink()
    refused = run("stat", store)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "kvctl rebuild" in refused.err
    done = run("rebuild", store)
    assert (done.code, "5 blocks, 2 extents, 2 segments" in done.out) == (0, True)
    assert run("rebuild", store, "--json").document["blocks"] == 5
    assert run("verify", store).code == 0


# -- simulate ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A session that grows by four blocks a request, then comes back after an hour."""
    lines = [
        {"t": t, "s": "a", "i": blocks * 128 + 10, "o": 20, "b": [[0, blocks]]}
        for t, blocks in ((0.0, 4), (60.0, 8), (4000.0, 12))
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_simulate(run: Run, trace: Path) -> None:
    found = run("simulate", trace, "--class", "agent", "--json").document
    tokens = cast("dict[str, int]", found["tokens"])
    assert (found["requests"], found["input_tokens"], sum(tokens.values())) == (3, 3102, 3102)
    assert found["token_hit_rate"] == 12 * 128 / 3102
    assert set(tokens) == {"swa_hit", "block_hit", "replayed", "computed"}
    assert set(cast("dict[str, int]", found["bytes"])) == {"stored", "read", "written", "freed"}
    for name in ("adopted_rate", "replay_share_of_hits", "swa_alive_share", "amplification", "evictions", "seconds"):
        assert name in found
    text = run("simulate", trace)
    assert (text.code, text.err) == (0, "")
    assert "chat, blocks live 7d" in text.out, "the class of a trace of unknown name"


def test_simulate_obeys_its_options(run: Run, trace: Path) -> None:
    def rate(*options: str) -> float:
        found = run("simulate", trace, "--class", "quick", "--ttl", "quick=1d", *options, "--json").document
        return cast("float", found["token_hit_rate"]) * 3102 / 128

    assert rate() == 12
    assert rate("--ttl", "chat=1h", "--ttl", "quick=120s") == 4
    assert rate("--capacity-blocks", "5", "--capacity", "unbounded", "--swa-keep", "prompt-end") < 12
    assert run("simulate", trace, "--limit", "2", "--json").document["requests"] == 2
    small = ("--payload", "real", "--geometry", "tiny", "--swa-bytes", "1000000", "--keep-rows", "128")
    real = run("simulate", trace, *small, "--swa-expiry", "unbounded", "--json").document
    assert cast("dict[str, int]", real["bytes"])["read"] > 0


# -- misuse ------------------------------------------------------------------------------------------------------------


def one_line(result: Result) -> str:
    """The error of a refused run: exactly one line on stderr, nothing on stdout, exit code 2."""
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("kvctl: ")
    assert result.err.count("\n") == 1
    assert "Traceback" not in result.err
    return result.err


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


# -- surroundings ------------------------------------------------------------------------------------------------------


def test_help_documents_exit_codes_and_every_command(run: Run) -> None:
    text = run("--help")
    assert text.code == 0
    for words in ("Exit codes", "130 interrupted", "DUOKV_DEBUG", "stat", "ls", "explain", "prefix", "ttl", "evict",
                  "verify", "rebuild", "simulate"):  # fmt: skip
        assert words in text.out
    for command in ("stat", "ls", "explain", "prefix", "evict", "verify", "rebuild", "simulate"):
        assert "--json" in run(command, "--help").out


def test_output_is_plain_and_fits_a_terminal(run: Run, store: Path) -> None:
    for command in (
        ("stat",),
        ("ls",),
        ("ls", "--segments"),
        ("verify",),
        ("ttl", "show"),
        ("evict", "--all", "--dry-run"),
    ):
        text = run(*command, "--store", store)
        assert "\x1b" not in text.out
        longest = max(line for line in text.out.splitlines() if str(store) not in line)
        assert len(longest.rstrip()) <= 80, longest


def test_the_store_and_its_settings_from_the_environment(
    run: Run, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUOKV_STORE", str(store))
    assert run("stat", "--json").document["blocks"] == 5
    (store / "index").rename(tmp_path / "elsewhere")
    assert "not there; build it with kvctl rebuild" in one_line(run("stat"))
    (tmp_path / "kv.toml").write_text(f'index_path = "{tmp_path / "elsewhere"}"\n')
    assert run("stat", "--config", tmp_path / "kv.toml", "--json").document["blocks"] == 5
    monkeypatch.setenv("DUOKV_INDEX_PATH", str(tmp_path / "elsewhere"))
    assert run("ttl", "set", "agent", "1h").code == 0
    monkeypatch.setenv("DUOKV_CAPACTY", "1GiB")
    assert "did you mean 'DUOKV_CAPACITY'?" in one_line(run("stat"))


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


# -- other processes ---------------------------------------------------------------------------------------------------


def spawn(*args: object, caps: bool = True, **pipes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from duokv.tools.kvctl import main; main()", *map(str, args)]
    return subprocess.Popen(
        command, text=True, stdout=pipes.get("stdout", subprocess.PIPE), stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts if caps else give_up_root, env=without_settings(os.environ),  # noqa: PLW1509
    )  # fmt: skip


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("DUOKV_")}


def heed_interrupts() -> None:
    """As a command at a terminal does: tests that run in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def give_up_root() -> None:
    """Let permissions hold for root too: drop CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH from what exec may give."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails where they are not held anyway


def finish(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=60)
    return Result(process.returncode, out, err)


def test_a_folder_that_may_only_be_read(store: Path) -> None:
    """Looking works and leaves no trace; changing is refused in one line."""
    before = tree(store)
    folders = [store, *(path for path in store.rglob("*") if path.is_dir())]
    files = [path for path in store.rglob("*") if path.is_file()]
    for path in (*folders, *files):
        path.chmod(0o555 if path in folders else 0o444)
    try:
        assert '"blocks": 5' in finish(spawn("stat", store, "--json", caps=False)).out
        assert finish(spawn("verify", store, caps=False)).code == 0
        refused = one_line(finish(spawn("evict", store, "--all", caps=False)))
        assert "EACCES" in refused
        store.chmod(0o000)
        assert "EACCES" in one_line(finish(spawn("stat", store, caps=False)))
    finally:
        for path in (*folders, *files):
            path.chmod(0o755)
    assert tree(store) == before


def test_a_closed_pipe_is_no_error(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = spawn("ls", store, stdout=writing)
    os.close(writing)
    result = finish(process)
    assert (result.code, result.err) == (-signal.SIGPIPE, "")


def test_an_interrupt_is_one_line(store: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    process = spawn("prefix", fifo, "--store", store, *NAMED)
    with fifo.open("w"):  # opens once kvctl reads, and then it waits for us
        for _ in range(6):  # an interrupt that falls into a finaliser is lost, as any is in Python
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
                break
        result = finish(process)
    assert (result.code, result.out, result.err) == (130, "", "kvctl: interrupted; run it again\n")


ENGINE = """
import sys, threading
from duokv.kvstore import Namespace, StoreConfig, open_store

store = open_store(sys.argv[1], config=StoreConfig(swa_bytes=0, maintenance_interval_s=0.0, fsync="none"))
ns = Namespace("m", "w", "t", "fp4")
stop = threading.Event()

def commit():
    number = 0
    while not stop.is_set():
        number = (number + 1) % 500
        store.commit(ns, [1000 + number] * 129, [bytes(3000)], traffic="chat")

thread = threading.Thread(target=commit)
thread.start()
print("ready", flush=True)
prompt = [number for number in (1, 2, 3) for _ in range(128)] + [9]
for _ in sys.stdin:
    print(store.lookup(ns, prompt, traffic="agent").tokens, flush=True)
stop.set()
thread.join()
store.close()
"""


@contextmanager
def engine(store: Path) -> Iterator[Callable[[], int]]:
    """Another process that has the store open and commits without pause; call what this yields to look `AGENT` up."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=without_settings(os.environ),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def lookup() -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    try:
        yield lookup
    finally:
        process.stdin.close()
        code = process.wait(timeout=60)
        process.stdout.close()
    assert code == 0


def test_looking_at_a_store_in_use(run: Run, store: Path) -> None:
    with engine(store) as lookup:
        for _ in range(5):
            found = run("stat", store, "--json").document
            assert cast("int", found["blocks"]) >= 5
            ((writer),) = cast("list[dict[str, object]]", found["writers"])
            assert writer["alive"] is True
            assert run("explain", key_of(AGENT), "--store", store, "--json").code == 0
        assert run("verify", store).code == 0
        assert lookup() == 384
    assert run("verify", store).code == 0


def test_changing_a_store_in_use(run: Run, store: Path) -> None:
    with engine(store) as lookup:
        assert lookup() == 384
        refused = run("rebuild", store)
        assert "is running; stop that engine, then rebuild" in one_line(refused)
        run("ttl", "set", "agent", "0s", "--store", store)
        assert lookup() == 0, "the engine follows at its next lookup"
        run("ttl", "set", "agent", "3d", "--store", store)
        assert lookup() == 384, "nothing was deleted yet"
        evicted = run("evict", store, "--key", key_of(AGENT[:2])[:32])
        assert (evicted.code, evicted.err) == (0, "")
        assert lookup() == 128
    assert run("verify", store).code == 0


def test_simulate_without_a_trace_generates_traffic(run: Callable[..., Result]) -> None:
    result = run("simulate", "--class", "chat", "--limit", "40", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["trace"] == "generated chat traffic"
    assert report["requests"] == 40
    assert sum(report["tokens"].values()) == report["input_tokens"] > 0
