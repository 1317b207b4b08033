"""How costs grow with the number of blocks stored: time, CPU and memory from ten thousand blocks to a million or more.

python -m duokv.bench.scale                               # to a million, in a minute or two; --blocks for more
python -m duokv.bench.scale --check bench/budget.json     # figures that do not depend on the machine; 1 if one is over
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.progress import track

from duokv.bench.command_line import OneLineParser, number, terminal
from duokv.bench.scale_check import check, measure_figures, read_budget
from duokv.bench.scale_report import as_json, table
from duokv.bench.scale_size import Scale, measure_size
from duokv.kvstore.errors import DuoKVError

LEAST = 10_000
MOST = 1_000_000
QUICK = 100_000
REPEATS = 100
_PLAIN_WIDTH = 120


def sizes_to(most: int) -> list[int]:
    """Powers of ten from 10,000 below `most`, and `most`."""
    sizes = []
    size = LEAST
    while size < most:
        sizes.append(size)
        size *= 10
    return [*sizes, most]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 1 if the budget is exceeded, 2 for what cannot be done."""
    parser = OneLineParser(prog="python -m duokv.bench.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=number(1), help=f"the most blocks, from {LEAST:,} on (default: {MOST:,})")
    parser.add_argument("--quick", action="store_true", help=f"up to {QUICK:,} blocks")
    parser.add_argument("--repeats", type=number(1), default=REPEATS, help=f"calls a median is taken of ({REPEATS})")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with the budget in this file instead")
    given = parser.parse_args(argv)
    try:
        if given.check is not None:
            return _check(given.check, given.blocks, as_json=given.json)
        sizes = sizes_to(given.blocks or (QUICK if given.quick else MOST))
        scales = measured(sizes, given.repeats, progress=not given.json and sys.stderr.isatty())
    except DuoKVError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(as_json(scales)))
    else:
        terminal(_PLAIN_WIDTH).print(table(scales))
    return 0


def measured(sizes: Sequence[int], repeats: int = REPEATS, *, progress: bool) -> list[Scale]:
    """Measure every size, in a process each."""
    return list(track(_measure(sizes, repeats), "measuring growth", total=len(sizes), disable=not progress))


def _measure(sizes: Sequence[int], repeats: int) -> Iterator[Scale]:
    # A process each: memory that an earlier size gave back would hide what the next one takes.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for size in sizes:
            yield pool.submit(measure_size, size, repeats).result()


def _check(path: Path, blocks: int | None, *, as_json: bool) -> int:
    budget = read_budget(path)
    figures = measure_figures(blocks or budget.blocks)
    over = check(figures, budget)
    if over:
        # Other work on the machine raises figures and never lowers them: what is over twice is.
        again = measure_figures(blocks or budget.blocks)
        figures = {name: min(found, again[name]) for name, found in figures.items()}
        over = check(figures, budget)
    if as_json:
        print(json.dumps({"figures": figures, "over": sorted(over)}))
    else:
        for line in over.values():
            print(line)
        if not over:
            print(f"{len(figures)} figures are within {path}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
