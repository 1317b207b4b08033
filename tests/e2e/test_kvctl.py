"""kvctl as operators run it: every command in text and JSON, its help, its width, and settings from the environment."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from kvctl_kit import (
    AGENT,
    CHAT,
    CONFIG,
    NAMED,
    SLOT,
    Result,
    Run,
    bare_environment,  # noqa: F401
    key_of,
    one_line,
    prompt,
    prompt_file,
    run_fixture,  # noqa: F401
    store_fixture,  # noqa: F401
    trace_fixture,  # noqa: F401
    tree,
)

from duokv.kvstore.opening import open_store

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


def flip(folder: Path, byte: int = 10) -> None:
    """Change one payload bit of the first slot of the first segment."""
    file = sorted(folder.glob("seg/*/*.seg"))[0]
    raw = bytearray(file.read_bytes())
    raw[byte] ^= 1
    file.write_bytes(raw)


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


def test_simulate_without_a_trace_generates_traffic(run: Callable[..., Result]) -> None:
    result = run("simulate", "--class", "chat", "--limit", "40", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["trace"] == "generated chat traffic"
    assert report["requests"] == 40
    assert sum(report["tokens"].values()) == report["input_tokens"] > 0


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
