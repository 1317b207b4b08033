"""What serving costs beside computing: first tokens, steps, SWA windows and copies against limits of the same run.

python -m duokv.bench.serving                  # some minutes
python -m duokv.bench.serving --quick --json   # fewer rounds, in under a minute
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median

from duokv.bench.command_line import OneLineParser, number, numbers, progress_bar, terminal
from duokv.bench.io_limits import check_disk
from duokv.bench.io_report import Machine
from duokv.bench.report_markdown import Row, markdown_table, terminal_table
from duokv.bench.samples import Sample
from duokv.bench.serving_engine import (
    BATCH,
    Bookkeeping,
    FirstToken,
    FirstTokenCase,
    FirstTokens,
    computed_blocks,
    measure_bookkeeping,
    positions,
)
from duokv.bench.serving_memory import ArenaCost, CopySpeed, copy_devices, measure_arenas, measure_copies
from duokv.engine.weights import load_model
from duokv.kvstore import CacheGeometry
from duokv.kvstore.errors import DuoKVError

BLOCKS = 601
STEPS = 200
WINDOWS = (1_000, 100_000)
ROUNDS, QUICK_ROUNDS = 9, 5
WAVES, QUICK_WAVES = 4, 2
"""Batches of decode steps at most: one takes as long as several of the other figures' rounds."""
_SLICES, _LIVES = 10, 2_000
_BESIDE = 4
"""Prompts that are asked for at once where more than one is."""
_GEOMETRIES = ("deepseek-v4.1-flash", "tiny")
_HEADINGS = ("figure", "found", "low", "high", "aim", "")
_PLAIN_WIDTH = 110
_FIRST_TITLE = "First tokens of prompts whose head is on disk"
_FIRST_HEADINGS = ("prompts", "load ms", "compute ms", "cold ms", "of the larger", "low", "high")
_FIRST_NOTE = (
    "load: without computing; compute: on blocks in engine memory; cold: until the last prompt's first token; each the "
    "fastest of its rounds. Slow reads take as long as computing: a prompt alone then waits for both, since its first "
    "layer with compressed KV reads all of it"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """found: one figure for `parts`, as a rule their median. aim: what it should reach."""

    name: str
    found: float
    parts: tuple[float, ...]
    lower_is_better: bool
    aim: float
    unit: str = "ratio"

    @classmethod
    def of(
        cls,
        name: str,
        parts: Sequence[float],
        *,
        at_most: float | None = None,
        at_least: float = 0.0,
        unit: str = "ratio",
    ) -> Figure:
        """Of the median."""
        return cls(
            name, median(parts), tuple(parts), at_most is not None, at_least if at_most is None else at_most, unit
        )

    @property
    def reached(self) -> bool:
        """Whether it is as it should be."""
        return self.found <= self.aim if self.lower_is_better else self.found >= self.aim

    def row(self) -> Row:
        """For people."""
        kind = "most" if self.lower_is_better else "least"
        low, high = (f"{min(self.parts):,.4f}", f"{max(self.parts):,.4f}") if len(self.parts) > 1 else ("", "")
        verdict = "reached" if self.reached else "NOT reached"
        return self.name, f"{self.found:,.4f}", low, high, f"at {kind} {self.aim:g}", verdict


@dataclass(frozen=True, slots=True)
class Serving:
    """All that was measured. first_tokens: the first one's is a main figure; the others are for comparison."""

    first_tokens: tuple[FirstToken, ...]
    bookkeeping: Bookkeeping
    arenas: tuple[ArenaCost, ...]
    copies: tuple[CopySpeed, ...]

    def figures(self) -> list[Figure]:
        """The main figures."""
        small, large = self.arenas[0], self.arenas[-1]
        lives = [one + other for one, other in zip(large.put_us, large.lease_us, strict=True)]
        found = [
            Figure("first_token_vs_max", self.first_tokens[0].ratio, self.first_tokens[0].ratios, True, 1.1),
            Figure.of("bookkeeping_share", self.bookkeeping.shares, at_most=0.01),
            Figure.of("swa_cost_growth", [life / small.life_us for life in lives], at_most=1.5),
            Figure.of(
                "swa_page_faults_median", [n for one in self.arenas for n in one.faults], at_most=0.0, unit="faults"
            ),
        ]
        for copy in self.copies:
            name = copy.geometry.rpartition("-")[0] or copy.geometry
            name += "" if copy.device == "cpu" else f" {copy.device}"
            found.append(Figure.of(f"to_slots_vs_memcpy {name}", copy.to_slots, at_least=0.8))
            found.append(Figure.of(f"from_slots_vs_memcpy {name}", copy.from_slots, at_least=0.8))
        return found


def measure(folder: Path, given: argparse.Namespace, done: Callable[[], None]) -> Serving:
    """Measure below `folder`; `done` is called after each part. StoreError if something does less than asked."""
    rounds = given.rounds
    cases = first_token_cases(given.blocks, quick=given.quick)
    model = load_model(max_positions=positions(given.blocks, given.steps))
    sample = computed_blocks(model)
    first = []
    for place, case in enumerate(cases):
        with FirstTokens(folder / f"store-{place}", model, case, sample) as subject:
            first.append(subject.measure(rounds))
        done()
    waves = min(rounds, QUICK_WAVES if given.quick else WAVES)
    bookkeeping = measure_bookkeeping(folder / "batch", model, steps=given.steps, waves=waves)
    done()
    arenas = measure_arenas(given.windows, lives=_LIVES, slices=_SLICES, done=done)
    copies = []
    for name, device in product(_GEOMETRIES, copy_devices()):
        copies.append(measure_copies(CacheGeometry.preset(name), given.blocks, 2 * rounds + 1, device))
        done()
    return Serving(tuple(first), bookkeeping, tuple(arenas), tuple(copies))


def first_token_cases(blocks: int, *, quick: bool) -> list[FirstTokenCase]:
    """What first tokens are measured of, the main case first."""
    main = FirstTokenCase(blocks)
    if quick:
        return [main]
    few = max(2, blocks // 10)  # a hit of one block is not worth adopting
    return [
        main,
        FirstTokenCase(few),
        FirstTokenCase(blocks, slow=True),
        FirstTokenCase(few, _BESIDE),
        FirstTokenCase(few, _BESIDE, slow=True),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 2 for what cannot be done."""
    given = arguments(argv)
    try:
        machine, found = measured(given, shown=not given.json and sys.stderr.isatty())
    except (DuoKVError, OSError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({figure.name: round(figure.found, 5) for figure in found.figures()}))
        return 0
    out = terminal(_PLAIN_WIDTH)
    for line in machine.lines():
        out.print(line)
    out.print(terminal_table("Main figures", _about(found), _HEADINGS, [one.row() for one in found.figures()]))
    rows = [_case(one) for one in found.first_tokens]
    out.print(terminal_table(_FIRST_TITLE, _FIRST_NOTE, _FIRST_HEADINGS, rows))
    return 0


def measured(given: argparse.Namespace, *, shown: bool) -> tuple[Machine, Serving]:
    """Measure what arguments ask for."""
    folder = given.folder.absolute()
    cases = first_token_cases(given.blocks, quick=given.quick)
    geometry = CacheGeometry.preset("tiny")
    check_disk(folder, sum(2 * case.requests * case.blocks * geometry.slot_bytes for case in cases) + (256 << 20))
    machine = Machine.here(folder)
    parts = len(cases) + 1 + len(given.windows) + _SLICES + len(_GEOMETRIES) * len(copy_devices())
    with (
        tempfile.TemporaryDirectory(prefix="duokv-serving-", dir=folder) as name,
        progress_bar("measured", parts, shown=shown) as done,
    ):
        found = measure(Path(name), given, done)
    return machine.ended(), found


def sections(found: Serving) -> list[str]:
    """The figures in Markdown."""
    return [
        f"{_about(found)}.",
        markdown_table(_HEADINGS, [one.row() for one in found.figures()]),
        f"### {_FIRST_TITLE}",
        f"{_FIRST_NOTE}.",
        markdown_table(_FIRST_HEADINGS, [_case(one) for one in found.first_tokens]),
    ]


def samples(found: Serving) -> Iterator[Sample]:
    """The figures for programs."""
    for figure in found.figures():
        for turn, part in enumerate(figure.parts):
            yield Sample("serving", "main figures", figure.name, figure.unit, turn, part, figure.aim)
    for one in found.first_tokens:
        for kind, seconds in (("load", one.load_s), ("compute", one.compute_s), ("cold", one.cold_s)):
            for turn, taken in enumerate(seconds):
                yield Sample("serving", _FIRST_TITLE, f"{_case(one)[0]}, {kind}", "s", turn, taken)


def _about(found: Serving) -> str:
    small, large = found.arenas[0], found.arenas[-1]
    speeds = ", ".join(
        f"{one.gigabytes_s:.1f} GB/s for {one.blocks} x {one.geometry} ({one.device})" for one in found.copies
    )
    return (
        f"A decode step of {BATCH} rows takes {found.bookkeeping.step_ms:.1f} ms of CPU ({found.bookkeeping.steps:,} "
        f"measured). Storing and leasing a window takes {small.life_us:.1f} us among {small.windows:,}, "
        f"{large.life_us:.1f} us among {large.windows:,} ({sum(one.lives for one in found.arenas):,} measured). "
        f"One copy: {speeds}. first_token_vs_max: the fastest first token by the fastest of what it waits for; the "
        "others are medians. bookkeeping_share: the store's and the engine's own work in a step; swa_cost_growth: a "
        "window's time in the largest arena by that in the smallest; to_slots, from_slots: copies between rows and "
        "block slots"
    )


def _case(one: FirstToken) -> Row:
    case = one.case
    return (
        f"{case.requests} x {case.blocks} blocks{', slow reads' if case.slow else ''}",
        *(f"{1e3 * min(seconds):,.1f}" for seconds in (one.load_s, one.compute_s, one.cold_s)),
        *(f"{ratio:.3f}" for ratio in (one.ratio, min(one.ratios), max(one.ratios))),
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line."""
    parser = OneLineParser(prog="python -m duokv.bench.serving", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the main figures only, in fewer rounds")
    parser.add_argument("--json", action="store_true", help="the main figures as one JSON object instead of tables")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="measure below it, on a disk (default: here)",
    )
    parser.add_argument("--rounds", type=number(1), help=f"each figure so often ({ROUNDS}, quick {QUICK_ROUNDS})")
    parser.add_argument("--blocks", type=number(2), default=BLOCKS, help=f"stored blocks of a prompt ({BLOCKS})")
    parser.add_argument("--steps", type=number(1), default=STEPS, help=f"decode steps of a batch ({STEPS})")
    shown = ",".join(map(str, WINDOWS))
    parser.add_argument(
        "--windows", type=numbers(10), default=WINDOWS, metavar="N,N", help=f"sizes of SWA arenas, rising ({shown})"
    )
    given = parser.parse_args(argv)
    if given.rounds is None:
        given.rounds = QUICK_ROUNDS if given.quick else ROUNDS
    return given


if __name__ == "__main__":
    sys.exit(main())
