"""Housekeeping beside lookups and commits: what they need not wait for, and that nothing is forgotten meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from duokv.connectors.fs_memory import MemoryBackend
from duokv.kvstore import CacheGeometry, ClassRule, Namespace, Policy, StoreConfig, open_store, reclaimer
from duokv.kvstore.clock import Clock
from duokv.kvstore.extent import Life
from duokv.kvstore.reclaim import VictimQueue

NS = Namespace(model="m", weights="w", tokenizer="t", kv_format="f")
LIFE_S = 100.0
GEOMETRY = CacheGeometry.opaque("reclaimer", payload_bytes=64)


class Place:
    """A store whose clock is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1_790_000_000.0
        policy = Policy({"chat": ClassRule(LIFE_S)}, "chat").numbered()
        config = StoreConfig(
            swa_bytes=0, maintenance_interval_s=0, use_flush_s=0, index_path=str(folder), seed_policy=policy
        )
        clock = Clock(wall=lambda: self.now_s, monotonic=lambda: self.now_s)
        self.store = open_store(
            "memory://here", geometry=GEOMETRY, config=config, clock=clock, backend=MemoryBackend(metadata_only=True)
        )

    def prompt(self, number: int, blocks: int = 2) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.full(blocks * 128 + 1, number, np.int32)

    def commit(self, number: int) -> None:
        assert self.store.commit(NS, self.prompt(number), np.zeros((2, 64), np.uint8)).new == 2

    def hits(self, number: int) -> int:
        return self.store.lookup(NS, self.prompt(number)).tokens // 128


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path / "index")
    yield place
    place.store.close()


def while_built(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> list[str]:
    """Have `act` done on another thread when the next queue is half built; tells that it was done by then."""
    plain = VictimQueue.built.__func__  # type: ignore[attr-defined]
    done: list[str] = []

    def built(cls: type[VictimQueue], lives: Iterable[tuple[int, Life]], policy: Policy) -> VictimQueue:
        queue: VictimQueue = plain(cls, lives, policy)
        if not done:
            thread = threading.Thread(target=act)
            thread.start()
            thread.join(timeout=60)
            done.append("stuck" if thread.is_alive() else "done")
        return queue

    monkeypatch.setattr(VictimQueue, "built", classmethod(built))
    return done


def test_lookups_and_commits_go_on_while_extents_are_put_in_order(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.commit(1)

    def serve() -> None:
        assert place.hits(1) == 2
        place.commit(2)

    done = while_built(monkeypatch, serve)
    place.store.maintain()
    assert done == ["done"]
    assert place.hits(2) == 2


def test_what_was_stored_meanwhile_expires_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.commit(1)
    done = while_built(monkeypatch, lambda: place.commit(2))
    place.store.maintain()
    assert done == ["done"]
    place.now_s += LIFE_S + 1
    place.store.maintain()
    assert place.store.stats().blocks == 0


def test_an_order_that_was_overtaken_is_made_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.commit(1)
    reclaimer = place.store.blocks.space.reclaimer

    def change() -> None:
        reclaimer.reset_queue()
        place.commit(2)

    while_built(monkeypatch, change)
    place.store.maintain()
    place.now_s += LIFE_S + 1
    place.store.maintain()
    assert place.store.stats().blocks == 0


def test_a_long_expiry_lets_others_in_between(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(600):
        place.commit(number)
    place.store.maintain()
    place.now_s += LIFE_S + 1
    place.commit(1_000)
    left: list[int] = []
    planned = VictimQueue.plan_expired

    def watched(*given: object, **named: int) -> object:
        left.append(place.store.stats().blocks)
        return planned(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(VictimQueue, "plan_expired", watched)
    place.store.maintain()
    assert len(left) >= 3
    assert left == sorted(left, reverse=True)
    assert place.store.stats().blocks == 2
    assert place.hits(1_000) == 2


def test_a_queue_does_not_grow_with_what_is_long_gone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaimer, "_FEW_EXTENTS", 10)
    for number in range(60):
        place.commit(number)
        place.now_s += LIFE_S + 1
        place.store.maintain()
    queue = place.store.blocks.space.reclaimer._queue
    assert queue is not None
    assert len(queue) <= 4 * 11
    place.commit(99)
    assert place.hits(99) == 2
    place.now_s += LIFE_S + 1
    place.store.maintain()
    assert (place.hits(99), place.store.stats().blocks) == (0, 0)
