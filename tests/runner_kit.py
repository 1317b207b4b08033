"""What the runner's tests share: texts computed cold, requests that start from parts of them, and their outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from engine_kit import CONFIG, model
from torch import Tensor

from duokv.engine.runner import BoundaryState, Runner, Truncation, Work
from duokv.engine.session import Session
from duokv.engine.slots import BlockSlots
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import Mode, ReplayPlan, ReplayPolicy, plan_replay

GENERATED = 4
"""Tokens after the prompt that tests append: a few decode steps and an odd end."""


def policy(mode: Mode = "bounded", keep_rows: int = 140) -> ReplayPolicy:
    return ReplayPolicy(encoder_layers=CONFIG.encoder_layers, mode=mode, keep_rows=keep_rows)


def cold_plan(length: int, keep_rows: int = 140) -> ReplayPlan:
    return plan_replay(hit_tokens=0, prompt_tokens=length, swa_at=None, policy=policy(keep_rows=keep_rows))


@dataclass
class Outcome:
    """What a request leaves: logits of its prompt's last row and of every row after, blocks, states, final rings.

    memory: uint8 [blocks, payload_bytes], the last perhaps partly written; `blocks` are the whole ones. states: by
    boundary. rings: encoder and decoder rows of the last window, as far as they were computed or restored.
    """

    tokens: int
    logits: Tensor
    memory: Tensor
    states: dict[int, bytes]
    rings: tuple[Tensor, Tensor]
    rows: int
    decoder_rows: int

    @property
    def blocks(self) -> Tensor:
        return self.memory[: self.tokens // BLOCK_TOKENS]

    def boundaries(self, after: int) -> range:
        """Boundaries above `after`, and one beyond what was computed."""
        return range(after - after % BLOCK_TOKENS + BLOCK_TOKENS, self.tokens + 2 * BLOCK_TOKENS, BLOCK_TOKENS)


@dataclass
class Request:
    """A prompt with tokens to follow, in memory of its own, cut into steps. rows as in `Outcome`.

    chunks: rows of the prompt's steps, repeated; tokens after the prompt come one a step.
    """

    session: Session
    prompt: int
    chunks: Sequence[int]
    logits: list[Tensor] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    steps: int = 0

    def work(self) -> Work | None:
        """The next step, None at the end."""
        at = self.session.computed
        if at == len(self.session.tokens):
            return None
        chunk = self.chunks[self.steps % len(self.chunks)] if at < self.prompt else 1
        self.steps += 1
        end = min(at + chunk, self.prompt) if at < self.prompt else at + 1
        return Work(self.session, end, logits=end >= self.prompt)

    def take(self, logits: Tensor | None, states: list[BoundaryState]) -> None:
        if logits is not None:
            self.logits.append(logits)
        self.states |= {state.end: state.data.tobytes() for state in states}


class Bench:
    """Slots and a runner over them."""

    def __init__(self, *, truncation: Truncation = "compact", num_slots: int = 64) -> None:
        self.slots = BlockSlots(CONFIG.cache, num_slots, poison=True)
        self.runner = Runner(model(), self.slots, truncation=truncation)
        self.rows = self.decoder_rows = 0

    def request(
        self,
        tokens: Sequence[int],
        prompt: int,
        plan: ReplayPlan,
        *,
        chunks: Sequence[int] = (1 << 20,),
        blocks: Tensor | None = None,
        state: bytes | None = None,
    ) -> Request:
        """Admit a request: `blocks` are copied into its slots up to the plan's hit, `state` is restored."""
        table = self.slots.allocate(-(-len(tokens) // BLOCK_TOKENS))
        adopted = plan.write_floor // BLOCK_TOKENS
        if adopted:
            assert blocks is not None
            self.slots.memory[table[:adopted]] = blocks[:adopted]
        window = None if state is None else memoryview(state)
        session = Session.begin(CONFIG, plan, list(tokens), slots=table, window=window, poison=True)
        return Request(session, prompt, chunks)

    def run(self, *requests: Request) -> None:
        """Step all requests together, each to its end."""
        while True:
            works = {i: work for i, request in enumerate(requests) if (work := request.work()) is not None}
            if not works:
                return
            done = self.runner.step(list(works.values()))
            self.rows += done.rows
            self.decoder_rows += done.decoder_rows
            for i, logits, states in zip(works, done.logits, done.states, strict=True):
                requests[i].take(logits, states)

    def outcome(self, request: Request) -> Outcome:
        session = request.session
        encoder = CONFIG.encoder_layers
        slots = session.ring.shape[1]

        def newest(rows: Tensor, floor: int) -> Tensor:
            return rows[:, torch.arange(max(session.computed - BLOCK_TOKENS, floor), session.computed) % slots]

        return Outcome(
            tokens=session.computed,
            logits=torch.stack(request.logits),
            memory=self.slots.memory[session.slots],
            states=dict(request.states),
            rings=(
                newest(session.ring[:encoder], session.held_from),
                newest(session.ring[encoder:], session.plan.decoder_start),
            ),
            rows=self.rows,
            decoder_rows=self.decoder_rows,
        )


def run_alone(
    tokens: Sequence[int],
    prompt: int,
    plan: ReplayPlan,
    *,
    chunks: Sequence[int] = (1 << 20,),
    truncation: Truncation = "compact",
    blocks: Tensor | None = None,
    state: bytes | None = None,
) -> Outcome:
    """Compute one request in memory of its own."""
    bench = Bench(truncation=truncation)
    request = bench.request(tokens, prompt, plan, chunks=chunks, blocks=blocks, state=state)
    bench.run(request)
    return bench.outcome(request)
