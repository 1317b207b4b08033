"""The event bus: everyone hears everything, and nobody who fails is in anyone's way."""

from __future__ import annotations

import threading

import pytest

from duokv.kvstore.events import BlockQuarantined, ClockJumped, Degraded, Event, EventBus, SpaceFreed, log_warning

ONE, TWO = ClockJumped(90.0), SpaceFreed("seg/a", 4096)


def test_every_subscriber_hears_every_event_in_order() -> None:
    bus = EventBus()
    heard: list[tuple[str, Event]] = []
    bus.subscribe(lambda event: heard.append(("a", event)))
    bus.subscribe(lambda event: heard.append(("b", event)))
    bus.emit(ONE)
    bus.emit(TWO)
    assert heard == [("a", ONE), ("b", ONE), ("a", TWO), ("b", TWO)]


def test_who_left_hears_no_more() -> None:
    bus = EventBus()
    heard: list[Event] = []
    leave = bus.subscribe(heard.append)
    bus.emit(ONE)
    leave()
    leave()
    bus.emit(TWO)
    assert heard == [ONE]


def test_one_may_leave_or_join_while_an_event_is_delivered() -> None:
    bus = EventBus()
    heard: list[Event] = []

    def once(_: Event) -> None:
        leave()
        bus.subscribe(heard.append)

    leave = bus.subscribe(once)
    bus.emit(ONE)
    bus.emit(TWO)
    assert heard == [TWO]


def test_a_failing_subscriber_is_reported_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    bus = EventBus()
    heard: list[Event] = []

    def broken(_: Event) -> None:
        raise RuntimeError("no disk for metrics")

    bus.subscribe(broken)
    bus.subscribe(heard.append)
    bus.emit(ONE)
    bus.emit(TWO)
    assert heard == [ONE, TWO]
    assert len(caplog.messages) == 1
    assert "no disk for metrics" in caplog.messages[0]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Degraded("file:///s", "O_DIRECT refused: EINVAL"), ["file:///s", "EINVAL"]),
        (BlockQuarantined(b"\x0f", "seg/a", 3, "checksum"), ["0f", "seg/a", "slot 3", "checksum"]),
        (ClockJumped(-90.0), ["-90 s"]),
    ],
)
def test_what_an_operator_should_look_at_is_logged_in_one_line(
    event: Event, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    log_warning(event)
    log_warning(TWO)
    (line,) = caplog.messages
    assert all(word in line for word in words)
    assert "\n" not in line
    assert caplog.records[0].levelname == "WARNING"


def test_joining_from_many_threads_loses_nobody() -> None:
    bus = EventBus()
    counts = [0] * 200
    ready = threading.Barrier(4)

    def join(first: int) -> None:
        ready.wait()
        for i in range(first, first + 50):

            def count(_: Event, i: int = i) -> None:
                counts[i] += 1

            bus.subscribe(count)

    threads = [threading.Thread(target=join, args=(first,)) for first in range(0, 200, 50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bus.emit(ONE)
    assert counts == [1] * 200
