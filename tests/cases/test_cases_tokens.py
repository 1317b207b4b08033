"""Every token is counted once, by how it was come by: case 16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from msgspec.structs import asdict
from store_kit import GEOMETRY, NS, config

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import KVStore, Origin, RequestServed, SwaWindow, chain_keys
from duokv.kvstore.keys import TokenIds
from duokv.replay import ReplayPlan, ReplayPolicy, plan_replay, swa_candidates

if TYPE_CHECKING:
    from cases.conftest import World

TOKENS = np.arange(1000, dtype=np.int32)
POLICY = ReplayPolicy(keep_rows=128)
State = Literal["at the hit", "one before", "lost"]


def serve(store: KVStore, tokens: TokenIds, request_id: str | None, traffic: str = "long") -> ReplayPlan:
    """What an engine asks and tells for one prompt, up to where it would compute."""
    hit = store.lookup(NS, tokens, traffic, request_id=request_id)
    numbers = {"hit_tokens": hit.tokens, "prompt_tokens": len(tokens), "policy": POLICY}
    restored = None
    for boundary in swa_candidates(**numbers):  # type: ignore[arg-type]
        with store.lease_window(hit.keys[boundary // 128 - 1]) as window:
            if window is not None:
                restored = boundary
                break
    plan = plan_replay(swa_at=restored, **numbers)  # type: ignore[arg-type]
    store.report(RequestServed(traffic, **asdict(plan.partition(len(tokens)))), request_id=request_id)
    return plan


def by_tier(store: KVStore, traffic: str = "long") -> dict[str, int]:
    counts = store.stats().counts
    parts = ("swa_hit", "block_hit", "replayed", "computed")
    return {part: counts[f'request_tokens{{class="{traffic}",by="{part}"}}'] for part in parts}


def in_tokens(store: KVStore) -> dict[str, int]:
    return {name: n for name, n in store.stats().counts.items() if "tokens" in name or name.startswith("lookups")}


def stored(world: World, state: State = "lost", blocks: int = 6) -> KVStore:
    """A store that has 768 of the tokens, and a window where it is said to be."""
    store = world.on(MemoryBackend(), config(swa_bytes=4 * GEOMETRY.swa_bytes))
    world.put(store, TOKENS[: blocks * 128], traffic="long")
    if state != "lost":
        boundary = blocks * 128 - (128 if state == "one before" else 0)
        window = SwaWindow(boundary, memoryview(bytes(GEOMETRY.swa_bytes)), 0, Origin.EXACT)
        store.put_window(chain_keys(NS, TOKENS)[boundary // 128 - 1], window)
    return store


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        ("lost", {"swa_hit": 0, "block_hit": 640, "replayed": 128, "computed": 232}),
        ("at the hit", {"swa_hit": 768, "block_hit": 0, "replayed": 0, "computed": 232}),
        ("one before", {"swa_hit": 640, "block_hit": 0, "replayed": 128, "computed": 232}),
    ],
)
def test_case_16_each_token_is_counted_once_and_a_retry_adds_none(
    world: World, state: State, parts: dict[str, int]
) -> None:
    """A preempted request was counted again each time it was resumed, and tiers that overlap counted tokens twice.

    Here 1,000 tokens with 768 present are 1,000 in the tiers together, and the same request id adds nothing more.
    """
    store = stored(world, state)
    serve(store, TOKENS, "r1")
    assert by_tier(store) == parts
    assert sum(parts.values()) == 1000
    counts = in_tokens(store)
    assert counts['hit_tokens{class="long"}'] == 768 == 1000 - parts["computed"]
    assert counts['query_tokens{class="long"}'] == 1000
    for _ in range(3):
        serve(store, TOKENS, "r1")
        assert in_tokens(store) == counts
    serve(store, TOKENS, "r2")
    assert by_tier(store) == {part: 2 * n for part, n in parts.items()}


def test_case_16_requests_without_an_id_are_all_new(world: World) -> None:
    """The other way round: nobody's tokens are lost because callers name no request."""
    store = stored(world)
    for _ in range(2):
        serve(store, TOKENS, None)
    assert sum(by_tier(store).values()) == 2000


def test_case_16_a_retry_that_was_never_served_is_counted_when_it_is(world: World) -> None:
    """A request that was looked up and preempted before it was served counts once in both, whenever each happens."""
    store = stored(world)
    store.lookup(NS, TOKENS, "long", request_id="r1")
    world.put(store, TOKENS[: 7 * 128], traffic="long")
    serve(store, TOKENS, "r1")
    counts = in_tokens(store)
    assert counts['query_tokens{class="long"}'] == 1000
    assert counts['hit_tokens{class="long"}'] == 768, "as it was when the request came"
    assert sum(by_tier(store).values()) == 1000


@pytest.mark.parametrize("length", [1, 100, 128, 129, 256, 257, 500, 1000])
def test_case_16_hits_and_misses_are_the_prompt_at_every_length(world: World, length: int) -> None:
    """The same at every length, for hits that are adopted and for those too short to be."""
    store = stored(world)
    plan = serve(store, TOKENS[:length], "r1")
    counts, parts = in_tokens(store), by_tier(store)
    hit = min(768, (length - 1) // 128 * 128)
    assert counts['hit_tokens{class="long"}'] == hit
    assert counts['hit_tokens{class="long"}'] + counts['miss_tokens{class="long"}'] == length
    assert sum(parts.values()) == length
    assert parts["computed"] == length - (hit if plan.adopted_tokens else 0)


def test_case_16_classes_are_counted_apart(world: World) -> None:
    """And by the class that asked, whichever class stored the blocks."""
    store = stored(world)
    serve(store, TOKENS, "r1", traffic="brief")
    serve(store, TOKENS[:500], "r2", traffic="long")
    assert sum(by_tier(store, "brief").values()) == 1000
    assert sum(by_tier(store, "long").values()) == 500
