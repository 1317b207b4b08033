"""One run of all speed benchmarks: a page for people, its plots, and every value for programs.

python -m duokv.bench.results bench/RESULTS.md     # in a quarter of an hour; the last one is kept there
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duokv.bench import io, io_report, peers, peers_report, scale, scale_report, serving
from duokv.bench.command_line import OneLineParser, number
from duokv.bench.io_report import IoReport, Machine
from duokv.bench.peers_report import PeersReport
from duokv.bench.samples import write_parquet
from duokv.bench.scale_size import Scale
from duokv.bench.serving import Serving
from duokv.kvstore.errors import DuoKVError, UsageError

BLOCKS = 10_000_000
_SMALL = ("--batches", "8,64", "--threads", "1,2", "--index", "0", "--processes", "1", "--slots", "114688")
"""What --quick asks of duokv.bench.io."""


@dataclass(frozen=True, slots=True)
class Results:
    """All that was measured, in one run on one machine."""

    machine: Machine
    io: IoReport
    peers: PeersReport
    scales: list[Scale]
    serving: Serving


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; 0, or 2 for what cannot be done."""
    given = _arguments(argv)
    try:
        _check_place(given.page)
        results = _measure(given)
        write(given.page, results)
    except (DuoKVError, OSError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    print(f"{given.page}, plots and {given.page.with_suffix('.parquet').name} beside it")
    return 0


def write(page: Path, results: Results) -> None:
    """Write the page, a plot for each part that has one, and all values as Parquet, beside each other."""
    plots = {part: page.with_name(f"{page.stem}-{part}.svg") for part in ("io", "peers", "scale")}
    try:
        io_report.draw(plots["io"], results.io)
        peers_report.draw(plots["peers"], results.peers)
        scale_report.draw(plots["scale"], results.scales)
    except ImportError as error:
        raise UsageError(f"{page}: plots need matplotlib ({error}); pip install 'duokv[tools]'") from error
    values = page.with_suffix(".parquet")
    write_parquet(
        values,
        [
            *io_report.samples(results.io),
            *peers_report.samples(results.peers),
            *scale_report.samples(results.scales),
            *serving.samples(results.serving),
        ],
    )
    page.write_text("\n\n".join(_page(results, {part: plot.name for part, plot in plots.items()}, values.name)) + "\n")


def _page(results: Results, plots: dict[str, str], parquet: str) -> list[str]:
    return [
        "# Speed",
        f"Made by `python -m duokv.bench.results` on {time.strftime('%Y-%m-%d', time.gmtime())}; the times and "
        f"ratios of every repetition are in {parquet} (columns: `bench/samples.py`).",
        "\n".join(f"- {line}" for line in results.machine.lines()),
        "A block is the KV of 128 tokens: 114,048 bytes, 114,688 on disk. 601 blocks are a prompt of 77,000 tokens. A "
        "pair is one turn of the store between two of the limit. Aims are what this project set itself, not promises. "
        "Rows differ where the device does: see a row's low and high before comparing it with another.",
        "## The store against the machine's limits",
        *io_report.sections(results.io, plots["io"]),
        "## Beside its peers",
        *peers_report.sections(results.peers, plots["peers"]),
        "## Growth",
        *scale_report.sections(results.scales, plots["scale"]),
        "## Serving",
        *serving.sections(results.serving),
    ]


def _measure(given: argparse.Namespace) -> Results:
    shown = sys.stderr.isatty()
    folder = ["--folder", str(given.folder)]
    few = ["--pairs", str(given.pairs)] if given.pairs else []
    environments = [word for environment in given.env for word in ("--env", environment)]
    among = peers.arguments([*folder, *few, *environments, *(["--quick"] if given.quick else [])])
    served = serving.arguments([*folder, *(["--quick"] if given.quick else [])])
    swept = io.arguments([*folder, *few, *(_SMALL if given.quick else [])])
    machine = Machine.here(given.folder.absolute())
    found_io = io.measured(swept, shown=shown)
    found_peers = peers.measured(among, shown=shown)
    sizes = scale.sizes_to(scale.QUICK if given.quick else given.blocks)
    scales = scale.measured(sizes, progress=shown)
    _, found_serving = serving.measured(served, shown=shown)
    return Results(machine.ended(), found_io, found_peers, scales, found_serving)


def _check_place(page: Path) -> None:
    """UsageError now rather than in a quarter of an hour."""
    if page.suffix != ".md":
        raise UsageError(f"{page} is no name of a page in Markdown; give one that ends in .md")
    if not page.parent.is_dir():
        raise UsageError(f"{page}: there is no folder {page.parent}; make it, or name a file elsewhere")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m duokv.bench.results", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, help="the page to write, for example bench/RESULTS.md")
    parser.add_argument("--quick", action="store_true", help="small sizes, in a few minutes")
    parser.add_argument(
        "--folder", type=Path, default=Path(), metavar="DIR", help="measure below this folder, on a disk (here)"
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME=PYTHON", help="as in duokv.bench.peers")
    parser.add_argument(
        "--pairs", type=number(1), help="store or peer against limit, so often (as in bench.io and bench.peers)"
    )
    parser.add_argument("--blocks", type=number(1), default=BLOCKS, help=f"the most blocks of an index ({BLOCKS:,})")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
