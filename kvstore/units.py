"""Sizes, durations and counts as people write them. A string always names its unit, so that '10' cannot be misread."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from duokv.kvstore.errors import UsageError

_SIZES: Mapping[str, int] = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)},
}
_DURATIONS: Mapping[str, Fraction] = {
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86_400),
}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")

SIZE_UNITS = ", ".join(_SIZES)
DURATION_UNITS = ", ".join(_DURATIONS)
UNBOUNDED = "unbounded"
"""The spelling of 'no limit', which is None in code."""


def parse_bytes(text: str | int) -> int:
    """Return the bytes meant by '10GiB', '512 KiB', '1GB' (10**9) or an int of bytes.

    UsageError unless it is a whole, non-negative number of bytes with a known unit; units are case-sensitive.
    """
    if isinstance(text, int):
        if isinstance(text, bool) or text < 0:
            raise UsageError(f"size {text!r} is not a number of bytes; give at least 0")
        return text
    number, unit = _split(text, "size", SIZE_UNITS, "10GiB")
    if unit not in _SIZES:
        raise UsageError(f"size {text!r} has the unknown unit {unit!r}; accepted: {SIZE_UNITS}")
    size = number * _SIZES[unit]
    if size.denominator != 1:
        raise UsageError(f"size {text!r} is not a whole number of bytes; use a smaller unit of {SIZE_UNITS}")
    return int(size)


def parse_duration(text: str) -> float | None:
    """Return the seconds meant by '180s', '5m', '1h', '3d' or '500ms'; None for 'unbounded'. UsageError otherwise."""
    if text == UNBOUNDED:
        return None
    number, unit = _split(text, "duration", f"{DURATION_UNITS}, or {UNBOUNDED!r}", "180s")
    if unit not in _DURATIONS:
        raise UsageError(
            f"duration {text!r} has the unknown unit {unit!r}; accepted: {DURATION_UNITS}, or {UNBOUNDED!r}"
        )
    return float(number * _DURATIONS[unit])


def parse_count(text: str | int) -> int:
    """Return a non-negative whole number from '65536', '65_536' or an int; UsageError otherwise."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    if isinstance(text, str) and re.fullmatch(r"[0-9]+(?:_[0-9]+)*", text):
        return int(text)
    raise UsageError(f"count {text!r} is not a whole number of at least 0; write digits, as in '65536'")


def format_bytes(size: int) -> str:
    """Return a size for people in the largest fitting binary unit, rounded to one decimal: '112 KiB', '1.3 MiB'."""
    unit = "B"
    for power, prefix in enumerate("KMGTP", 1):
        if round(size / 1024 ** (power - 1), 1) < 1024:
            break
        unit = f"{prefix}iB"
    number = f"{size / _SIZES[unit]:.1f}"
    return f"{number.removesuffix('.0')} {unit}"


def format_duration(seconds: float | None) -> str:
    """Return a duration in the largest unit that keeps it whole ('3d', '90m', '500ms'); `parse_duration` reads it."""
    if seconds is None:
        return UNBOUNDED
    for unit, length in reversed(list(_DURATIONS.items())):
        number = Fraction(repr(float(seconds))) / length
        if number.denominator == 1 and number:
            return f"{int(number)}{unit}"
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def _split(text: str, kind: str, units: str, example: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{kind} {text!r} is not a number with a unit, as in {example!r}; accepted: {units}")
    number, unit = match.groups()
    if not unit:
        raise UsageError(f"{kind} {text!r} has no unit; write it as in {example!r}, accepted: {units}")
    return Fraction(number), unit
