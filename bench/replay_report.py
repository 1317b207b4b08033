"""The figures of a replay's cost, for people: tables for the terminal, and a report in Markdown with plots."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from duokv.bench.replay_measure import EXACT, SCORED, Case, Comparison, Kind
from duokv.bench.replay_time import FirstToken
from duokv.bench.report_markdown import Row, drawn, markdown_table, terminal_table, write_with_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = ("bits/byte", "over cold", "± error", "KL bits", "same greedy", "texts")
_TARGET = 0.001


@dataclass(frozen=True, slots=True)
class ReplayCost:
    """Everything measured of one model.

    found: by context length in tokens, then by case. context: the one whose figures are the main ones.
    trained_context: longest context it was trained at. joined_above: longer texts are joined from several files.
    first_token: by way; empty if not timed. command: what measured it.
    """

    model: str
    context: int
    trained_context: int
    bytes_per_token: float
    found: dict[int, dict[Case, Comparison]]
    first_token: dict[str, FirstToken]
    joined_above: int
    command: str

    def of_kind(self, *kinds: Kind) -> dict[Case, Comparison]:
        """The main context's cases of these kinds."""
        return {case: one for case, one in self.found[self.context].items() if case.kind in kinds}


@dataclass(frozen=True, slots=True)
class _Grid:
    title: str
    note: str
    headings: Row
    rows: list[Row]


def tables(cost: ReplayCost) -> list[Table]:
    """The figures as tables for a terminal."""
    return [terminal_table(grid.title, grid.note, grid.headings, grid.rows) for grid in _grids(cost)]


def write_report(path: Path, cost: ReplayCost) -> None:
    """Write the figures to `path` in Markdown and their plots beside it, as the same name with .svg.

    UsageError if matplotlib is missing or the folder cannot be written.
    """
    write_with_plot(path, partial(_plot, cost=cost), partial(_markdown, cost))


def _grids(cost: ReplayCost) -> list[_Grid]:
    grids = []
    for context, found in cost.found.items():
        beyond = ", beyond the trained length" if context > cost.trained_context else ""
        rows = [_row(_span(case.amount), one, cost) for case, one in found.items() if case.kind == "replay"]
        note = "these texts are joined from several files each" if context > cost.joined_above else ""
        grids.append(_Grid(f"Context of {context:,} tokens{beyond}", note, ("rows replayed", *HEADINGS), rows))
    sides = cost.of_kind("encoder", "decoder", "both")
    if sides:
        rows = [_row(f"{case.kind}, {case.amount}", one, cost) for case, one in sides.items()]
        note = "against a cold run with every decoder row"
        grids.append(_Grid(f"Which side, {cost.context:,} tokens", note, ("side, rows replayed", *HEADINGS), rows))
    repeats = cost.of_kind("earlier")
    if repeats:
        rows = [_row(f"{case.amount}", one, cost) for case, one in repeats.items()]
        note = "each earlier replay was followed by a turn of 128 tokens, whose block the next one adopted"
        grids.append(
            _Grid(f"Repeated replays of 128 rows, {cost.context:,} tokens", note, ("earlier", *HEADINGS), rows)
        )
    if cost.first_token:
        rows = [
            (way, f"{one.rows:,}", f"{one.first_token_ms:,.0f}", f"{one.share:.1%}")
            for way, one in cost.first_token.items()
        ]
        grids.append(_Grid("First token of one prompt", "", ("come by", "encoder rows", "ms", "of cold"), rows))
    return grids


def _row(label: str, one: Comparison, cost: ReplayCost) -> Row:
    per_byte = 1 / cost.bytes_per_token
    return (
        label,
        f"{one.bits * per_byte:.4f}",
        f"{one.excess_bits * per_byte:+.4f}",
        f"{one.error_bits * per_byte:.4f}",
        f"{one.kl_bits:.5f}",
        f"{one.agreement:.2%}",
        f"{one.texts}",
    )


def _span(amount: int | str) -> str:
    return "exact: a window per layer" if amount == EXACT else f"{amount}"


def _markdown(cost: ReplayCost, plots: str) -> str:
    found = cost.found[cost.context]
    parts = [
        "# What bounded replay costs",
        f"Model: {cost.model}. Made by `{cost.command}` on {platform.machine()} under {platform.system()}; torch on "
        "the CPU.",
        _verdict(cost),
        f"A hit ends {SCORED} tokens before the end of a held-out text. Its Block KV is there, its sliding window is "
        f"not: so many rows before the hit's end are computed again, their windows cut at the first of them. The "
        f"{SCORED} tokens that follow are then predicted and compared with a cold run that leaves out the same decoder "
        "rows. `over cold` is the loss added, with its standard error over texts; `KL bits` is the divergence from the "
        "cold run's prediction, per token; `same greedy` is how often the likeliest token is the same.",
        f"![plots]({plots})",
    ]
    for grid in _grids(cost):
        parts.append(f"## {grid.title}")
        if grid.note:
            parts.append(f"{grid.note[0].upper()}{grid.note[1:]}.")
        parts.append(markdown_table(grid.headings, grid.rows))
    exact = found.get(Case("replay", EXACT))
    if exact is not None:
        equal = "equals" if all(of[Case("replay", EXACT)].equal for of in cost.found.values()) else "does NOT equal"
        parts.append(f"An exact replay {equal} the cold run, made from row 0, bit for bit on every text.")
    return "\n\n".join(parts) + "\n"


def _verdict(cost: ReplayCost) -> str:
    said = []
    whole = cost.found[cost.context].get(Case("replay", 128))
    if whole is not None:
        excess = whole.excess_bits / cost.bytes_per_token
        word = "within" if excess <= _TARGET else "MORE than"
        said.append(
            f"At {cost.context:,} tokens a replay of 128 rows adds {excess:+.4f} bits per byte, {word} the "
            f"{_TARGET} aimed at."
        )
    repeats = cost.of_kind("earlier")
    if len(repeats) > 1:
        (few, first), (many, last) = min(repeats.items()), max(repeats.items())
        said.append(
            f"After {few.amount} earlier replay the loss added is {first.excess_bits / cost.bytes_per_token:+.4f}, "
            f"after {many.amount} it is {last.excess_bits / cost.bytes_per_token:+.4f}; the KL divergence goes from "
            f"{first.kl_bits:.5f} to {last.kl_bits:.5f} bits."
        )
    return " ".join(said)


# -- plots -----------------------------------------------------------------------------------------------------------


def _plot(path: Path, cost: ReplayCost) -> None:
    with drawn(path, 11, 3.4, font_size=9) as figure:
        left, middle, right = figure.subplots(1, 3)
        _plot_spans(left, cost)
        _plot_sides(middle, cost)
        _plot_repeats(right, cost)


def _plot_spans(axes: Axes, cost: ReplayCost) -> None:
    for context, found in cost.found.items():
        spans = [case.amount for case in found if case.kind == "replay" and case.amount != EXACT]
        style = "--" if context > cost.trained_context else "-"
        kl = [found[Case("replay", span)].kl_bits for span in spans]
        axes.plot([int(span) for span in spans], kl, style, marker=".", label=f"{context:,}")
    axes.set(title="by context (dashed: beyond trained)", xlabel="rows replayed", ylabel="KL from cold, bits")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.legend(fontsize=7)


def _plot_sides(axes: Axes, cost: ReplayCost) -> None:
    kinds: Sequence[Kind] = ("encoder", "decoder", "both")
    for kind in kinds:
        found = cost.of_kind(kind)
        if found:
            axes.plot(*_curve(found, lambda one: one.kl_bits), marker=".", label=kind)
    axes.set(title=f"by side, {cost.context:,} tokens", xlabel="rows replayed", ylabel="KL from cold, bits")
    axes.set_yscale("symlog", linthresh=1e-4)
    if axes.lines:
        axes.legend(fontsize=7)


def _plot_repeats(axes: Axes, cost: ReplayCost) -> None:
    found = cost.of_kind("earlier")
    if found:
        axes.plot(*_curve(found, lambda one: one.kl_bits), marker=".")
        axes.set_ylim(bottom=0)
    axes.set(title="repeated replays of 128 rows", xlabel="earlier replays in the session", ylabel="KL from cold, bits")


def _curve(found: dict[Case, Comparison], value: Callable[[Comparison], float]) -> tuple[list[int], list[float]]:
    return [int(case.amount) for case in found], [value(one) for one in found.values()]
