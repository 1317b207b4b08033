"""How far a replayed request is from a cold one: loss, KL divergence and greedy agreement on held-out text.

Everything is computed by `engine.forward`, which the engine equals bit for bit. A hit ends at token H; the next
`SCORED` rows are scored, each predicting the token after it, as a cold run has them and after a replay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import BOS
from duokv.engine.forward import ForwardPass, Planes, forward
from duokv.engine.model import Model
from duokv.engine.weights import load_model
from duokv.kvstore.keys import BLOCK_TOKENS

SCORED = 256
"""Rows scored after a hit."""
EXACT = "exact"
"""As a number of rows: so many that the replay equals the cold run."""
Kind = Literal["replay", "encoder", "decoder", "both", "earlier"]


class Case(NamedTuple):
    """What is done to a text, and how much of it.

    replay: `amount` encoder rows before the hit's end are replayed, as the engine does it; compared with a cold run
        that leaves out the same decoder rows, so that the replay is all that differs.
    encoder, decoder, both: `amount` rows of these layers are replayed; compared with a cold run that has all rows.
    earlier: replay of 128 rows over blocks of which the last `amount` turns of 128 tokens were each computed after a
        replay of their own.
    """

    kind: Kind
    amount: int | str


class Scored(NamedTuple):
    """One text's means over its scored rows, in bits per token.

    agreement: share of rows with the cold run's likeliest token. equal: all logits are the cold run's, bit for bit.
    """

    cold_bits: float
    bits: float
    kl_bits: float
    agreement: float
    equal: bool


class Subject(Protocol):
    """A text and what can be done to it."""

    def run(self, case: Case) -> Scored:
        """Carry a case out."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Means over `texts` texts of `Scored`. excess_bits: replayed less cold; error_bits: its standard error.

    equal: every text's logits are equal, bit for bit.
    """

    cold_bits: float
    bits: float
    excess_bits: float
    error_bits: float
    kl_bits: float
    agreement: float
    equal: bool
    texts: int

    @classmethod
    def of(cls, scored: Sequence[Scored]) -> Comparison:
        """Average texts."""
        excess = [one.bits - one.cold_bits for one in scored]
        return cls(
            cold_bits=fmean(one.cold_bits for one in scored),
            bits=fmean(one.bits for one in scored),
            excess_bits=fmean(excess),
            error_bits=stdev(excess) / math.sqrt(len(excess)) if len(excess) > 1 else math.nan,
            kl_bits=fmean(one.kl_bits for one in scored),
            agreement=fmean(one.agreement for one in scored),
            equal=all(one.equal for one in scored),
            texts=len(scored),
        )


def score(cold: Tensor, replayed: Tensor, targets: Tensor) -> Scored:
    """Compare logits [n, vocabulary] of the same rows, which predict `targets` [n]."""
    bit = math.log(2)
    right, other = functional.log_softmax(cold, dim=-1), functional.log_softmax(replayed, dim=-1)
    return Scored(
        cold_bits=functional.nll_loss(right, targets).item() / bit,
        bits=functional.nll_loss(other, targets).item() / bit,
        kl_bits=(right.exp() * (right - other)).sum(-1).mean().item() / bit,
        agreement=(right.argmax(-1) == other.argmax(-1)).float().mean().item(),
        equal=torch.equal(cold, replayed),
    )


class TinySubject:
    """A text of `engine.model.Model`. tokens: [L + 1] ids, the last one only predicted; the last `SCORED` rows are new.

    Thread-safe.
    """

    def __init__(self, model: Model, tokens: Tensor) -> None:
        c = model.config
        self._model = model
        self._rows, self._targets = tokens[:-1], tokens[1:][-SCORED:]
        self._hit = len(self._rows) - SCORED
        self._encoder_reach = c.encoder_layers * c.window
        # From here on, decoder rows of the scored ones have all they can see.
        self._decoder_from = max(self._hit - (c.layers - c.encoder_layers) * c.window, 0)
        # Made from row 0, by nothing that a replay uses; decoder rows are left out as the engine does.
        self._whole = forward(model, self._rows, decoder_start=self._hit)

    def run(self, case: Case) -> Scored:
        """Carry a case out."""
        kind, amount = case
        start = self._hit - (self._encoder_reach if amount == EXACT else int(amount))
        match kind:
            case "replay":
                return self._score(self._whole, self._pass(start, self._hit))
            case "encoder":
                return self._score(self._untruncated, self._pass(start, self._decoder_from))
            case "decoder":
                return self._score(self._untruncated, self._cold(start))
            case "both":
                return self._score(self._untruncated, self._pass(start, start))
            case "earlier":
                planes = self._after_replays(int(amount))
                return self._score(self._whole, self._pass(self._hit - BLOCK_TOKENS, self._hit, planes))

    @cached_property
    def _untruncated(self) -> ForwardPass:
        """The cold run with all decoder rows that the scored ones see."""
        return self._cold(self._decoder_from)

    def _score(self, cold: ForwardPass, replayed: ForwardPass) -> Scored:
        return score(cold.logits[-SCORED:], replayed.logits[-SCORED:], self._targets)

    def _cold(self, decoder_start: int) -> ForwardPass:
        """The cold run with decoder rows from `decoder_start` on, made of as few encoder rows as that takes."""
        return self._pass(min(decoder_start, self._hit) - self._encoder_reach, decoder_start)

    def _pass(self, start: int, decoder_start: int, planes: Planes | None = None) -> ForwardPass:
        start = max(start, 0)
        return forward(
            self._model, self._rows, start=start, decoder_start=max(decoder_start, 0),
            adopted=planes or self._whole.planes, adopted_tokens=self._hit,
            encoded_before=self._whole.encoded[:start],
        )  # fmt: skip

    def _after_replays(self, earlier: int) -> Planes:
        planes: Planes = self._whole.planes
        for hit in range(self._hit - earlier * BLOCK_TOKENS, self._hit, BLOCK_TOKENS):
            rows = self._rows[: hit + BLOCK_TOKENS]
            planes = forward(
                self._model, rows, start=hit - BLOCK_TOKENS, decoder_start=len(rows) - 1, adopted=planes,
                adopted_tokens=hit,
            ).planes  # fmt: skip
        return planes


@dataclass(frozen=True, slots=True)
class TinyTexts:
    """Makes subjects of texts up to `longest` tokens and the model in `weights`, loaded anew in any process."""

    weights: Path
    longest: int

    def model(self) -> Model:
        """Load the model; UsageError if it cannot be."""
        return load_model(self.weights, max_positions=self.longest)

    def __call__(self, tokens: Tensor) -> TinySubject:
        """The subject of a text of [L + 1] tokens."""
        return TinySubject(self.model(), tokens)


def byte_texts(data: bytes, context: int, most: int | None) -> list[Tensor]:
    """Cut up to `most` texts of `context` + 1 byte tokens, a `BOS` first, spread evenly over `data`; none overlap."""
    count = len(data) // context
    chosen = range(count) if most is None else np.linspace(0, count - 1, min(most, count)).astype(int).tolist()
    return [torch.tensor([BOS, *data[i * context : (i + 1) * context]]) for i in chosen]


def measure(
    subject: Callable[[Tensor], Subject], texts: Sequence[Tensor], cases: Sequence[Case], pool: Executor,
    done: Callable[[], None],
) -> dict[Case, Comparison]:  # fmt: skip
    """Carry out every case on every text in `pool`; `done` is called after each text."""
    running = [pool.submit(_scores, subject, tokens.tolist(), cases) for tokens in texts]
    for ended in as_completed(running):
        ended.result()
        done()
    columns = zip(*(one.result() for one in running), strict=True)
    return {case: Comparison.of(column) for case, column in zip(cases, columns, strict=True)}


def _scores(subject: Callable[[Tensor], Subject], tokens: list[int], cases: Sequence[Case]) -> list[Scored]:
    torch.set_num_threads(1)  # of this worker
    with torch.inference_mode():
        on = subject(torch.tensor(tokens))
        return [on.run(case) for case in cases]
