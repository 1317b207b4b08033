"""What all commands share: which store is meant, and how answers and times are shown."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from duokv.kvstore.config import StoreConfig, load_config
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.inspection import StoreView, inspect_store, operate_store
from duokv.kvstore.units import parse_count, parse_duration

StoreArgument: TypeAlias = Annotated[
    str | None, typer.Argument(metavar="[STORE]", help="The store's folder or URL; the same as --store.")
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

Unbounded = "unbounded"


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

    def open(self, *, change: bool) -> AbstractContextManager[StoreView]:
        """Open it to change it, or only to look."""
        return self.operate() if change else self.inspect()


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


def choice(option: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`; UsageError names the nearest."""
    names = tuple(known)
    if value not in names:
        raise UsageError(f"{option} {value!r} is not a choice; {nearest(value, names)}")
    return value


def count(option: str, text: str) -> int:
    """Read a whole number given to an option."""
    return _named(option, lambda: parse_count(text))


def duration(option: str, text: str) -> float | None:
    """Read a duration given to an option; None is unbounded."""
    return _named(option, lambda: parse_duration(text))
