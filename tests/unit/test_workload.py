"""Reading traces strictly, and finding output ends."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from duokv.bench.workload import (
    OutputEnd,
    Run,
    TraceRequest,
    read_trace,
    trace_class,
    traces_dir,
    with_output_ends,
)
from duokv.kvstore.errors import UsageError

GOOD = '{"t":0.5,"s":"x","i":400,"o":7,"b":[[0,2],[9,1]],"a":2.5}'
LATER = '{"t":1,"s":"","i":130,"o":0,"b":[[0,1]]}'


def write(path: Path, *lines: str) -> Path:
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_read(tmp_path: Path, name: str) -> None:
    first, second = read_trace(write(tmp_path / name, GOOD, LATER))
    assert first == TraceRequest(0.5, "x", 400, 7, ((0, 2), (9, 1)), 2.5)
    assert (first.blocks, first.answered_at) == (3, 3.0)
    assert second == TraceRequest(1.0, "", 130, 0, ((0, 1),), None)
    assert second.answered_at is None


def test_limit_stops_before_a_bad_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "nonsense")
    assert len(list(read_trace(path, limit=1))) == 1
    assert list(read_trace(path, limit=0)) == []
    with pytest.raises(UsageError, match=r"^--limit -1: .*leave it out$"):
        list(read_trace(path, limit=-1))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("", "truncated"),
        ('{"t":1,"s":"","i":130,"b":[[0,1]]}', "missing required field `o`"),
        ('{"t":1,"s":"","i":130,"o":0,"b":[[0,1]],"x":1}', "unknown field `x`"),
        ('{"t":1,"s":"","i":-1,"o":0,"b":[]}', ">= 0"),
        ('{"t":1,"s":"","i":130,"o":0,"b":[[0,-1]]}', ">= 1"),
        ('{"t":1,"s":"","i":130,"o":0,"b":[[-1,1]]}', ">= 0"),
        ('{"t":1,"s":"","i":130,"o":0,"b":[[0,1,2]]}', "length 2"),
        ('{"t":0.25,"s":"","i":130,"o":0,"b":[[0,1]]}', "t goes back from 0.5 to 0.25"),
        ('{"t":1,"s":"","i":255,"o":0,"b":[[0,1],[5,1]]}', "2 full blocks listed, 255 input tokens have 1"),
        ('{"t":1,"s":"","i":1300,"o":0,"b":[[268435455,2]]}', "past chain id 268435455"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "t.jsonl.gz", GOOD, line, LATER)
    requests = read_trace(path)
    next(requests)
    with pytest.raises(UsageError) as caught:
        next(requests)
    message = str(caught.value)
    assert message.startswith("t.jsonl.gz line 2: ")
    assert reason in message
    assert message.endswith("; fix or cut that line, or use --limit 1")
    assert "\n" not in message


def test_bad_first_line_leaves_nothing_to_limit_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^t\.jsonl line 1: .*; fix or cut that line$"):
        next(read_trace(write(tmp_path / "t.jsonl", "nonsense")))


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.jsonl: No such file or directory; give the path"):
        next(read_trace(tmp_path / "absent.jsonl"))
    with pytest.raises(UsageError, match=r"Is a directory; give the path"):
        next(read_trace(tmp_path))
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text(GOOD)
    with pytest.raises(UsageError, match=r"^plain\.jsonl\.gz: Not a gzipped file .*; name it without \.gz"):
        next(read_trace(plain))


def test_cut_gzip_names_the_last_good_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl.gz", *[GOOD] * 50_000)
    path.write_bytes(path.read_bytes()[:-20])
    good: list[TraceRequest] = []
    with pytest.raises(UsageError) as caught:
        good.extend(read_trace(path))
    read = len(good)
    assert str(caught.value).startswith(f"t.jsonl.gz line {read + 1}: damaged gzip data (")
    assert str(caught.value).endswith(f"or use --limit {read}")
    assert len(list(read_trace(path, limit=read))) == read > 0


def test_trace_class() -> None:
    names = ["weka_agent.jsonl.gz", "mooncake_conversation.jsonl", "ragpulse.jsonl.gz", "lmcache_miniswe.jsonl", "x"]
    assert [trace_class(Path("/any") / name) for name in names] == ["agent", "chat", "chat", "agent", "chat"]


def test_traces_dir() -> None:
    assert traces_dir({"DUOKV_DATA": "/data"}) == Path("/data/traces")
    assert traces_dir({"DUOKV_DATA": ""}) is None
    assert traces_dir({}) is None


def test_output_end() -> None:
    asked = TraceRequest(10, "x", 300, 100, ((0, 2),), 5)  # 400 tokens: 3 blocks
    other = TraceRequest(11, "y", 300, 100, ((0, 2),))
    grown = TraceRequest(20, "x", 520, 1, ((0, 2), (7, 2)), 1)
    ends = with_output_ends([asked, other, grown])
    assert list(ends) == [(asked, OutputEnd(15, 400, ((0, 2), (7, 2)))), (other, None), (grown, None)]


@pytest.mark.parametrize(
    ("later", "t"),
    [
        (TraceRequest(20, "x", 400, 1, ((0, 1), (1, 1), (2, 1))), 10),  # the same runs, written otherwise
        (TraceRequest(20, "x", 383, 1, ((0, 2),)), None),  # does not reach past the output
        (TraceRequest(20, "x", 520, 1, ((0, 1), (7, 3))), None),  # another prefix
        (TraceRequest(20, "x", 520, 1, ((1, 4),)), None),
        (TraceRequest(20, "x", 600, 1, ((0, 4),)), 10),
        (TraceRequest(20, "x", 700, 1, ((0, 4),)), None),  # one block is not listed, which is not known
        (TraceRequest(20, "", 600, 1, ((0, 4),)), None),
    ],
)
def test_output_end_needs_the_next_prompt(later: TraceRequest, t: float | None) -> None:
    asked = TraceRequest(10, later.session, 300, 100, ((0, 2),))
    [(_, end), _] = with_output_ends([asked, later])
    assert end == (None if t is None else OutputEnd(t, 400, later.runs))


@pytest.mark.parametrize(
    ("asked", "later", "known"),
    [
        (((0, 2), (7, 1)), ((0, 2), (7, 1), (9, 1)), True),
        (((0, 2), (7, 1)), ((0, 2), (7, 2)), True),
        (((0, 2), (7, 1)), ((0, 1), (1, 1), (7, 2)), True),
        (((0, 1), (7, 2)), ((0, 1), (7, 1), (8, 2)), True),
        (((0, 2), (7, 1)), ((0, 1), (7, 1), (8, 2)), False),
        (((0, 1), (4, 1), (7, 1)), ((0, 1), (5, 1), (7, 2)), False),  # alike at the last run only
        (((0, 1), (7, 2)), ((0, 1), (7, 1), (9, 2)), False),
        ((), ((0, 4),), True),
    ],
)
def test_an_output_ends_in_a_prompt_that_begins_alike(
    asked: tuple[Run, ...], later: tuple[Run, ...], known: bool
) -> None:
    first = TraceRequest(10, "x", 128 * sum(count for _, count in asked), 1, asked)
    second = TraceRequest(20, "x", 128 * sum(count for _, count in later), 1, later)
    [(_, end), _] = with_output_ends([first, second])
    assert (end is not None) is known


def test_output_ends_before_the_prompt_that_carries_it() -> None:
    asked = TraceRequest(10, "x", 300, 100, ((0, 2),), 99)
    [(_, end), _] = with_output_ends([asked, TraceRequest(20, "x", 600, 1, ((0, 4),))])
    assert end is not None
    assert end.t == 20


def test_known_output_ends_of_a_real_trace(data_dir: Path) -> None:
    ends = [end for _, end in with_output_ends(read_trace(data_dir / "traces/lmcache_miniswe.jsonl.gz"))]
    assert (len(ends), sum(end is not None for end in ends)) == (402, 213)
