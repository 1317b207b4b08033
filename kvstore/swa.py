"""SWA KV in host memory: fixed-size windows in one slab, least recently used out first, gone some time after last use.

Nothing here is ever written to disk: losing a window costs a replay of 128 tokens, never a prefix.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from duokv.kvstore.errors import StoreError, UsageError
from duokv.kvstore.events import Event, WindowEvicted, WindowLeased, WindowStored
from duokv.kvstore.geometry import PAGE_BYTES
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.kvstore.origin import Origin

_NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class SwaWindow:
    """The sliding-window KV of the encoder layers at one boundary.

    end: the boundary in tokens, a multiple of 128; the rows are those of the positions just below it.
    data: the geometry's `swa_bytes` contiguous bytes, None where an arena keeps no bytes. What a lease hands out is
        read-only and valid only until the lease ends. Rows of positions below `valid_from` are the producer's duty: it
        zeroes them, so that they are never another request's.
    valid_from: the first position whose row may be used; the window serves a request iff end - 128 >= valid_from.
    """

    end: int
    data: memoryview | None
    valid_from: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class SwaStats:
    """An arena at one moment.

    windows: keys that can be leased, `leased` of them under a lease now.
    used_bytes, capacity_bytes: of the slab, in whole slots. Slots being filled are used, and so are those that were
        replaced or dropped while leased. An arena without bytes counts as if it had them; None is no capacity.
    """

    windows: int
    leased: int
    used_bytes: int
    capacity_bytes: int | None


@dataclass(slots=True)
class _Entry:
    end: int
    valid_from: int
    origin: Origin
    last_use: float
    slot: int
    leases: int = 0


class SwaArena:
    """Windows by the key of their boundary. Thread-safe; the lock is never held while a window is copied.

    A window lives `expiry_s` seconds after its last use, inclusive (None: until its space is needed). Uses are a put,
    and a lease from its beginning to its end. While leased, a window is never evicted or expired and its bytes never
    change: a replacement goes to another slot. `monotonic` gives seconds that never go back.

    Windows start at page boundaries of a slab whose memory is committed at construction, so that no put pays for page
    faults. `capacity_bytes` bounds the slab: 0 keeps nothing, None (no bound) is only for `payload=False`, which keeps
    all but the bytes, for replaying traces, and of the events emits `WindowLeased` only.
    """

    def __init__(
        self,
        window_bytes: int,
        *,
        capacity_bytes: int | None,
        expiry_s: float | None,
        monotonic: Callable[[], float],
        emit: Callable[[Event], None],
        payload: bool = True,
    ) -> None:
        pitch = -(-window_bytes // PAGE_BYTES) * PAGE_BYTES
        if window_bytes <= 0:
            raise UsageError(f"SWA window of {window_bytes} bytes: the geometry has no SWA state; use no arena with it")
        if capacity_bytes is None and payload:
            raise UsageError("SWA capacity is unbounded, host memory is not; give bytes, or payload=False to keep none")
        if capacity_bytes and capacity_bytes < pitch:
            raise UsageError(f"SWA capacity of {capacity_bytes} bytes holds no window; give 0 or at least {pitch}")
        self._window_bytes = window_bytes
        self._pitch = pitch
        self._slots = None if capacity_bytes is None else capacity_bytes // pitch
        self._expiry_s = expiry_s
        self._monotonic = monotonic
        self._emit = emit
        self._payload = payload
        self._slab = _commit(self._slots * pitch) if payload and self._slots else memoryview(b"")
        self._free = list(range(self._slots or 0)) if payload else []
        self._used = 0
        self._lock = threading.Lock()
        # Idle entries lie in order of last use; leased ones lie apart and come back as the youngest, so that neither
        # eviction nor expiry ever looks past the head. A key is in one of the two at most.
        self._idle: OrderedDict[bytes, _Entry] = OrderedDict()
        self._leased: dict[bytes, _Entry] = {}

    def put(self, key: bytes, window: SwaWindow) -> bool:
        """Copy a window in; False if it was dropped because every slot is leased or being filled.

        EXACT replaces APPROX; APPROX onto EXACT changes nothing, not even the last use. Within one origin the larger
        coverage (smaller `valid_from`) stays and the put is a use either way. UsageError if the data is not contiguous
        or not `window_bytes` long (with payload=False: not None).
        """
        data = self._bytes_of(window)
        events: list[Event] = []
        with self._lock:
            now = self._monotonic()
            self._expire(now, events)
            needed = not self._covered(key, window.origin, window.valid_from, now)
            slot = self._reserve(key, events) if needed else None
        self._tell(events)
        if slot is None:
            return not needed
        settled = False
        try:
            if data is not None:
                start = slot * self._pitch
                self._slab[start : start + self._window_bytes] = data
            with self._lock:
                now = self._monotonic()
                # Another put of this key may have come first while the lock was free.
                overtaken = self._covered(key, window.origin, window.valid_from, now)
                settled = True
                if overtaken:
                    self._give_back(slot)
                else:
                    self._publish(key, _Entry(window.end, window.valid_from, window.origin, now, slot))
        finally:
            if not settled:
                with self._lock:
                    self._give_back(slot)
        if self._payload and not overtaken:
            self._emit(WindowStored(key))
        return True

    def put_marks(self, keys: Sequence[bytes], end_of_first: int, *, valid_from: int, origin: Origin) -> int:
        """Put windows without bytes at the boundaries `end_of_first`, + 128, ... in this order.

        Returns how many were dropped. The same as `put` of each at one instant, at a fraction of the cost. UsageError
        unless payload=False.
        """
        if self._payload:
            raise UsageError("put_marks would publish windows without bytes; use put, or an arena with payload=False")
        dropped = 0
        end = end_of_first
        events: list[Event] = []
        with self._lock:
            now = self._monotonic()
            self._expire(now, events)
            idle, leased = self._idle, self._leased
            find, touch = idle.get, idle.move_to_end
            for key in keys:
                entry = find(key)
                known = entry is not None or key in leased
                if entry is not None and entry.origin is origin:
                    entry.last_use = now
                    if valid_from < entry.valid_from:  # noqa: PLR1730  a call of min() costs a third of the loop
                        entry.valid_from = valid_from
                    touch(key)
                elif not known or not self._covered(key, origin, valid_from, now):
                    slot = self._reserve(key, events)
                    if slot is None:
                        dropped += 1
                    else:
                        if known:
                            self._remove(key)
                        idle[key] = _Entry(end, valid_from, origin, now, slot)
                end += BLOCK_TOKENS
        return dropped

    @contextmanager
    def lease(self, key: bytes, *, require: Origin | None = None) -> Iterator[SwaWindow | None]:
        """Lend the window of `key` without a copy, None on a miss (absent, expired, or worse than `require`).

        Several leases of one window may overlap. `data` is released when the lease ends; arrays made from it must not
        be used any longer, as their bytes may become another window's.
        """
        events: list[Event] = []
        with self._lock:
            self._expire(self._monotonic(), events)
            entry = self._begin_lease(key, require)
        view: memoryview | None = None
        try:
            events.append(WindowLeased(key, entry is not None))
            self._tell(events)
            if entry is None:
                yield None
                return
            if self._payload:
                start = entry.slot * self._pitch
                view = self._slab[start : start + self._window_bytes].toreadonly()
            yield SwaWindow(entry.end, view, entry.valid_from, entry.origin)
        finally:
            _release(view)
            if entry is not None:
                with self._lock:
                    self._end_lease(key, entry)

    def contains(self, key: bytes, require: Origin | None = None) -> bool:
        """Whether a lease would hit now. Not a use."""
        with self._lock:
            entry = self._leased.get(key)
            if entry is None:
                entry = self._idle.get(key)
                if entry is None or self._is_expired(entry, self._monotonic()):
                    return False
            return require is None or entry.origin <= require

    def drop(self, key: bytes) -> bool:
        """Forget a window; return whether there was one. A lease of it goes on with its bytes unchanged."""
        events: list[Event] = []
        with self._lock:
            self._expire(self._monotonic(), events)
            known = self._remove(key)
        self._tell(events)
        return known

    def expire(self) -> int:
        """Evict every window past its expiry; return how many. Puts and leases do so too, this is for idle times."""
        events: list[Event] = []
        with self._lock:
            count = self._expire(self._monotonic(), events)
        self._tell(events)
        return count

    def stats(self) -> SwaStats:
        """Return the state of this moment; windows that are past their expiry count until they are evicted."""
        with self._lock:
            return SwaStats(
                windows=len(self._idle) + len(self._leased),
                leased=len(self._leased),
                used_bytes=self._used * self._pitch,
                capacity_bytes=None if self._slots is None else self._slots * self._pitch,
            )

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            self._emit(event)

    def _bytes_of(self, window: SwaWindow) -> memoryview | None:
        data = window.data
        if (data is None) is self._payload:
            have, want = ("no data", "keeps bytes") if data is None else ("data", "keeps none")
            raise UsageError(f"SWA window at {window.end} has {have}, but the arena {want} (payload={self._payload})")
        if data is not None and (data.nbytes != self._window_bytes or not data.c_contiguous):
            raise UsageError(
                f"SWA window at {window.end} has {data.nbytes} bytes{'' if data.c_contiguous else ', not contiguous'}; "
                f"give {self._window_bytes} contiguous ones"
            )
        return None if data is None else data.cast("B")

    # Below, the caller holds the lock.

    def _is_expired(self, entry: _Entry, now: float) -> bool:
        return self._expiry_s is not None and now - entry.last_use > self._expiry_s

    def _expire(self, now: float, events: list[Event]) -> int:
        """Evict from the head of the LRU order, which is that of last use, up to the first window to keep."""
        idle, expiry_s = self._idle, self._expiry_s
        if expiry_s is None:
            return 0
        gone = []
        for key, entry in idle.items():
            if now - entry.last_use <= expiry_s:
                break
            gone.append(key)
            self._give_back(entry.slot)
        for key in gone:
            del idle[key]
        if self._payload:
            events.extend([WindowEvicted(key, "expired") for key in gone])
        return len(gone)

    def _covered(self, key: bytes, origin: Origin, valid_from: int, now: float) -> bool:
        """Whether the arena's window of `key` makes a put of this origin and coverage needless; it is a use then."""
        entry = self._idle.get(key) or self._leased.get(key)
        if entry is None or entry.origin > origin:
            return False
        if entry.origin < origin:
            return True
        if entry.leases == 0:
            entry.last_use = now
            self._idle.move_to_end(key)
        return entry.valid_from <= valid_from

    def _reserve(self, key: bytes, events: list[Event]) -> int | None:
        """Take a free slot, else that of the window to be replaced, else the oldest idle window's."""
        if self._slots is None or self._used < self._slots:
            self._used += 1
            return self._free.pop() if self._payload else _NO_SLOT
        own = self._idle.pop(key, None)
        if own is not None:
            return own.slot
        if not self._idle:
            return None
        victim, entry = self._idle.popitem(last=False)
        if self._payload:
            events.append(WindowEvicted(victim, "capacity"))
        return entry.slot

    def _publish(self, key: bytes, entry: _Entry) -> None:
        self._remove(key)
        self._idle[key] = entry

    def _remove(self, key: bytes) -> bool:
        idle = self._idle.pop(key, None)
        if idle is not None:
            self._give_back(idle.slot)
            return True
        return self._leased.pop(key, None) is not None

    def _give_back(self, slot: int) -> None:
        self._used -= 1
        if self._payload:
            self._free.append(slot)

    def _begin_lease(self, key: bytes, require: Origin | None) -> _Entry | None:
        entry = self._leased.get(key) or self._idle.get(key)
        if entry is None or (require is not None and entry.origin > require):
            return None
        if entry.leases == 0:
            self._leased[key] = self._idle.pop(key)
        entry.leases += 1
        return entry

    def _end_lease(self, key: bytes, entry: _Entry) -> None:
        entry.leases -= 1
        if entry.leases:
            return
        if self._leased.get(key) is entry:
            del self._leased[key]
            entry.last_use = self._monotonic()
            self._idle[key] = entry
        else:
            self._give_back(entry.slot)


def _commit(nbytes: int) -> memoryview:
    """Return private anonymous memory with every page touched, so that its frames exist from now on."""
    try:
        slab = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StoreError(f"SWA arena of {nbytes} bytes: refused ({error.strerror}); lower swa_bytes") from error
    # MAP_POPULATE would not report a failure, and not every kernel honours it.
    slab[::PAGE_BYTES] = bytes(nbytes // PAGE_BYTES)
    return memoryview(slab)


def _release(view: memoryview | None) -> None:
    """End a lent view, so that using it after its lease raises; arrays made from it cannot be ended that way."""
    if view is not None:
        with suppress(BufferError):
            view.release()
