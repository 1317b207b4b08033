"""Pieces of a one-file HTML page: charts as inline SVG, tiles, bars, tables. No script, nothing loaded from outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BLUE, LIGHT_BLUE, ORANGE, GREY, GREEN, INK = "#1d5fc2", "#8db8ee", "#d9730d", "#c3c9d1", "#14804a", "#1f2630"
"""Told apart by brightness as well, for colour-blind eyes and grey prints."""
_FAINT, _GRID = "#5d6773", "#e4e7eb"
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 10, 40
_MARK_ROW = 15

_STYLE = f"""
:root {{ color-scheme: light; }}
body {{ margin: 0; background: #f4f5f7; color: {INK}; font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 1120px; margin: 0 auto; padding: 32px 24px 48px; }}
h1 {{ font-size: 26px; margin: 0; }} h2 {{ font-size: 17px; margin: 0 0 4px; }}
p {{ margin: 4px 0 12px; max-width: 100ch; }} .faint, footer {{ color: {_FAINT}; }}
section {{ background: #fff; border: 1px solid {_GRID}; border-radius: 10px; padding: 18px 22px; margin-top: 18px; }}
.pair {{ display: grid; grid-template-columns: 1fr 1fr; gap: 18px; }}
.tiles {{ display: grid; grid-template-columns: repeat(4, 1fr); gap: 18px; margin-top: 18px; }}
.tiles section {{ margin: 0; }} .tiles b {{ display: block; font-size: 31px; line-height: 1.25; font-weight: 650; }}
.tiles span {{ color: {_FAINT}; font-size: 13.5px; }}
.bar {{ display: flex; height: 30px; border-radius: 6px; overflow: hidden; margin: 12px 0 14px; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: 6px 14px 6px 0; border-top: 1px solid {_GRID}; vertical-align: top; }}
th {{ color: {_FAINT}; font-weight: 500; border-top: 0; }}
tr > td:last-child, tr > th:last-child {{ padding-right: 0; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
.narrow {{ white-space: nowrap; }}
.key {{ display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 22px; font-size: 13.5px; color: {_FAINT}; }}
svg {{ display: block; width: 100%; height: auto; font: 12px system-ui, "Segoe UI", Roboto, sans-serif; }}
/* A white rim keeps labels readable across lines. */
.on-lines {{ paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round; }}
footer {{ margin-top: 22px; font-size: 13.5px; }}
@media (max-width: 900px) {{ .pair {{ grid-template-columns: 1fr; }} .tiles {{ grid-template-columns: 1fr 1fr; }} }}
"""


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high`, labelled at `ticks`; a logarithmic one starts above 0."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def place(self, values: Floats) -> Floats:
        """Where values lie on the axis, 0 to 1; those outside at its ends, NaN stays NaN."""
        inside = np.clip(values, self.low, self.high)
        if self.log:
            return np.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)


PERCENT = Axis(0, 1, tuple((tick / 100, f"{tick} %") for tick in (0, 25, 50, 75, 100)))


class Chart:
    """One plot. Add to it in the order of painting, then take `svg()`; `label` is for those who do not see it.

    Room for the labels of `marks` vertical marks is left above the plot.
    """

    def __init__(self, width: int, height: int, x: Axis, y: Axis, *, label: str, marks: int = 0) -> None:
        self._size = (width, height)
        self._x, self._y = x, y
        self._top = _TOP + _MARK_ROW * marks
        self._plot = (width - _LEFT - _RIGHT, height - self._top - _BOTTOM)
        self._marks = 0
        self._parts = [f"<title>{escape(label)}</title>"]
        self._frame()

    def line(self, xs: Floats, ys: Floats, color: str, *, dashed: bool = False) -> None:
        """A line through float64 [n] points, broken at NaN."""
        left, top = self._points(xs, ys)
        runs: list[list[str]] = [[]]
        for a, b in zip(left.tolist(), top.tolist(), strict=True):
            if math.isnan(b):
                runs.append([])
            else:
                runs[-1].append(f"{a:.1f},{b:.1f}")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        for run in filter(None, runs):
            if len(run) == 1:  # a lone point would have no line
                a, b = run[0].split(",")
                self._parts.append(f'<circle cx="{a}" cy="{b}" r="2" fill="{color}"/>')
            self._parts.append(
                f'<polyline points="{" ".join(run)}" fill="none" stroke="{color}" stroke-width="2" '
                f'stroke-linejoin="round"{dash}/>'
            )

    def bars(self, edges: Floats, heights: Floats, color: str) -> None:
        """Bars between `edges` [n + 1] of the given heights [n]."""
        left, top = self._points(edges, np.append(heights, 0.0))
        floor = self._top + self._plot[1]
        for a, b, y in zip(left[:-1].tolist(), left[1:].tolist(), top[:-1].tolist(), strict=True):
            self._parts.append(
                f'<rect x="{a:.1f}" y="{y:.1f}" width="{max(b - a - 1, 0.5):.1f}" height="{floor - y:.1f}" '
                f'fill="{color}"/>'
            )

    def mark(self, x: float, text: str) -> None:
        """A vertical line with its label above the plot, each label on its own row."""
        at = self._points(np.array([x]), np.array([self._y.low]))[0][0]
        row = _TOP + _MARK_ROW * self._marks
        self._marks += 1
        end = "end" if at > _LEFT + self._plot[0] / 2 else "start"
        gap = -5 if end == "end" else 5
        self._parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{row - 4}" y2="{self._top + self._plot[1]}" stroke="{_FAINT}" '
            f'stroke-dasharray="2 3"/><text class="on-lines" x="{at + gap:.1f}" y="{row + 5}" text-anchor="{end}" '
            f'fill="{INK}">{escape(text)}</text>'
        )

    def dot(self, x: float, y: float, color: str, text: str) -> None:
        """A point that tells its text when pointed at."""
        left, top = self._points(np.array([x]), np.array([y]))
        self._parts.append(
            f'<circle cx="{left[0]:.1f}" cy="{top[0]:.1f}" r="5" fill="{color}" stroke="#fff" stroke-width="1.5">'
            f"<title>{escape(text)}</title></circle>"
        )

    def svg(self) -> str:
        """The finished chart."""
        width, height = self._size
        return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(self._parts)}</svg>'

    def _points(self, xs: Floats, ys: Floats) -> tuple[Floats, Floats]:
        wide, high = self._plot
        return _LEFT + wide * self._x.place(xs), self._top + high * (1 - self._y.place(ys))

    def _frame(self) -> None:
        wide, high = self._plot
        for value, text in self._y.ticks:
            y = self._points(np.array([self._x.low]), np.array([value]))[1][0]
            self._parts.append(
                f'<line x1="{_LEFT}" x2="{_LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID}"/>'
                f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end" fill="{_FAINT}">{escape(text)}</text>'
            )
        floor = self._top + high
        for value, text in self._x.ticks:
            x = self._points(np.array([value]), np.array([self._y.low]))[0][0]
            self._parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" y2="{floor + 4}" stroke="{_FAINT}"/>'
                f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle" fill="{_FAINT}">{escape(text)}</text>'
            )


def document(title: str, subtitle: str, body: Sequence[str], footer: str) -> str:
    """The whole page; `body` is HTML, the rest plain text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>"
        f'<h1>{escape(title)}</h1><p class="faint">{escape(subtitle)}</p>\n'
        + "\n".join(body)
        + f"\n<footer>{escape(footer)}</footer></main></body></html>\n"
    )


def section(heading: str, text: str, *parts: str) -> str:
    """A card: heading and explanation as plain text, then HTML."""
    told = f'<p class="faint">{escape(text)}</p>' if text else ""
    return f"<section><h2>{escape(heading)}</h2>{told}{''.join(parts)}</section>"


def pair(left: str, right: str) -> str:
    """Two cards side by side."""
    return f'<div class="pair">{left}{right}</div>'


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """Headline figures: (name, figure, what it means) each."""
    cards = "".join(
        f"<section>{escape(name)}<b>{escape(figure)}</b><span>{escape(meaning)}</span></section>"
        for name, figure, meaning in figures
    )
    return f'<div class="tiles">{cards}</div>'


def partition_bar(parts: Sequence[tuple[str, float, str, str, str]]) -> str:
    """A whole cut into parts: (name, share, colour, number, meaning) each, the shares summing to 1."""
    bar = "".join(
        f'<div style="width:{100 * share:.4f}%;background:{color}" title="{escape(name)}: {share:.2%}"></div>'
        for name, share, color, _, _ in parts
    )
    rows = "".join(
        f'<tr><td class="narrow">{_key(color)}{escape(name)}</td><td>{escape(meaning)}</td>'
        f'<td class="number">{escape(number)}</td><td class="number">{share:.2%}</td></tr>'
        for name, share, color, number, meaning in parts
    )
    head = '<tr><th>part</th><th></th><th class="number">tokens</th><th class="number">share</th></tr>'
    return f'<div class="bar">{bar}</div><table>{head}{rows}</table>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = (), narrow: Sequence[int] = ()
) -> str:
    """A table of plain text; columns `numbers` are set to the right, `narrow` ones are not broken."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = ["number" if at in numbers else "narrow" if at in narrow else "" for at in range(len(row))]
        return "".join(f'<{tag} class="{kind}">{escape(text)}</{tag}>' for kind, text in zip(kinds, row, strict=True))

    lines = [cells("th", head), *(cells("td", row) for row in rows)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """What colours mean: (colour, text) each."""
    keys = "".join(f"<span>{_key(color)}{escape(text)}</span>" for color, text in entries)
    return f'<div class="legend">{keys}</div>'


def _key(color: str) -> str:
    return f'<i class="key" style="background:{color}"></i>'
