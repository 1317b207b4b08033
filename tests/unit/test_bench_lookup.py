"""The benchmark measures what it says, on an index small enough for a test."""

import json

import pytest

from duokv.bench.lookup import main


def test_it_reports_every_cost_of_a_small_index(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--blocks", "340", "--repeats", "2", "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)
    assert cost["blocks"] == 340 + 3 * 601
    assert all(value > 0 for value in cost.values())
