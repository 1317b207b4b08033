"""The file system tier of vLLM's KV offloading, for `peer_serve.py`."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from duokv.bench.peer_serve import About, Action, Given, Peer, Rows


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys as the tier has them, the place of the first row in the memory, and the rows."""

    keys: list[Any]
    first: int
    rows: Rows


def open_peer(name: str, given: Given) -> Peer[Wanted]:
    """Open the tier. `name` is not looked at."""
    del name
    return _Tier(given)


class _Tier:
    def __init__(self, given: Given) -> None:
        self._given = given
        self._base = importlib.import_module("vllm.v1.kv_offload.base")
        self._tiering = importlib.import_module("vllm.v1.kv_offload.tiering.base")
        self._io = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
        manager = importlib.import_module("vllm.v1.kv_offload.tiering.fs.manager")
        self._tier = manager.FileSystemTierManager(
            _settings(), given.memory.data, tier_type="fs", root_dir=str(given.folder),
            n_read_threads=given.threads, n_write_threads=given.threads,
        )  # fmt: skip
        self._jobs = 0

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        how = "its C extension" if self._io._HAS_FSIO_C else "its Python code, its C extension being unusable here"
        direct = "O_DIRECT" if self._tier._use_o_direct else "through the page cache"
        return {
            "version": f"vllm {importlib.metadata.version('vllm')}",
            "durable": False,
            "durability": "none: a new file for each block, renamed, never flushed",
            "integrity": "none: only a short read is noticed",
            "note": f"by {how}, {direct}; whole rows; a request is one job, so one thread",
            "missing": {"tokens": "takes keys"},
        }

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Wanted:
        """See `Peer.prepare`."""
        del action
        made = [self._base.make_offload_key(key, 0) for key in keys]
        return Wanted(made, self._given.first_row(rows), rows)

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        self._tier.submit_store(self._job(handle, promotion=False))
        self._finish()

    def read(self, handle: Wanted) -> Iterable[Rows]:
        """See `Peer.read`."""
        self._tier.submit_load(self._job(handle, promotion=True))
        self._finish()
        return list(handle.rows)

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        # What its worker does with a step's keys, without the wait for the step after.
        found = self._tier._lookup_manager.batch_lookup(handle.keys, self._base.ReqContext(req_id="bench"))
        return next((place for place, one in enumerate(found) if not one), len(handle.keys))

    def lookup_tokens(self, handle: Wanted) -> int:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Peer.close`."""
        self._tier.shutdown()

    def _job(self, handle: Wanted, *, promotion: bool) -> Any:  # noqa: ANN401  # foreign, untyped
        self._jobs += 1
        return self._tiering.TransferJob(
            job_id=self._jobs,
            keys=handle.keys,
            chunk_ids=np.arange(handle.first, handle.first + len(handle.keys), dtype=np.int32),
            is_promotion=promotion,
            req_context=self._base.ReqContext(req_id="bench"),
        )

    def _finish(self) -> None:
        self._tier.drain_jobs()
        if not all(result.success for result in self._tier.get_finished_jobs()):
            raise OSError("the fs tier did less than asked")


def _settings() -> SimpleNamespace:
    """What the tier reads of the engine's configuration: it names folders."""
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
    return SimpleNamespace(
        blocks_per_chunk=1,
        kv_events_config=None,
        config=SimpleNamespace(
            groups=[],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            kv_cache_layout=None,
            model=SimpleNamespace(name="bench", dtype="uint8"),
            cache=SimpleNamespace(tokens_per_hash=128),
        ),
    )
