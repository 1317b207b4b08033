"""The figures of `duokv.bench.io` for people: tables for the terminal, a report in Markdown with a plot, and JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from rich.table import Table

from duokv.bench.io_case import Case, Result
from duokv.bench.io_limits import file_system
from duokv.bench.lookup import LookupCost
from duokv.bench.report_markdown import Row, drawn, markdown_table, plot_ratios, terminal_table
from duokv.bench.samples import Sample, with_limits

_QUICK_HEADINGS = ("figure", "found", "low", "high", "aim", "")
HEADINGS = ("", "store MB/s", "limit MB/s", "of limit", "low", "high")
_STREAM_HEADINGS = ("", "first blocks ms", "one read ms", "more ms", "low", "high")
AIMS: Mapping[str, tuple[str, float]] = {
    "cold_read_vs_device": ("least", 0.9),
    "warm_read_vs_memcpy": ("least", 0.8),
    "commit_vs_device": ("least", 0.8),
    "write_amplification": ("most", 1.02),
    "lookup_ms_77k": ("most", 0.6),
    "open_s": ("most", 0.5),
    "bytes_per_indexed_block": ("most", 40.0),
}
"""What the main figures are aimed to be."""
_UNITS: Mapping[str, str] = {"lookup_ms_77k": "ms", "open_s": "s", "bytes_per_indexed_block": "B"}


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured. load: of the last minute, before and after."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    disk: str
    python: str
    load: tuple[float, ...]

    @classmethod
    def here(cls, folder: Path) -> Machine:
        """This machine, and the file system that holds `folder`."""
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else platform.machine()
        return cls(
            cpu=cpu,
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            kernel=f"{platform.system()} {platform.release()}",
            disk=file_system(folder),
            python=platform.python_version(),
            load=(os.getloadavg()[0],),
        )

    def ended(self) -> Machine:
        """The same with the load of now added."""
        return replace(self, load=(*self.load, os.getloadavg()[0]))

    def lines(self) -> list[str]:
        """For people."""
        load = " before, ".join(f"{one:.2f}" for one in self.load)
        return [
            f"{self.cpu}, {self.cores} cores, {self.memory_bytes / (1 << 30):.1f} GiB; {self.disk} on {self.kernel}; "
            f"Python {self.python}",
            f"load average over one minute: {load} after; between machines compare the ratios to a limit, "
            "not the MB/s, ms and us",
        ]


@dataclass(frozen=True, slots=True)
class Quick:
    """The main figures' sources."""

    cold: Result
    warm: Result
    commit: Result
    lookup: LookupCost

    def as_json(self) -> dict[str, float]:
        """The main figures."""
        return {
            "cold_read_vs_device": round(self.cold.ratio, 4),
            "warm_read_vs_memcpy": round(self.warm.ratio, 4),
            "commit_vs_device": round(self.commit.ratio, 4),
            "write_amplification": round(self.commit.amplification or 0.0, 5),
            "lookup_ms_77k": round(self.lookup.lookup_ms, 4),
            "open_s": round(self.lookup.open_s, 4),
            "bytes_per_indexed_block": round(self.lookup.index_bytes_per_block, 2),
        }


@dataclass(frozen=True, slots=True)
class IoReport:
    """All that was measured: `groups` by what changes in them."""

    machine: Machine
    pairs: int
    quick: Quick
    groups: dict[str, list[Result]]

    def as_json(self) -> dict[str, object]:
        """The main figures alone if nothing else was measured; else them, the machine and every group's rows."""
        if not self.groups:
            return dict(self.quick.as_json())
        return {
            "machine": asdict(self.machine),
            "pairs": self.pairs,
            "main": self.quick.as_json(),
            "groups": {title: [_as_json(one) for one in group] for title, group in self.groups.items()},
        }


def tables(report: IoReport) -> list[Table]:
    """The figures as tables for a terminal."""
    quick = report.quick
    return [
        terminal_table("Main figures", _about(quick), _QUICK_HEADINGS, _quick_rows(quick)),
        *(
            terminal_table(title, _limit(group), _headings(group), [_row(one) for one in group])
            for title, group in report.groups.items()
        ),
    ]


def sections(report: IoReport, plot: str) -> list[str]:
    """The figures in Markdown; `plot` is the name of the plot's file."""
    parts = [
        f"{report.pairs} pairs a row. `of limit` is the store's rate as a share of the limit's, which is measured "
        "before and after it in the same folder with the same bytes and threads: the median of the pairs, `low` and "
        "`high` their ends; above 1 the device or the processor was faster in the store's turn than around it. Loads "
        "verify every block they read; what comes from the store's own cache was verified when it came in. Commits "
        "return when power loss cannot undo them; the limits do neither. Cold loads go past the page cache, or drop it "
        "first where they are called buffered.",
        "### Main figures",
        f"{_about(report.quick)}.",
        markdown_table(_QUICK_HEADINGS, _quick_rows(report.quick)),
        f"![store and limits]({plot})",
    ]
    for title, group in report.groups.items():
        parts.append(f"### {title}")
        parts.append(f"{_limit(group)}.")
        parts.append(markdown_table(_headings(group), [_row(one) for one in group]))
    return parts


def samples(report: IoReport) -> Iterator[Sample]:
    """The figures for programs."""
    for title, group in report.groups.items():
        for one in group:
            for turn, (found, limit) in enumerate(with_limits(one.store_s, one.limit_s)):
                yield Sample("io", title, _case(one.case), "s", turn, found, limit)
    for name, value in report.quick.as_json().items():
        yield Sample("io", "main figures", name, _UNITS.get(name, "ratio"), 0, value, AIMS[name][1])


def _quick_rows(quick: Quick) -> list[Row]:
    spreads = {
        "cold_read_vs_device": quick.cold.ratios,
        "warm_read_vs_memcpy": quick.warm.ratios,
        "commit_vs_device": quick.commit.ratios,
    }
    rows: list[Row] = []
    for name, value in quick.as_json().items():
        kind, aim = AIMS[name]
        spread = spreads.get(name)
        low, high = (f"{min(spread):.3f}", f"{max(spread):.3f}") if spread else ("", "")
        verdict = "reached" if (value >= aim if kind == "least" else value <= aim) else "NOT reached"
        rows.append((name, f"{value:,.3f}", low, high, f"at {kind} {aim:g}", verdict))
    return rows


def _about(quick: Quick) -> str:
    return (
        f"{_case(quick.cold.case)}; lookups of 77,000 tokens in an index of {quick.lookup.blocks:,} blocks, of whose "
        "time "
        f"hashing alone takes {quick.lookup.hashing_ms:.2f} ms"
    )


def _limit(group: list[Result]) -> str:
    case = group[0].case
    if case.action == "stream":
        return "Until a load gives its first blocks, beside one raw O_DIRECT read of one block (aim: 5 ms more at most)"
    if case.action == "commit":
        return "Limit: raw O_DIRECT write of the same bytes into an allocated file, with one fdatasync"
    if case.source == "device":
        return "Limit: raw O_DIRECT preadv of the same bytes, as many threads"
    return "Limit: memcpy of the same bytes, as many threads"


def _headings(group: list[Result]) -> Row:
    return _STREAM_HEADINGS if group[0].case.action == "stream" else HEADINGS


def _row(one: Result) -> Row:
    if one.case.action == "stream":
        more = [own - mean(limits) for own, *limits in zip(one.store_s, one.limit_s, one.limit_s[1:], strict=False)]
        shown = (median(one.store_s), median(one.limit_s), median(more), min(more), max(more))
        return (_case(one.case), *(f"{seconds * 1e3:.2f}" for seconds in shown))
    ratios = one.ratios
    written = "" if one.amplification is None else f"; {one.amplification:.4f} bytes written a byte"
    return (
        _case(one.case) + written,
        f"{one.store_rate / 1e6:,.0f}",
        f"{one.limit_rate / 1e6:,.0f}",
        f"{one.ratio:.2f}",
        f"{min(ratios):.2f}",
        f"{max(ratios):.2f}",
    )


def _case(case: Case) -> str:
    parts = [f"{case.blocks} x {case.slot_bytes:,} B", f"{case.threads} thread{'s' * (case.threads != 1)}"]
    if case.processes != 1:
        parts.append(f"{case.processes} processes")
    if case.index_blocks:
        parts.append(f"{case.index_blocks:,} in the index")
    return ", ".join(parts)


def _as_json(one: Result) -> dict[str, object]:
    return {
        **asdict(one.case),
        "store_s": [round(seconds, 6) for seconds in one.store_s],
        "limit_s": [round(seconds, 6) for seconds in one.limit_s],
        "ratio": round(one.ratio, 4),
        "low": round(min(one.ratios), 4),
        "high": round(max(one.ratios), 4),
        "amplification": one.amplification,
    }


def draw(path: Path, report: IoReport) -> None:
    """Plot every group's ratios to `path`."""
    rows = -(-len(report.groups) // 3)
    with drawn(path, 12, 2.6 * rows, font_size=8) as figure:
        grid = figure.subplots(rows, 3, squeeze=False).reshape(-1)
        for axes, (title, group) in zip(grid, report.groups.items(), strict=False):
            names = [_case(one.case).replace(", ", "\n") for one in group]
            plot_ratios(axes, title, names, [one.ratios for one in group], rotation=0)
        for axes in grid[len(report.groups) :]:
            axes.set_axis_off()
