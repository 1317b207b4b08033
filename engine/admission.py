"""How a request comes to its cache: the store is consulted, and what it lacks is replayed.

`admit` is the whole of it; everything else here serves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

import torch

from duokv.engine.config import ModelConfig
from duokv.engine.live import LiveBlock, LiveBlocks
from duokv.engine.request import Admission, Request, WindowLease, blocks_for
from duokv.engine.session import Session
from duokv.kvstore import KVStore, Origin, PrefixHit
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import (
    Reason,
    ReplayPlan,
    ReplayPolicy,
    is_exact,
    plan_replay,
    swa_candidates,
    usable,
    valid_from,
)


def admit(
    request: Request, *, store: KVStore, live: LiveBlocks, model: ModelConfig, policy: ReplayPolicy, deadline_s: float
) -> Admission:
    """Give a request what the store holds of its prompt, and the plan to compute the rest.

    Block KV of the prompt's head is adopted together with its SWA state, restored from the SWA tier. If that tier does
    not have it, the plan has the last 128 tokens of the hit replayed (in exact mode, a window per encoder layer). Block
    KV is never adopted with neither. A preempted request gets its own plan and state again while its blocks are there.

    Blocks until the blocks are loaded or `deadline_s` has passed, so it is called on a load thread. SlotsExhausted, with
    nothing held, if its tokens do not fit now.
    """
    exact_only = Origin.EXACT if policy.mode == "exact" else None
    length = len(request.tokens)
    hit = store.lookup(
        request.namespace, request.tokens, request.traffic, require=exact_only, request_id=request.handle.request_id
    )
    found = hit.tokens
    with Adoption(store, live, hit, deadline_s) as blocks:
        while True:
            plan, lease = resumable(request, found)
            if plan is None:
                for boundary in swa_candidates(
                    hit_tokens=found, prompt_tokens=length, policy=policy, decoder_start=request.decoder_start
                ):  # the anchor, and the boundary before it
                    lease = WindowLease(store, hit.keys[boundary // BLOCK_TOKENS - 1], require=exact_only)
                    if lease.window is not None and usable(boundary, lease.window.valid_from):
                        break
                    lease = blocks.undo(lease)
                plan = plan_replay(
                    hit_tokens=found, prompt_tokens=length, swa_at=lease and lease.window.end, policy=policy,
                    decoder_start=request.decoder_start,
                )  # SWA_HIT restores the state, SWA_MISS replays, NO_HIT and SHORT_HIT run cold
            verified = blocks.load(plan.adopted_tokens)
            if verified >= plan.adopted_tokens:
                return begin(...)
            found = verified  # a short load: plan again with fewer verified blocks
