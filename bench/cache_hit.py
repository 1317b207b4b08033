"""The cache-hit harness: a trace through the store's own code under a virtual clock.

Keys, index, lives, reclaim, SWA tier and planner are the product's; only time is virtual and, with `payload="none"`,
blocks have no bytes. A request's prompt is looked up, planned, and all its blocks are then renewed or stored at the
arrival, hit or not; generated tokens count only where a later prompt carries them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np

from duokv.bench.keymemo import KeyMemo, block_tokens
from duokv.bench.keys_ahead import LEAST_BLOCKS, TOKEN_CACHE_BYTES, PiecesAhead, PromptsAhead
from duokv.bench.workload import OutputEnd, Run, TraceRequest, with_output_ends
from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore.clock import Clock
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.events import BlocksEvicted, BlocksLoaded, BlocksStored, Event, SpaceFreed
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import BLOCK_TOKENS, KEY_BYTES, BlockKeys, Namespace
from duokv.kvstore.opening import open_store
from duokv.kvstore.origin import Origin
from duokv.kvstore.policy import Policy
from duokv.kvstore.store import KVStore
from duokv.kvstore.swa import SwaArena
from duokv.replay.plan import (
    Reason,
    ReplayPlan,
    ReplayPolicy,
    kept_boundaries,
    plan_replay,
    swa_candidates,
    usable,
    valid_from,
)

_Pair: TypeAlias = tuple[TraceRequest, OutputEnd | None]
Keep = Literal["every-block", "prompt-end", "prompt-and-output-end"]
_MAINTAIN_S = 3600.0
EPOCH_S = 1_700_000_000.0
"""Where a trace's second 0 lies on the virtual wall clock; any time after 1970 would do."""
NAMESPACE = Namespace(model="trace", weights="none", tokenizer="chain-ids", kv_format="opaque")


@dataclass(frozen=True, slots=True)
class SimOptions:
    """What to simulate. Durations in seconds, None = unbounded; see `kvctl simulate --help`.

    payload: "real" writes, reads and compares the bytes of every block.
    keys: "memo" hashes every block of a trace once, "hashed" at every prompt that has it, as a lookup must; the figures
        are the same, the seconds are not. Of no effect on a "real" payload, where the store hashes tokens.
    """

    traffic: str
    policy: Policy = field(default_factory=Policy.standard)
    geometry: str = "deepseek-v4.1-flash"
    capacity_blocks: int | None = None
    capacity: int | None = None
    swa_expiry_s: float | None = 180.0
    swa_bytes: int | None = None
    swa_keep: Keep = "prompt-and-output-end"
    keep_hit_boundary: bool = True
    keep_rows: int = 140
    payload: Literal["none", "real"] = "none"
    keys: Literal["memo", "hashed"] = "memo"


def parse_keep(text: str) -> tuple[Keep, bool]:
    """Split `prompt-end+hit-boundary` into the places states are kept at and whether the hit's end is one."""
    place, plus, extra = text.partition("+")
    if place not in get_args(Keep) or (plus and extra != "hit-boundary"):
        known = [name + tail for name in get_args(Keep) for tail in ("", "+hit-boundary")]
        raise UsageError(f"--swa-keep {text!r} is no place to keep states at; {nearest(text, known)}")
    return place, bool(plus)  # type: ignore[return-value]


@dataclass(slots=True)
class SimReport:
    """Sums over all requests. `tokens` partitions the input; rates are fractions."""

    requests: int = 0
    input_tokens: int = 0
    index_hit_tokens: int = 0
    tokens: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("swa_hit", "block_hit", "replayed", "computed"), 0)
    )
    adopted_requests: int = 0
    replayed_requests: int = 0
    hit_requests: int = 0
    swa_alive_requests: int = 0
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stored", "read", "written", "freed"), 0))
    evictions: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, object]:
        """The report with its rates, for programs."""
        adopted = self.tokens["swa_hit"] + self.tokens["block_hit"] + self.tokens["replayed"]
        through = self.tokens["replayed"] + self.tokens["computed"]
        return {
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "tokens": dict(self.tokens),
            "token_hit_rate": _ratio(self.index_hit_tokens, self.input_tokens),
            "adopted_rate": _ratio(adopted, self.input_tokens),
            "replay_share_of_hits": _ratio(self.replayed_requests, self.adopted_requests),
            "swa_alive_share": _ratio(self.swa_alive_requests, self.hit_requests),
            "amplification": _ratio(self.input_tokens, through),
            "bytes": dict(self.bytes),
            "evictions": dict(self.evictions),
            "seconds": round(self.seconds, 3),
        }


class Served(msgspec.Struct, frozen=True):
    """One simulated request: where it stood in the trace and how its tokens were come by."""

    request: TraceRequest
    hit_blocks: int
    plan: ReplayPlan
    swa_alive: bool


class Simulation:
    """One run over one trace. Iterate over `run`, then read `report`."""

    def __init__(self, options: SimOptions) -> None:
        self.options = options
        self.report = SimReport()
        self._policy = ReplayPolicy(keep_rows=options.keep_rows)
        self._now = EPOCH_S
        self._maintained = EPOCH_S
        ttls = [rule.ttl_s for rule in options.policy.classes.values() if rule.ttl_s is not None]
        self._maintain_s = max(_MAINTAIN_S, min(ttls) / 24) if ttls else math.inf
        self._clock = Clock(wall=lambda: self._now, monotonic=lambda: self._now)
        self._geometry = CacheGeometry.preset(options.geometry)
        self._root = NAMESPACE.root()
        self._memo = KeyMemo(self._root)
        self._keys = self._memo.keys
        if options.keys == "hashed":
            self._keys = KeyMemo(self._root, token_bytes=TOKEN_CACHE_BYTES).hashed
        self._ends: list[tuple[float, int, OutputEnd, int]] = []
        self._evicted: defaultdict[str, int] = defaultdict(int)
        self._arena = self._marks()
        # The published column asks when the hit's last block last ended a prompt; a hit is no use there.
        self._prompt_ends = self._marks()

    def run(self, requests: Iterable[TraceRequest]) -> Iterator[Served]:
        """Simulate request by request in arrival order."""
        started = time.perf_counter()
        outputs = self.options.swa_keep == "prompt-and-output-end"
        pairs = list(with_output_ends(requests) if outputs else ((request, None) for request in requests))
        with ExitStack() as stack:
            with suppress(OSError):
                self._derive_ahead(stack, pairs)
            store = stack.enter_context(self._open(stack))
            store.events.subscribe(self._count)
            serve = self._serve_real if self.options.payload == "real" else self._serve
            for number, (request, end) in enumerate(pairs):
                self._output_ends_until(request.t)
                self._now = EPOCH_S + request.t
                self._maintain(store)
                served = serve(store, request)
                self._add(served)
                if end is not None:
                    heapq.heappush(self._ends, (end.t, number, end, valid_from(served.plan, self._policy)))
                self.report.seconds = time.perf_counter() - started
                yield served
            self.report.bytes["stored"] = store.stats().blocks * self._geometry.slot_bytes
        self.report.evictions = dict(self._evicted)
        self._check_sums()

    def _derive_ahead(self, stack: ExitStack, pairs: Sequence[_Pair]) -> None:
        """Have the keys of a long trace derived by other processors meanwhile, where there are some."""
        if self.options.keys == "memo":
            pieces = self._memo.plan(_in_order_of_need(pairs))
            if sum([piece.blocks for piece in pieces]) >= LEAST_BLOCKS:
                self._memo.take_from(stack.enter_context(PiecesAhead(self._root, pieces)).keys)
        elif self.options.payload == "none" and sum([request.blocks for request, _ in pairs]) >= LEAST_BLOCKS:
            prompts = [request.runs for request, _ in pairs]
            self._keys = stack.enter_context(PromptsAhead(self._root, prompts)).keys

    def _marks(self) -> SwaArena:
        """An arena of states without bytes, whatever `payload` says: their lives are what is simulated."""
        return SwaArena(
            self._geometry.swa_bytes, capacity_bytes=self.options.swa_bytes, expiry_s=self.options.swa_expiry_s,
            monotonic=self._clock.monotonic, emit=_nobody, payload=False,
        )  # fmt: skip

    def _open(self, stack: ExitStack) -> KVStore:
        options = self.options
        # The virtual clock passes seconds between two requests, so a flush a second would be one a request.
        config = StoreConfig(
            capacity=options.capacity, capacity_blocks=options.capacity_blocks, swa_bytes=0, fsync="none",
            maintenance_interval_s=0, checkpoint_interval_s=0, use_flush_s=3600.0, seed_policy=options.policy,
            read_deadline_s=60.0,
        )  # fmt: skip
        if options.payload == "none":
            backend = MemoryBackend(metadata_only=True)
            return open_store(
                "memory://simulation", geometry=self._geometry, config=config, clock=self._clock, backend=backend
            )
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="duokv-simulate-"))
        return open_store(f"file://{folder}", geometry=self._geometry, config=config, clock=self._clock)

    def _maintain(self, store: KVStore) -> None:
        """Delete what expired, now and then: a pass for every request would cost more than the requests."""
        if self._now - self._maintained >= self._maintain_s:
            self._maintained = self._now
            store.maintain()

    # -- one request -------------------------------------------------------------------------------------------------

    def _serve(self, store: KVStore, request: TraceRequest) -> Served:
        blob = self._keys(request.runs)
        blocks = len(blob) // KEY_BYTES
        # No use: the commit below is one, at the same instant and of more.
        found = store.blocks.find(blob, blocks, self.options.traffic, use=False)
        served = self._plan(request, blob, found.blocks)
        store.blocks.commit(blob, blocks, self.options.traffic, first=0, payload=None, origin=Origin.EXACT)
        self._keep(request, blob, served)
        return served

    def _serve_real(self, store: KVStore, request: TraceRequest) -> Served:
        """The same through the public face: tokens are hashed, hits are read and verified, new blocks written."""
        tokens = np.append(block_tokens(_ids_of(request)), np.uint32(1 << 20))
        hit = store.lookup(NAMESPACE, tokens, self.options.traffic)
        loaded = 0
        blocks = request.blocks
        payload_bytes = self._geometry.payload_bytes
        with store.buffers(min(blocks, 64)) as lent:
            while loaded < len(hit.keys):
                rows = lent.rows[: min(64, len(hit.keys) - loaded)]
                got = store.load(hit, rows, first_block=loaded)
                for row, key in zip(rows[:got], itertools.islice(hit.keys, loaded, loaded + got), strict=True):
                    if not np.array_equal(row[:payload_bytes], _payload_of(key, payload_bytes)):
                        raise AssertionError("the store returned bytes of another block")
                loaded += got
                if got < len(rows):
                    break
        served = self._plan(request, hit.keys.blob[: loaded * KEY_BYTES], loaded)
        blob = self._memo.keys(request.runs)
        new = [_payload_of(key, payload_bytes) for key in BlockKeys(blob)[loaded:]]
        store.commit(NAMESPACE, tokens, new, first_block=loaded, traffic=self.options.traffic)
        self._keep(request, blob, served)
        return served

    def _plan(self, request: TraceRequest, blob: bytes, hit_blocks: int) -> Served:
        hit = hit_blocks * BLOCK_TOKENS
        length = max(request.input_tokens, hit, 1)
        swa_at = None
        tier = self._arena if self.options.swa_keep == "every-block" else self._prompt_ends
        alive = bool(hit) and tier.contains(_key(blob, hit_blocks))
        for boundary in swa_candidates(hit_tokens=hit, prompt_tokens=length, policy=self._policy):
            with self._arena.lease(_key(blob, boundary // BLOCK_TOKENS)) as window:
                if window is not None:
                    swa_at = boundary
                    break
        plan = plan_replay(hit_tokens=hit, prompt_tokens=length, swa_at=swa_at, policy=self._policy)
        return Served(request, hit_blocks, plan, alive)

    # -- SWA states --------------------------------------------------------------------------------------------------

    def _keep(self, request: TraceRequest, blob: bytes, served: Served) -> None:
        valid = valid_from(served.plan, self._policy)
        blocks = len(blob) // KEY_BYTES
        if self.options.swa_keep == "every-block":
            keys = [blob[at : at + KEY_BYTES] for at in range(0, len(blob), KEY_BYTES)]
            self._arena.put_marks(keys, BLOCK_TOKENS, valid_from=0, origin=Origin.EXACT)
            return
        if blocks:
            self._mark_end(blob, blocks)
        self._put(kept_boundaries(request.input_tokens, self._policy), blob, 0, valid)
        if self.options.keep_hit_boundary and served.plan.reason is Reason.SWA_MISS:
            self._put((served.plan.write_floor,), blob, 0, valid)

    def _output_ends_until(self, t: float) -> None:
        while self._ends and self._ends[0][0] <= t:
            at, _, end, valid = heapq.heappop(self._ends)
            self._now = EPOCH_S + at
            if kept := kept_boundaries(end.tokens, self._policy):
                first, blocks = kept[0] // BLOCK_TOKENS - 1, end.tokens // BLOCK_TOKENS
                blob = self._memo.part(end.runs, first, blocks)
                self._mark_end(blob, blocks)
                self._put(kept, blob, first, valid)

    def _put(self, boundaries: Sequence[int], blob: bytes, first: int, valid: int) -> None:
        """Keep the usable ones of states at `boundaries`, a block apart; the keys of `blob` begin at block `first`."""
        listed = (first + len(blob) // KEY_BYTES) * BLOCK_TOKENS
        ends = [boundary for boundary in boundaries if boundary <= listed and usable(boundary, valid)]
        if ends:
            keys = [_key(blob, boundary // BLOCK_TOKENS - first) for boundary in ends]
            self._arena.put_marks(keys, ends[0], valid_from=valid, origin=Origin.EXACT)

    def _mark_end(self, blob: bytes, blocks: int) -> None:
        end = blocks * BLOCK_TOKENS
        self._prompt_ends.put_marks([blob[-KEY_BYTES:]], end, valid_from=0, origin=Origin.EXACT)

    # -- sums --------------------------------------------------------------------------------------------------------

    def _add(self, served: Served) -> None:
        report, plan = self.report, served.plan
        length = max(served.request.input_tokens, 1)
        part = plan.partition(length)
        report.requests += 1
        report.input_tokens += served.request.input_tokens
        report.index_hit_tokens += served.hit_blocks * BLOCK_TOKENS
        for name in report.tokens:
            report.tokens[name] += getattr(part, name)
        report.adopted_requests += plan.adopted_tokens > 0
        report.replayed_requests += plan.reason is Reason.SWA_MISS
        report.hit_requests += served.hit_blocks > 0
        report.swa_alive_requests += served.swa_alive

    def _count(self, event: Event) -> None:
        match event:
            case BlocksEvicted():
                self._evicted[event.reason] += event.blocks
            case BlocksStored():
                self.report.bytes["written"] += event.bytes_written
            case BlocksLoaded():
                self.report.bytes["read"] += event.bytes_read
            case SpaceFreed():
                self.report.bytes["freed"] += event.bytes

    def _check_sums(self) -> None:
        total = sum(self.report.tokens.values())
        if total != self.report.input_tokens:
            raise AssertionError(f"token partition sums to {total}, the input is {self.report.input_tokens} tokens")


def simulate(
    requests: Iterable[TraceRequest], options: SimOptions, *, on_request: Callable[[Served], None] | None = None
) -> SimReport:
    """Run a whole trace and return its report."""
    simulation = Simulation(options)
    for served in simulation.run(requests):
        if on_request is not None:
            on_request(served)
    return simulation.report


def _in_order_of_need(pairs: Iterable[_Pair]) -> Iterator[Sequence[Run]]:
    """The prompts in the order in which `Simulation.run` asks for keys of theirs."""
    ends: list[tuple[float, int, Sequence[Run]]] = []
    for number, (request, end) in enumerate(pairs):
        while ends and ends[0][0] <= request.t:
            yield heapq.heappop(ends)[2]
        yield request.runs
        if end is not None:
            heapq.heappush(ends, (end.t, number, end.runs))


def _key(blob: bytes, blocks: int) -> bytes:
    return blob[(blocks - 1) * KEY_BYTES : blocks * KEY_BYTES]


def _ids_of(request: TraceRequest) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.empty(0, np.int64), *[np.arange(first, first + count) for first, count in request.runs]])


def _payload_of(key: bytes, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Bytes that say whose they are: the key, over and over."""
    return np.resize(np.frombuffer(key, np.uint8), length)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _nobody(_: Event) -> None:
    return None
