"""The SWA arena against a model that keeps a plain dict and looks through all of it at every step."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duokv.kvstore.events import Event, WindowEvicted, WindowLeased, WindowStored
from duokv.kvstore.origin import Origin
from duokv.kvstore.swa import SwaArena, SwaWindow

WINDOW = 4096
KEYS = [bytes([n]) * 32 for n in range(5)]
keys = st.sampled_from(KEYS)
origins = st.sampled_from(list(Origin))
coverages = st.sampled_from([0, 128, 256])


def end_of(key: bytes) -> int:
    """The boundary a key stands for."""
    return 128 * (1 + KEYS.index(key))


@dataclass
class Kept:
    """A window as the model keeps it: `used` orders uses, `leases` counts those that are out."""

    end: int
    valid_from: int
    origin: Origin
    content: bytes
    last_use: float
    used: int
    leases: int = 0


@dataclass
class Lent:
    """A lease that is out, on which side it was given."""

    manager: AbstractContextManager[SwaWindow | None]
    window: SwaWindow
    key: bytes
    kept: Kept


class ArenaMachine(RuleBasedStateMachine):
    """Puts, leases and time in any order. Bytes are derived from the key and the put that wrote them."""

    payload = True

    @initialize(slots=st.integers(1, 3), expiry_s=st.sampled_from([None, 10.0]))
    def open(self, slots: int, expiry_s: float | None) -> None:
        self.slots, self.expiry_s = slots, expiry_s
        self.now = 0.0
        self.serial = 0
        self.model: dict[bytes, Kept] = {}
        self.lent: list[Lent] = []
        self.events: list[Event] = []
        self.expected: list[Event] = []
        self.arena = SwaArena(
            WINDOW,
            capacity_bytes=slots * WINDOW,
            expiry_s=expiry_s,
            monotonic=lambda: self.now,
            emit=self.events.append,
            payload=self.payload,
        )

    @rule(seconds=st.sampled_from([0.5, 5.0, 10.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=keys, origin=origins, valid_from=coverages)
    def put(self, key: bytes, origin: Origin, valid_from: int) -> None:
        content = self.fill(key)
        data = memoryview(content) if self.payload else None
        stored = self.arena.put(key, SwaWindow(end_of(key), data, valid_from, origin))
        self.model_expire()
        assert stored == self.model_put(key, Kept(end_of(key), valid_from, origin, content, self.now, 0))

    @rule(key=keys, require=st.sampled_from([None, *Origin]))
    def lease(self, key: bytes, require: Origin | None) -> None:
        manager = self.arena.lease(key, require=require)
        window = manager.__enter__()
        self.model_expire()
        kept = self.model.get(key)
        if kept is None or (require is Origin.EXACT and kept.origin is Origin.APPROX):
            assert window is None
            manager.__exit__(None, None, None)
        else:
            assert window is not None
            assert (window.end, window.valid_from, window.origin) == (kept.end, kept.valid_from, kept.origin)
            kept.leases += 1
            self.lent.append(Lent(manager, window, key, kept))
        self.expected.append(WindowLeased(key, hit=window is not None))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        lent = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        lent.manager.__exit__(None, None, None)
        lent.kept.leases -= 1
        self.model_use(lent.kept)

    @rule(key=keys, require=st.sampled_from([None, *Origin]))
    def contains(self, key: bytes, require: Origin | None) -> None:
        kept = self.model.get(key)
        expected = kept is not None and not self.is_expired(kept) and (require is None or kept.origin <= require)
        assert self.arena.contains(key, require) == expected

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        dropped = self.arena.drop(key)
        self.model_expire()
        assert dropped == (self.model.pop(key, None) is not None)

    @rule()
    def expire(self) -> None:
        assert self.arena.expire() == self.model_expire()

    @invariant()
    def lent_bytes_never_change(self) -> None:
        for lent in self.lent:
            assert (bytes(lent.window.data) if lent.window.data is not None else b"") == lent.kept.content

    @invariant()
    def events_tell_what_happened(self) -> None:
        stored_or_evicted = (WindowStored, WindowEvicted)
        expected = [event for event in self.expected if self.payload or not isinstance(event, stored_or_evicted)]
        assert self.events == expected

    @invariant()
    def books_balance(self) -> None:
        stats = self.arena.stats()
        assert stats.windows == len(self.model)
        assert stats.leased == sum(kept.leases > 0 for kept in self.model.values())
        assert stats.used_bytes == self.model_slots_used() * WINDOW <= self.slots * WINDOW

    def teardown(self) -> None:
        for lent in getattr(self, "lent", []):
            lent.manager.__exit__(None, None, None)

    def fill(self, key: bytes) -> bytes:
        self.serial += 1
        return (
            hashlib.sha256(key + self.serial.to_bytes(8, "little")).digest() * (WINDOW // 32) if self.payload else b""
        )

    def is_expired(self, kept: Kept) -> bool:
        return not kept.leases and self.expiry_s is not None and self.now - kept.last_use > self.expiry_s

    def model_slots_used(self) -> int:
        replaced = {id(lent.kept) for lent in self.lent} - {id(kept) for kept in self.model.values()}
        return len(self.model) + len(replaced)

    def model_use(self, kept: Kept) -> None:
        self.serial += 1
        kept.last_use, kept.used = self.now, self.serial

    def model_oldest(self) -> bytes | None:
        idle = [(kept.used, key) for key, kept in self.model.items() if not kept.leases]
        return min(idle)[1] if idle else None

    def model_expire(self) -> int:
        gone = sorted((kept.used, key) for key, kept in self.model.items() if self.is_expired(kept))
        for _, key in gone:
            del self.model[key]
            self.expected.append(WindowEvicted(key, "expired"))
        return len(gone)

    def model_put(self, key: bytes, new: Kept) -> bool:
        """Apply the rules of a put; return whether the window was taken or needless."""
        old = self.model.get(key)
        if old is not None and old.origin <= new.origin:
            if old.origin == new.origin:
                self.model_use(old)
            if old.origin < new.origin or old.valid_from <= new.valid_from:
                return True
        replaces_idle = old is not None and not old.leases
        if self.model_slots_used() >= self.slots and not replaces_idle:
            victim = self.model_oldest()
            if victim is None:
                return False
            del self.model[victim]
            self.expected.append(WindowEvicted(victim, "capacity"))
        self.model_use(new)
        self.model[key] = new
        self.expected.append(WindowStored(key))
        return True


class MarksMachine(ArenaMachine):
    """The same without bytes, where windows also come in batches."""

    payload = False

    @rule(first=st.integers(0, 4), count=st.integers(0, 5), origin=origins, valid_from=coverages)
    def put_marks(self, first: int, count: int, origin: Origin, valid_from: int) -> None:
        batch = KEYS[first : first + count]
        dropped = self.arena.put_marks(batch, end_of(KEYS[first]), valid_from=valid_from, origin=origin)
        self.model_expire()
        taken = [self.model_put(key, Kept(end_of(key), valid_from, origin, b"", self.now, 0)) for key in batch]
        assert dropped == taken.count(False)


TestArena = ArenaMachine.TestCase
TestMarks = MarksMachine.TestCase
