"""Command lines of the benchmarks: one line for what is wrong, lists of numbers, progress, a console for people."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Advance(Protocol):
    """Tells a progress bar that so much more is done; from any thread."""

    def __call__(self, count: int = 1) -> None:
        """Move the bar on."""


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


@contextmanager
def progress_bar(what: str, total: int, *, shown: bool = True) -> Iterator[Advance]:
    """A bar on stderr while the block runs, of `total` things to do."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task("", total=total)

        def advance(count: int = 1) -> None:
            bar.advance(task, count)

        yield advance
    if shown and not sys.stderr.isatty():  # there, rich leaves its only line unfinished
        print(file=sys.stderr)


def terminal(plain_width: int) -> Console:
    """Where tables go: as wide as the terminal, or `plain_width` columns where there is none."""
    return Console(width=None if sys.stdout.isatty() else plain_width, highlight=False)
