"""The figures of `duokv.bench.peers`: tables for the terminal, a report in Markdown with a plot, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from duokv.bench.io_report import Machine
from duokv.bench.peer_serve import Action
from duokv.bench.peers_case import Figure, Measured, Part, Size
from duokv.bench.report_markdown import Row, drawn, markdown_table, plot_ratios, terminal_table
from duokv.bench.samples import Sample, with_limits
from duokv.kvstore import StoreConfig

HEADINGS = ("peer", "peer", "limit", "of limit", "low", "high")
PROMISES = ("peer", "version", "durability of a put", "integrity", "driven")
LIMITS: Mapping[Action, str] = {
    "cold": "raw O_DIRECT preadv of the same bytes",
    "warm": "memcpy of the same bytes",
    "put": "raw O_DIRECT write of the same bytes into an allocated file, with one fdatasync; * is not durable",
    "lookup": "a dictionary of the keys in memory",
    "tokens": "a dictionary of the keys in memory; here the tokens are hashed as well",
}
_TITLES: Mapping[Action, str] = {
    "cold": "Cold read", "warm": "Warm read", "put": "Put", "lookup": "Lookup of keys", "tokens": "Lookup of tokens",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeersReport:
    """All that was measured."""

    machine: Machine
    pairs: int
    size: Size
    parts: tuple[Part, ...]
    peers: Sequence[Measured]

    def as_json(self) -> dict[str, object]:
        """Everything, skipped peers with their reasons."""
        return {
            "machine": asdict(self.machine),
            "pairs": self.pairs,
            "size": asdict(self.size),
            "peers": [
                {
                    "name": peer.name,
                    "skipped": peer.skipped,
                    "about": peer.about,
                    "figures": [{**asdict(part), **_as_json(figure)} for part, figure in peer.figures.items()],
                }
                for peer in self.peers
            ],
        }


def tables(report: PeersReport) -> list[Table]:
    """The figures as tables for a terminal."""
    made = [
        terminal_table(_title(part), _limit(part), _headings(part), _rows(report, part), wrap=True)
        for part in report.parts
    ]
    promises = Table(title="What each promises", title_justify="left", show_lines=True)
    for heading in PROMISES:
        promises.add_column(heading)
    for row in _promises(report):
        promises.add_row(*row)
    return [*made, promises]


def sections(report: PeersReport, plot: str) -> list[str]:
    """The figures in Markdown; `plot` is the name of the plot's file."""
    size = report.size
    parts = [
        f"{report.pairs} pairs a row. Blocks of {size.payload_bytes:,} bytes, the same for each and in the same order; "
        f"what is read is checked to be what was put. `of limit` is the peer's rate as a share of the limit's, which "
        f"is measured before and after it with {size.threads} threads: the median of the pairs, `low` and `high` their "
        f"ends. Each peer times itself; rates count {size.slot_bytes:,} bytes a block. Cold: what is on the device was "
        f"taken out of the page cache. DuoKV reads with {size.threads} threads here ({StoreConfig().read_threads} "
        "unless set), "
        "and its reads and puts include hashing and looking up the prompt.",
        f"![peers]({plot})",
    ]
    for part in report.parts:
        parts += [f"### {_title(part)}", f"{_limit(part)}.", markdown_table(_headings(part), _rows(report, part))]
    return [*parts, "### What each promises", markdown_table(PROMISES, _promises(report), numbers=False)]


def samples(report: PeersReport) -> Iterator[Sample]:
    """The figures for programs."""
    for peer in report.peers:
        for part, figure in peer.figures.items():
            for turn, (found, limit) in enumerate(with_limits(figure.peer_s, figure.limit_s)):
                yield Sample("peers", _title(part), peer.name, "s", turn, found, limit)


def _title(part: Part) -> str:
    return f"{_TITLES[part.action]}, {part.blocks} blocks"


def _limit(part: Part) -> str:
    return f"Limit: {LIMITS[part.action]}"


def _headings(part: Part) -> tuple[str, ...]:
    unit = "us" if part.action in ("lookup", "tokens") else "MB/s"
    return (HEADINGS[0], *(f"{heading} {unit}" for heading in HEADINGS[1:3]), *HEADINGS[3:])


def _rows(report: PeersReport, part: Part) -> list[Row]:
    rows: list[Row] = []
    for peer in report.peers:
        figure = peer.figures.get(part)
        star = "*" if part.action == "put" and peer.about is not None and not peer.about["durable"] else ""
        if figure is None or figure.reason:
            reason = figure.reason if figure is not None else f"skipped: {peer.skipped}"
            rows.append((f"{peer.name}: {reason}", "", "", "", "", ""))
            continue
        if part.action in ("lookup", "tokens"):
            pair = [f"{1e6 * median(seconds):,.0f}" for seconds in (figure.peer_s, figure.limit_s)]
        else:
            nbytes = part.blocks * report.size.slot_bytes
            pair = [f"{nbytes / median(seconds) / 1e6:,.0f}" for seconds in (figure.peer_s, figure.limit_s)]
        ratios = figure.ratios
        rows.append((peer.name + star, *pair, f"{figure.ratio:.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"))
    return rows


def _promises(report: PeersReport) -> list[Row]:
    rows: list[Row] = []
    for peer in report.peers:
        if peer.about is None:
            rows.append((peer.name, "", "", "", f"skipped: {peer.skipped}"))
        else:
            about = peer.about
            rows.append((peer.name, about["version"], about["durability"], about["integrity"], about["note"]))
    return rows


def _as_json(figure: Figure) -> dict[str, object]:
    if figure.reason:
        return {"reason": figure.reason}
    return {
        "peer_s": [round(seconds, 7) for seconds in figure.peer_s],
        "limit_s": [round(seconds, 7) for seconds in figure.limit_s],
        "ratio": round(figure.ratio, 4),
        "low": round(min(figure.ratios), 4),
        "high": round(max(figure.ratios), 4),
    }


def draw(path: Path, report: PeersReport) -> None:
    """Plot the ratios of reads and puts to `path`."""
    shown = [part for part in report.parts if part.action in ("cold", "warm", "put")]
    with drawn(path, 12, 6, font_size=8) as canvas:
        grid = canvas.subplots(2, 2).reshape(-1)
        for axes, part in zip(grid, shown, strict=False):
            found = [(peer.name, peer.figures[part]) for peer in report.peers if part in peer.figures]
            found = [(name, figure) for name, figure in found if not figure.reason]
            names, ratios = [name for name, _ in found], [figure.ratios for _, figure in found]
            plot_ratios(axes, _title(part), names, ratios, rotation=30)
        for axes in grid[len(shown) :]:
            axes.set_axis_off()
