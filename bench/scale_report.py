"""The figures of `duokv.bench.scale` for people and programs: fits, tables, a plot, JSON and samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table

from duokv.bench.report_markdown import Row, drawn, markdown_table, terminal_table
from duokv.bench.samples import Sample
from duokv.bench.scale_size import OPERATIONS, Scale

_TITLE = "Wall time of a call, CPU time by block"
_NOTE = (
    "commit: 34 new blocks; lookup: 77,000 tokens; find: the same, hashed already; miss: a first block that is not "
    "there; renewal: 601 blocks; expiry: 10,000 at once; reclaim: a commit that evicts 34; queue: ordering all extents "
    "after opening; rebuild: at most 100,000 blocks without an index; memory: growth of the process, by block, of "
    "which the extents kept are bounded. growth: exponent of the wall time in the number of blocks, 0 is none, 1 as "
    "fast as they; of bytes: what one more block adds"
)


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


def table(scales: Sequence[Scale]) -> Table:
    """The figures as a table for a terminal."""
    return terminal_table(_TITLE, _NOTE, _headings(scales), _rows(scales))


def sections(scales: Sequence[Scale], plot: str) -> list[str]:
    """The figures in Markdown; `plot` is the name of the plot's file."""
    return [f"{_TITLE}; {_NOTE}.", markdown_table(_headings(scales), _rows(scales)), f"![growth]({plot})"]


def samples(scales: Sequence[Scale]) -> Iterator[Sample]:
    """The figures for programs."""
    for scale in scales:
        case = f"{scale.blocks} blocks"
        for name, cost in scale.costs.items():
            yield Sample("scale", "wall", f"{name}, {case}", "s", 0, cost.wall_s)
            yield Sample("scale", "cpu by block", f"{name}, {case}", "us", 0, cost.cpu_us_per_block)
        yield Sample("scale", "bytes by block", f"memory, {case}", "B", 0, scale.memory_bytes / scale.blocks)
        yield Sample("scale", "bytes by block", f"index, {case}", "B", 0, scale.index_bytes / scale.blocks)


def draw(path: Path, scales: Sequence[Scale]) -> None:
    """Plot wall times by blocks, both logarithmic."""
    with drawn(path, 8, 4.5, font_size=8) as figure:
        axes = figure.subplots()
        for name in OPERATIONS:
            axes.plot([scale.blocks for scale in scales], [s.costs[name].wall_s for s in scales], "o-", label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("blocks in the index")
        axes.set_ylabel("seconds of a call")
        axes.legend(ncols=2, fontsize=7)


def _headings(scales: Sequence[Scale]) -> Row:
    return ("", *(f"{scale.blocks:,} blocks" for scale in scales), "growth")


def _rows(scales: Sequence[Scale]) -> list[Row]:
    exponents, extra = growth(scales), bytes_per_block(scales)
    rows: list[Row] = []
    for name in OPERATIONS:
        cells = [f"{_time(scale.costs[name].wall_s)} {scale.costs[name].cpu_us_per_block:9.4f} us" for scale in scales]
        rows.append((name, *cells, f"{exponents[name]:+.2f}" if exponents else ""))
    for name in ("memory", "index"):
        totals = [scale.memory_bytes if name == "memory" else scale.index_bytes for scale in scales]
        cells = [f"{total / scale.blocks:,.1f} B/block" for total, scale in zip(totals, scales, strict=True)]
        rows.append((name, *cells, f"{extra[name]:.1f} B"))
    return rows


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:,.1f} us"


def _slope(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float:
    return float(np.polyfit(x, y, 1)[0])
