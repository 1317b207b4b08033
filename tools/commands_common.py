"""What all commands share: which store is meant, and how answers and times are shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TextIO, TypeAlias, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from duokv.kvstore.config import StoreConfig, load_config
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.inspection import StoreView, inspect_store, operate_store
from duokv.kvstore.units import format_duration

StoreArgument: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="STORE", help="The store's folder or URL; the same as --store.")
]
StoreOption: TypeAlias = Annotated[
    str | None, typer.Option("--store", metavar="STORE", envvar="DUOKV_STORE", help="The store's folder or URL.")
]
ConfigOption: TypeAlias = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings of the engines that use it (TOML).")
]
GeometryOption: TypeAlias = Annotated[
    str | None, typer.Option("--geometry", metavar="NAME", help="Refuse a store of another geometry.")
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
DryRunOption: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Say what would happen and change nothing.")]


Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True, slots=True)
class Target:
    """The store a command is about."""

    url: str
    config: StoreConfig
    geometry: str | None

    def inspect(self) -> AbstractContextManager[StoreView]:
        """Open it to look."""
        return inspect_store(self.url, config=self.config, geometry=self.geometry)

    def operate(self) -> AbstractContextManager[StoreView]:
        """Open it to change it."""
        return operate_store(self.url, config=self.config, geometry=self.geometry)


def target(named: str | None, store: str | None, config: Path | None, geometry: str | None) -> Target:
    """Make out which store is meant, from the argument or --store; UsageError if none is."""
    url = named or store
    if url is None:
        raise UsageError("no store given; name its folder with --store, or set DUOKV_STORE")
    return Target(url, load_config(config, environ=os.environ), geometry)


def show(document: object, *, as_json: bool) -> bool:
    """Print `document` (dataclasses, dicts, plain values) as JSON if asked for; returns whether it did."""
    if as_json:
        plain = msgspec.to_builtins(document)
        sys.stdout.write(json.dumps(plain, indent=2) + "\n")
        sys.stdout.flush()
    return as_json


def choice(option: str, value: str, known: Sequence[Choice]) -> Choice:
    """Return the one of `known` that `value` is; UsageError names the nearest."""
    for one in known:
        if one == value:
            return one
    raise UsageError(f"{option} {value!r} is not a choice; {nearest(value, known)}")


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print labelled lines; long values are not broken, so that keys and paths can be copied."""
    rows = list(rows)
    width = max((len(label) for label, _ in rows), default=0)
    out = _console(sys.stdout)
    for label, value in rows:
        out.print(f"{label:<{width}}  {value}", soft_wrap=True)


def lines(*texts: str) -> None:
    """Print lines as they are."""
    out = _console(sys.stdout)
    for text in texts:
        out.print(text, soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; a column whose name begins with '>' is aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    _console(sys.stdout).print(made)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the block runs, if that is a terminal; call what this yields with (done, of how many)."""
    console = _console(sys.stderr)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def moment(at_s: float) -> str:
    """A time in seconds since the epoch as people read it, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def relative(at_s: float, now_s: float) -> str:
    """A time seen from now: 'in 2d 3h', '5m 10s ago'."""
    distance = abs(at_s - now_s)
    return f"in {span(distance)}" if at_s > now_s else f"{span(distance)} ago"


def span(seconds: float) -> str:
    """A length of time in its two largest units: '2d 3h', '5m 10s'."""
    left = round(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number or (unit == "s" and not parts):
            parts.append(f"{number}{unit}")
    return " ".join(parts[:2])


def amount(number: int, noun: str) -> str:
    """'1 block', '2,000 blocks'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def rule(ttl_s: float | None, mode: str) -> str:
    """A class's rule in words."""
    since = "after its last use" if mode == "sliding" else "after it was stored"
    return "until space is needed" if ttl_s is None else f"{format_duration(ttl_s)} {since}"


def _console(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, markup=False, emoji=False)
