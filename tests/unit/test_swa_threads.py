"""The SWA arena under many threads: each leased window is whole, and puts overtake each other by the usual rules."""

from __future__ import annotations

import threading

from swa_kit import APPROX, EXACT, PITCH, World, content, window

from duokv.kvstore.events import Event, WindowEvicted


def test_a_put_that_was_overtaken_while_it_copied_follows_the_same_rules() -> None:
    """The event of the eviction it causes comes between its reservation and its copy: a hook for the other put."""
    world = World(slots=2)
    for key in (b"a", b"b"):
        world.arena.put(key, window(key))

    def overtake(event: Event) -> None:
        if event == WindowEvicted(b"a", "capacity"):
            assert world.arena.put(b"k", window(b"exact", EXACT))

    world.on_event = overtake
    assert world.arena.put(b"k", window(b"approx", APPROX))
    assert world.read(b"k") == content(b"exact")
    assert world.arena.stats().used_bytes == PITCH


def test_threads_never_see_another_windows_bytes() -> None:
    """Few slots, many keys, the same key from several threads: each leased window is whole and its own."""
    world = World(slots=3, expiry_s=None)
    keys = [bytes([n]) * 32 for n in range(5)]
    faults: list[object] = []
    start = threading.Barrier(4)

    def work(seed: int) -> None:
        start.wait()
        for step in range(400):
            key = keys[(seed * 7 + step * (seed + 1)) % len(keys)]
            valid_from = -step  # always the larger coverage, so that every put writes
            world.arena.put(key, window(key, valid_from=valid_from))
            with world.arena.lease(key) as lent:
                if lent is not None and lent.data is not None and bytes(lent.data) != content(key):
                    faults.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    stats = world.arena.stats()
    assert (stats.leased, stats.used_bytes) == (0, stats.windows * PITCH)
