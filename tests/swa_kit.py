"""What the SWA arena's tests share: an arena with a clock to set and its events, and windows to put into it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from duokv.kvstore.events import Event
from duokv.kvstore.origin import Origin
from duokv.kvstore.swa import SwaArena, SwaWindow

EXACT, APPROX = Origin.EXACT, Origin.APPROX
WINDOW = 5000  # not a multiple of a page
PITCH = 8192


class World:
    """An arena with a clock to turn and its events in a list."""

    def __init__(self, slots: int | None = 2, expiry_s: float | None = 180.0, payload: bool = True) -> None:
        self.now = 1000.0
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda event: None
        self.arena = SwaArena(
            WINDOW,
            capacity_bytes=None if slots is None else slots * PITCH,
            expiry_s=expiry_s,
            monotonic=lambda: self.now,
            emit=self.emit,
            payload=payload,
        )

    def emit(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def read(self, key: bytes, require: Origin | None = None) -> bytes | None:
        with self.arena.lease(key, require=require) as window:
            return None if window is None or window.data is None else bytes(window.data)


def content(text: bytes) -> bytes:
    """The bytes of the window named `text`."""
    return (hashlib.sha256(text).digest() * (WINDOW // 32 + 1))[:WINDOW]


def window(text: bytes, origin: Origin = EXACT, valid_from: int = 0, end: int = 256) -> SwaWindow:
    """The window named `text`."""
    return SwaWindow(end, memoryview(content(text)), valid_from, origin)


def mark(origin: Origin = EXACT, valid_from: int = 0) -> SwaWindow:
    """A window without its bytes."""
    return SwaWindow(256, None, valid_from, origin)
