"""What an engine tells about a request and about itself. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from duokv.replay import Reason, TokenPartition

Finish = Literal["length", "stop", "cancelled"]
"""Why an output ended: `max_tokens` reached, a stop token met, or cancelled."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A request in an engine. index: its place among the prompts of one `generate`; 0 after `submit`."""

    request_id: str
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """How a request was served.

    prompt_tokens: its prompt's length. hit_tokens: what the index held of it, adopted or not.
    partition, reason: how the prompt's tokens were come by, and why; None if it ended before its prompt was computed.
    exact: whether its tokens and the cache it leaves equal a cold run's, bit for bit.
    load_ms: from the lookup to verified blocks in their slots, the last time it was admitted. first_token_ms, total_ms:
        from submission; None if there was no token.
    rows: rows it took through the encoder, those computed again after a preemption included.
    """

    prompt_tokens: int
    hit_tokens: int
    partition: TokenPartition | None
    reason: Reason | None
    exact: bool
    load_ms: float
    first_token_ms: float | None
    total_ms: float
    rows: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request. tokens: what it generated, a stop token included."""

    handle: Handle
    tokens: tuple[int, ...]
    finish: Finish
    report: RequestReport


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine at one moment.

    rows, decoder_rows: as the runner counted them, through the encoder and through the decoder, of `steps` steps.
    running, waiting: requests with slots and without; those whose blocks are being loaded count as waiting.
    dropped_blocks, dropped_windows: given up because write-back's queue was full, offered again or not.
    """

    steps: int
    rows: int
    decoder_rows: int
    preemptions: int
    running: int
    waiting: int
    free_slots: int
    dropped_blocks: int
    dropped_windows: int
