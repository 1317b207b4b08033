"""What a store answers: the hit of a lookup, the outcome of a commit, its sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from duokv.kvstore.blockcache import CacheStats
from duokv.kvstore.keys import BlockKeys
from duokv.kvstore.swa import SwaStats
from duokv.kvstore.walk import Found, MissReason
from duokv.kvstore.writebehind import Pending


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the store holds of a prompt. A value: it locks and pins nothing.

    tokens: leading tokens stored, a multiple of 128, less than the prompt's length so that a row is left to compute.
    keys: their block keys. miss_reason: why the next block is no hit, None when the hit is as long as it can be.
    exact_tokens: how many of the leading tokens are of exact origin. Loading them never gives approximate blocks, even
        if those have taken their place since.
    """

    tokens: int
    keys: BlockKeys
    miss_reason: MissReason | None
    traffic: str
    exact_tokens: int
    _found: Found = field(repr=False, default=Found((), 0, None))
    _pending: tuple[Pending, ...] = field(repr=False, default=())
    _ids: bytes | memoryview = field(repr=False, default=b"")
    _root: bytes = field(repr=False, default=b"")


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit's outcome in blocks: written, present already, dropped (no room, or a failing backend).

    With `write_behind_bytes` new ones are yet to be written, and present ones may be on their way.
    """

    new: int
    present: int
    dropped: int
    _wait: Callable[[], None] = field(repr=False)

    def wait_durable(self) -> None:
        """Return once the new blocks survive power loss; OSError if the backend cannot promise it."""
        self._wait()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Sizes now (blocks, bytes) and counts since this process opened the store."""

    blocks: int
    extents: int
    segments: int
    physical_bytes: int
    index_bytes: int
    cache: CacheStats
    windows: SwaStats
    counts: dict[str, int]
