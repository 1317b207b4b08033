"""The serving benchmark at sizes small enough for a test: what it prints, what it refuses, and that it cleans up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_kit import refusal

from duokv.bench.serving import Figure, main
from duokv.bench.serving_engine import FirstToken, FirstTokenCase, FirstTokens
from duokv.bench.serving_memory import measure_arenas, measure_copies
from duokv.engine.weights import load_model
from duokv.kernels.transfer import HostTransfer
from duokv.kvstore import CacheGeometry, KVStore
from duokv.kvstore.errors import StoreError

FIGURES = (
    "first_token_vs_max", "bookkeeping_share", "swa_cost_growth", "swa_page_faults_median",
    "to_slots_vs_memcpy deepseek-v4.1", "from_slots_vs_memcpy deepseek-v4.1",
    "to_slots_vs_memcpy tiny", "from_slots_vs_memcpy tiny",
)  # fmt: skip
SMALL = ["--rounds", "1", "--blocks", "3", "--steps", "8", "--windows", "10,20"]


def small(disk: Path, *, slow: bool = False) -> FirstTokens:
    sample = np.zeros((1, CacheGeometry.preset("tiny").payload_bytes), np.uint8)
    return FirstTokens(disk, load_model(max_positions=512), FirstTokenCase(3, slow=slow), sample)


def test_the_main_figures(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--folder", str(disk), *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert tuple(found) == FIGURES
    assert all(value > 0 for name, value in found.items() if name != "swa_page_faults_median")
    assert found["swa_page_faults_median"] >= 0
    assert not list(disk.iterdir())


def test_all_cases_as_tables(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--folder", str(disk), *SMALL, "--blocks", "20"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in FIGURES)
    for prompts in ("1 x 20", "1 x 2", "4 x 2"):
        assert f"{prompts} blocks  " in printed
    for prompts in ("1 x 20", "4 x 2"):
        assert f"{prompts} blocks, slow reads" in printed
    assert not list(disk.iterdir())


def test_slow_reads_take_as_long_as_computing(disk: Path) -> None:
    with small(disk, slow=True) as subject:
        found = subject.measure(1)
    assert min(found.load_s) > 0
    assert min(found.cold_s) > min(found.load_s)


def test_a_ratio_is_to_the_larger_part() -> None:
    found = FirstToken(FirstTokenCase(3), load_s=(1.0, 5.0), compute_s=(2.0, 3.0), cold_s=(3.0, 6.0))
    assert found.ratios == (1.5, 1.2)
    assert found.ratio == 1.5


@pytest.mark.parametrize(("value", "at_most", "reached"), [(1.0, True, True), (1.3, True, False), (1.3, False, True)])
def test_a_figure_says_whether_it_is_as_it_should_be(value: float, at_most: bool, reached: bool) -> None:
    assert Figure("f", value, (value,), at_most, 1.2).reached is reached


def test_a_load_that_falls_short_is_not_measured(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object, **__: object) -> int:
        return 2

    monkeypatch.setattr(KVStore, "load", short)
    with pytest.raises(StoreError), small(disk) as subject:
        subject.measure(1)


def test_blocks_that_are_not_stored_are_not_measured(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is given none computes the prompt, which would pass for a slow hit."""
    with small(disk) as subject:

        def none(*_: object, **__: object) -> Iterator[int]:
            return iter(())

        monkeypatch.setattr(KVStore, "load_iter", none)
        monkeypatch.setattr(KVStore, "load", lambda *_, **__: 3)
        with pytest.raises(StoreError, match="adopted"):
            subject.measure(1)


def test_copies_that_move_other_bytes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: HostTransfer, index: torch.Tensor, rows: torch.Tensor) -> None:
        self._slots[index] = rows[:, : self._slots.shape[1]].flip(0)

    monkeypatch.setattr(HostTransfer, "put", wrong)
    with pytest.raises(StoreError, match="other bytes"):
        measure_copies(CacheGeometry.preset("tiny"), 3, 1, torch.device("cpu"))


def test_arenas_are_full_and_roll() -> None:
    small, large = measure_arenas([10, 30], lives=50, slices=2, done=lambda: None)
    assert (small.windows, large.windows) == (10, 30)
    for one in (small, large):
        assert one.lives == 100
        assert len(one.put_us) == len(one.lease_us) == len(one.faults) == 2
        assert one.life_us > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--blocks", "1"], "at least 2"),
        (["--windows", "many"], "is no list of whole numbers"),
        (["--windows", "5"], "at least 10"),
        (["--rounds", "1,2"], "more than one number"),
        (["--quik"], "unrecognized arguments"),
        (["--folder", "missing"], "no such folder"),
        (["--folder", "{disk}", "--blocks", "1000000000"], "make room"),
    ],
)
def test_misuse_is_one_line(disk: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str) -> None:
    line = refusal(main, [argument.format(disk=disk) for argument in arguments], capsys)
    assert line.startswith("serving: ")
    assert reason in line
    assert not list(disk.iterdir())
