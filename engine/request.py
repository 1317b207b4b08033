"""One request from submission to its end: what belongs to it and survives preemption."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from duokv.engine.report import Handle
from duokv.engine.runner import BoundaryState
from duokv.engine.sampler import Sampling
from duokv.engine.session import Session
from duokv.kvstore import BlockKeys, KVStore, Namespace, Origin, SwaWindow
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import ReplayPlan

OnToken = Callable[[Handle, int], None]
"""Called with each token of a request as it is sampled, on the thread that steps the engine."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold `tokens` tokens, the last one perhaps in part."""
    return -(-tokens // BLOCK_TOKENS)


class WindowLease:
    """An SWA window that stays as it is until `close`; `window` is None if the tier does not have it."""

    def __init__(self, store: KVStore, key: bytes, *, require: Origin | None) -> None:
        self._stack = ExitStack()
        self.window: SwaWindow | None = self._stack.enter_context(store.lease_window(key, require=require))

    def close(self) -> None:
        """End the lease; idempotent."""
        self.window = None
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Admission:
    """A request with slots, ready to be computed.

    session: at `plan.start`, its window restored. slots: its block table, all tokens so far have room. lease: of the
    restored window, on an SWA hit. exact: what it will leave equals a cold run's. valid_from: first position whose SWA
    rows may be kept. hit_tokens: what the index held. traffic: the class it was looked up under.
    """

    plan: ReplayPlan
    session: Session
    slots: tuple[int, ...]
    lease: WindowLease | None
    exact: bool
    valid_from: int
    hit_tokens: int
    traffic: str


@dataclass(slots=True, eq=False)
class Request:
    """number: order of arrival; a smaller one is never preempted for a larger one. keys: of the prompt's whole blocks.

    tokens: prompt and output so far. admission: the latest one, whose plan and lease a preempted request resumes with.
    resident: holds slots now. decoder_start: fixed by the first plan. states: SWA states at boundaries crossed.
    prompt_states: boundaries to keep when the prompt is done. stored_blocks: leading blocks write-back has taken over.
    served: the prompt was computed once, and reported. crowded_out: its last admission found too few slots.
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
    admission: Admission | None = None
    resident: bool = False
    decoder_start: int | None = None
    states: dict[int, BoundaryState] = field(default_factory=dict)
    prompt_states: frozenset[int] = frozenset()
    stored_blocks: int = 0
    served: bool = False
    crowded_out: bool = False
    cancelled: bool = False
    load_s: float = 0.0
    first_token_s: float | None = None
    rows: int = 0
    preemptions: int = 0

    @property
    def session(self) -> Session:
        """Its session; only while it is resident."""
        assert self.admission is not None and self.resident
        return self.admission.session

    @property
    def rows_left(self) -> int:
        """Rows to compute before its next token can be sampled."""
        return len(self.tokens) - self.session.computed

    @property
    def output(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[self.prompt_tokens :])
