"""Sizes, durations and counts as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duokv.kvstore.errors import UsageError
from duokv.kvstore.units import format_bytes, format_duration, parse_bytes, parse_count, parse_duration


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10GiB", 10 << 30),
        ("512 KiB", 512 << 10),
        ("1GB", 10**9),
        ("0B", 0),
        ("1.5MiB", 3 << 19),
        ("1.001KB", 1001),
        (" 2 TiB ", 2 << 40),
        (4096, 4096),
        (0, 0),
    ],
)
def test_parse_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10GBB", "unknown unit 'GBB'"),
        ("10gib", "unknown unit 'gib'"),
        ("10", "has no unit"),
        ("", "not a number with a unit"),
        ("GiB", "not a number with a unit"),
        ("-1GiB", "not a number with a unit"),
        ("1e3B", "not a number with a unit"),
        ("1GiB 2", "not a number with a unit"),
        ("inf", "not a number with a unit"),
        ("\u0661B", "not a number with a unit"),
        ("0.5B", "whole number of bytes"),
        (-1, "at least 0"),
        (True, "not a number of bytes"),
    ],
)
def test_parse_bytes_refuses_with_text_reason_and_way_out(text: str | int, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    message = str(caught.value)
    assert repr(text) in message
    assert reason in message
    assert "\n" not in message
    assert not isinstance(text, str) or "B, KiB, MiB, GiB" in message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("180s", 180.0),
        ("3d", 259_200.0),
        ("7d", 604_800.0),
        ("1h", 3600.0),
        ("5m", 300.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
    ],
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


def test_unbounded_is_no_limit() -> None:
    assert parse_duration("unbounded") is None


@pytest.mark.parametrize("text", ["3", "3days", "-3d", "", "forever", "3 d d", "nan"])
def test_parse_duration_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="ms, s, m, h, d, or 'unbounded'") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(("text", "count"), [("65536", 65_536), ("65_536", 65_536), (0, 0), (7, 7)])
def test_parse_count(text: str | int, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1k", "_1", "1__0", -1, True])
def test_parse_count_refuses(text: str | int) -> None:
    with pytest.raises(UsageError, match="not a whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (114_688, "112 KiB"),
        (1_415_040, "1.3 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (10 << 30, "10 GiB"),
        (5000 << 50, "5000 PiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 1 << 60))
def test_formatted_size_is_within_its_last_digit(size: int) -> None:
    number, unit = format_bytes(size).split()
    assert abs(float(number) * parse_bytes(f"1{unit}") - size) <= 0.0501 * parse_bytes(f"1{unit}")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unbounded"), (0, "0s"), (180, "3m"), (259_200, "3d"), (5400, "90m"), (0.5, "500ms"), (90_061, "90061s")],
)
def test_format_duration(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(0, 10**9))
def test_formatted_duration_reads_back(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000
