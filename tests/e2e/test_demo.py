"""`python -m duokv.tools.demo` as a newcomer runs it."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import operator
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from duokv.engine import Output
from duokv.kvstore import StoreError, UsageError
from duokv.replay import Reason
from duokv.tools import demo as demo_module
from duokv.tools import demo_conversation
from duokv.tools.demo_conversation import BEFORE_KILL, Conversation, Turn, conversation
from duokv.tools.demo_process import in_new_process

REPLY = 8


def demo(tmp_path: Path, *arguments: str, data: str | None = None) -> subprocess.CompletedProcess[str]:
    temporary = tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DUOKV_")}
    environ |= {"TMPDIR": str(temporary), "PYTHONSAFEPATH": "1"}
    if data is not None:
        environ["DUOKV_DATA"] = data
    command = [sys.executable, "-m", "duokv.tools.demo", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environ, check=False, capture_output=True, text=True, timeout=300)


def test_demo_without_traces(tmp_path: Path) -> None:
    done = demo(tmp_path, "--limit", "50", "--blocks", "40", "--file", str(short_file(tmp_path)), "--reply", "2")
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
    assert "A conversation about short.py" in shown
    assert "Exact mode gave the cold run's tokens in all 5 turns." in shown
    assert list((tmp_path / "tmp").iterdir()) == []


def test_demo_of_a_trace(tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOKV_DATA", str(data_dir))
    shown = io.StringIO()
    trace = data_dir / "traces/ragpulse.jsonl.gz"
    demo_module.replay_trace(Console(file=shown, width=110), trace, 50, tmp_path / "elsewhere")
    assert "ragpulse" in shown.getvalue()
    assert "class chat" in shown.getvalue()
    assert "31.4 % (whole trace)" in shown.getvalue()
    assert (tmp_path / "elsewhere/report.html").is_file()


def short_file(folder: Path) -> Path:
    """The beginning of a real source file: few blocks, so that it takes little time."""
    path = folder / "short.py"
    path.write_bytes(Path(textwrap.__file__).read_bytes()[:900])
    return path


@pytest.fixture(scope="module")
def talked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Conversation, str]:
    """A whole conversation and what was printed."""
    path = short_file(tmp_path_factory.mktemp("talk"))
    shown = io.StringIO()
    console = Console(file=shown, width=110, highlight=False)
    served = conversation(console, path, path.read_bytes(), reply=REPLY)
    return served, " ".join(shown.getvalue().split())


def test_conversation_shares_prefixes(talked: tuple[Conversation, str]) -> None:
    turns = talked[0].turns
    for last, turn in itertools.pairwise(turns[:-1]):
        said = (*last.prompt, *last.output.tokens)
        assert turn.prompt[: len(said)] == said
        assert len(turn.prompt) > len(said)
    file = turns[0].prompt[:901]
    assert turns[-1].prompt[:901] == file
    assert bytes(file[1:]) == Path(textwrap.__file__).read_bytes()[:900]
    assert turns[-1].prompt != turns[0].prompt


def test_conversation_is_served_as_the_demo_says(talked: tuple[Conversation, str]) -> None:
    turns = talked[0].turns
    reports = [turn.output.report for turn in turns]
    assert [report.reason for report in reports] == [
        Reason.NO_HIT, Reason.SWA_HIT, Reason.SWA_MISS, Reason.SWA_MISS, Reason.SWA_MISS,
    ]  # fmt: skip
    # What follows a bounded replay is an approximation too.
    assert [report.exact for report in reports] == [True, True, False, False, False]
    for before, turn in itertools.pairwise(turns[:-1]):
        # Everything but the last token of a reply was computed and is stored, also by a process that was killed.
        assert adopted(turn) == (len(before.prompt) + REPLY - 1) // 128 * 128
    # The other user adopts the blocks of the file, and of nothing else.
    assert adopted(turns[-1]) == 901 // 128 * 128
    assert_partitions(turns)


def test_exact_mode_replays_and_gives_the_cold_tokens(talked: tuple[Conversation, str]) -> None:
    served, shown = talked
    assert [turn.prompt for turn in served.exact] == [turn.prompt for turn in served.turns]
    assert {turn.output.report.reason for turn in served.exact} == {Reason.SWA_MISS}
    assert all(turn.output.report.exact for turn in served.exact)
    assert_partitions(served.exact)
    assert {output.report.reason for output in served.cold} == {Reason.NO_HIT}
    assert [turn.output.tokens for turn in served.exact] == [output.tokens for output in served.cold]
    assert {len(output.tokens) for output in served.cold} == {REPLY}
    assert "Exact mode gave the cold run's tokens in all 5 turns." in shown


def test_every_turn_is_a_line_with_its_counts(talked: tuple[Conversation, str]) -> None:
    served, shown = talked
    for turn in (*served.turns, *served.exact):
        part = turn.output.report.partition
        assert part is not None
        counts = (part.swa_hit, part.block_hit, part.replayed, part.computed)
        assert " │ ".join(f"{count:,}" for count in counts) in shown
        assert f"{turn.ask.name} {turn.ask.question}" in shown


def adopted(turn: Turn) -> int:
    part = turn.output.report.partition
    assert part is not None
    return part.swa_hit + part.block_hit + part.replayed


def assert_partitions(turns: Sequence[Turn]) -> None:
    for turn in turns:
        report = turn.output.report
        assert report.partition is not None
        assert report.partition.input_tokens == report.prompt_tokens == len(turn.prompt)


def test_exact_mode_that_differs_ends_the_demo(
    tmp_path: Path, talked: tuple[Conversation, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    served = talked[0]
    lives = iter([served.turns[:BEFORE_KILL], (*served.turns[BEFORE_KILL:], *served.exact)])

    def recorded(work: object, kind: object, *, count: int) -> Iterator[Turn]:
        life = next(lives)
        assert len(life) == count
        return iter(life)

    def wrong(prompts: Sequence[Sequence[int]], reply: int) -> list[Output]:
        assert [*prompts] == [turn.prompt for turn in served.turns[1:]]
        tokens = served.cold[2].tokens
        other = dataclasses.replace(served.cold[2], tokens=(*tokens[:5], tokens[5] ^ 1, *tokens[6:]))
        return [served.cold[1], other, *served.cold[3:]]

    monkeypatch.delenv("DUOKV_DATA", raising=False)
    monkeypatch.setattr(demo_conversation, "in_new_process", recorded)
    monkeypatch.setattr(demo_conversation, "cold_runs", wrong)
    arguments = ["--limit", "10", "--blocks", "2", "--out", str(tmp_path), "--file", str(short_file(tmp_path))]
    assert demo_module.main([*arguments, "--reply", str(REPLY)]) == 2
    shown = capsys.readouterr()
    assert "Exact mode gave" not in shown.out
    assert "│ 5 of 8 │" in shown.out
    assert shown.err.splitlines()[-1] == (
        "demo: turn '3, 181 s later': exact mode left the cold run's tokens after 5 of 8; "
        "run `make test` to see what is broken"
    )


def test_a_process_that_fails_is_an_error() -> None:
    # Called with `send`, it sends 1: a fresh interpreter can import no function of a test.
    sends_one = operator.methodcaller("__call__", 1)
    assert list(in_new_process(sends_one, int)) == [1]
    values = in_new_process(sends_one, int, count=2)
    assert next(values) == 1
    with pytest.raises(StoreError, match="ended early"):
        next(values)
    with pytest.raises(UsageError, match="nonsense"):
        next(in_new_process(functools.partial(demo_module._write, "nonsense://x", 2), int))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--trace", "missing.jsonl"), "missing.jsonl: No such file"),
        (("--limit", "0"), "--limit 0"),
        (("--blocks", "1"), "--blocks 1"),
        (("--reply", "0"), "--reply 0"),
        (("--file", "missing.py"), "missing.py: No such file"),
        (("--file", "."), ".: Is a directory"),
        (("--file", "small.py"), "small.py: only 511 bytes"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    (tmp_path / "small.py").write_bytes(b"#" * 511)
    done = demo(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"demo: {reason}")
    assert "; " in line
