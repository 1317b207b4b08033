"""The laws of punching as tests. `BackendContract` includes them; they skip where a backend does not punch."""

from __future__ import annotations

import pytest
from backend_kit import PAGE, get, pattern

from duokv.kvstore.backend import Backend


class PunchContract:
    """Tests that every backend passes that can punch."""

    def test_punch_zeroes_ranges_and_frees_their_space(self, backend: Backend) -> None:
        if not backend.can_punch:
            pytest.skip("this backend does not punch")
        data = pattern(64 * PAGE, seed=1)
        writer = backend.create("a", 64 * PAGE)
        writer.write(0, [data])
        writer.sync()
        before = backend.list("a")[0]
        freed = backend.punch("a", [(8 * PAGE, 16 * PAGE), (40 * PAGE, 8 * PAGE)])
        after = backend.list("a")[0]
        assert 0 < freed == before.allocated - after.allocated
        assert after.size == before.size
        want = bytearray(data)
        want[8 * PAGE : 24 * PAGE] = bytes(16 * PAGE)
        want[40 * PAGE : 48 * PAGE] = bytes(8 * PAGE)
        assert get(backend, "a", 64 * PAGE) == want
        assert backend.punch("a", [(8 * PAGE, 16 * PAGE)]) == 0
        assert backend.punch("gone", [(0, PAGE)]) == 0
        assert backend.punch("a", []) == 0
        # A hole stays one when the writer goes on, and until it is written again.
        writer.reserve(80 * PAGE)
        assert backend.list("a")[0].allocated - after.allocated <= 16 * PAGE
        writer.write(8 * PAGE, [data[8 * PAGE : 24 * PAGE]])
        assert get(backend, "a", 16 * PAGE, offset=8 * PAGE) == data[8 * PAGE : 24 * PAGE]
        writer.seal(64 * PAGE)
        assert backend.list("a")[0].allocated > after.allocated
