"""Who computes what in a step, who may come in, and who gives way when block slots run out.

Requests wait for slots, then for their blocks to be loaded, then run until they end. Age decides everything: the oldest
waiting request comes in first, and the youngest running one gives way first, so the oldest always gets on.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from duokv.engine.live import LiveBlocks
from duokv.engine.request import Request, blocks_for
from duokv.engine.session import Session
from duokv.engine.slots import SlotsExhausted


class Turn(NamedTuple):
    """Rows [start, end) of a request, to be computed in one step."""

    request: Request
    session: Session
    start: int
    end: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.end - self.start

    @property
    def is_last(self) -> bool:
        """Whether a token can be sampled after it."""
        return self.end == len(self.session.tokens)


class Progress(NamedTuple):
    """A request's rows computed so far, and all it has tokens for."""

    computed: int
    tokens: int


def plan_rows(running: Sequence[Progress], *, chunk_tokens: int) -> dict[int, int]:
    """Return {place in `running`: end of its rows} for one step, in the order in which rows are packed. Pure.

    First the requests with one row left, as every decoding one has: they never wait for another's prompt. Then prompts
    and replays, oldest first, with `chunk_tokens` rows between them.
    """
    ends = {i: one.tokens for i, one in enumerate(running) if one.tokens - one.computed == 1}
    budget = chunk_tokens
    for i, one in enumerate(running):
        rows = min(one.tokens - one.computed, budget)
        if i not in ends and rows > 0:
            ends[i] = one.computed + rows
            budget -= rows
    return ends


class Scheduler:
    """Queues of requests, oldest first. For the thread that steps the engine.

    waiting: without slots. loading: {request: slots it may take, those it has taken included} while the store is
    consulted for it. running: with a session. max_batch: requests running and loading at most. chunk_tokens: prompt
    rows in a step.
    """

    def __init__(self, live: LiveBlocks, *, max_batch: int, chunk_tokens: int) -> None:
        self.waiting: list[Request] = []
        self.loading: dict[Request, int] = {}
        self.running: list[Request] = []
        self._live = live
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens

    def wait(self, request: Request) -> None:
        """Queue a request by age."""
        bisect.insort(self.waiting, request, key=_age)

    def next_to_load(self) -> Request | None:
        """Move the oldest waiting request to `loading` and return it, or None while there is no place for it.

        Beside its own slots one must be free for each running request, which may need it soon; else a request would
        come in only to give way again.
        """
        if not self.waiting or len(self.running) + len(self.loading) >= self._max_batch:
            return None
        request = self.waiting[0]
        shared = 0 if request.crowded else self._live.live_run(request.keys)
        needed = max(1, blocks_for(len(request.tokens)) - shared)
        # Counted before what is free: slots that a load takes meanwhile are then missed twice rather than not at all.
        promised = sum(max(0, slots - other.taken) for other, slots in self.loading.items())
        if needed + len(self.running) > self._live.free - promised:
            return None
        request.taken = 0
        self.loading[self.waiting.pop(0)] = needed
        return request

    def run(self, request: Request) -> None:
        """Add a request with a session to the running ones."""
        bisect.insort(self.running, request, key=_age)

    def forget(self, request: Request) -> None:
        """Take a request out of whatever it is in."""
        self.loading.pop(request, None)
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def turns(self, give_way: Callable[[Request], None]) -> list[Turn]:
        """Choose this step's rows and see that each has a slot to be written to.

        give_way: takes a running request's slots and lets it wait; for the youngest, until older ones have enough.
        """
        running = list(self.running)
        ends = plan_rows([_progress(request) for request in running], chunk_tokens=self._chunk_tokens)
        ready = {place for place in sorted(ends) if self._secure(running[place], ends[place], give_way)}
        return [
            Turn(request, request.session, request.session.computed, end)
            for request, place, end in ((running[place], place, end) for place, end in ends.items())
            if place in ready and request.session is not None
        ]

    def _secure(self, request: Request, end: int, give_way: Callable[[Request], None]) -> bool:
        """Extend a request's block table to hold rows up to `end`; False if it must do without this step."""
        while request.session is not None:
            slots = request.session.slots
            missing = blocks_for(end) - len(slots)
            if missing <= 0:
                return True
            try:
                slots.extend(self._live.allocate(missing))
            except SlotsExhausted:
                youngest = self.running[-1]
                if youngest is request and self.loading:
                    return False  # one being loaded is younger and gives way once it has come in
                give_way(youngest)
            else:
                return True
        return False


def _age(request: Request) -> int:
    return request.number


def _progress(request: Request) -> Progress:
    assert request.session is not None
    return Progress(request.session.computed, len(request.tokens))
