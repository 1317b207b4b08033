"""A store's settings: strict, typed, validated once. From code, from a TOML file, and from `DUOKV_*` variables.

    capacity = "10GiB"              # DUOKV_CAPACITY=10GiB
    read_threads = 4                # DUOKV_READ_THREADS=4
    default_class = "chat"          # DUOKV_DEFAULT_CLASS=chat
    [classes.agent]
    ttl = "3d"                      # DUOKV_CLASSES__AGENT__TTL=3d
    mode = "sliding"                # DUOKV_CLASSES__AGENT__MODE=sliding

Sizes and durations are strings with units; a variable wins over the file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.policy import MODES, ClassRule, Policy
from duokv.kvstore.units import UNBOUNDED, parse_bytes, parse_count, parse_duration

PREFIX = "DUOKV_"
OTHER_VARIABLES = ("DUOKV_DATA", "DUOKV_DEBUG", "DUOKV_STORE")
"""Variables that are not settings: where test data lies, whether errors show their traceback, kvctl's store."""
SEGMENTS_PER_CAPACITY = 64
"""At least this many segments fill a store, so that dropping one frees little more than is needed."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "direct": ("auto", "require", "off"),
    "fsync": ("none", "segment", "always"),
    "write_behind_full": ("wait", "drop"),
}
_AT_LEAST: Mapping[str, int] = {
    "capacity": 1,
    "capacity_blocks": 1,
    "segment_bytes": 1,
    "preallocate_bytes": 1,
    "swa_bytes": 0,
    "swa_expiry_s": 0,
    "read_threads": 1,
    "read_deadline_s": 0,
    "buffer_bytes": 1,
    "cache_bytes": 0,
    "write_behind_bytes": 0,
    "use_flush_s": 0,
    "maintenance_interval_s": 0,
    "checkpoint_interval_s": 0,
    "index_map_bytes": 1 << 20,
}


class StoreConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one process runs a store. Nothing here changes what stored bytes mean. UsageError for a value out of range.

    capacity: physical bytes the store may hold on disk, preallocation included; None (default) is unbounded.
    capacity_blocks: written slots the store may hold; None (default) is unbounded. Both limits hold.
    segment_bytes: size of a segment file, at most capacity/64; default 256 MiB.
    preallocate_bytes: the step in which a segment's space is taken from the file system; default 8 MiB.
    swa_bytes: host memory for SWA windows, committed at open; default 1 GiB, 0 keeps none.
    swa_expiry_s: seconds a window lives after its last use; default 180, None until its space is needed.
    direct: O_DIRECT "auto" where the file system takes it (default), "require" or refuse to open, "off".
    fsync: what a write waits for: "none", "segment" when one is sealed or flushed (default), "always" every commit.
    read_threads: threads that read, at most what the backend can use (POSIX: 8); default 8. Two more verify.
    read_deadline_s: seconds after which a read is a miss, unless the caller says otherwise; default 1.
    buffer_bytes: cap of the pool of aligned rows lent to callers; default 256 MiB.
    cache_bytes: host memory for verified copies of blocks, committed at open; default 0 keeps none.
    write_behind_bytes: host memory for commits that return once their blocks are copied, and are written by a thread
        (a single one may be larger); default 0, a commit writes before it returns.
    write_behind_full: what a commit does without room there: "wait" (default), or "drop" its blocks.
    use_flush_s: seconds uses may stay in memory only; default 1, 0 writes each at once.
    maintenance_interval_s: seconds between background passes (expiry, reclaim); default 1, 0 leaves them to the caller.
    checkpoint_interval_s: seconds between checkpoints of last uses beside the data, written by those passes: what power
        loss can make them older by; default 600, 0 leaves it to close.
    index_path: directory of the index, on a local disk; None (default) is beside the data.
    index_map_bytes: address space for the index, not memory or disk; default 64 GiB.
    writer_id: name of this process's segment directory; None (default) makes a fresh one.
    seed_policy: traffic classes a NEW store starts with; an existing store keeps its own. Default: agent 3 d, chat 7 d,
        sliding, chat for callers that name none.
    """

    capacity: int | None = None
    capacity_blocks: int | None = None
    segment_bytes: int = 256 << 20
    preallocate_bytes: int = 8 << 20
    swa_bytes: int = 1 << 30
    swa_expiry_s: float | None = 180.0
    direct: Literal["auto", "require", "off"] = "auto"
    fsync: Literal["none", "segment", "always"] = "segment"
    read_threads: int = 8
    read_deadline_s: float = 1.0
    buffer_bytes: int = 256 << 20
    cache_bytes: int = 0
    write_behind_bytes: int = 0
    write_behind_full: Literal["wait", "drop"] = "wait"
    use_flush_s: float = 1.0
    maintenance_interval_s: float = 1.0
    checkpoint_interval_s: float = 600.0
    index_path: str | None = None
    index_map_bytes: int = 64 << 30
    writer_id: str | None = None
    seed_policy: Policy = msgspec.field(default_factory=Policy.standard)

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            number = getattr(self, name)
            if number is not None and not number >= least:
                raise UsageError(f"{name} of {number} is too small; give at least {least}")
        for name in _CHOICES:
            _check_choice(name, getattr(self, name))
        if self.writer_id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", self.writer_id):
            raise UsageError(f"writer_id {self.writer_id!r} is no directory name; use up to 64 letters, digits, '_.-'")

    @property
    def effective_segment_bytes(self) -> int:
        """Bytes of a segment: `segment_bytes`, or 1/64 of the capacity if that is less."""
        if self.capacity is None:
            return self.segment_bytes
        return min(self.segment_bytes, self.capacity // SEGMENTS_PER_CAPACITY)


def load_config(path: Path | None, *, environ: Mapping[str, str]) -> StoreConfig:
    """Read settings from a TOML file (None: no file) and the `DUOKV_*` variables of `environ`.

    A file that gives classes replaces the standard ones; variables then change or add single ones (a class with '-' in
    its name has no variable). UsageError for anything unknown, malformed or out of range.
    """
    settings = [*(_from_file(path) if path else ()), *_from_environ(environ)]
    standard = Policy.standard()
    if any(setting.file and setting.path[0] == "classes" for setting in settings):
        ttls: dict[str, float | None] = {}
    else:
        ttls = {name: rule.ttl_s for name, rule in standard.classes.items()}
    modes: dict[str, Literal["sliding", "fixed"]] = {}
    default = standard.default
    values: dict[str, object] = {}
    for setting in settings:
        try:
            match setting.path:
                case ("classes", name, "ttl"):
                    ttls[name] = _duration(setting.value)
                case ("classes", name, "mode"):
                    modes[name] = _mode(setting.value)
                case ("default_class",):
                    default = _text(setting.value)
                case (name,) if name in _PARSERS:
                    values[name] = _PARSERS[name](setting.value)
                    msgspec.convert({name: values[name]}, StoreConfig)
                case _:
                    raise _unknown(setting, {*ttls, *modes, *standard.classes})
        except UsageError as error:
            raise UsageError(f"{setting.where}: {error}") from None
    try:
        values["seed_policy"] = _policy(ttls, modes, default)
    except UsageError as error:
        raise UsageError(f"{path or 'environment'}: {error}") from None
    return msgspec.convert(values, StoreConfig)


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value as given: in `file` (None: by a variable), under the key `path`."""

    file: Path | None
    path: tuple[str, ...]
    value: object

    @property
    def where(self) -> str:
        """What to name in an error."""
        return f"{self.file}: {self.spell(self.path)}" if self.file else self.spell(self.path)

    def spell(self, path: tuple[str, ...]) -> str:
        """Return a key as this setting's source writes it."""
        return ".".join(path) if self.file else PREFIX + "__".join(path).upper()


def _from_file(path: Path) -> Iterator[_Setting]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); correct the path or its permissions") from error
    except ValueError as error:  # also bytes that are not UTF-8
        raise UsageError(f"{path}: not TOML ({error}); correct that place") from error
    yield from _flatten(path, (), table)


def _flatten(file: Path, path: tuple[str, ...], value: object) -> Iterator[_Setting]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(file, (*path, key), inner)
    elif path:
        yield _Setting(file, path, value)


def _from_environ(environ: Mapping[str, str]) -> Iterator[_Setting]:
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            yield _Setting(None, tuple(name.removeprefix(PREFIX).lower().split("__")), environ[name])


def _unknown(setting: _Setting, classes: Iterable[str]) -> UsageError:
    """Name the nearest key, also if a class's key was guessed as a flat one (`ttl_agent`)."""
    class_paths = [("classes", name, key) for name in sorted(classes) for key in ("ttl", "mode")]
    paths: list[tuple[str, ...]] = [*((name,) for name in (*_PARSERS, "default_class")), *class_paths]
    guesses = {"_".join(path): path for path in paths}
    for path in class_paths:
        guesses |= {f"{path[2]}_{path[1]}": path, f"{path[1]}_{path[2]}": path}
    close = difflib.get_close_matches("_".join(setting.path), guesses, n=1)
    valid = [setting.spell(path) for path in ([guesses[close[0]]] if close else paths)]
    kind = "key" if setting.file else "variable"
    way_out = f"did you mean {valid[0]!r}?" if close else f"valid: {', '.join(valid)}"
    return UsageError(f"unknown {kind}; {way_out}")


def _policy(ttls: dict[str, float | None], modes: dict[str, Literal["sliding", "fixed"]], default: str) -> Policy:
    for name in modes:
        if name not in ttls:
            raise UsageError(f"classes.{name} has a mode and no ttl; give one, as in '3d' or {UNBOUNDED!r}")
    if default not in ttls:
        raise UsageError(f"default_class {default!r} is not one of the classes; {nearest(default, ttls)}")
    return Policy({name: ClassRule(ttl, modes.get(name, "sliding")) for name, ttl in ttls.items()}, default).numbered()


def _text(value: object, example: str = "a-name") -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{value!r} is not a text; write it in quotes, as in {example!r}")
    return value


def _mode(value: object) -> Literal["sliding", "fixed"]:
    if value == "sliding":
        return "sliding"
    if value == "fixed":
        return "fixed"
    raise UsageError(f"mode {value!r} is not a choice; {nearest(str(value), MODES)}")


def _check_choice(name: str, value: object) -> object:
    if value not in _CHOICES[name]:
        raise UsageError(f"{name} {value!r} is not a choice; {nearest(str(value), _CHOICES[name])}")
    return value


def _size(value: object) -> int:
    return parse_bytes(_text(value, "10GiB"))


def _limit(value: object) -> int | None:
    return None if value == UNBOUNDED else _size(value)


def _count(value: object) -> int:
    if not isinstance(value, int | str):
        raise UsageError(f"{value!r} is not a whole number; write digits")
    return parse_count(value)


def _count_limit(value: object) -> int | None:
    return None if value == UNBOUNDED else _count(value)


def _duration(value: object) -> float | None:
    return parse_duration(_text(value, "180s"))


def _seconds(value: object) -> float:
    seconds = _duration(value)
    if seconds is None:
        raise UsageError(f"{UNBOUNDED!r} is not possible here; give a duration, as in '1s'")
    return seconds


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "capacity": _limit,
    "capacity_blocks": _count_limit,
    "segment_bytes": _size,
    "preallocate_bytes": _size,
    "swa_bytes": _size,
    "swa_expiry_s": _duration,
    "direct": partial(_check_choice, "direct"),
    "fsync": partial(_check_choice, "fsync"),
    "read_threads": _count,
    "read_deadline_s": _seconds,
    "buffer_bytes": _size,
    "cache_bytes": _size,
    "write_behind_bytes": _size,
    "write_behind_full": partial(_check_choice, "write_behind_full"),
    "use_flush_s": _seconds,
    "maintenance_interval_s": _seconds,
    "checkpoint_interval_s": _seconds,
    "index_path": _text,
    "index_map_bytes": _size,
    "writer_id": _text,
}
