"""The machine's clocks, put forward: what is measured by them is real, what expires by them is not waited for."""

from __future__ import annotations

import time
from dataclasses import dataclass

from duokv.kvstore.clock import Clock


@dataclass(slots=True)
class Time:
    """ahead_s: seconds by which both clocks are ahead; only to be raised."""

    ahead_s: float = 0.0

    def clock(self) -> Clock:
        """As a store and an engine take it."""
        return Clock(lambda: time.time() + self.ahead_s, lambda: time.monotonic() + self.ahead_s)
