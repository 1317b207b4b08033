"""Pieces of a report in Markdown with a plot beside it, and of the same tables on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from duokv.kvstore.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = tuple[str, ...]


def write_with_plot(path: Path, draw: Callable[[Path], None], text: Callable[[str], str]) -> None:
    """Write what `text` makes of the plot's file name to `path`, and the plot beside it, as the same name with .svg.

    UsageError if matplotlib is missing or the folder cannot be written.
    """
    plot = path.with_suffix(".svg")
    try:
        draw(plot)
        path.write_text(text(plot.name))
    except ImportError as error:
        raise UsageError(f"{plot}: plots need matplotlib ({error}); pip install 'duokv[tools]'") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error}); name a file in a folder of yours") from error


def markdown_table(headings: Sequence[str], rows: Sequence[Row], *, numbers: bool = True) -> str:
    """A table whose columns after the first hold numbers, or text."""
    lines = ["| " + " | ".join(headings) + " |", "|---|" + ("---:|" if numbers else "---|") * (len(headings) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)])


def terminal_table(title: str, note: str, headings: Sequence[str], rows: Sequence[Row], *, wrap: bool = False) -> Table:
    """The same on a terminal, `note` below it."""
    table = Table(title=title, title_justify="left", caption=note, caption_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=not wrap)
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def drawn(path: Path, width: float, height: float, *, font_size: int) -> Iterator[Figure]:
    """A figure of so many inches, written to `path` afterwards; the same figures make the same file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "duokv", "font.size": font_size}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None})


def plot_ratios(axes: Axes, title: str, names: Sequence[str], ratios: Sequence[Sequence[float]], rotation: int) -> None:
    """Bars of medians with their ends, and a line at the limit, 1."""
    places, middles = range(len(ratios)), [median(found) for found in ratios]
    below = [middle - min(found) for middle, found in zip(middles, ratios, strict=True)]
    above = [max(found) - middle for middle, found in zip(middles, ratios, strict=True)]
    axes.bar(places, middles, yerr=(below, above), capsize=3, width=0.6)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(list(places), names, fontsize=6, rotation=rotation)
    axes.set_title(title, fontsize=8)
    axes.set_ylabel("of limit")
