"""The few exceptions the store raises. A miss is a value and corruption an event; neither is here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DuoKVError(Exception):
    """Base class. The message is one line: the thing, the reason, the way out."""


class UsageError(DuoKVError):
    """The caller or operator asked for something that cannot be meant (exit code 2)."""


class StoreError(DuoKVError):
    """A store cannot be opened or operated as it is: foreign, busy, read-only, of another geometry (exit code 2)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the ending of an error message that names the closest valid spelling of `name`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else "valid: " + ", ".join(names)
