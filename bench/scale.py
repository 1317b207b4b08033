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

import numpy as np
from rich.progress import track
from rich.table import Table

from duokv.bench.command_line import OneLineParser, number, terminal
from duokv.bench.scale_check import check, measure_figures, read_budget
from duokv.bench.scale_size import OPERATIONS, Scale, measure_size
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


def growth(scales: Sequence[Scale]) -> dict[str, float]:
    """Exponent of each operation's wall time in the number of blocks: 0 does not grow, 1 grows as fast as they do.

    A straight line through the logarithms; empty for one size.
    """
    if len(scales) < 2:
        return {}
    blocks = np.log([scale.blocks for scale in scales])
    return {name: _slope(blocks, np.log([scale.costs[name].wall_s for scale in scales])) for name in OPERATIONS}


def bytes_per_block(scales: Sequence[Scale]) -> dict[str, float]:
    """Bytes that one more block takes in memory and in the index file; from nothing on, for one size."""
    if len(scales) < 2:
        return {"memory": scales[0].memory_bytes / scales[0].blocks, "index": scales[0].index_bytes / scales[0].blocks}
    blocks = np.array([float(scale.blocks) for scale in scales])
    return {
        "memory": _slope(blocks, np.array([float(scale.memory_bytes) for scale in scales])),
        "index": _slope(blocks, np.array([float(scale.index_bytes) for scale in scales])),
    }


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
        shown = not given.json and sys.stderr.isatty()
        scales = list(track(_measure(sizes, given.repeats), "measuring", total=len(sizes), disable=not shown))
    except DuoKVError as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(as_json(scales)))
    else:
        terminal(_PLAIN_WIDTH).print(_table(scales))
    return 0


def as_json(scales: Sequence[Scale]) -> dict[str, object]:
    """All figures: per size, the growth over sizes, and what a block takes."""
    return {
        "sizes": [
            {
                "blocks": scale.blocks,
                "memory_bytes_per_block": round(scale.memory_bytes / scale.blocks, 2),
                "index_bytes_per_block": round(scale.index_bytes / scale.blocks, 2),
                "wall_us": {name: round(1e6 * cost.wall_s, 2) for name, cost in scale.costs.items()},
                "cpu_us_per_block": {name: round(cost.cpu_us_per_block, 5) for name, cost in scale.costs.items()},
            }
            for scale in scales
        ],
        "growth": {name: round(exponent, 3) for name, exponent in growth(scales).items()},
        "bytes_per_block": {name: round(found, 2) for name, found in bytes_per_block(scales).items()},
    }


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


def _table(scales: Sequence[Scale]) -> Table:
    exponents, extra = growth(scales), bytes_per_block(scales)
    table = Table(
        title="Wall time of a call, CPU time by block",
        title_justify="left",
        caption="growth: exponent of the time in the number of blocks, by least squares; of bytes: what a block adds",
        caption_justify="left",
    )
    table.add_column("", no_wrap=True)
    for scale in scales:
        table.add_column(f"{scale.blocks:,} blocks", justify="right", no_wrap=True)
    table.add_column("growth", justify="right", no_wrap=True)
    for name in OPERATIONS:
        cells = [f"{_time(scale.costs[name].wall_s)} {scale.costs[name].cpu_us_per_block:9.4f} us" for scale in scales]
        table.add_row(name, *cells, f"{exponents[name]:+.2f}" if exponents else "")
    for name in ("memory", "index"):
        totals = [scale.memory_bytes if name == "memory" else scale.index_bytes for scale in scales]
        cells = [f"{total / scale.blocks:,.1f} B/block" for total, scale in zip(totals, scales, strict=True)]
        table.add_row(name, *cells, f"{extra[name]:.1f} B")
    return table


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.1f} us"


def _slope(x: np.ndarray[tuple[int], np.dtype[np.float64]], y: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.polyfit(x, y, 1)[0])


if __name__ == "__main__":
    sys.exit(main())
