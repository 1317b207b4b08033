"""What the engine's tests share: a store to break, a clock to set, a runner that is quick, and what is right.

`FakeRunner` has a real runner's dependencies and none of its cost: each encoder layer's row is a digest of the rows its
window sees in the ring, the last one's of the block slots before it as well; two decoder layers digest what their
windows see of the rows below, and a token is drawn from the last. A wrong byte anywhere becomes another token, and so
does a missing one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from duokv.connectors.fs_faulty import FaultyBackend
from duokv.connectors.fs_memory import MemoryBackend
from duokv.engine import Engine, EngineConfig, Output, Sampling, namespace_of
from duokv.engine.config import LOOK_BACK, ModelConfig, parameter_shapes
from duokv.engine.model import Model
from duokv.engine.runner import BoundaryState, Runner, StepResult, Work
from duokv.engine.session import Session, ring_geometry
from duokv.engine.slots import BlockSlots
from duokv.kernels.reference import rope_table
from duokv.kvstore import Clock, KVStore, Origin, StoreConfig, chain_keys, open_store
from duokv.kvstore.backend import ReadOp
from duokv.kvstore.events import Event
from duokv.kvstore.record import BlockCodec, Trailer
from duokv.replay import Mode, Reason, ReplayPlan, ReplayPolicy, pack_state, plan_replay

CONFIG = ModelConfig.preset("tiny")
NS = namespace_of(CONFIG, "test weights")
_DIGEST = 8
_ROW = 16
"""Bytes of a row in a fake block."""


@cache
def model() -> Model:
    """The tiny model with random weights."""
    torch.manual_seed(0)
    shapes = parameter_shapes(CONFIG).items()
    weights = {name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0) for name, shape in shapes}
    return Model(CONFIG, weights, rope_table(16_384, CONFIG.rope_dim, theta=CONFIG.rope_theta))


def text(seed: int, tokens: int) -> list[int]:
    """A prompt of random bytes."""
    found: list[int] = np.random.default_rng(seed).integers(0, 256, tokens).tolist()
    return found


def policy(mode: Mode = "bounded", keep_rows: int = 140) -> ReplayPolicy:
    return ReplayPolicy(encoder_layers=CONFIG.encoder_layers, mode=mode, keep_rows=keep_rows)


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=_DIGEST).digest()


@dataclass
class _Rows:
    """What a fake session has beside its ring: rows the decoder layers read, and digests of the blocks read so far."""

    session: Session
    outputs: dict[int, bytes] = field(default_factory=dict)
    decoded: dict[int, bytes] = field(default_factory=dict)
    chains: list[bytes] = field(default_factory=lambda: [b""])


class FakeRunner:
    """See the module's docstring. rows: all that were computed, as (session, position)."""

    def __init__(self, slots: BlockSlots) -> None:
        self._memory = slots.memory.numpy()
        self._geometry = ring_geometry(CONFIG)
        self._sessions: dict[int, _Rows] = {}
        self.rows: list[tuple[int, int]] = []

    def step(self, works: Sequence[Work]) -> StepResult:
        logits: list[Tensor | None] = []
        states: list[list[BoundaryState]] = []
        before = len(self.rows)
        decoder_rows = 0
        for work in works:
            session = work.session
            assert session.computed < work.end <= min(len(session.tokens), len(session.slots) * 128)
            own = self._sessions.setdefault(id(session), _Rows(session))
            decoder_rows += max(0, work.end - max(session.computed, session.plan.decoder_start))
            cut = []
            for pos in range(session.computed, work.end):
                self._row(own, pos)
                if (pos + 1) % 128 == 0 and pos + 1 - 128 >= session.held_from:
                    cut.append(self._state(session, pos + 1))
            session.computed = work.end
            states.append(cut)
            logits.append(self._logits(own, work.end - 1) if work.logits else None)
        return StepResult(logits, states, len(self.rows) - before, decoder_rows)

    def _row(self, own: _Rows, pos: int) -> None:
        session = own.session
        self.rows.append((id(session), pos))
        ring = session.ring.numpy()
        seen = np.arange(max(session.plan.floor, pos - 127, 0), pos + 1) % ring.shape[1]
        at = pos % ring.shape[1]
        row = _digest(*(token.to_bytes(4, "little") for token in session.tokens[max(0, pos - LOOK_BACK) : pos + 1]))
        ring[0, at] = 0
        ring[0, at, :_DIGEST] = np.frombuffer(row, np.uint8)
        for layer in range(1, CONFIG.encoder_layers):
            blocks = self._blocks(own, pos // 128) if layer > 1 else b""
            row = _digest(ring[layer - 1, seen, :_DIGEST].tobytes(), blocks)
            ring[layer, at] = 0
            ring[layer, at, :_DIGEST] = np.frombuffer(row, np.uint8)
        if pos >= session.plan.decoder_start:
            own.outputs[pos] = row
            own.decoded[pos] = _digest(*(own.outputs[at] for at in self._decoder_window(session, pos)))
        if pos >= session.plan.write_floor:
            slot = self._memory[session.slots[pos // 128]]
            if pos % 128 == 0:
                slot[:] = 0
            place = pos % 128 * _ROW
            slot[place : place + _DIGEST] = np.frombuffer(row, np.uint8)

    def _decoder_window(self, session: Session, pos: int) -> range:
        return range(max(session.plan.decoder_start, pos - 127), pos + 1)

    def _blocks(self, own: _Rows, count: int) -> bytes:
        while len(own.chains) <= count:
            slot = own.session.slots[len(own.chains) - 1]
            own.chains.append(_digest(own.chains[-1], self._memory[slot].tobytes()))
        return own.chains[count]

    def _state(self, session: Session, end: int) -> BoundaryState:
        ring = session.ring[: CONFIG.encoder_layers].numpy()
        state = pack_state(self._geometry, ring, ring_end=end, boundary=end, valid_from=session.held_from)
        return BoundaryState(end, state.reshape(-1))

    def _logits(self, own: _Rows, pos: int) -> Tensor:
        seen = self._decoder_window(own.session, pos)
        slot = self._memory[own.session.slots[pos // 128]]
        entries = slot[: (pos % 128 + 1) * _ROW].tobytes()
        seed = _digest(*(own.decoded[at] for at in seen), self._blocks(own, pos // 128), entries)
        rng = np.random.default_rng(int.from_bytes(seed, "little"))
        return torch.from_numpy(rng.standard_normal(CONFIG.vocab_size).astype(np.float32))


@dataclass
class Cold:
    """A text computed at once without a store: payloads of its whole blocks, its state at every boundary."""

    blocks: npt.NDArray[np.uint8]
    states: dict[int, bytes]


def compute(tokens: Sequence[int], *, fake: bool, plan: ReplayPlan | None = None, blocks: Tensor | None = None) -> Cold:
    """Compute a text by a plan (None: cold) on top of the blocks it adopts."""
    plan = plan or ReplayPlan(0, 0, 0, max(0, len(tokens) - 140), Reason.NO_HIT)
    slots = BlockSlots(CONFIG.cache, -(-len(tokens) // 128), poison=True)
    table = slots.allocate(-(-len(tokens) // 128))
    if blocks is not None:
        slots.memory[table[: len(blocks)]] = blocks
    session = Session.begin(CONFIG, plan, list(tokens), slots=table, poison=True)
    runner = FakeRunner(slots) if fake else Runner(model(), slots)
    result = runner.step([Work(session, len(tokens), False)])
    whole = table[: len(tokens) // 128]
    payloads = clean(slots.memory[whole].numpy())
    return Cold(payloads, {state.end: state.data.tobytes() for state in result.states[0]})


def clean(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Payloads with zeros for padding."""
    last = CONFIG.cache.planes[-1]
    blocks = blocks.copy()
    blocks[:, last.offset + last.nbytes :] = 0
    return blocks


class World:
    """A store on memory that survives restarts and can be made to fail, and engines on it.

    fake: engines compute with `FakeRunner`. now: both clocks of the store and the engines.
    """

    def __init__(self, *, fake: bool = True, swa_bytes: int = 64 << 15) -> None:
        self.fake = fake
        self.now = 1_790_000_000.0
        self.clock = Clock(wall=lambda: self.now, monotonic=lambda: self.now)
        self.backend = FaultyBackend(MemoryBackend(), sleep=lambda _: None)
        self.settings = StoreConfig(
            maintenance_interval_s=0, swa_bytes=swa_bytes, index_map_bytes=1 << 26, buffer_bytes=1 << 24,
            segment_bytes=1 << 20, preallocate_bytes=1 << 18, read_threads=1,
        )  # fmt: skip
        self.events: list[Event] = []
        self.store = self._opened()

    def _opened(self) -> KVStore:
        store = open_store(
            "memory://engine", geometry=CONFIG.cache, config=self.settings, clock=self.clock, backend=self.backend
        )
        store.events.subscribe(self.events.append)
        return store

    def restart(self) -> None:
        """Close the store and open it again: Block KV stays, SWA windows do not."""
        self.store.close()
        self.store = self._opened()

    def lose_windows(self, tokens: Sequence[int]) -> None:
        """Forget the SWA states of a text."""
        for key in chain_keys(NS, tokens):
            self.store.windows.drop(key)

    def evict(self, tokens: Sequence[int], *, keep: int) -> None:
        """Take a text's blocks from block `keep` on out of the index, as an operator would."""
        found = self.store.blocks.find(chain_keys(NS, tokens).blob, len(tokens) // 128, None, use=False)
        for (hop, _), span in zip(found.held, found.spans(), strict=True):
            self.store.blocks.take_out(int.from_bytes(hop.place, "big"), max(0, keep - span.block), "operator")

    @contextmanager
    def engine(self, mode: Mode = "bounded", *, keep_rows: int = 140, **changes: object) -> Iterator[Engine]:
        """An engine on the store; what it holds is checked and given back at the end."""
        standard: dict[str, object] = {
            "num_slots": 64, "chunk_tokens": 512, "load_deadline_s": 60.0, "poison": True,
            "replay": policy(mode, keep_rows),
        }  # fmt: skip
        config = EngineConfig(**{**standard, **changes})  # type: ignore[arg-type]
        engine = Engine(model(), config, store=self.store, clock=self.clock)
        if self.fake:
            engine._runner = FakeRunner(engine._slots)  # type: ignore[assignment]
        try:
            yield engine
            engine.check_integrity()
        except BaseException:
            # What still stalls would keep the engine from closing, and the failure from being seen.
            self.backend.heal()
            raise
        finally:
            engine.close()

    def ask(
        self, tokens: Sequence[int], mode: Mode = "bounded", n: int = 4, *, keep_rows: int = 140, **changes: object
    ) -> Output:
        """Serve one prompt by an engine of its own."""
        with self.engine(mode, keep_rows=keep_rows, **changes) as engine:
            (output,) = engine.generate([tokens], ns=NS, sampling=greedy(n))
        return output

    def blocks(self) -> dict[bytes, tuple[Origin, bytes]]:
        """Every block the index holds, by key: its origin by its own trailer and its payload."""
        found = {}
        codec = BlockCodec(CONFIG.cache)
        with self.store._index.read() as txn:
            lives = dict(txn.lives())
            for extent in txn.extents():
                info = txn.segment(extent.segment)
                assert info is not None
                for slot in range(extent.first_slot, extent.first_slot + lives[extent.place].n):
                    row = np.empty(codec.slot_bytes, np.uint8)
                    op = ReadOp(info.name(extent.segment), slot * codec.slot_bytes, (row.data,))
                    assert self.backend.inner.read_many([op], deadline_s=60.0) == [codec.slot_bytes]
                    trailer = codec.decode(row)
                    assert isinstance(trailer, Trailer)
                    assert trailer.origin is extent.origin
                    found[trailer.identity.key] = (trailer.origin, row[: codec.payload_bytes].tobytes())
        return found

    def close(self) -> None:
        self.backend.heal()
        self.store.close()


def greedy(n: int) -> Sampling:
    return Sampling(max_tokens=n)


def cold_output(tokens: Sequence[int], n: int = 4, *, fake: bool = True, sampling: Sampling | None = None) -> Output:
    """What a prompt gives without any cache."""
    world = World(fake=fake)
    with world.engine() as engine:
        (output,) = engine.generate([tokens], ns=NS, sampling=sampling or greedy(n))
    world.close()
    return output


def bounded_plan(length: int, hit: int) -> ReplayPlan:
    return plan_replay(hit_tokens=hit, prompt_tokens=length, swa_at=None, policy=policy())


def serve(engine: Engine, *prompts: Sequence[int], sampling: Sampling | None = None) -> list[Output]:
    """Outputs in the order of the prompts."""
    outputs = engine.generate(prompts, ns=NS, sampling=sampling or greedy(4))
    return sorted(outputs, key=lambda output: output.handle.index)


def parts(output: Output) -> tuple[int, int, int, int]:
    """swa_hit, block_hit, replayed, computed."""
    part = output.report.partition
    assert part is not None
    return part.swa_hit, part.block_hit, part.replayed, part.computed


def finish(engine: Engine) -> dict[str, Output]:
    """Step until all is done."""
    done: dict[str, Output] = {}
    while engine.stats().running or engine.stats().waiting:
        done |= {output.handle.request_id: output for output in engine.step()}
    return done


def replayed_tokens(world: World, tokens: Sequence[int], hit: int, n: int) -> tuple[int, ...]:
    """The output of a bounded replay by its definition: stored blocks adopted, rows from the floor on, nothing else."""
    plan = plan_replay(hit_tokens=hit, prompt_tokens=len(tokens), swa_at=None, policy=policy())
    stored = world.blocks()
    slots = BlockSlots(CONFIG.cache, len(tokens) // 128 + 2, poison=True)
    table = slots.allocate(len(tokens) // 128 + 2)
    for slot, key in zip(table, chain_keys(NS, tokens)[: plan.write_floor // 128], strict=False):
        slots.memory[slot] = torch.from_numpy(np.frombuffer(stored[key][1], np.uint8).copy())
    session = Session.begin(CONFIG, plan, list(tokens), slots=table, poison=True)
    runner = FakeRunner(slots) if world.fake else Runner(model(), slots)
    for _ in range(n):
        (logits,) = runner.step([Work(session, len(session.tokens), True)]).logits
        assert logits is not None
        session.tokens.append(int(logits.argmax()))
    return tuple(session.tokens[len(tokens) :])
