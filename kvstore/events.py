"""What the store tells about itself. Mechanisms emit typed events; metrics, logs and tests subscribe.

Counters belong to subscribers, so that a mechanism never knows who counts it. Subscribers run on the thread that
emits, must be quick and must not call back into the store; one that raises is dropped from that event and reported
once through `logging`, since a metric must never fail a request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal

import msgspec


class Event(msgspec.Struct, frozen=True):
    """Base of every event; immutable."""


class PrefixLookedUp(Event, frozen=True):
    """One lookup in the index. `hit_tokens` + `miss_tokens` = the prompt's; `retry` marks a repeated request id."""

    traffic: str
    hit_tokens: int
    miss_tokens: int
    miss_reason: str | None
    retry: bool


class BlocksStored(Event, frozen=True):
    """Blocks became visible: `new` written, `present` stored already, `dropped` for lack of space or a failure."""

    traffic: str
    new: int
    present: int
    dropped: int
    bytes_written: int


class StoreFailed(Event, frozen=True):
    """A write or a sync failed, and the blocks in question are not in the index. segment: its name, or "commit"."""

    segment: str
    reason: str


class BlocksLoaded(Event, frozen=True):
    """Verified blocks reached the caller: `loaded` of `wanted`, the rest is a miss for `reason`.

    bytes_read: of those read from the backend. cached, bytes_cached: those that were copied from the block cache.
    """

    loaded: int
    wanted: int
    bytes_read: int
    reason: str | None
    cached: int = 0
    bytes_cached: int = 0


class BlockQuarantined(Event, frozen=True):
    """A stored block did not verify and was taken out of the index."""

    key: bytes
    segment: str
    slot: int
    reason: str


class BlocksEvicted(Event, frozen=True):
    """Blocks left the index: past their deadline, for capacity, by an operator, damaged, lost, or replaced by exact."""

    blocks: int
    reason: Literal["expired", "capacity", "operator", "lost", "corrupt", "replaced"]


class SpaceFreed(Event, frozen=True):
    """Physical bytes were given back to the file system."""

    segment: str
    bytes: int


class ClockJumped(Event, frozen=True):
    """The wall clock moved by `seconds` between two passes; nothing was deleted in this one."""

    seconds: float


class Degraded(Event, frozen=True):
    """Something works less well than asked, and why (O_DIRECT refused, punch unsupported, index rebuilt)."""

    what: str
    reason: str


class WindowStored(Event, frozen=True):
    """An SWA window entered the arena under its boundary's key."""

    key: bytes


class WindowEvicted(Event, frozen=True):
    """An SWA window left the arena."""

    key: bytes
    reason: Literal["capacity", "expired"]


class WindowLeased(Event, frozen=True):
    """An SWA window was asked for."""

    key: bytes
    hit: bool


class RequestServed(Event, frozen=True):
    """How the tokens of one request's prompt were come by; the four sum to its length."""

    traffic: str
    swa_hit: int
    block_hit: int
    replayed: int
    computed: int
    retry: bool = False


Subscriber = Callable[[Event], None]


class EventBus:
    """Hands each event to every subscriber in order of subscription. Subscribing is thread-safe, so is emitting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscribers: tuple[Subscriber, ...] = ()
        self._reported: set[int] = set()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Add a subscriber; call the returned function to remove it."""
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(s for s in self._subscribers if s is not subscriber)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Deliver one event."""
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception as error:  # noqa: BLE001
                if id(subscriber) not in self._reported:
                    self._reported.add(id(subscriber))
                    logging.getLogger("duokv").warning("subscriber %r raised %r on %r", subscriber, error, event)


def log_warning(event: Event) -> None:
    """A subscriber that tells people through the logger `duokv` what an operator should look at."""
    match event:
        case Degraded():
            logging.getLogger("duokv").warning("%s: %s", event.what, event.reason)
        case BlockQuarantined():
            place = (event.key.hex(), event.segment, event.slot, event.reason)
            logging.getLogger("duokv").warning("block %s in %s, slot %d: %s; taken out", *place)
        case ClockJumped():
            logging.getLogger("duokv").warning("wall clock jumped by %.0f s; nothing expires this time", event.seconds)
