"""Names of files in a store: relative, '/'-separated, never out of the root."""

from __future__ import annotations

from duokv.kvstore.errors import UsageError

LOCKS = "locks"
"""Folder of lock files; not a place for other files, and not listed."""


def check_name(name: str) -> str:
    """Return `name` when it is one a store may use; UsageError otherwise.

    Names that begin with a dot belong to the backends (temporary files), which also keeps '..' out.
    """
    parts = name.split("/")
    if any(not part or part.startswith(".") or "\0" in part for part in parts) or parts[0] == LOCKS:
        raise UsageError(
            f"file name {name!r} is not one a store uses; "
            f"give '/'-separated parts without a leading dot, not in {LOCKS}/"
        )
    return name


def check_prefix(prefix: str) -> str:
    """Return `prefix` when names could begin with it; UsageError otherwise."""
    folder, slash, _ = prefix.rpartition("/")
    if slash:
        check_name(folder)
    return prefix
