"""Derives a trace's block keys in another process, ahead of who needs them; run by `KeysAhead` alone.

On stdin: the root key and, as int64, the pieces in order. On stdout: their keys.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from duokv.bench.keymemo import KeyMemo, Piece
from duokv.kvstore.keys import KEY_BYTES

WORTH_IT = 200_000
"""Blocks that take about as long to derive as two processes to start."""
_AHEAD_BYTES = 1 << 20
"""Bytes of keys that may wait to be read."""


class KeysAhead:
    """A process that derives the keys of pieces in order; a context manager that ends it.

    OSError if it cannot begin.
    """

    def __init__(self, root: bytes, pieces: Sequence[Piece]) -> None:
        with tempfile.TemporaryFile() as given:
            given.write(root)
            given.write(np.array(pieces, np.int64).tobytes())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=given, stdout=subprocess.PIPE, bufsize=_AHEAD_BYTES
            )
        assert self._process.stdout is not None
        self._keys = self._process.stdout
        with suppress(OSError):
            fcntl.fcntl(self._keys, fcntl.F_SETPIPE_SZ, _AHEAD_BYTES)

    def keys(self, piece: Piece) -> bytes | None:
        """The keys of the next piece; None if the process ended early, or was ended."""
        if self._keys.closed:
            return None
        keys = self._keys.read(piece.blocks * KEY_BYTES)
        return keys if len(keys) == piece.blocks * KEY_BYTES else None

    def __enter__(self) -> KeysAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Derive what stdin asks for."""
    root = sys.stdin.buffer.read(KEY_BYTES)
    pieces = np.frombuffer(sys.stdin.buffer.read(), np.int64).reshape(-1, len(Piece._fields))
    memo = KeyMemo(root)
    with suppress(BrokenPipeError):
        for piece in pieces.tolist():
            sys.stdout.buffer.write(memo.derive(Piece(*piece)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
