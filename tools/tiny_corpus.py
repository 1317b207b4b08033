"""The small model's texts: the sources of the Python standard library, which every machine that runs it has.

Left out are test packages, which some distributions drop, and generated tables, which are no text.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from duokv.engine.config import BOS

LEFT_OUT = frozenset({
    "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data",
})  # fmt: skip
"""Folders, at any depth, whose files are not taken."""
_HELD_OUT_SHARE = 20 / 256
_WINDOWS_PER_FILE = 2
"""Of a held-out file: enough for variety, few enough that no large file dominates."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path below the library's root, its digest and its bytes."""

    path: str
    sha256: str
    text: bytes

    @property
    def held_out(self) -> bool:
        """Whether training must not see it: decided by the digest of its path alone."""
        return hashlib.sha256(self.path.encode()).digest()[0] < 256 * _HELD_OUT_SHARE


def read_sources(root: Path | None = None) -> list[Source]:
    """Read the library's sources in the order of their paths; `root` is the running interpreter's by default."""
    root = root or Path(sysconfig.get_path("stdlib"))
    return [
        Source(path.relative_to(root).as_posix(), hashlib.sha256(text).hexdigest(), text)
        for path in sorted(root.rglob("*.py"))
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
        if (text := path.read_bytes())
    ]


def training_tokens(sources: list[Source]) -> NDArray[np.int64]:
    """Return the ids of all texts that are not held out, one after another, each after a `BOS`."""
    parts = [np.append([BOS], np.frombuffer(source.text, np.uint8)) for source in sources if not source.held_out]
    return np.concatenate(parts).astype(np.int64)


def held_out_slice(sources: list[Source], *, windows: int, length: int) -> bytes:
    """Return up to `windows` times `length` bytes: whole windows of held-out files, in the order of their digests.

    Files are held out, not passages: about 6 % of the slice, in pieces of 64 bytes, also occurs in files trained on.
    """
    files = sorted((source for source in sources if source.held_out), key=lambda source: source.sha256)
    cut = [w for file in files for w in _whole_windows(file.text, length)]
    return b"".join(cut[:windows])


def random_crops(tokens: NDArray[np.int64], rng: np.random.Generator, *, rows: int, length: int) -> NDArray[np.int64]:
    """Return [rows, length + 1]: each a `BOS` and `length` ids from anywhere in the texts."""
    starts = rng.integers(0, tokens.size - length, rows)
    crops = tokens[starts[:, None] + np.arange(length)]
    return np.concatenate([np.full((rows, 1), BOS), crops], axis=1)


def manifest(sources: list[Source]) -> dict[str, object]:
    """Return what was read: the digest of every file, by path, of those trained on and of those held out."""
    seen, unseen = ({s.path: s.sha256 for s in sources if s.held_out == held_out} for held_out in (False, True))
    return {"left_out": sorted(LEFT_OUT), "trained_on": seen, "held_out": unseen}


def _whole_windows(text: bytes, length: int) -> list[bytes]:
    count = min(len(text) // length, _WINDOWS_PER_FILE)
    return [text[i * length : (i + 1) * length] for i in range(count)]
