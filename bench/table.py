"""The harness against the figures published with the public traces: `python -m duokv.bench.table`.

Every figure is a whole run of `Simulation`, that is of the store's own keys, index, lives, reclaim and SWA tier. A
harness that prints other figures under the same rules is wrong; this table says so and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from duokv.bench.cache_hit import Keep, SimOptions, SimReport, simulate
from duokv.bench.command_line import progress_bar, terminal
from duokv.bench.workload import read_trace, trace_class, traces_dir
from duokv.kvstore.errors import DuoKVError, UsageError
from duokv.kvstore.policy import DAY_S, ClassRule, Policy

_TELL_EVERY = 200
_POLL_S = 0.2
_PLAIN_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a trace, in seconds and blocks; None = unbounded. All traffic classes live `ttl_s` seconds."""

    ttl_s: float | None = None
    capacity_blocks: int | None = None
    swa_expiry_s: float = 180.0
    swa_keep: Keep = "prompt-end"

    def options(self, traffic: str) -> SimOptions:
        """What to give the harness."""
        rules = {name: ClassRule(self.ttl_s) for name in ("agent", "chat")}
        return SimOptions(
            traffic=traffic,
            policy=Policy(rules, "chat").numbered(),
            capacity_blocks=self.capacity_blocks,
            swa_expiry_s=self.swa_expiry_s,
            swa_keep=self.swa_keep,
        )


FIGURES: Mapping[str, Run] = {
    "unbounded": Run(),
    "T = 180 s": Run(ttl_s=180),
    "T = 1 h": Run(ttl_s=3600),
    "T = 3 d": Run(ttl_s=3 * DAY_S),
    "T = 7 d": Run(ttl_s=7 * DAY_S),
    "LRU of 4,096 blocks": Run(capacity_blocks=4096),
    "LRU of 65,536 blocks": Run(capacity_blocks=65_536),
    "SWA, every block, 60 s": Run(swa_expiry_s=60, swa_keep="every-block"),
    "SWA, every block, 180 s": Run(swa_keep="every-block"),
    "SWA, every block, 600 s": Run(swa_expiry_s=600, swa_keep="every-block"),
    "SWA, every block, 1 h": Run(swa_expiry_s=3600, swa_keep="every-block"),
    "SWA, prompt end, 180 s": Run(),
}
"""The published columns: token hit rates by idle expiry T and by capacity, then the share of requests with a prefix hit
whose hit tail has a live SWA state, by where states are kept and their expiry. Equal runs are made once."""

PUBLISHED: Mapping[str, tuple[float, ...]] = {
    "weka_agent": (96.4, 89.5, 96.0, 96.4, 96.4, 85.2, 96.4, 82.1, 92.6, 97.0, 99.5, 89.4),
    "mooncake_conversation": (37.4, 24.1, 37.4, 37.4, 37.4, 4.6, 27.4, 69.6, 85.9, 97.9, 100.0, 6.4),
    "ragpulse": (31.4, 23.4, 31.0, 31.4, 31.4, 31.4, 31.4, 44.3, 67.3, 88.9, 98.7, 0.0),
    "lmcache_miniswe": (92.6, 92.5, 92.6, 92.6, 92.6, 92.6, 92.6, 99.5, 99.5, 100.0, 100.0, 99.2),
}
"""Percent, in the order of FIGURES. Source: the README published with these traces, computed independently of the
project. They hold for whole traces only."""


def published(trace: Path, figure: str) -> float | None:
    """The published percentage of a whole trace, by its file name and one of FIGURES; None if the trace is unknown."""
    row = PUBLISHED.get(trace_name(trace))
    return None if row is None else dict(zip(FIGURES, row, strict=True))[figure]


def trace_name(trace: Path) -> str:
    """A trace's file name without its endings."""
    return trace.name.partition(".")[0]


def rate(report: SimReport, name: str) -> float:
    """One of the rates of `SimReport.as_json`, such as "token_hit_rate"."""
    value = report.as_json()[name]
    assert isinstance(value, float)
    return value


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of one trace in percent; `published` None where none applies. `seconds` is its run's time."""

    trace: str
    figure: str
    percent: float
    published: float | None
    requests: int
    seconds: float

    @property
    def verdict(self) -> Literal["OK", "off", ""]:
        """Whether it equals the published figure to the digit printed there."""
        if self.published is None:
            return ""
        return "OK" if round(self.percent, 1) == self.published else "off"


def measure(
    traces: Sequence[Path], *, limit: int | None, workers: int, on_requests: Callable[[int], None] = lambda _: None
) -> list[Cell]:
    """Run every figure of every trace in `workers` processes; `on_requests` gets the number of requests just done.

    UsageError for a trace that cannot be read.
    """
    jobs = [(path, run) for path in traces for run in dict.fromkeys(FIGURES.values())]
    # Fresh interpreters: a forked one would inherit this one's threads half-way.
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(workers, mp_context=context) as pool:
        told: queue.Queue[int] = manager.Queue()
        futures = {job: pool.submit(_measure_one, *job, limit, told) for job in jobs}
        _follow(list(futures.values()), told, on_requests)
        done = {job: future.result() for job, future in futures.items()}
    cells = []
    for path in traces:
        for figure, run in FIGURES.items():
            got = done[path, run]
            percent = 100 * (got.swa_alive_share if figure.startswith("SWA") else got.token_hit_rate)
            known = published(path, figure) if limit is None else None
            cells.append(Cell(trace_name(path), figure, percent, known, got.requests, got.seconds))
    return cells


@dataclass(frozen=True, slots=True)
class _Measured:
    token_hit_rate: float
    swa_alive_share: float
    requests: int
    seconds: float


def _measure_one(path: Path, run: Run, limit: int | None, told: queue.Queue[int]) -> _Measured:
    served = 0

    def tell(_: object) -> None:
        nonlocal served
        served += 1
        if served % _TELL_EVERY == 0:
            told.put(_TELL_EVERY)

    report = simulate(read_trace(path, limit=limit), run.options(trace_class(path)), on_request=tell)
    told.put(served % _TELL_EVERY)
    return _Measured(rate(report, "token_hit_rate"), rate(report, "swa_alive_share"), served, report.seconds)


def _follow(futures: Sequence[Future[_Measured]], told: queue.Queue[int], on_requests: Callable[[int], None]) -> None:
    pending = set(futures)
    while pending:
        done, pending = wait(pending, timeout=_POLL_S)
        while not told.empty():
            on_requests(told.get())
        if any(future.exception() for future in done):
            for future in pending:
                future.cancel()
            return


def table_of(cells: Sequence[Cell]) -> Table:
    """A table for people: a row per figure; per trace the measured and the published percentage and the verdict."""
    table = Table(title="Cache hit rates, measured | published, in percent", title_justify="left")
    table.add_column("figure", no_wrap=True)
    by_trace: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_trace.setdefault(cell.trace, {})[cell.figure] = cell
    for trace, row in by_trace.items():
        requests = next(iter(row.values())).requests
        table.add_column(trace.replace("_", "\n", 1) + f"\n{requests:,} requests", justify="right")
    for figure in FIGURES:
        table.add_row(
            figure,
            *(_text(row[figure]) for row in by_trace.values()),
            end_section=figure in ("T = 7 d", "LRU of 65,536 blocks"),
        )
    return table


def _text(cell: Cell) -> str:
    if cell.published is None:
        return f"{cell.percent:.1f}"
    ending = "[green]OK[/]" if cell.verdict == "OK" else f"[red]off by {cell.percent - cell.published:+.2f}[/]"
    return f"{cell.percent:.1f} | {cell.published:.1f} {ending}"


def found_traces() -> list[Path]:
    """All traces of `$DUOKV_DATA/traces`, the known ones first. UsageError if there are none."""
    folder = traces_dir()
    found = sorted(folder.glob("*.jsonl*")) if folder else []
    if not found:
        where = f"{folder} holds no *.jsonl or *.jsonl.gz" if folder else "DUOKV_DATA is not set"
        raise UsageError(f"no traces: {where}; name trace files, or set DUOKV_DATA to the folder that holds traces/")
    order = {name: place for place, name in enumerate(PUBLISHED)}
    return sorted(found, key=lambda path: (order.get(trace_name(path), len(order)), path.name))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m duokv.bench.table", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="*", type=Path, help="trace files; default: all in $DUOKV_DATA/traces")
    parser.add_argument("--limit", type=int, help="only the first LIMIT requests; the published figures do not apply")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: one a core")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 0, or 1 if a figure is off, or 2 for what cannot be done."""
    given = _arguments(argv)
    started = time.perf_counter()
    try:
        traces = given.traces or found_traces()
        cells = _measure_with_progress(traces, given.limit, max(1, given.workers))
    except DuoKVError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    compared = [cell for cell in cells if cell.published is not None]
    off = [cell for cell in compared if cell.verdict == "off"]
    if given.json:
        print(json.dumps([{**asdict(cell), "verdict": cell.verdict} for cell in cells], indent=1))
        return 1 if off else 0
    terminal(_PLAIN_WIDTH).print(table_of(cells))
    print("T: idle expiry of Block KV. SWA: share of the requests with a prefix hit whose hit tail has a live state.")
    if compared:
        equal = len(compared) - len(off)
        print(f"{equal} of {len(compared)} figures equal the published ones ({time.perf_counter() - started:.0f} s).")
    else:
        print("The published figures hold for whole known traces, so nothing is compared here.")
    return 1 if off else 0


def _measure_with_progress(traces: Sequence[Path], limit: int | None, workers: int) -> list[Cell]:
    runs = len(dict.fromkeys(FIGURES.values()))
    total = runs * sum(sum(1 for _ in read_trace(path, limit=limit)) for path in traces)
    with progress_bar("simulated requests", total) as advance:
        return measure(traces, limit=limit, workers=workers, on_requests=advance)


if __name__ == "__main__":
    sys.exit(main())
