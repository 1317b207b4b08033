"""What bounded replay costs in quality, and what it saves: loss, KL divergence and agreement with a cold run.

python -m duokv.bench.replay_cost                  # everything, in minutes; --write makes bench/REPLAY.md of it
python -m duokv.bench.replay_cost --quick --json   # the main figures, in under a minute
python -m duokv.bench.replay_cost --model PATH     # a pretrained model with sliding layers, in a local folder
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from duokv.bench.command_line import OneLineParser, number, progress_bar, terminal
from duokv.bench.replay_measure import EXACT, Case, TinyTexts, byte_texts, measure
from duokv.bench.replay_pretrained import Pretrained
from duokv.bench.replay_report import ReplayCost, tables, write_report
from duokv.bench.replay_time import measure_first_token
from duokv.engine.config import BOS
from duokv.engine.weights import ASSETS, TINY_WEIGHTS, weights_revision
from duokv.kvstore.errors import DuoKVError

TRAINED_CONTEXT = 4096
CONTEXTS = (512, 1024, 2048, TRAINED_CONTEXT, 8192, 16_384)
SPANS: tuple[int | str, ...] = (0, 32, 64, 128, 256, EXACT)
SIDE_SPANS = (32, 64, 128, 256)
EARLIER_REPLAYS = (1, 2, 4, 8, 16)
TIMED_TOKENS = 8192
HELD_OUT = ASSETS / "held_out.txt"
WORKERS = 2
"""Texts measured at once, on one thread each."""
_FILE_TOKENS = 8192
"""At most so much of the held-out slice is of one file, one after another."""
_QUICK_TEXTS = 8
_ROUNDS = 3
_PLAIN_WIDTH = 110


def measure_tiny(weights: Path, *, quick: bool, progress: bool, command: str) -> ReplayCost:
    """Measure the model in `weights` on the shipped held-out text; UsageError if it cannot be loaded."""
    subject = TinyTexts(weights, max(CONTEXTS))
    model = subject.model()
    data = HELD_OUT.read_bytes()
    cases = {TRAINED_CONTEXT: _quick_cases()} if quick else {context: _cases(context) for context in CONTEXTS}
    main, others = (_QUICK_TEXTS, 0) if quick else (None, 2 * _QUICK_TEXTS)
    texts = {context: byte_texts(data, context, main if context == TRAINED_CONTEXT else others) for context in cases}
    rounds = 0 if quick else _ROUNDS
    # Processes, since the interpreter's lock is most of what this model waits for.
    with (
        progress_bar("measured", sum(map(len, texts.values())) + rounds, shown=progress) as done,
        ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool,
    ):
        found = {context: measure(subject, texts[context], cases[context], pool, done) for context in cases}
        prompt = [BOS, *data[: TIMED_TOKENS - 1]]
        first_token = measure_first_token(model, prompt, rounds=rounds, done=done) if rounds else {}
    return ReplayCost(
        model=f"tiny, weights {weights_revision(weights)}",
        context=TRAINED_CONTEXT,
        trained_context=TRAINED_CONTEXT,
        bytes_per_token=1.0,
        found=found,
        first_token=first_token,
        joined_above=_FILE_TOKENS,
        command=command,
    )


def measure_pretrained(folder: Path, *, context: int, quick: bool, progress: bool, command: str) -> ReplayCost:
    """Measure a pretrained model with sliding and full layers; UsageError if `folder` holds none."""
    model = Pretrained.load(folder)
    texts = model.texts(HELD_OUT.read_text(), context, _QUICK_TEXTS if quick else 4 * _QUICK_TEXTS)
    amounts = _quick_cases() if quick else [case for case in _cases(context) if case.kind in ("replay", "earlier")]
    if not quick:
        amounts += [Case("replay", model.window * times) for times in (1, 2)]
    cases = [case for case in dict.fromkeys(amounts) if model.fits(case, context)]
    with progress_bar("measured", len(texts), shown=progress) as done, ThreadPoolExecutor(WORKERS) as pool:
        found = {context: measure(model.subject, texts, cases, pool, done)}
    return ReplayCost(
        model=f"{folder.name}: {model.shape}",
        context=context,
        trained_context=model.trained_context,
        bytes_per_token=model.bytes_per_token(texts),
        found=found,
        first_token={},
        joined_above=0,
        command=command,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; 0, or 2 for what cannot be done."""
    given = _arguments(argv)
    progress = not given.json and sys.stderr.isatty()
    command = shlex.join(["python", "-m", "duokv.bench.replay_cost", *(sys.argv[1:] if argv is None else argv)])
    try:
        if given.model is not None and given.model.is_dir():
            cost = measure_pretrained(
                given.model, context=given.context, quick=given.quick, progress=progress, command=command
            )
        else:
            cost = measure_tiny(given.model or TINY_WEIGHTS, quick=given.quick, progress=progress, command=command)
        if given.write is not None:
            write_report(given.write, cost)
    except DuoKVError as error:
        print(f"replay_cost: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(as_json(cost)))
    else:
        out = terminal(_PLAIN_WIDTH)
        for table in tables(cost):
            out.print(table)
    return 0


def as_json(cost: ReplayCost) -> dict[str, object]:
    """The main figures, at `cost.context`."""
    found = cost.found[cost.context]
    spans = {str(case.amount): one for case, one in found.items() if case.kind == "replay"}
    earlier = {str(case.amount): one for case, one in found.items() if case.kind == "earlier"}
    groups = {"span": spans, "earlier_replays": earlier}

    def column(name: str, unit: float) -> dict[str, object]:
        return {
            group: {amount: round(getattr(one, name) / unit, 6) for amount, one in rows.items()}
            for group, rows in groups.items()
        }

    cold = next(iter(found.values())).cold_bits / cost.bytes_per_token
    return {
        "bits_per_byte": {"cold": round(cold, 6), **column("bits", cost.bytes_per_token)},
        "greedy_agreement": column("agreement", 1.0),
        "kl_bits": column("kl_bits", 1.0),
        "exact_bit_equal": found[Case("replay", EXACT)].equal,
    }


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(prog="python -m duokv.bench.replay_cost", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the main figures only, on fewer texts")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--model", type=Path, help="weights of the small model, or the folder of a pretrained one")
    parser.add_argument("--context", type=number(1), default=TRAINED_CONTEXT, help="of a pretrained model, in tokens")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write a report in Markdown, and its plots beside it"
    )
    return parser.parse_args(argv)


def _quick_cases() -> list[Case]:
    return [*(Case("replay", span) for span in (0, 64, 128, EXACT)), Case("earlier", 1), Case("earlier", 16)]


def _cases(context: int) -> list[Case]:
    cases = [Case("replay", span) for span in SPANS]
    if context == TRAINED_CONTEXT:
        cases += [Case(side, span) for side in ("encoder", "decoder", "both") for span in SIDE_SPANS]
        cases += [Case("earlier", count) for count in EARLIER_REPLAYS]
    return cases


if __name__ == "__main__":
    sys.exit(main())
