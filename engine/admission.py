"""How a request comes by its cache: the store is consulted, and what it lacks is replayed.

`admit` is the whole of it; the rest of this file serves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch

from duokv.engine.config import ModelConfig
from duokv.engine.live import LiveBlock, LiveBlocks
from duokv.engine.request import Admission, Request, WindowLease, blocks_for
from duokv.engine.session import Session
from duokv.kvstore import BlockKeys, KVStore, Origin, PrefixHit
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import ReplayPlan, ReplayPolicy, is_exact, plan_replay, swa_candidates, usable, valid_from


def admit(
    request: Request, *, store: KVStore, live: LiveBlocks, model: ModelConfig, policy: ReplayPolicy, deadline_s: float,
    poison: bool = False,
) -> Admission:  # fmt: skip
    """Give a request what the store holds of its tokens, and the plan to compute the rest.

    Block KV of its head is adopted together with the SWA state there, restored from the SWA tier. On a miss of that
    tier the plan replays the last 128 tokens of the hit (in exact mode, a window per encoder layer). Block KV is never
    adopted with neither. A preempted request resumes with its own plan and state as long as its blocks are there.

    Runs on a load thread for as long as the store takes; blocks that come after `deadline_s` are a miss.
    SlotsExhausted, with nothing held, if the request's tokens do not fit now.
    """
    require = Origin.EXACT if policy.mode == "exact" else None
    length, decoder_start = len(request.tokens), request.decoder_start
    hit = store.lookup(
        request.namespace, request.tokens, request.traffic, require=require, request_id=request.handle.request_id
    )
    found = hit.tokens
    with Adoption(store, live, hit, request) as blocks, ExitStack() as undo:
        while True:
            plan, lease = own_plan(request, found)
            if plan is None:
                boundaries = swa_candidates(  # the anchor, then the boundary before it
                    hit_tokens=found, prompt_tokens=length, policy=policy, decoder_start=decoder_start
                )
                lease = lease_state(store, hit.keys, boundaries, require, undo)
                plan = plan_replay(  # SWA_HIT restores the state; SWA_MISS replays; NO_HIT and SHORT_HIT run cold
                    hit_tokens=found, prompt_tokens=length, swa_at=lease.window.end if lease else None, policy=policy,
                    decoder_start=decoder_start,
                )  # fmt: skip
            verified = blocks.load(plan.adopted_tokens, deadline_s)
            if verified >= plan.adopted_tokens:
                break
            found = verified  # a short load: plan again with fewer blocks
            if lease is not None:
                lease.close()
        placed = blocks.place(plan.adopted_tokens)
        undo.callback(live.release, placed.slots)
        admission = begin(request, plan, lease, placed, model, policy, hit_tokens=hit.tokens, poison=poison)
        undo.pop_all()
    return admission


def admit_cold(
    request: Request, *, live: LiveBlocks, model: ModelConfig, policy: ReplayPolicy, poison: bool = False
) -> Admission:
    """Admit a request without the store, whatever it was given before. SlotsExhausted as in `admit`."""
    length = len(request.tokens)
    plan = plan_replay(
        hit_tokens=0, prompt_tokens=length, swa_at=None, policy=policy, decoder_start=request.decoder_start
    )
    placed = Placed(live.allocate(blocks_for(length)), True)
    request.taken = len(placed.slots)
    return begin(request, plan, None, placed, model, policy, hit_tokens=0, poison=poison)


def own_plan(request: Request, found: int) -> tuple[ReplayPlan | None, WindowLease | None]:
    """The plan of a preempted request and the lease of its state, if both can be had again with `found` tokens stored.

    Another plan could give another output: bounded replays from different starts are different approximations.
    """
    last = request.admission
    if last is None or found < last.plan.adopted_tokens or (last.lease is not None and not last.lease.held):
        return None, None
    return last.plan, last.lease


def lease_state(
    store: KVStore, keys: BlockKeys, boundaries: Iterable[int], require: Origin | None, undo: ExitStack
) -> WindowLease | None:
    """Borrow the SWA state at the first of `boundaries` that has a usable one; `undo` ends the lease."""
    for boundary in boundaries:
        with ExitStack() as stack:
            window = stack.enter_context(store.lease_window(keys[boundary // BLOCK_TOKENS - 1], require=require))
            if window is not None and window.end == boundary and usable(boundary, window.valid_from):
                lease = WindowLease(window, stack.pop_all())
                undo.callback(lease.close)
                return lease
    return None


def begin(
    request: Request, plan: ReplayPlan, lease: WindowLease | None, placed: Placed, model: ModelConfig,
    policy: ReplayPolicy, *, hit_tokens: int, poison: bool,
) -> Admission:  # fmt: skip
    """Make the session of a plan whose adopted blocks are in their slots. lease: of the state it restores, if any."""
    window = None if lease is None else lease.window
    data = None if window is None else window.data
    session = Session.begin(model, plan, request.tokens, slots=placed.slots, window=data, poison=poison)
    state_exact = None if window is None else window.origin is Origin.EXACT
    return Admission(
        plan=plan,
        session=session,
        lease=lease,
        exact=is_exact(plan, policy, blocks_exact=placed.exact, state_exact=state_exact),
        valid_from=valid_from(plan, policy),
        hit_tokens=hit_tokens,
    )


class Placed(NamedTuple):
    """A request's slots, one per block of its tokens, and whether all adopted blocks in them are exact."""

    slots: list[int]
    exact: bool


class Adoption:
    """The blocks of a hit on their way into slots: leading ones that live requests hold already, then loaded ones.

    A context that gives back what was not placed. For one thread.
    """

    def __init__(self, store: KVStore, live: LiveBlocks, hit: PrefixHit, request: Request) -> None:
        self._store = store
        self._live = live
        self._hit = hit
        self._request = request
        self._exact_blocks = hit.exact_tokens // BLOCK_TOKENS
        self._shared = live.hold(hit.keys, exact_blocks=self._exact_blocks)
        self._own: list[int] = []
        """Slots of the blocks after the shared ones, in order."""
        self._loaded: int | None = None

    def load(self, tokens: int, deadline_s: float) -> int:
        """See that the blocks of the first `tokens` tokens are verified; return how many are, fewer on a short load.

        Reads at most once: what was not there then is given up. Blocks are put into slots while the next ones are read;
        SlotsExhausted, with nothing read, if there are too few for all the request's tokens.
        """
        first = len(self._shared)
        wanted = tokens // BLOCK_TOKENS - first
        if wanted > 0 and self._loaded is None:
            self._loaded = 0
            self._take(blocks_for(len(self._request.tokens)) - first)
            transfer, slots = self._live.slots.transfer, torch.tensor(self._own)
            with self._store.buffers(wanted) as lent:
                rows = torch.from_numpy(lent.rows)
                for lead in self._store.load_iter(self._hit, lent.rows, first_block=first, deadline_s=deadline_s):
                    transfer.put(slots[self._loaded : lead], rows[self._loaded : lead])
                    self._loaded = lead
        return (first + (self._loaded or 0)) * BLOCK_TOKENS

    def place(self, adopted_tokens: int) -> Placed:
        """Hand over slots for all the request's tokens, the adopted ones filled; SlotsExhausted as above."""
        adopted = adopted_tokens // BLOCK_TOKENS
        first = len(self._shared)
        # Others may have loaded the same blocks meanwhile: one copy of them is enough.
        self._shared += self._live.hold(self._hit.keys[first:adopted], exact_blocks=self._exact_blocks - first)
        twice = len(self._shared) - first
        shared = self._shared[:adopted]
        self._take(blocks_for(len(self._request.tokens)) - len(shared) - len(self._own[twice:]))
        own = self._own[twice:]
        loaded = [
            LiveBlock(slot, block < self._exact_blocks)
            for block, slot in zip(range(len(shared), adopted), own, strict=False)
        ]
        self._live.share(self._hit.keys[len(shared) : adopted], loaded)
        self._shared, self._own = self._shared[adopted:], self._own[:twice]
        exact = all(block.exact for block in (*shared, *loaded))
        return Placed([*(block.slot for block in shared), *own], exact)

    def _take(self, count: int) -> None:
        """Take `count` more slots, which need not be kept free for the request any longer."""
        self._own += self._live.allocate(count)
        self._request.taken = len(self._own)

    def __enter__(self) -> Adoption:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.release([*(block.slot for block in self._shared), *self._own])
