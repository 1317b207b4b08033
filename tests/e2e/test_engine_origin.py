"""A label of EXACT is a promise of a cold run's bytes, whatever mixture of hits and misses came before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from engine_kit import NS, World, clean, compute, cold_output, text
from hypothesis import given, settings
from hypothesis import strategies as st

from duokv.kvstore import Origin, chain_keys
import numpy as np


def check_labels(world: World, texts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Compare every EXACT block and window of these texts with the cold run's; returns how many blocks of each origin."""
    stored = world.blocks()
    known = set()
    wrong = []
    for tokens in texts:
        cold = compute(tokens, fake=world.fake)
        for block, key in enumerate(chain_keys(NS, tokens)):
            origin, payload = stored.get(key, (None, b""))
            if origin is not None:
                known.add(key)
                if origin is Origin.EXACT and payload != cold.blocks[block].tobytes():
                    wrong.append(("block", block))
            with world.store.lease_window(key, require=Origin.EXACT) as window:
                if window is not None and bytes(window.data or b"") != cold.states[window.end]:
                    wrong.append(("window", window.end))
    assert not wrong
    assert known == set(stored), "nothing is stored that no text has"
    origins = [origin for origin, _ in stored.values()]
    return origins.count(Origin.EXACT), origins.count(Origin.APPROX)
