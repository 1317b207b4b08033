"""The demo's conversation about a source file: what each turn costs an engine that embeds the store.

Two processes serve it from one store on disk, the first of them killed. The same prompts are then served in exact mode
and without any cache, in this process: those two must give the same tokens.
"""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from duokv.bench.clock import Time
from duokv.engine import Engine, EngineConfig, Output, Sampling, namespace_of
from duokv.engine.config import BOS
from duokv.engine.model import Model
from duokv.engine.weights import load_model, weights_revision
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import StoreError
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.kvstore.opening import open_store
from duokv.kvstore.store import KVStore
from duokv.replay import Mode, Reason, ReplayPolicy
from duokv.tools.demo_process import Send, in_new_process, milliseconds

LAPSE_S = 181.0
"""An SWA state lives 180 s after its last use."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A line of the script. after_s: virtual seconds before it. anew: by somebody who has said nothing before."""

    name: str
    question: str
    after_s: float = 0.0
    anew: bool = False


SCRIPT: Sequence[Ask] = (
    Ask("1", "What is this module for?"),
    Ask("2", "Which class does the work?"),
    Ask("3, 181 s later", "Which of its methods would a caller use first?", after_s=LAPSE_S),
    Ask("4, new process", "What becomes of two events at the same time?"),
    Ask("another user", "Is it safe to use from several threads?", anew=True),
)
BEFORE_KILL = 3
"""Lines of the script that the first process serves."""
HOW: Mapping[Reason, str] = {
    Reason.NO_HIT: "nothing stored",
    Reason.SHORT_HIT: "too short a hit",
    Reason.SWA_HIT: "SWA restored",
    Reason.SWA_MISS: "SWA replayed",
}

_CONFIG = StoreConfig(swa_bytes=8 << 20, maintenance_interval_s=0)
_DEADLINE_S = 60.0
_NAME_WIDTH = max(len(ask.name) for ask in SCRIPT) + 2
_REPLY_WIDTH = 90


@dataclass(frozen=True, slots=True)
class Turn:
    """A line of the script and how it was served. prompt: token ids."""

    ask: Ask
    prompt: tuple[int, ...]
    output: Output


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said, and the same prompts in exact mode and without any cache; each in the order of the script."""

    turns: Sequence[Turn]
    exact: Sequence[Turn]
    cold: Sequence[Output]


def conversation(console: Console, file: Path, text: bytes, *, reply: int) -> Conversation:
    """Talk about `text`, of `file`, in replies of `reply` tokens; print and return how it was served.

    StoreError if exact mode gives other tokens than a run without a cache, or if a process fails.
    """
    console.rule(f"4. A conversation about {escape(file.name)}", align="left")
    console.print(
        f"The first prompt is {escape(str(file))} ({len(text):,} bytes, a token each) and a question; each further "
        "one is the last, its reply and another question. The engine is real, the model a toy: 6 M parameters that "
        "read bytes and were trained on Python sources. Its replies go on writing; they answer nothing. Milliseconds "
        f"are real; {LAPSE_S:.0f} s are put on the clock, not waited for.\n"
    )
    with tempfile.TemporaryDirectory(prefix="duokv-demo-") as folder:
        url = f"file://{folder}"
        turns = []
        for turn in in_new_process(partial(_first_life, url, text, reply), Turn, count=BEFORE_KILL):
            turns.append(turn)
            _print_turn(console, turn)
        console.print(f"{'':<{_NAME_WIDTH}}(the process is killed, nothing closed; another opens its store)")
        second = partial(_second_life, url, text, reply, tuple(turns))
        arriving = in_new_process(second, Turn, count=2 * len(SCRIPT) - BEFORE_KILL)
        for turn in itertools.islice(arriving, len(SCRIPT) - BEFORE_KILL):
            turns.append(turn)
            _print_turn(console, turn)
        console.print(_turns_table(turns))
        console.print(_note(turns))
        exact = list(arriving)
    # The first turn met an empty store, and is the cold run of its prompt.
    cold = [turns[0].output, *cold_runs([turn.prompt for turn in turns[1:]], reply)]
    served = Conversation(turns, exact, cold)
    compare(console, served)
    return served


# -- serving ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Server:
    """The model on a store. For one thread."""

    model: Model
    store: KVStore
    clock: Clock

    def serve(self, prompt: Sequence[int], reply: int, mode: Mode = "bounded") -> Output:
        """Serve one request by an engine of its own; what it leaves is durable then."""
        config = EngineConfig(
            num_slots=(len(prompt) + reply) // BLOCK_TOKENS + 1,
            replay=ReplayPolicy(encoder_layers=self.model.config.encoder_layers, mode=mode),
            load_deadline_s=_DEADLINE_S,
        )
        namespace = namespace_of(self.model.config, weights_revision())
        with Engine(self.model, config, store=self.store, clock=self.clock) as engine:
            (output,) = engine.generate([prompt], ns=namespace, traffic="chat", sampling=_sampling(reply))
        self.store.flush()
        return output


@contextmanager
def _serving(url: str, now: Time) -> Iterator[_Server]:
    model, clock = load_model(), now.clock()
    with open_store(url, geometry=model.config.cache, config=_CONFIG, clock=clock) as store:
        yield _Server(model, store, clock)


def _first_life(url: str, text: bytes, reply: int, send: Send) -> None:
    now = Time()
    with _serving(url, now) as server:
        for turn in _talk(server, now, SCRIPT[:BEFORE_KILL], text, reply):
            send(turn)
        os.kill(os.getpid(), signal.SIGKILL)


def _second_life(url: str, text: bytes, reply: int, before: tuple[Turn, ...], send: Send) -> None:
    """Send the rest of the conversation, then all of it again in exact mode, each prompt with its SWA states expired.

    Exact mode comes last: the blocks it leaves replace approximate ones, which later turns would have met.
    """
    now = Time(sum(turn.ask.after_s for turn in before))
    with _serving(url, now) as server:
        turns = list(before)
        for turn in _talk(server, now, SCRIPT[BEFORE_KILL:], text, reply, last=before[-1]):
            turns.append(turn)
            send(turn)
        for turn in turns:
            now.ahead_s += LAPSE_S
            send(replace(turn, output=server.serve(turn.prompt, reply, "exact")))


def _talk(
    server: _Server, now: Time, script: Sequence[Ask], text: bytes, reply: int, *, last: Turn | None = None
) -> Iterator[Turn]:
    for ask in script:
        now.ahead_s += ask.after_s
        before = (BOS, *text) if last is None or ask.anew else (*last.prompt, *last.output.tokens)
        prompt = (*before, *f"\n\n# Question: {ask.question}\n# Answer:".encode())
        last = Turn(ask, prompt, server.serve(prompt, reply))
        yield last


def cold_runs(prompts: Sequence[Sequence[int]], reply: int) -> list[Output]:
    """Serve prompts in one batch without any cache: the store is empty, and a salt each keeps them from sharing."""
    model = load_model()
    slots = sum(len(prompt) + reply for prompt in prompts) // BLOCK_TOKENS + len(prompts)
    outputs: list[Output] = []
    with (
        open_store("memory://cold", geometry=model.config.cache, config=_CONFIG) as store,
        Engine(model, EngineConfig(num_slots=slots), store=store) as engine,
    ):
        for index, prompt in enumerate(prompts):
            namespace = namespace_of(model.config, weights_revision(), salt=b"%d" % index)
            engine.submit(prompt, ns=namespace, sampling=_sampling(reply), index=index)
        while len(outputs) < len(prompts):
            outputs += engine.step()
    return sorted(outputs, key=lambda output: output.handle.index)


def _sampling(reply: int) -> Sampling:
    # Drawn, as the likeliest token is often the same after a wrong prefix; seeded, as all runs must draw alike.
    return Sampling(max_tokens=reply, temperature=1.0, seed=1)


# -- printing --------------------------------------------------------------------------------------------------------


def compare(console: Console, served: Conversation) -> None:
    """Print how exact mode and the replies compare with runs without a cache; StoreError if exact mode differs."""
    console.print(
        "\nThe same prompts in exact mode, which uses no block that a bounded replay left and replays more rows; "
        f"{LAPSE_S:.0f} s pass before each, so that no SWA state is left. And, in one batch, without any cache (cold; "
        "turn 1 was so already). All replies are drawn with one seed at temperature 1, where a small difference shows:"
    )
    table = _table("turn", last=("first\ntoken", "total", "exact\n= cold", "above\n= cold"))
    same = [_same(turn.output, cold) for turn, cold in zip(served.exact, served.cold, strict=True)]
    own = [_same(turn.output, cold) for turn, cold in zip(served.turns, served.cold, strict=True)]
    for turn, cold, *counts in zip(served.exact, served.cold, same, own, strict=True):
        table.add_row(turn.ask.name, *_costs(turn.output), *(f"{count} of {len(cold.tokens)}" for count in counts))
    console.print(table)
    for turn, cold, count in zip(served.exact, served.cold, same, strict=True):
        if turn.output.tokens != cold.tokens:
            raise StoreError(
                f"turn {turn.ask.name!r}: exact mode left the cold run's tokens after {count} of {len(cold.tokens)}; "
                "run `make test` to see what is broken"
            )
    total = sum(len(cold.tokens) for cold in served.cold)
    replays = sum(turn.output.report.reason is Reason.SWA_MISS for turn in served.turns)
    console.print(
        f"[bold]Exact mode gave the cold run's tokens in all {len(served.cold)} turns.[/] The replies above, {replays} "
        f"of them after a bounded and so approximate replay, are its own for {sum(own)} of {total} tokens; a reply "
        "counts up to its first other token, as it goes on from there with another text."
    )


def _same(output: Output, other: Output) -> int:
    """How many leading tokens are the same. What follows another token continues another text."""
    pairs = zip(output.tokens, other.tokens, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _print_turn(console: Console, turn: Turn) -> None:
    # Ids that are no bytes, and bytes that are no text, become the replacement character.
    reply = repr(bytes(min(token, 0xFF) for token in turn.output.tokens).decode(errors="replace"))
    shown = reply if len(reply) <= _REPLY_WIDTH else f"{reply[: _REPLY_WIDTH - 3]}..."
    console.print(f"{turn.ask.name:<{_NAME_WIDTH}}{turn.ask.question}", markup=False)
    console.print(f"{'':<{_NAME_WIDTH}}{shown}", markup=False, emoji=False, style="italic")


def _turns_table(turns: Sequence[Turn]) -> Table:
    table = _table("turn", "how", last=("first token", "total"))
    for turn in turns:
        reason = turn.output.report.reason
        assert reason is not None
        table.add_row(turn.ask.name, HOW[reason], *_costs(turn.output))
    return table


def _note(turns: Sequence[Turn]) -> str:
    """What in the table of costs may surprise."""
    reports = [turn.output.report for turn in turns]
    note = ""
    if any(report.reason is Reason.SWA_HIT and report.partition.replayed for report in reports if report.partition):
        note += (
            f"A restored state is one that leaves the decoder layers the prompt's last {ReplayPolicy().keep_rows} rows "
            "to read, so whole blocks near the end are replayed after it too. "
        )
    if reports[-1].reason is Reason.SWA_MISS:
        note += (
            "The other user shares the file and no more: its blocks were there, but SWA states are kept where prompts "
            "and replies end, and this process has seen none end there."
        )
    return note


def _table(*left: str, last: Sequence[str]) -> Table:
    table = Table()
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in ("swa_hit", "block_hit", "replayed", "computed", *last):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _costs(output: Output) -> Iterator[str]:
    """The four token counts and the two times."""
    report = output.report
    part = report.partition
    assert part is not None
    assert report.first_token_ms is not None
    yield from (f"{tokens:,}" for tokens in (part.swa_hit, part.block_hit, part.replayed, part.computed))
    yield from (milliseconds(ms / 1000) for ms in (report.first_token_ms, report.total_ms))
