"""The two clocks the store reads, injected so that tests and the harness own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """wall: seconds since the epoch; dates lives, may jump. monotonic: seconds that never go back; SWA expiry."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
