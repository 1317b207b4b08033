"""Prompts and namespaces from files, for kvctl prefix."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import msgspec

from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.keys import Media, Namespace

_REQUIRED = ("model", "weights", "tokenizer", "kv_format")
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and what stands at its placeholders."""

    tokens: list[int]
    media: tuple[Media, ...]


class _MediaItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]
    digest: str


class _PromptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: list[Id]
    media: list[_MediaItem] = []


def read_prompt(file: str) -> Prompt:
    """Read `[1, 2, ...]`, `{"tokens": [...], "media": [{"offset", "length", "digest": hex}]}` or numbers in plain text.

    '-' is stdin. UsageError naming the file if it cannot be read or meant.
    """
    text = sys.stdin.read() if file == "-" else _read(file)
    try:
        if text.lstrip().startswith("{"):
            whole = msgspec.json.decode(text, type=_PromptFile)
        elif text.lstrip().startswith("["):
            whole = _PromptFile(msgspec.json.decode(text, type=list[Id]))
        else:
            whole = _PromptFile(msgspec.convert([int(word) for word in re.split(r"[\s,]+", text.strip())], list[Id]))
        return Prompt(whole.tokens, tuple(Media(m.offset, m.length, bytes.fromhex(m.digest)) for m in whole.media))
    except (msgspec.MsgspecError, ValueError) as error:
        raise UsageError(f"{file}: no token ids ({error}); give a JSON list of them, or plain numbers") from None


def read_namespace(file: str | None, options: Mapping[str, str]) -> Namespace:
    """A namespace from a TOML or JSON file and options, which win. `salt` is hex. UsageError for what is missing."""
    known = [field.name for field in fields(Namespace)]
    values: dict[str, object] = {**(_read_table(file) if file else {}), **options}
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"{file}: unknown key {name!r}; {nearest(name, known)}")
        if not isinstance(value, str):
            raise UsageError(f"{file}: {name} is {value!r}; give it as text, in quotes")
    texts = {name: str(value) for name, value in values.items()}
    lacking = [name for name in _REQUIRED if name not in texts]
    if lacking:
        ways = " ".join(f"--{name.replace('_', '-')}" for name in lacking)
        raise UsageError(f"namespace without {', '.join(lacking)}; give {ways}, or a file with --namespace")
    try:
        salt = bytes.fromhex(texts.pop("salt")) if "salt" in texts else None
    except ValueError:
        raise UsageError("namespace: salt is not hex; write its bytes as pairs of hex digits") from None
    return msgspec.convert({**texts, "salt": salt}, Namespace)


def _read_table(file: str) -> dict[str, object]:
    text = _read(file)
    try:
        table: object = json.loads(text) if file.endswith(".json") else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if file.endswith(".json") else "TOML"
        raise UsageError(f"{file}: not {kind} ({error}); correct that place") from None
    if not isinstance(table, dict):
        raise UsageError(f'{file}: not a table of names; write model = "..." and so on')
    return table


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); correct the path or its permissions") from None
    except ValueError as error:
        raise UsageError(f"{file}: not text ({error}); give a file of token ids") from None
