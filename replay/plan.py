"""Where a request's computation starts on a prefix hit, and which sliding-window states are worth keeping.

A hit gives back the compressed Block KV of a prompt's head. The sliding-window layers also need the `window_tokens`
rows before the first computed one: either restored from a stored SWA state, or recomputed ("replayed") from rows whose
Block KV is there already. Everything here is a pure function of its arguments: no clock, no I/O, safe on any thread.

The rules, with W the window (and the block), K the decoder rows kept, E the encoder layers, L the prompt's length,
D = max(0, L-K) fixed at first admission, floor_W(x) = x rounded down to a multiple of W, even(x) to a multiple of 2:

    H = floor_W(min(hit, L-1))               adopted hit; H <= W is not adopted: the request runs cold
    A = min(H, floor_W(D))                   anchor: the decoder layers need encoder outputs of every row from D on
    SWA hit at B, A-W <= B <= A, B > 0       start = B,                         floor = 0
    SWA miss, bounded                        start = min(H - span, even(D)),    floor = start; start <= 0 runs cold
    SWA miss, exact                          start = max(0, min(H, D) - E*W),   floor = start
    always                                   write_floor = H

Sources: bounded replay, its 128 tokens and decoder truncation from the DeepSeek-V4.1 paper (arXiv 2609.19969); the 140
rows kept from the README of DeepInfer 0.1.0. The start, floor and write rules are this project's derivation;
`duokv.replay.oracle` shows them right.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

import msgspec

from duokv.kvstore.errors import UsageError, nearest

WINDOW_TOKENS = 128
"""Sliding window of every DeepSeek-V4.1 layer, and the grain of its stored blocks and states."""

Mode = Literal["bounded", "exact"]


class Reason(StrEnum):
    """Why a plan starts where it does."""

    NO_HIT = "NO_HIT"
    """No whole block of the prompt is stored: computed from row 0."""
    SHORT_HIT = "SHORT_HIT"
    """The hit is too short to save anything over replaying it: not adopted, computed from row 0."""
    SWA_HIT = "SWA_HIT"
    """Block KV adopted, the window restored from a stored state."""
    SWA_MISS = "SWA_MISS"
    """Block KV adopted, the window replayed."""


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """The numbers of replay.

    span_tokens: rows a bounded replay recomputes before the hit's end; even. The published value is the window.
    keep_rows: last prompt rows the decoder layers compute at a prefill, at least one window. An engine that verifies
        drafts needs its rollback rows on top (DeepInfer: 140 >= 128 + 6).
    encoder_layers: causal-encoder layers, the ones with a stored SWA state.
    mode: what an SWA miss costs. "bounded" replays `span_tokens` rows and is approximate; "exact" replays one window
        per encoder layer and equals a cold run.
    window_tokens: sliding window, and the size of a stored block; even, so that compressed entries end at boundaries.

    UsageError if a number cannot be meant.
    """

    span_tokens: int = WINDOW_TOKENS
    keep_rows: int = 140
    encoder_layers: int = 20
    mode: Mode = "bounded"
    window_tokens: int = WINDOW_TOKENS

    def __post_init__(self) -> None:
        for name, tokens in (("window_tokens", self.window_tokens), ("span_tokens", self.span_tokens)):
            if tokens < 2 or tokens % 2:
                raise UsageError(f"replay policy: {name} = {tokens} would cut a compressed entry; give an even number")
        if self.keep_rows < self.window_tokens:
            raise UsageError(
                f"replay policy: keep_rows = {self.keep_rows} leaves the decoder's window incomplete; "
                f"give at least {self.window_tokens}"
            )
        if self.encoder_layers < 1:
            raise UsageError(f"replay policy: encoder_layers = {self.encoder_layers} is no encoder; give at least 1")
        if self.mode not in get_args(Mode):
            raise UsageError(f"replay policy: mode {self.mode!r} is unknown; {nearest(self.mode, get_args(Mode))}")


class TokenPartition(msgspec.Struct, frozen=True, gc=False):
    """How the tokens of one prompt are come by. The four sum to its length; each token is counted once.

    swa_hit: adopted and not recomputed, with a restored SWA state; block_hit: the same without one;
    replayed: adopted and recomputed for the window's sake; computed: not adopted.
    """

    swa_hit: int
    block_hit: int
    replayed: int
    computed: int

    @property
    def input_tokens(self) -> int:
        """Length of the prompt."""
        return self.swa_hit + self.block_hit + self.replayed + self.computed

    @property
    def amplification(self) -> float:
        """Input tokens per token that went through the encoder."""
        return self.input_tokens / (self.replayed + self.computed)


class ReplayPlan(msgspec.Struct, frozen=True, gc=False):
    """Which rows of a request are computed and what they may see and write. It belongs to the request: a preempted
    request resumes with its own plan, or replans with its own `decoder_start`. Positions are absolute.

    start: first computed row; rows [start, L) go through the encoder layers.
    floor: lowest position a window may see. Global entries are not clipped by it.
    write_floor: end of the adopted hit, a multiple of the block. A global entry is written only if its last token is
        here or later; 0 when nothing was adopted.
    decoder_start: first row of the decoder layers, and the floor of their windows. Their shared global plane is still
        written for every row from write_floor on.
    """

    start: int
    floor: int
    write_floor: int
    decoder_start: int
    reason: Reason

    @property
    def adopted_tokens(self) -> int:
        """Tokens whose stored Block KV the request uses."""
        return self.write_floor

    def partition(self, prompt_tokens: int) -> TokenPartition:
        """Split the prompt's tokens by how they are come by; UsageError if the plan adopts the whole prompt or more."""
        if prompt_tokens <= self.write_floor:
            raise UsageError(
                f"prompt of {prompt_tokens} tokens: the plan adopts {self.write_floor}; give the length it was made for"
            )
        restored = self.reason is Reason.SWA_HIT
        return TokenPartition(
            swa_hit=self.start if restored else 0,
            block_hit=0 if restored else self.start,
            replayed=self.write_floor - self.start,
            computed=prompt_tokens - self.write_floor,
        )


def anchor(*, hit_tokens: int, prompt_tokens: int, policy: ReplayPolicy, decoder_start: int | None = None) -> int:
    """Return the boundary at which an SWA state serves the request best, 0 if none can.

    It is not the end of the hit when fewer than `keep_rows` tokens follow: starting there would leave the decoder's
    window without encoder outputs. Arguments and errors as in `plan_replay`.
    """
    _check(hit_tokens, prompt_tokens, policy, decoder_start)
    adopted = _adopted(hit_tokens, prompt_tokens, policy)
    return _anchor(adopted, _decoder_start(prompt_tokens, policy, decoder_start), policy)


def swa_candidates(
    *, hit_tokens: int, prompt_tokens: int, policy: ReplayPolicy, decoder_start: int | None = None
) -> tuple[int, ...]:
    """Return the boundaries to ask the SWA tier for, best first: the anchor and the one before it, never 0.

    Arguments and errors as in `plan_replay`.
    """
    _check(hit_tokens, prompt_tokens, policy, decoder_start)
    adopted = _adopted(hit_tokens, prompt_tokens, policy)
    return _candidates(adopted, _decoder_start(prompt_tokens, policy, decoder_start), policy)


def plan_replay(
    *,
    hit_tokens: int,
    prompt_tokens: int,
    swa_at: int | None,
    policy: ReplayPolicy,
    decoder_start: int | None = None,
) -> ReplayPlan:
    """Return where a request starts and what it may see and write.

    hit_tokens: tokens found in the Block KV index; need be neither aligned nor shorter than the prompt.
    prompt_tokens: tokens to compute, at least 1; after a preemption the grown length.
    swa_at: the boundary among `swa_candidates` whose state is usable and leased, None if there is none.
    decoder_start: what the request's first plan said, when it is planned anew; None at first admission.

    UsageError on negative numbers, an empty prompt, a decoder_start later than first admission would give, or a swa_at
    that is no candidate.
    """
    _check(hit_tokens, prompt_tokens, policy, decoder_start)
    decoder = _decoder_start(prompt_tokens, policy, decoder_start)
    adopted = _adopted(hit_tokens, prompt_tokens, policy)
    if swa_at is not None and swa_at not in (candidates := _candidates(adopted, decoder, policy)):
        usable_here = " or ".join(map(str, (*candidates, None)))
        raise UsageError(f"swa_at = {swa_at} is no candidate boundary of this request; give {usable_here}")
    if adopted == 0:
        short = min(hit_tokens, prompt_tokens - 1) >= policy.window_tokens
        return ReplayPlan(0, 0, 0, decoder, Reason.SHORT_HIT if short else Reason.NO_HIT)
    if swa_at is not None:
        return ReplayPlan(swa_at, 0, adopted, decoder, Reason.SWA_HIT)
    if policy.mode == "exact":
        start = max(0, min(adopted, decoder) - policy.encoder_layers * policy.window_tokens)
        return ReplayPlan(start, start, adopted, decoder, Reason.SWA_MISS)
    start = min(adopted - policy.span_tokens, _floor(decoder, 2))
    if start <= 0:
        return ReplayPlan(0, 0, 0, decoder, Reason.SHORT_HIT)
    return ReplayPlan(start, start, adopted, decoder, Reason.SWA_MISS)


def valid_from(plan: ReplayPlan, policy: ReplayPolicy) -> int:
    """Return the first position from which the SWA rows of all encoder layers may be kept in a state.

    An exact replay's own first rows are not exact: each encoder layer pushes the first exact row one window less one
    further. A bounded replay's rows all count (as approximate ones).
    """
    if plan.start == 0:
        return 0
    if plan.reason is Reason.SWA_HIT:
        return plan.start - policy.window_tokens
    if policy.mode == "exact":
        return plan.start + (policy.encoder_layers - 1) * (policy.window_tokens - 1)
    return plan.start


def usable(boundary: int, valid_from: int, *, window_tokens: int = WINDOW_TOKENS) -> bool:
    """Return whether the state at `boundary` has a whole window of rows that may be kept."""
    return boundary - window_tokens >= valid_from


def kept_boundaries(total_tokens: int, policy: ReplayPolicy) -> tuple[int, ...]:
    """Return the boundaries, ascending, whose states are worth keeping at the end of a prompt or an output.

    They hold the anchor of every later prompt that repeats these `total_tokens` tokens, with or without more after
    them. Keep those of them that are also `usable`. UsageError if total_tokens is negative.
    """
    if total_tokens < 0:
        raise UsageError(f"total_tokens = {total_tokens} is negative; give the tokens computed so far")
    window = policy.window_tokens
    return tuple(range(max(window, _floor(total_tokens - policy.keep_rows, window)), total_tokens + 1, window))


def is_exact(plan: ReplayPlan, policy: ReplayPolicy, *, blocks_exact: bool, state_exact: bool | None = None) -> bool:
    """Return whether what the request writes (blocks and states) equals that of a cold run.

    blocks_exact: every adopted block is exact. state_exact: the restored state is, given on an SWA hit and only then
    (UsageError). An approximate state taints the result even when the blocks have been replaced by exact ones since.
    """
    if (state_exact is None) == (plan.reason is Reason.SWA_HIT):
        raise UsageError(f"state_exact = {state_exact} on {plan.reason}; give it exactly when a state was restored")
    if plan.adopted_tokens == 0:
        return True
    replayed_bounded = plan.reason is Reason.SWA_MISS and policy.mode == "bounded"
    return blocks_exact and state_exact is not False and not replayed_bounded


def _floor(tokens: int, grain: int) -> int:
    return tokens - tokens % grain


def _adopted(hit_tokens: int, prompt_tokens: int, policy: ReplayPolicy) -> int:
    """The longest block-aligned hit that leaves a row to compute, 0 if it is too short to adopt."""
    aligned = _floor(min(hit_tokens, prompt_tokens - 1), policy.window_tokens)
    return aligned if aligned > policy.window_tokens else 0


def _anchor(adopted: int, decoder: int, policy: ReplayPolicy) -> int:
    return min(adopted, _floor(decoder, policy.window_tokens))


def _candidates(adopted: int, decoder: int, policy: ReplayPolicy) -> tuple[int, ...]:
    best = _anchor(adopted, decoder, policy)
    before = best - policy.window_tokens
    return (best, before) if before > 0 else (best,) if best > 0 else ()


def _decoder_start(prompt_tokens: int, policy: ReplayPolicy, given: int | None) -> int:
    return max(0, prompt_tokens - policy.keep_rows) if given is None else given


def _check(hit_tokens: int, prompt_tokens: int, policy: ReplayPolicy, decoder_start: int | None) -> None:
    if hit_tokens < 0:
        raise UsageError(f"hit_tokens = {hit_tokens} is negative; give 0 for no hit")
    if prompt_tokens < 1:
        raise UsageError(f"prompt_tokens = {prompt_tokens} leaves no row to compute; give at least 1")
    latest = _decoder_start(prompt_tokens, policy, None)
    if decoder_start is not None and not 0 <= decoder_start <= latest:
        raise UsageError(
            f"decoder_start = {decoder_start} is not in [0, {latest}]; give the first plan's, or None at first"
        )
