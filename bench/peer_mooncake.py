"""Mooncake Store over TCP, for `peer_serve.py`: a master, a process that owns the memory, and this client of both."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duokv.bench.peer_serve import About, Action, Given, Peer, Rows

_HOST = "127.0.0.1"
_START_S = 30.0
_LEASE_MS = 60_000
_BUFFER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys as text, where each row's payload begins, its length, and the rows."""

    keys: list[str]
    pointers: list[int]
    sizes: list[int]
    rows: Rows


def open_peer(name: str, given: Given) -> Peer[Wanted]:
    """Start its processes and connect. `name` is not looked at."""
    del name
    return _Store(given)


class _Store:
    def __init__(self, given: Given) -> None:
        self._payload_bytes = given.payload_bytes
        self._processes: list[subprocess.Popen[bytes]] = []
        importlib.import_module("mooncake.store")
        try:
            self._store = self._connected(given)
        except BaseException:
            self.close()
            raise

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return {
            "version": f"mooncake {importlib.metadata.version('mooncake-transfer-engine-non-cuda')}",
            "durable": False,
            "durability": "none: the memory of another process",
            "integrity": "none of its own; TCP's",
            "note": "over TCP of one machine, registered memory; no bytes on a device",
            "missing": {"cold": "keeps its bytes in memory", "tokens": "takes keys"},
        }

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Wanted:
        """See `Peer.prepare`."""
        del action
        pointers = [row.ctypes.data for row in rows]
        return Wanted([key.hex() for key in keys], pointers, [self._payload_bytes] * len(keys), rows)

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        if any(self._store.batch_put_from(handle.keys, handle.pointers, handle.sizes)):
            raise OSError("Mooncake stored less than asked")

    def read(self, handle: Wanted) -> Iterable[Rows]:
        """See `Peer.read`."""
        got = self._store.batch_get_into(handle.keys, handle.pointers, handle.sizes)
        return [row for row, nbytes in zip(handle.rows, got, strict=True) if nbytes == self._payload_bytes]

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        found = self._store.batch_is_exist(handle.keys)
        return next((place for place, one in enumerate(found) if one != 1), len(found))

    def lookup_tokens(self, handle: Wanted) -> int:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Peer.close`."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()

    def _connected(self, given: Given) -> Any:  # noqa: ANN401  # foreign, untyped
        package = Path(importlib.import_module("mooncake").__path__[0])
        port, metrics = _free_port(), _free_port()
        self._start(
            [
                sys.executable,
                "-c",
                "import sys; from mooncake.cli import main; sys.exit(main())",
                f"-rpc_address={_HOST}",
                f"-rpc_port={port}",
                f"-metrics_host={_HOST}",
                f"-metrics_port={metrics}",
                f"-default_kv_lease_ttl={_LEASE_MS}",
            ],
            package,
        )
        _wait_for(port)
        segment = (given.rounds + 2) * given.blocks * given.slot_bytes + (256 << 20)
        owner = self._start([sys.executable, "-c", _OWNER, f"{_HOST}:{port}", str(segment)], package)
        if owner.stdout is None or owner.stdout.readline().strip() != b"0":
            raise ConnectionError("the process that owns Mooncake's memory did not start")
        store = _client(f"{_HOST}:{port}", 0, _BUFFER_BYTES)
        if store.register_buffer(given.memory.ctypes.data, given.memory.nbytes):
            raise OSError("Mooncake refused the memory")
        return store

    def _start(self, command: list[str], folder: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sys.stderr, cwd=folder.parent
        )
        self._processes.append(process)
        return process


def _client(master: str, segment_bytes: int, buffer_bytes: int) -> Any:  # noqa: ANN401  # foreign, untyped
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(_HOST, "P2PHANDSHAKE", segment_bytes, buffer_bytes, "tcp", "", master)
    if code:
        raise ConnectionError(f"Mooncake's setup gave {code}")
    return store


# Its memory must not be the client's, or a read would be a copy within one process.
_OWNER = f"""
import os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
answers.write(f"{{store.setup({_HOST!r}, 'P2PHANDSHAKE', int(sys.argv[2]), 64 << 20, 'tcp', '', sys.argv[1])}}\\n")
answers.flush()
import threading
threading.Event().wait()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int) -> None:
    ends = time.monotonic() + _START_S
    while time.monotonic() < ends:
        with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"Mooncake's master did not listen within {_START_S:.0f} s")
