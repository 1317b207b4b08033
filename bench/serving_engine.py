"""The engine's part of `duokv.bench.serving`: first tokens of prompts on disk, and what a step costs beside the model.

A layer with compressed KV scores every entry before its row, so a prompt can be computed once its whole head is there.
What goes on during its reads is the copying of what came into slots, and other requests' steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from duokv.bench.io_limits import Bytes
from duokv.connectors import open_backend
from duokv.connectors.fs_faulty import Delay, FaultyBackend
from duokv.engine import Engine, EngineConfig, Handle, Sampling, namespace_of
from duokv.engine.model import Model
from duokv.engine.runner import Runner, StepResult, Work
from duokv.kvstore import KVStore, StoreConfig, chain_keys, open_store
from duokv.kvstore.errors import StoreError
from duokv.kvstore.keys import BLOCK_TOKENS

TAIL = 64
"""Tokens after the stored blocks: too few for a block of their own, so that serving a prompt stores nothing."""
BATCH = 8
_SAMPLE_BLOCKS = 8
_WARM_UP_STEPS = 20
_HEAD_TOKENS = 256
_DEADLINE_S = 60.0
_VOCABULARY = 256


@dataclass(frozen=True, slots=True)
class FirstTokenCase:
    """Prompts of `blocks` stored blocks and `TAIL` more tokens, each. slow: reads take as long as computing."""

    blocks: int
    requests: int = 1
    slow: bool = False


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Seconds by round: loads without computing, computing on blocks that are there, and both, until the last prompt's
    first token."""

    case: FirstTokenCase
    load_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    cold_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Cold time to the larger of the two alone, of the fastest of each: others on the machine only add."""
        return min(self.cold_s) / max(min(self.load_s), min(self.compute_s))

    @property
    def ratios(self) -> tuple[float, ...]:
        """The same by round."""
        return tuple(
            cold / max(load, compute)
            for load, compute, cold in zip(self.load_s, self.compute_s, self.cold_s, strict=True)
        )


def positions(blocks: int, steps: int) -> int:
    """How many a model needs for all that is measured here."""
    longest = max(blocks * BLOCK_TOKENS + TAIL, _SAMPLE_BLOCKS * BLOCK_TOKENS, _HEAD_TOKENS + BLOCK_TOKENS + steps)
    return longest + 2


class FirstTokens:
    """An engine on a store on disk that holds the heads of a case's prompts. Close it.

    sample: blocks that heads are made of, as `computed_blocks` gives them.
    """

    def __init__(self, folder: Path, model: Model, case: FirstTokenCase, sample: Bytes) -> None:
        self._case = case
        self._ns = namespace_of(model.config, "bench")
        rng = np.random.default_rng(0)
        self._prompts: list[list[int]] = [
            rng.integers(0, _VOCABULARY, case.blocks * BLOCK_TOKENS + TAIL).tolist() for _ in range(case.requests)
        ]
        config = StoreConfig(
            swa_bytes=0, maintenance_interval_s=0, read_threads=1 if case.slow else StoreConfig().read_threads,
            buffer_bytes=max(256 << 20, 4 * case.requests * case.blocks * model.config.cache.slot_bytes),
        )  # fmt: skip
        with ExitStack() as undo:
            self._backend = FaultyBackend(open_backend(folder.as_uri(), direct="require"))
            self._store = undo.enter_context(
                open_store(folder.as_uri(), geometry=model.config.cache, config=config, backend=self._backend)
            )
            blocks = sample[np.arange(case.blocks) % len(sample)]
            for prompt in self._prompts:
                self._store.commit(self._ns, prompt, blocks)
            self._store.flush()
            lent = undo.enter_context(self._store.buffers(case.blocks))
            self._rows = lent.rows
            settings = EngineConfig(
                num_slots=case.requests * (case.blocks + 2), max_batch=case.requests, load_deadline_s=_DEADLINE_S
            )
            self._engine = undo.enter_context(_HoldingEngine(model, settings, store=self._store))
            self._undo = undo.pop_all()

    def measure(self, rounds: int) -> FirstToken:
        """Measure in turn; the first round only warms up. StoreError if a cold prompt's token is another one."""
        found: list[tuple[float, float, float]] = []
        for number in range(rounds + 1):
            load = self._load()
            cold, cold_tokens = self._serve(hold=True)
            compute, tokens = self._serve(hold=False)
            if cold_tokens != tokens:
                raise StoreError(f"first tokens are {cold_tokens} of loaded blocks, {tokens} of blocks in memory")
            if number:
                found.append((load, compute, cold))
            elif self._case.slow:
                self._slow_down(compute)
        load_s, compute_s, cold_s = zip(*found, strict=True)
        return FirstToken(self._case, load_s, compute_s, cold_s)

    def close(self) -> None:
        """Close engine and store."""
        self._undo.close()

    def __enter__(self) -> FirstTokens:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self) -> float:
        hits = [self._store.lookup(self._ns, prompt) for prompt in self._prompts]
        started = time.perf_counter()
        loaded = [self._store.load(hit, self._rows, deadline_s=_DEADLINE_S) for hit in hits]
        ended = time.perf_counter()
        if loaded != [self._case.blocks] * len(hits):
            raise StoreError(f"loads gave {loaded} blocks of {self._case.blocks}; see the warnings before this line")
        return ended - started

    def _slow_down(self, seconds: float) -> None:
        """Let the reads of one `_load` take so long together."""
        before = len(self._backend.log)
        self._load()
        reads = sum(operation.kind == "read" for operation in self._backend.log[before:])
        self._backend.inject(Delay(kind="read", seconds=seconds / reads, lasting=True))

    def _serve(self, *, hold: bool) -> tuple[float, list[int]]:
        """Seconds to the last first token, and the tokens. hold: keep the blocks for the next call, which ends that."""
        first: dict[int, int] = {}
        ended = started = time.perf_counter()

        def on_token(handle: Handle, token: int) -> None:
            nonlocal ended
            if handle.index not in first:
                first[handle.index] = token
                ended = time.perf_counter()
                if hold:
                    self._engine.hold_blocks(chain_keys(self._ns, self._prompts[handle.index]))

        started = time.perf_counter()
        # With a second token to come, a request still has its blocks when it is told of the first.
        sampling = Sampling(max_tokens=2)
        outputs = list(self._engine.generate(self._prompts, ns=self._ns, sampling=sampling, on_token=on_token))
        if not hold:
            self._engine.let_go()
        computed = {None if part is None else part.computed for part in (output.report.partition for output in outputs)}
        if computed != {TAIL}:
            raise StoreError(f"{computed} tokens were not adopted, only {TAIL} are not stored; see the warnings before")
        return ended - started, [first[index] for index in sorted(first)]


class _HoldingEngine(Engine):
    """An engine whose block slots can be kept beyond their requests."""

    def __init__(self, model: Model, config: EngineConfig, *, store: KVStore) -> None:
        super().__init__(model, config, store=store)
        self._held: list[int] = []

    def hold_blocks(self, keys: Sequence[bytes]) -> None:
        """Keep the blocks that live requests have of `keys`."""
        self._held += [block.slot for block in self._live.hold(keys, exact_blocks=len(keys))]

    def let_go(self) -> None:
        """Keep them no longer."""
        self._live.release(self._held)
        self._held = []


def computed_blocks(model: Model) -> Bytes:
    """Payloads of a few real blocks, uint8 [n, payload_bytes]: computing with what random bytes decode to is slower."""
    text: list[int] = np.random.default_rng(1).integers(0, _VOCABULARY, _SAMPLE_BLOCKS * BLOCK_TOKENS + 1).tolist()
    ns = namespace_of(model.config, "sample")
    config = StoreConfig(swa_bytes=0, maintenance_interval_s=0)
    with open_store("memory://serving", geometry=model.config.cache, config=config) as store:
        with Engine(model, EngineConfig(num_slots=_SAMPLE_BLOCKS + 2), store=store) as engine:
            list(engine.generate([text], ns=ns, sampling=Sampling(max_tokens=1)))
        with store.buffers(_SAMPLE_BLOCKS) as lent:
            store.load(store.lookup(ns, text), lent.rows)
            return lent.rows[:, : model.config.cache.payload_bytes].copy()


# -- what a step costs beside the model ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bookkeeping:
    """By wave of `BATCH` requests, each from submission to its blocks in the store: CPU seconds of all threads outside
    the model, and of the model's decode steps; and how many of those there were, all waves together."""

    other_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    steps: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Everything but the model per second of decode steps, by wave."""
        return tuple(other / decode for other, decode in zip(self.other_s, self.decode_s, strict=True))

    @property
    def step_ms(self) -> float:
        """CPU milliseconds of a decode step, mean."""
        return 1e3 * sum(self.decode_s) / self.steps


def measure_bookkeeping(folder: Path, model: Model, *, steps: int, waves: int) -> Bookkeeping:
    """Serve waves of `BATCH` prompts whose heads are stored, `steps` decode steps each, after a short one to warm up.

    StoreError if a wave is too short to have a step of all its requests.
    """
    ns = namespace_of(model.config, "bench")
    rng = np.random.default_rng(0)
    heads = [rng.integers(0, _VOCABULARY, _HEAD_TOKENS).tolist() for _ in range(BATCH)]
    config = StoreConfig(swa_bytes=64 << 20)
    found: list[tuple[float, float]] = []
    total = 0
    with open_store(folder.as_uri(), geometry=model.config.cache, config=config) as store:
        blocks = -(-(_HEAD_TOKENS + BLOCK_TOKENS + steps) // BLOCK_TOKENS)
        with _TimedEngine(model, EngineConfig(num_slots=BATCH * blocks, max_batch=BATCH), store=store) as engine:
            for wave in range(waves + 1):
                tokens = 1 + (steps if wave else min(steps, _WARM_UP_STEPS))
                prompts = [[*head, *rng.integers(0, _VOCABULARY, 70).tolist()] for head in heads]
                started, model_before = time.process_time(), engine.timed.seconds
                for prompt in prompts:
                    engine.submit(prompt, ns=ns, sampling=Sampling(max_tokens=tokens))
                ended, count, decode = 0, 0, 0.0
                while ended < BATCH:
                    before = engine.timed.seconds
                    ended += len(engine.step())
                    if engine.timed.seconds > before and engine.timed.decoded:
                        count += 1
                        decode += engine.timed.seconds - before
                engine.flush()
                other = time.process_time() - started - (engine.timed.seconds - model_before)
                if wave and not count:
                    raise StoreError(f"{steps} decode steps: none was of {BATCH} rows; measure more of them")
                if wave:
                    found.append((other, decode))
                    total += count
    other_s, decode_s = zip(*found, strict=True)
    return Bookkeeping(other_s, decode_s, total)


class _TimedRunner(Runner):
    """seconds: CPU time of all steps. decoded: whether the last one was a row for each of `BATCH` requests."""

    seconds = 0.0
    decoded = False

    def step(self, works: Sequence[Work]) -> StepResult:
        started = time.thread_time()
        result = super().step(works)
        self.seconds += time.thread_time() - started
        self.decoded = len(works) == result.rows == BATCH
        return result


class _TimedEngine(Engine):
    def __init__(self, model: Model, config: EngineConfig, *, store: KVStore) -> None:
        super().__init__(model, config, store=store)
        self.timed = _TimedRunner(model, self._slots, truncation=config.truncation)
        self._runner = self.timed
