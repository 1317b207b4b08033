"""DuoKV beside what one would take instead: the same bytes in the same order, in one run, against the same limits.

python -m duokv.bench.peers --env lmcache=/venvs/lmcache/bin/python --env vllm=/venvs/vllm/bin/python
python -m duokv.bench.peers --quick      # fewer blocks and pairs, in under a minute
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from duokv.bench.command_line import OneLineParser, number, terminal
from duokv.bench.io_case import V41, V41_SLOT
from duokv.bench.io_limits import check_disk
from duokv.bench.io_report import Machine
from duokv.bench.peer_serve import Given, touched_rows
from duokv.bench.peers_case import FAILURES, KEPT, ForeignPeer, Limits, Measured, Part, Size, Worker, measure
from duokv.bench.peers_local import local_worker
from duokv.bench.peers_report import PeersReport, tables
from duokv.kvstore import CacheGeometry
from duokv.kvstore.errors import DuoKVError

LOCAL = ("duokv", "lmdb", "files", "files+fsync")
FOREIGN: Mapping[str, tuple[str, str]] = {
    "sglang-files": ("sglang", "peer_sglang.py"),
    "sglang-3fs-mock": ("sglang", "peer_sglang.py"),
    "vllm-fs": ("vllm", "peer_vllm.py"),
    "lmcache-disk": ("lmcache", "peer_lmcache.py"),
    "lmcache-fs-native": ("lmcache", "peer_lmcache.py"),
    "mooncake-tcp": ("mooncake", "peer_mooncake.py"),
}
"""Peers that need an environment: its name, and the driver beside this file."""
PAIRS, QUICK_PAIRS = 5, 3
BLOCKS, QUICK_BLOCKS = 601, 64
SMALL = 64
_ANSWER_S = 120.0
_PLAIN_WIDTH = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 2 for what cannot be done."""
    given = arguments(argv)
    try:
        report = measured(given, shown=not given.json and sys.stderr.isatty())
    except (DuoKVError, OSError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(report.as_json()))
        return 0
    out = terminal(_PLAIN_WIDTH)
    for part in (*report.machine.lines(), *tables(report)):
        out.print(part)
    return 0


def measured(given: argparse.Namespace, *, shown: bool) -> PeersReport:
    """Measure what arguments ask for. OSError for a folder that is no use."""
    folder = given.folder.absolute()
    geometry = CacheGeometry.preset(V41)
    size = Size(geometry.payload_bytes, V41_SLOT, given.blocks, KEPT + given.pairs, given.threads)
    # LMDB's pages are a little larger, and the limits have files of their own.
    check_disk(folder, (size.rounds + 2 * KEPT + 2) * size.blocks * size.slot_bytes)
    parts = [Part("cold", n) for n in sorted({min(SMALL, given.blocks), given.blocks})]
    parts += [Part(action, given.blocks) for action in ("warm", "put", "lookup", "tokens")]
    machine = Machine.here(folder)
    found = []
    with tempfile.TemporaryDirectory(prefix="duokv-peers-", dir=folder) as name:
        limits = Limits(Path(name), size)
        try:
            for peer in given.peers:
                if shown:
                    print(f"measuring {peer} ...", file=sys.stderr)
                found.append(_measure_one(peer, Path(name), limits, size, parts, given))
        finally:
            limits.close()
    return PeersReport(machine.ended(), given.pairs, size, tuple(parts), found)


def _measure_one(
    name: str, folder: Path, limits: Limits, size: Size, parts: Sequence[Part], given: argparse.Namespace
) -> Measured:
    if name in FOREIGN and FOREIGN[name][0] not in given.env:
        environment = FOREIGN[name][0]
        return Measured(name, None, {}, f"no environment; name one with --env {environment}=PYTHON")
    try:
        with _opened(name, folder, limits, size, given.env) as worker:
            return measure(name, worker, limits, parts, given.pairs)
    except FAILURES as error:
        return Measured(name, None, {}, str(error))


@contextmanager
def _opened(name: str, folder: Path, limits: Limits, size: Size, environments: Mapping[str, Path]) -> Iterator[Worker]:
    # What a peer leaves goes before the next one comes.
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=folder, ignore_cleanup_errors=True) as own:
        worker: Worker
        if name in FOREIGN:
            environment, driver = FOREIGN[name]
            worker = ForeignPeer(
                environments[environment], Path(__file__).with_name(driver), name,
                folder=Path(own), content=limits.content, size=size, answer_s=_ANSWER_S,
            )  # fmt: skip
        else:
            memory = touched_rows(2 * size.blocks, size.slot_bytes)
            opened = Given(Path(own), memory, size.payload_bytes, size.blocks, size.rounds, size.threads)
            worker = local_worker(name, opened, CacheGeometry.preset(V41), limits.content)
        try:
            yield worker
        finally:
            worker.close()


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line."""
    parser = OneLineParser(prog="python -m duokv.bench.peers", description=(__doc__ or "").partition("\n")[0])
    known = (*LOCAL, *FOREIGN)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_BLOCKS} blocks and {QUICK_PAIRS} pairs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="measure below this folder, on a disk (here)"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME=PYTHON",
        help=f"the interpreter that has a project: {', '.join(sorted({one for one, _ in FOREIGN.values()}))}",
    )  # fmt: skip
    parser.add_argument("--peers", default=",".join(known), metavar="NAME,NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--pairs", type=number(1), help=f"peer against limit, so often ({PAIRS})")
    parser.add_argument("--blocks", type=number(1), help=f"of a batch ({BLOCKS})")
    parser.add_argument(
        "--threads", type=number(1), default=4, help="of the limits, and of peers that let one choose (4)"
    )
    given = parser.parse_args(argv)
    given.pairs = given.pairs or (QUICK_PAIRS if given.quick else PAIRS)
    given.blocks = given.blocks or (QUICK_BLOCKS if given.quick else BLOCKS)
    given.peers = given.peers.split(",")
    if unknown := [name for name in given.peers if name not in known]:
        parser.error(f"no peer is called {unknown[0]!r}; there are {', '.join(known)}")
    given.env = dict(_environment(parser, text) for text in given.env)
    return given


def _environment(parser: OneLineParser, text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    names = sorted({one for one, _ in FOREIGN.values()})
    if name not in names or not python:
        parser.error(f"--env {text!r} is not NAME=PYTHON with NAME of {', '.join(names)}")
    # Not resolved: a virtual environment is told by the link's place.
    return name, Path(os.path.abspath(python))  # noqa: PTH100


if __name__ == "__main__":
    sys.exit(main())
