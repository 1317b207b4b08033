"""One request from submission to its end: what belongs to it and survives preemption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from duokv.engine.report import Handle
from duokv.engine.runner import BoundaryState
from duokv.engine.sampler import Sampling
from duokv.engine.session import Session
from duokv.kvstore import BlockKeys, Namespace, SwaWindow, UsageError
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import Reason, ReplayPlan, ReplayPolicy, TokenPartition, kept_boundaries

OnToken = Callable[[Handle, int], None]
"""Called with each token of a request once it is sampled, on the thread that steps the engine."""


Tokens = Sequence[int] | npt.NDArray[np.integer]
"""A prompt: token ids below the model's vocabulary size, at least one."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold `tokens` tokens, the last one perhaps in part."""
    return -(-tokens // BLOCK_TOKENS)


class WindowLease:
    """A window of the SWA tier that stays as it is until `close`."""

    def __init__(self, window: SwaWindow, stack: ExitStack) -> None:
        self.window = window
        self.held = True
        self._stack = stack

    def close(self) -> None:
        """End the lease; idempotent."""
        self.held = False
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request was given: a plan, and a session at its start whose slots have room for all tokens so far.

    lease: of the state restored into the session, on an SWA hit. exact: what the session makes equals a cold run's.
    valid_from: first position whose SWA rows may be kept. hit_tokens: what the index held of its tokens.
    """

    plan: ReplayPlan
    session: Session
    lease: WindowLease | None
    exact: bool
    valid_from: int
    hit_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """A request and all it owns.

    number: order of arrival; an older request is never preempted for a younger one. keys: of the prompt's whole blocks.
    tokens: prompt and output so far. decoder_start: fixed by its first plan.
    admission: the latest; a preempted request resumes with its plan and lease. session: while it holds slots.
    states: SWA states at boundaries it crossed that may be kept. stored_blocks: leading blocks write-back took over.
    exact: no token was sampled on top of an inexact cache.
    served: its prompt was computed and reported; `hit_tokens` were in the index, it was come by as `partition` and
        `reason` say.
    crowded: slots ran out under its last admission. taken: slots that one has taken so far. load_s: its seconds.
    rows: computed in the encoder.
    """

    handle: Handle
    number: int
    namespace: Namespace
    traffic: str | None
    tokens: list[int]
    prompt_tokens: int
    keys: BlockKeys
    sampling: Sampling
    seed: int
    on_token: OnToken | None
    submitted_s: float
    decoder_start: int | None
    admission: Admission | None = None
    session: Session | None = None
    states: dict[int, BoundaryState] = field(default_factory=dict)
    stored_blocks: int = 0
    exact: bool = True
    served: bool = False
    hit_tokens: int = 0
    crowded: bool = False
    taken: int = 0
    partition: TokenPartition | None = None
    reason: Reason | None = None
    load_s: float = 0.0
    first_token_s: float | None = None
    rows: int = 0
    preemptions: int = 0

    @property
    def output(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[self.prompt_tokens :])

    def end_lease(self) -> None:
        """Let go of the SWA state it restored, if any."""
        if self.admission is not None and self.admission.lease is not None:
            self.admission.lease.close()

    def keep_states(self, states: list[BoundaryState], policy: ReplayPolicy) -> None:
        """Note states of boundaries just crossed, and forget those that no later end of prompt or output wants."""
        if not states:
            return
        assert self.session is not None
        self.states.update((state.end, state) for state in states)
        wanted = () if self.served else self.prompt_boundaries(policy)
        low = next(iter(kept_boundaries(self.session.computed, policy)), 0)
        self.states = {end: state for end, state in self.states.items() if end >= low or end in wanted}

    def prompt_boundaries(self, policy: ReplayPolicy) -> list[int]:
        """Boundaries whose states are worth keeping once the prompt is computed, ascending."""
        assert self.admission is not None
        plan = self.admission.plan
        replayed = {plan.write_floor} if plan.start < plan.write_floor else set()
        return sorted(replayed | {*kept_boundaries(self.prompt_tokens, policy)})


def token_list(prompt: Tokens, vocab_size: int) -> list[int]:
    """Return a prompt as ints; UsageError if it is none of a model of so many ids."""
    array = np.asarray(prompt)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise UsageError(f"prompt: {array.dtype} of shape {array.shape}; give at least one integer token id")
    if int(array.min()) < 0 or int(array.max()) >= vocab_size:
        raise UsageError(f"prompt: an id is outside [0, {vocab_size}), the model's vocabulary; encode it with its own")
    return [int(token) for token in array]
