"""What a backend may do to a store: cases 02, 08, 09, 11 and 15."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_kit import GEOMETRY, NS, SLOT, census, check_space, config, prompt, record

from duokv.connectors.fs_faulty import FaultyBackend, Kind, Stall, fail_each
from duokv.connectors.fs_memory import MemoryBackend
from duokv.connectors.fs_posix import PosixBackend
from duokv.kvstore import KVStore, chain_keys
from duokv.kvstore.events import BlockQuarantined, StoreFailed

if TYPE_CHECKING:
    from cases.conftest import World

TOKENS = prompt(range(8))
KEYS = chain_keys(NS, TOKENS)


def count(store: KVStore, name: str) -> int:
    return store.stats().counts.get(name, 0)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("kind", ["write", "create", "reserve", "seal", "sync"])
def test_case_02_a_put_that_fails_half_way_leaves_nothing(world: World, kind: Kind, lasting: bool) -> None:
    """EIO in the middle of a put left a temporary file behind and an entry that pointed at half a block.

    Whatever operation fails, once or for good: what is not stored misses, what was promised is there, no file is left
    that the index does not know, and a failure that cost blocks is counted once.
    """
    rounds = 0
    for rounds, backend in enumerate(fail_each(MemoryBackend, kind, lasting=lasting)):
        store = world.fresh(backend, config(fsync="always"))
        events = record(store)
        done = store.commit(NS, TOKENS, world.content(KEYS))
        assert done.new + done.dropped == 8
        assert world.get(store, TOKENS) == done.new
        failures = [event for event in events if isinstance(event, StoreFailed)]
        assert len(failures) == count(store, "store_failures") == (done.dropped > 0)
        backend.heal()
        assert {file.name for file in backend.list("seg/")} == {
            info.name(number) for number, info in census(store).segments.items()
        }
        assert world.put(store, TOKENS) == done.dropped
        assert world.get(store, TOKENS) == 8
        store.flush()
        check_space(store, backend)
        store.close()
        assert [file.name for file in backend.inner.list("") if ".tmp" in file.name] == []
    assert rounds > 1
