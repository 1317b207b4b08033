"""Command lines of the benchmarks: one line for what is wrong, lists of numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        self.exit(2, f"{self.prog.rpartition('.')[2]}: {message}; --help tells what there is\n")


def numbers(least: int, *, multiple: int = 1) -> Callable[[str], tuple[int, ...]]:
    """A parser of comma-separated whole numbers of at least `least`, each a multiple of `multiple`."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers; write it as in 1,8,64") from None
        if min(found) < least or any(number % multiple for number in found):
            beside = "" if multiple == 1 else f", multiples of {multiple}"
            raise argparse.ArgumentTypeError(f"{text!r} holds what is out of range; give at least {least}{beside}")
        return found

    return parse


def number(least: int) -> Callable[[str], int]:
    """A parser of one whole number of at least `least`."""

    def parse(text: str) -> int:
        found = numbers(least)(text)
        if len(found) != 1:
            raise argparse.ArgumentTypeError(f"{text!r} is more than one number; give one")
        return found[0]

    return parse
