"""The growth benchmark on a small index: what it prints, how it fits, and that its budget catches what is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duokv.bench.scale import main, sizes_to
from duokv.bench.scale_check import FIGURES, Budget, check, read_budget
from duokv.bench.scale_report import bytes_per_block, growth
from duokv.bench.scale_size import OPERATIONS, Cost, Scale

ROOT = Path(__file__).resolve().parents[2]


def budget_file(path: Path, most: dict[str, float]) -> str:
    path.write_text(json.dumps({"blocks": 340, "most": most}))
    return str(path)


def test_figures_of_a_small_index(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--blocks", "340", "--repeats", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (size,) = found["sizes"]
    assert size["blocks"] == 34 + 340
    assert tuple(size["wall_us"]) == tuple(size["cpu_us_per_block"]) == OPERATIONS
    assert all(value > 0 for value in size["wall_us"].values())
    assert size["index_bytes_per_block"] > 16
    assert not found["growth"]


def test_sizes_are_powers_of_ten() -> None:
    assert sizes_to(1_000_000) == [10_000, 100_000, 1_000_000]
    assert sizes_to(30_000) == [10_000, 30_000]
    assert sizes_to(500) == [500]


def test_growth_is_the_exponent() -> None:
    scales = [
        Scale(blocks, 7_000_000 + 60 * blocks, 4096 + 30 * blocks, {
            name: Cost(1e-6 * blocks**exponent, 1.0, blocks)
            for name, exponent in zip(OPERATIONS, (0.0, 0.5, 1.0, *[0.0] * 10), strict=False)
        })
        for blocks in (10_000, 100_000, 1_000_000)
    ]  # fmt: skip
    found = growth(scales)
    assert [round(found[name], 6) for name in OPERATIONS[:4]] == [0.0, 0.5, 1.0, 0.0]
    assert {name: round(each, 6) for name, each in bytes_per_block(scales).items()} == {"memory": 60.0, "index": 30.0}


def test_what_is_over_the_budget_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    roomy = dict.fromkeys(FIGURES, 1e9)
    assert main(["--check", budget_file(tmp_path / "roomy.json", roomy)]) == 0
    assert f"{len(FIGURES)} figures are within" in capsys.readouterr().out
    tight = {**roomy, "reads_per_load": 1, "index_bytes_per_block": 16}
    assert main(["--check", budget_file(tmp_path / "tight.json", tight)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["index_bytes_per_block", "reads_per_load"]


def test_every_figure_is_compared() -> None:
    budget = Budget(340, dict.fromkeys(FIGURES, 2.0))
    assert not check(dict.fromkeys(FIGURES, 2.0), budget)
    for name in FIGURES:
        (line,) = check({**dict.fromkeys(FIGURES, 2.0), name: 2.001}, budget).values()
        assert line.startswith(f"{name} is 2.001, over the 2 allowed")


def test_the_shipped_budget_is_whole() -> None:
    budget = read_budget(ROOT / "bench" / "budget.json")
    assert set(budget.most) == set(FIGURES)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        ("{", "not a budget"),
        ('{"blocks": 340, "most": {"reads_per_lode": 1}}', "did you mean 'reads_per_load'?"),
        ('{"blocks": 340, "most": {"reads_per_load": 1}}', "no budget for lookup_over_hashing"),
    ],
)
def test_a_budget_that_cannot_be_meant_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, reason: str
) -> None:
    path = tmp_path / "budget.json"
    if content is not None:
        path.write_text(content)
    assert main(["--check", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scale: ")
    assert reason in line


@pytest.mark.parametrize("arguments", [["--blocks", "none"], ["--repeats", "0"], ["--chek"]])
def test_misuse_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scale: ")
