"""Derives a trace's block keys in other processes, ahead of who needs them; run by the classes below alone.

On stdin: a byte that names the task, the root key, and int64 numbers. On stdout: keys, in the order of the numbers.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, cycle
from typing import Self

import numpy as np
import numpy.typing as npt

from duokv.bench.keymemo import KeyMemo, Piece
from duokv.bench.workload import Run
from duokv.kvstore.keys import KEY_BYTES

LEAST_BLOCKS = 200_000
"""Below it, starting processes costs more than they save."""
TOKEN_CACHE_BYTES = 96 << 20
"""Token ids to keep where every block is hashed: that is to be timed, not how a trace's tokens are made up."""
_AHEAD_BYTES = 1 << 20
"""Bytes of keys that may wait to be read."""
_MOST_HASHING = 4
"""Processes; with more, who needs their keys is the slower one."""
_Numbers = npt.NDArray[np.int64]


class _Process:
    """A process that derives keys ahead; a context manager that ends it. OSError if it cannot begin."""

    def __init__(self, task: bytes, root: bytes, numbers: _Numbers) -> None:
        with tempfile.TemporaryFile() as given:
            given.write(task + root + numbers.tobytes())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=given, stdout=subprocess.PIPE, bufsize=_AHEAD_BYTES
            )
        assert self._process.stdout is not None
        self._keys = self._process.stdout
        with suppress(OSError):
            fcntl.fcntl(self._keys, fcntl.F_SETPIPE_SZ, _AHEAD_BYTES)

    def read(self, blocks: int) -> bytes | None:
        """The next keys; None if the process ended early, or was ended."""
        if self._keys.closed:
            return None
        keys = self._keys.read(blocks * KEY_BYTES)
        return keys if len(keys) == blocks * KEY_BYTES else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class PiecesAhead(_Process):
    """Derives pieces, each after what is before it."""

    def __init__(self, root: bytes, pieces: Sequence[Piece]) -> None:
        super().__init__(b"P", root, np.array(pieces, np.int64))

    def keys(self, piece: Piece) -> bytes | None:
        """The keys of the next piece; None if the process ended early, or was ended."""
        return self.read(piece.blocks)


class PromptsAhead:
    """Hashes every block of every prompt, in a process for each processor, four at most; a context manager as well."""

    def __init__(self, root: bytes, prompts: Sequence[Sequence[Run]]) -> None:
        self._memo = KeyMemo(root, token_bytes=TOKEN_CACHE_BYTES)
        """Hashes on when a process ended early."""
        count = min(len(os.sched_getaffinity(0)), _MOST_HASHING)
        with ExitStack() as started:
            shares = [_numbers_of(prompts[first::count], TOKEN_CACHE_BYTES // count) for first in range(count)]
            processes = [started.enter_context(_Process(b"H", root, share)) for share in shares]
            self._closing = started.pop_all()
        self._turns: Iterator[_Process] = cycle(processes)

    def keys(self, runs: Sequence[Run]) -> bytes:
        """The keys of the next prompt's blocks."""
        keys = next(self._turns).read(sum([count for _, count in runs]))
        return self._memo.hashed(runs) if keys is None else keys

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def _numbers_of(prompts: Sequence[Sequence[Run]], token_bytes: int) -> _Numbers:
    """What a process needs to hash prompts: token_bytes, their number, the runs of each, and the runs."""
    head = [token_bytes, len(prompts), *map(len, prompts)]
    return np.fromiter(chain(head, chain.from_iterable(chain.from_iterable(prompts))), np.int64)


def _hashed(root: bytes, numbers: _Numbers) -> Iterator[bytes]:
    token_bytes, count = numbers[:2].tolist()
    memo = KeyMemo(root, token_bytes=token_bytes)
    runs = numbers[2 + count :].reshape(-1, 2)
    end = 0
    for length in numbers[2 : 2 + count].tolist():
        first, end = end, end + length
        yield memo.hashed(runs[first:end].tolist())


def _derived(root: bytes, numbers: _Numbers) -> Iterator[bytes]:
    memo = KeyMemo(root)
    for piece in numbers.reshape(-1, len(Piece._fields)).tolist():
        yield memo.derive(Piece(*piece))


def main() -> None:
    """Derive what stdin asks for."""
    tasks: dict[bytes, Callable[[bytes, _Numbers], Iterator[bytes]]] = {b"P": _derived, b"H": _hashed}
    task, root = sys.stdin.buffer.read(1), sys.stdin.buffer.read(KEY_BYTES)
    with suppress(BrokenPipeError):
        for keys in tasks[task](root, np.frombuffer(sys.stdin.buffer.read(), np.int64)):
            sys.stdout.buffer.write(keys)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
