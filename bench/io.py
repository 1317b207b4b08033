"""How near the store comes to what the machine can do: loads and commits of real bytes against limits of the same run.

python -m duokv.bench.io                  # sweeps, in minutes
python -m duokv.bench.io --quick --json   # the main figures, in under a minute
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from duokv.bench import lookup
from duokv.bench.command_line import OneLineParser, number, numbers, progress_bar, terminal
from duokv.bench.io_case import V41_SLOT, Case, Result, run_case
from duokv.bench.io_limits import PAGE, check_disk
from duokv.bench.io_report import IoReport, Machine, Quick, tables
from duokv.kvstore.errors import DuoKVError

SLOTS = (V41_SLOT, 16_384, 524_288, 2_097_152)
BATCHES = (1, 8, 64, 601)
THREADS = (1, 2, 4, 8)
INDEXES = (0, 100_000, 1_000_000)
PROCESSES = (1, 2, 4)
PAIRS = 7
_LOOKUPS = 100
_PLAIN_WIDTH = 110


def sweep(
    base: Case, *, slots: Sequence[int], batches: Sequence[int], threads: Sequence[int], indexes: Sequence[int],
    processes: Sequence[int],
) -> Mapping[str, list[Case]]:  # fmt: skip
    """What to measure, by the one thing that changes; the rest stays as in `base`, of the slot also the bytes."""
    commit = replace(base, action="commit", threads=1)
    asked = replace(base, action="lookup+load")
    sizes = [(slot, max(1, base.blocks * base.slot_bytes // slot)) for slot in slots]
    return {
        "Cold loads by blocks": [replace(base, blocks=n) for n in batches],
        "Cold loads by slot": [replace(base, slot_bytes=slot, blocks=n) for slot, n in sizes],
        "Cold loads by threads": [replace(base, threads=n) for n in threads],
        "Cold loads by processes": [replace(base, processes=n) for n in processes],
        "Cold loads by blocks, buffered": [replace(base, blocks=n, direct=False) for n in batches],
        "Warm loads by blocks, own cache": [replace(base, blocks=n, source="cache") for n in batches],
        "Warm loads by threads, own cache": [replace(base, threads=n, source="cache") for n in threads],
        "Warm loads by blocks, page cache": [
            replace(base, blocks=n, source="page cache", direct=False) for n in batches
        ],
        "Cold loads with their lookup, by blocks in the index": [replace(asked, index_blocks=n) for n in indexes],
        "First blocks of streamed cold loads": [replace(base, action="stream", blocks=n) for n in batches],
        "Durable commits by blocks": [replace(commit, blocks=n) for n in batches],
        "Durable commits by slot": [replace(commit, slot_bytes=slot, blocks=n) for slot, n in sizes],
        "Durable commits by threads of the limit": [replace(commit, threads=n) for n in threads],
        "Durable commits by processes": [replace(commit, processes=n) for n in processes],
        "Durable commits, buffered": [replace(commit, direct=False)],
    }


def measure(
    folder: Path, base: Case, groups: Mapping[str, list[Case]], *, pairs: int, index_blocks: int,
    done: Callable[[], None],
) -> tuple[Quick, dict[str, list[Result]]]:  # fmt: skip
    """The main figures, and every group's. StoreError if the store falls short of what it is asked."""
    found: dict[Case, Result] = {}
    for case in _distinct(base, groups):
        found[case] = run_case(folder, case, pairs)
        done()
    looked_up = lookup.measure(index_blocks, repeats=_LOOKUPS, progress=False)
    done()
    cold, warm, commit = (found[case] for case in _main_cases(base))
    return Quick(cold, warm, commit, looked_up), {
        title: [found[case] for case in group] for title, group in groups.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 2 for what cannot be done."""
    given = arguments(argv)
    try:
        report = measured(given, shown=not given.json and sys.stderr.isatty())
    except (DuoKVError, OSError) as error:
        print(f"io: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(report.as_json()))
    else:
        out = terminal(_PLAIN_WIDTH)
        for part in (*report.machine.lines(), *tables(report)):
            out.print(part)
    return 0


def measured(given: argparse.Namespace, *, shown: bool) -> IoReport:
    """Measure what arguments ask for. StoreError if the store falls short, OSError for a folder that is no use."""
    case = Case("load", slot_bytes=given.slots[0], blocks=max(given.batches), threads=max(given.threads))
    groups: Mapping[str, list[Case]] = {} if given.quick else sweep(
        case, slots=given.slots, batches=given.batches, threads=given.threads, indexes=given.index,
        processes=given.processes,
    )  # fmt: skip
    cases = _distinct(case, groups)
    folder = given.folder.absolute()
    check_disk(folder, max(case.disk_bytes(given.pairs) for case in cases))
    machine = Machine.here(folder)
    with (
        tempfile.TemporaryDirectory(prefix="duokv-io-", dir=folder) as name,
        progress_bar("measured", len(cases) + 1, shown=shown) as done,
    ):
        quick, found = measure(
            Path(name), case, groups, pairs=given.pairs, index_blocks=max(1, *given.index), done=done
        )
    return IoReport(machine.ended(), given.pairs, quick, found)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line."""
    parser = OneLineParser(prog="python -m duokv.bench.io", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the main figures only")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="measure below this folder, on a disk (default: here)",
    )
    parser.add_argument("--pairs", type=number(1), default=PAIRS, help=f"store against limit, so often ({PAIRS})")
    for name, unit, least, multiple, default in (
        ("slots", "bytes of a block on disk", PAGE, PAGE, SLOTS),
        ("batches", "blocks of a call", 1, 1, BATCHES),
        ("threads", "reading threads", 1, 1, THREADS),
        ("index", "other blocks in the index", 0, 1, INDEXES),
        ("processes", "processes at once", 1, 1, PROCESSES),
    ):
        shown = ",".join(map(str, default))
        parser.add_argument(
            f"--{name}",
            type=numbers(least, multiple=multiple),
            default=default,
            metavar="N,N",
            help=f"{unit} ({shown})",
        )
    return parser.parse_args(argv)


def _main_cases(base: Case) -> tuple[Case, Case, Case]:
    """Cold, warm, commit."""
    return base, replace(base, source="cache"), replace(base, action="commit", threads=1)


def _distinct(base: Case, groups: Mapping[str, list[Case]]) -> list[Case]:
    return list(dict.fromkeys([*_main_cases(base), *(case for group in groups.values() for case in group)]))


if __name__ == "__main__":
    sys.exit(main())
