"""The decode engine that embeds the store: continuous batching, every request's cache consulted first and written back.

A step: take in what was loaded, choose rows, run them, settle each request. What waits for a disk has threads of its
own: `admit` before a request runs, write-back after.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count
from pathlib import Path
from typing import Self

from duokv.engine.admission import admit, admit_cold
from duokv.engine.live import LiveBlock, LiveBlocks
from duokv.engine.model import Model
from duokv.engine.report import EngineStats, Finish, Handle, Output, RequestReport
from duokv.engine.request import Admission, OnToken, Request, Tokens, token_list
from duokv.engine.runner import Runner, StepResult, Work
from duokv.engine.sampler import SEED_BITS, Sampling, sample
from duokv.engine.scheduler import Scheduler, Turn
from duokv.engine.settings import EngineConfig, check_fit
from duokv.engine.slots import BlockSlots, SlotsExhausted
from duokv.engine.weights import TINY_WEIGHTS, load_model
from duokv.engine.writeback import Leavings, WriteBack
from duokv.kvstore import Clock, KVStore, Namespace, Origin, RequestServed, StoreError, SwaWindow, UsageError
from duokv.kvstore.events import Degraded
from duokv.kvstore.keys import BLOCK_TOKENS, chain_keys
from duokv.replay import ReplayPolicy, kept_boundaries, usable


class Engine:
    """One model, its memory, and a store that outlives it. All methods are for one thread, callbacks included.

    A store that fails, or is late, costs time and never a request.
    """

    def __init__(self, model: Model, config: EngineConfig, *, store: KVStore, clock: Clock | None = None) -> None:
        self.config = config
        self.policy = config.replay or ReplayPolicy(encoder_layers=model.config.encoder_layers)
        check_fit(model.config, self.policy, store.geometry)
        self._model = model.config
        self._positions = len(model.rope)
        self._store = store
        self._clock = clock or Clock()
        self._slots = BlockSlots(model.config.cache, config.num_slots, poison=config.poison)
        self._live = LiveBlocks(self._slots)
        self._runner = Runner(model, self._slots, truncation=config.truncation)
        self._scheduler = Scheduler(self._live, max_batch=config.max_batch, chunk_tokens=config.chunk_tokens)
        self._pool = ThreadPoolExecutor(config.load_threads, thread_name_prefix="duokv-load")
        self._writeback = WriteBack(store, self._slots.memory, capacity_bytes=config.write_queue_bytes)
        self._requests: dict[Handle, Request] = {}
        self._loads: dict[Future[Admission], Request] = {}
        self._finished: list[Output] = []
        self._numbers = count()
        self._steps = self._rows = self._decoder_rows = self._preemptions = 0
        self._closed = False

    @classmethod
    def open(cls, config: EngineConfig, *, store: KVStore, clock: Clock | None = None) -> Engine:
        """Load the configured model and make an engine of it; UsageError if it, or the store, does not fit."""
        path = TINY_WEIGHTS if config.model == "tiny" else Path(config.model)
        model = load_model(path, max_positions=config.num_slots * BLOCK_TOKENS)
        return cls(model, config, store=store, clock=clock)

    # -- requests ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[Tokens], *, ns: Namespace, sampling: Sampling, traffic: str | None = None,
        on_token: OnToken | None = None,
    ) -> Iterator[Output]:  # fmt: skip
        """Compute prompts and yield outputs in order of completion; leaving the loop cancels those that are left.

        When it ends, what they leave is in the store, unless the store takes longer than the load deadline.
        """
        left: set[Handle] = set()
        try:
            for index, prompt in enumerate(prompts):
                left.add(self.submit(prompt, ns=ns, sampling=sampling, traffic=traffic, on_token=on_token, index=index))
            while left:
                outputs = self.step()
                mine = [output for output in outputs if output.handle in left]
                self._finished = [output for output in outputs if output.handle not in left]
                # Not waited for: what ended here, and what a step of the caller's own took meanwhile.
                left &= self._requests.keys()
                yield from mine
        finally:
            for handle in left:
                self.cancel(handle)
            self._finished = [output for output in self._finished if output.handle not in left]
            self._writeback.drain(self.config.load_deadline_s)

    def submit(
        self, prompt: Tokens, *, ns: Namespace, sampling: Sampling, traffic: str | None = None,
        request_id: str | None = None, on_token: OnToken | None = None, index: int = 0,
    ) -> Handle:  # fmt: skip
        """Queue a prompt; `step` computes it. UsageError if it cannot be served, whatever else is running.

        ns: all that changes KV, the weights' revision included. traffic: a class of the store's policy, None for its
        default. request_id: repeat it when a request is sent again, and it is counted once; None makes one up.
        """
        self._check_open()
        self._store.blocks.find(b"", 0, traffic, use=False)  # UsageError for an unknown class
        tokens = token_list(prompt, self._model.vocab_size)
        room = min(self.config.num_slots * BLOCK_TOKENS, self._positions)
        if len(tokens) + sampling.max_tokens - 1 > room:
            raise UsageError(
                f"prompt of {len(tokens)} tokens and {sampling.max_tokens} to generate: there is room for {room}; "
                "shorten it, or give the engine more num_slots and the model more positions"
            )
        handle = Handle(request_id or secrets.token_hex(8), index)
        if handle in self._requests:
            raise UsageError(f"request {handle.request_id!r} is being served; wait for it, or give another request_id")
        request = Request(
            handle=handle, number=next(self._numbers), namespace=ns, traffic=traffic, tokens=tokens,
            prompt_tokens=len(tokens), keys=chain_keys(ns, tokens), sampling=sampling, on_token=on_token,
            seed=secrets.randbits(SEED_BITS) if sampling.seed is None else sampling.seed,
            submitted_s=self._clock.monotonic(), decoder_start=0 if self.config.truncation == "off" else None,
        )  # fmt: skip
        self._requests[handle] = request
        self._scheduler.wait(request)
        return handle

    def cancel(self, handle: Handle) -> bool:
        """End a request; its output so far comes with the next step. False if it had ended already."""
        request = self._requests.get(handle)
        if request is not None:
            self._end(request, "cancelled")
        return request is not None

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Compute one step and return the outputs that ended since the last one.

        Waits only when every request waits for its blocks. What a callback raises is raised here, once all were called.
        """
        self._check_open()
        while (request := self._scheduler.next_to_load()) is not None:
            self._loads[self._pool.submit(self._admit, request)] = request
        self._take_in()
        turns = self._scheduler.turns(self._give_way)
        if turns:
            works = [Work(turn.session, turn.end, logits=turn.is_last) for turn in turns]
            self._settle(turns, self._runner.step(works))
        elif self._loads and self._requests and not self._finished:
            wait(self._loads, return_when=FIRST_COMPLETED)
            self._take_in()
        finished, self._finished = self._finished, []
        return finished

    def _admit(self, request: Request) -> Admission:
        """On a load thread, to which the request belongs until it is taken in."""
        started = self._clock.monotonic()
        try:
            return admit(
                request, store=self._store, live=self._live, model=self._model, policy=self.policy,
                deadline_s=self.config.load_deadline_s, poison=self.config.poison,
            )  # fmt: skip
        except SlotsExhausted:
            raise
        except Exception as error:  # noqa: BLE001  whatever is wrong with the store, the request is served
            self._store.events.emit(Degraded("admission", repr(error)))
            return admit_cold(
                request, live=self._live, model=self._model, policy=self.policy, poison=self.config.poison
            )
        finally:
            request.load_s = self._clock.monotonic() - started

    def _take_in(self) -> None:
        """Start the requests whose blocks have come; those that ended meanwhile give back what they were given."""
        for future in [future for future in self._loads if future.done()]:
            request = self._loads.pop(future)
            self._scheduler.forget(request)
            try:
                self._start(request, future.result())
            except SlotsExhausted:
                request.crowded = True
                if self._is_served(request):
                    self._scheduler.wait(request)
                else:
                    request.end_lease()

    def _is_served(self, request: Request) -> bool:
        """Whether a request has not ended. Its handle does not tell: a request sent again may have it by now."""
        return self._requests.get(request.handle) is request

    def _start(self, request: Request, admission: Admission) -> None:
        last, request.admission = request.admission, admission
        if last is not None and last.lease is not None and last.lease is not admission.lease:
            last.lease.close()
        if not self._is_served(request):
            self._live.release(admission.session.slots)
            request.end_lease()
            return
        request.session = admission.session
        request.decoder_start = admission.plan.decoder_start
        if not request.served:
            request.hit_tokens = admission.hit_tokens
        self._scheduler.run(request)

    def _give_way(self, request: Request) -> None:
        """Take a request's slots; its tokens, plan and lease stay, and it starts over from its plan's start."""
        self._preemptions += 1
        request.preemptions += 1
        request.states.clear()
        # It computes its blocks again, and what the store had of them may be gone by then.
        request.stored_blocks = 0
        self._release(request)
        self._scheduler.wait(request)

    def _release(self, request: Request) -> None:
        self._scheduler.forget(request)
        if request.session is not None:
            self._live.release(request.session.slots)
            request.session = None

    def _settle(self, turns: Sequence[Turn], result: StepResult) -> None:
        self._steps += 1
        self._rows += result.rows
        self._decoder_rows += result.decoder_rows
        sampled: list[tuple[Request, int]] = []
        for turn, logits, states in zip(turns, result.logits, result.states, strict=True):
            request = turn.request
            request.rows += turn.rows
            request.keep_states(states, self.policy)
            if logits is None:
                continue
            if not request.served:
                self._serve(request)
            assert request.admission is not None
            request.exact &= request.admission.exact
            token = sample(logits, request.sampling, seed=request.seed, position=len(request.tokens))
            request.tokens.append(token)
            sampled.append((request, token))
            if token in request.sampling.stop:
                self._end(request, "stop")
            elif len(request.tokens) - request.prompt_tokens == request.sampling.max_tokens:
                self._end(request, "length")
        # Last, so that a callback that raises or cancels finds every request settled.
        raised: list[Exception] = []
        for request, token in sampled:
            if request.on_token is not None:
                try:
                    request.on_token(request.handle, token)
                except Exception as error:  # noqa: BLE001  the others' tokens are not this caller's
                    raised.append(error)
        if raised:
            raise raised[0]

    def _serve(self, request: Request) -> None:
        """A prompt is computed: report it, store it, and let others share its blocks."""
        assert request.admission is not None
        assert request.session is not None
        request.served = True
        request.first_token_s = self._clock.monotonic() - request.submitted_s
        plan = request.admission.plan
        request.partition, request.reason = plan.partition(request.prompt_tokens), plan.reason
        part = request.partition
        self._store.report(
            RequestServed(
                request.traffic or self._store.blocks.default_class, part.swa_hit, part.block_hit, part.replayed,
                part.computed,
            ),
            request_id=request.handle.request_id,
        )  # fmt: skip
        first = plan.adopted_tokens // BLOCK_TOKENS
        slots = request.session.slots[first : len(request.keys)]
        self._live.share(request.keys[first:], [LiveBlock(slot, request.admission.exact) for slot in slots])
        self._write_back(request, request.prompt_boundaries(self.policy))

    def _write_back(self, request: Request, boundaries: Iterable[int]) -> None:
        """Offer the store what was computed: whole blocks not offered yet, and states at `boundaries`."""
        admission, session = request.admission, request.session
        assert admission is not None
        assert session is not None
        whole = session.computed // BLOCK_TOKENS
        first = max(request.stored_blocks, admission.plan.adopted_tokens // BLOCK_TOKENS)
        origin = Origin.EXACT if admission.exact else Origin.APPROX
        states = [request.states[end] for end in boundaries if end in request.states]
        leavings = Leavings(
            namespace=request.namespace,
            tokens=request.tokens[: session.computed],
            traffic=request.traffic,
            first_block=first,
            slots=tuple(session.slots[first:whole]),
            windows=tuple(
                SwaWindow(state.end, state.data.data, admission.valid_from, origin)
                for state in states
                if usable(state.end, admission.valid_from)
            ),
            origin=origin,
        )
        if self._writeback.offer(leavings):
            request.stored_blocks = max(first, whole)
            for state in states:
                del request.states[state.end]

    def _end(self, request: Request, finish: Finish) -> None:
        del self._requests[request.handle]
        if request.session is not None:
            # All its tokens, though the last one was not computed; fewer if its prompt was cut short.
            total = min(len(request.tokens), request.session.computed + 1)
            self._write_back(request, kept_boundaries(total, self.policy))
        # One that is being loaded is not touched: its load thread owns it until it is taken in.
        if request not in self._scheduler.loading:
            self._release(request)
            request.end_lease()
        self._finished.append(Output(request.handle, request.output, finish, self._report(request)))

    def _report(self, request: Request) -> RequestReport:
        admission = request.admission
        return RequestReport(
            prompt_tokens=request.prompt_tokens,
            hit_tokens=request.hit_tokens,
            partition=request.partition,
            reason=request.reason,
            exact=admission is not None and admission.exact and request.exact,
            load_ms=request.load_s * 1e3,
            first_token_ms=None if request.first_token_s is None else request.first_token_s * 1e3,
            total_ms=(self._clock.monotonic() - request.submitted_s) * 1e3,
            rows=request.rows,
            preemptions=request.preemptions,
        )

    # -- operation ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Sizes now and counts since the start."""
        return EngineStats(
            steps=self._steps,
            rows=self._rows,
            decoder_rows=self._decoder_rows,
            preemptions=self._preemptions,
            running=len(self._scheduler.running),
            waiting=len(self._requests) - len(self._scheduler.running),
            free_slots=self._live.free,
            dropped_blocks=self._writeback.dropped_blocks,
            dropped_windows=self._writeback.dropped_windows,
        )

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the store has what requests left so far, durable or not; False if that takes longer."""
        return self._writeback.drain(timeout_s)

    def check_integrity(self) -> None:
        """Raise AssertionError if slots, shares or leases are not exactly those of the requests there are.

        Call between steps. Waits for loads under way. Leases are counted when no request is left, provided that no
        other engine shares the store.
        """
        wait(self._loads)
        self._take_in()
        self._live.check_integrity(slot for request in self._scheduler.running for slot in _slots(request))
        if not self._requests:
            leased = self._store.windows.stats().leased
            assert not leased, f"{leased} SWA windows are leased and no request is left"

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel what is left, hand the store what it is owed and end the threads; idempotent.

        timeout_s: seconds to wait for a store that hangs; its threads are then left behind, and the interpreter waits
            for those that load when it ends.
        """
        if self._closed:
            return
        for handle in list(self._requests):
            self.cancel(handle)
        wait(self._loads, timeout_s)
        self._take_in()
        self._closed = True
        late, self._loads = self._loads, {}
        for future, request in late.items():
            future.add_done_callback(partial(self._give_back, request))
        self._pool.shutdown(wait=not late)
        self._writeback.close(timeout_s)

    def _give_back(self, request: Request, future: Future[Admission]) -> None:
        """Take in what a load brings after the end, on its thread."""
        if future.exception() is None:
            self._start(request, future.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("engine: closed; open another one")


def _slots(request: Request) -> list[int]:
    return request.session.slots if request.session is not None else []
