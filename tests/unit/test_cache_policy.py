"""The comparison of cache policies: what is counted as loaded, as had, and that both policies see the same."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from duokv.bench.cache_policy import Lru, main, measure
from duokv.bench.workload import TraceRequest


def request(t: float, *runs: tuple[int, int]) -> TraceRequest:
    return TraceRequest(t, "", 128 * sum(count for _, count in runs) + 1, 1, runs)


def test_what_earlier_prompts_had_is_loaded_and_what_is_still_there_is_had() -> None:
    prompts = [request(0, (0, 4)), request(1, (0, 2), (4, 2)), request(2, (0, 4), (6, 1)), request(3, (7, 1))]
    steps = [(loaded, dict(hits)) for loaded, hits in measure(prompts, [3, 100])]
    assert [loaded for loaded, _ in steps] == [0, 2, 6, 6]
    assert [hits["lru", 100] for _, hits in steps] == [hits["s3_fifo", 100] for _, hits in steps] == [0, 2, 6, 6]
    assert [hits["lru", 3] for _, hits in steps] == [0, 1, 2, 2]


def test_the_least_recently_used_leaves() -> None:
    cache = Lru(2)
    cache.store([1, 2])
    assert cache.load([1]) == 1
    assert cache.load([3]) == 0
    assert (cache.load([1]), cache.load([2])) == (1, 0)


def trace(path: Path) -> Path:
    lines = [{"t": t, "s": "", "i": 300, "o": 1, "b": [[0, 2]]} for t in range(5)]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


def test_it_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(trace(tmp_path / "few.jsonl.gz")), "--blocks", "1,8", "--json"]) == 0
    one, all_of_it = json.loads(capsys.readouterr().out)
    assert (one["trace"], one["cache_blocks"], one["loaded_blocks"]) == ("few", 1, 8)
    assert set(all_of_it["percent"].values()) == {100.0}
    assert main([str(trace(tmp_path / "few.jsonl.gz")), "--limit", "1"]) == 0
    assert "few" in capsys.readouterr().out


def test_what_cannot_be_done_is_one_line_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent.jsonl.gz")]) == 2
    assert capsys.readouterr().err.startswith("bench: ")
    with pytest.raises(SystemExit) as left:
        main(["--blocks", "0"])
    assert left.value.code == 2
