"""SGLang's storage backends for HiCache, for `peer_serve.py`: files, and its 3FS client with the mock of 3FS."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from duokv.bench.peer_serve import About, Action, Given, Peer, Rows

_JOBS = 16
_ENTRIES = 8


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys as text, and a tensor over each row's payload."""

    keys: list[str]
    tensors: list[Any]
    payloads: list[npt.NDArray[np.uint8]]


def open_peer(name: str, given: Given) -> Peer[Wanted]:
    """ "sglang-files" or "sglang-3fs-mock"."""
    _without_package_inits()
    return _Files(given) if name == "sglang-files" else _Mock3fs(given)


class _Backend:
    def __init__(self, given: Given, backend: Any) -> None:  # noqa: ANN401  # foreign, untyped
        self._payload_bytes = given.payload_bytes
        self._backend = backend

    def prepare(self, action: Action, keys: Sequence[bytes], rows: Rows) -> Wanted:
        """See `Peer.prepare`."""
        torch = importlib.import_module("torch")
        payloads = [row[: self._payload_bytes] for row in rows]
        return Wanted([key.hex() for key in keys], [torch.from_numpy(payload) for payload in payloads], payloads)

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        return int(self._backend.batch_exists(handle.keys))

    def lookup_tokens(self, handle: Wanted) -> int:
        """Not offered."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Peer.close`."""


class _Files(_Backend):
    def __init__(self, given: Given) -> None:
        storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        config = storage.HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True,
            enable_storage_metrics=False, is_page_first_layout=True, model_name="bench",
        )  # fmt: skip
        super().__init__(given, storage.HiCacheFile(config, str(given.folder)))

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return _about("none: a new file for each block, renamed, never flushed", "one thread")

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        if not self._backend.batch_set(handle.keys, handle.tensors):
            raise OSError("HiCacheFile.batch_set stored less than asked")

    def read(self, handle: Wanted) -> Iterable[Rows]:
        """See `Peer.read`."""
        got = self._backend.batch_get(handle.keys, handle.tensors)
        return [payload for payload, found in zip(handle.payloads, got, strict=True) if found is not None]


class _Mock3fs(_Backend):
    def __init__(self, given: Given) -> None:
        module = importlib.import_module("sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs")
        metadata = importlib.import_module("sglang.srt.mem_cache.storage.hf3fs.mini_3fs_metadata_server")
        torch = importlib.import_module("torch")
        backend = module.HiCacheHF3FS(
            rank=0,
            file_path=str(given.folder / "hicache.0.bin"),
            file_size=(given.rounds + 1) * given.blocks * given.payload_bytes,
            numjobs=_JOBS,
            bytes_per_page=given.payload_bytes,
            entries=_ENTRIES,
            client_timeout=5,
            dtype=torch.uint8,
            metadata_client=metadata.Hf3fsLocalMetadataClient(),
            use_mock_client=True,
        )
        self._rank = backend.rank
        super().__init__(given, backend)

    @property
    def about(self) -> About:
        """See `Peer.about`."""
        return _about(
            "none: written in place into one file, never flushed; its index is in memory and dies with it",
            f"{_JOBS} threads; a file in place of 3FS",
        )

    def put(self, handle: Wanted) -> None:
        """See `Peer.put`."""
        if not all(self._backend._batch_set(handle.keys, handle.tensors)):
            raise OSError("HiCacheHF3FS stored less than asked")

    def read(self, handle: Wanted) -> Iterable[Rows]:
        """See `Peer.read`."""
        got = self._backend._batch_get(handle.keys, handle.tensors)
        return [payload for payload, found in zip(handle.payloads, got, strict=True) if found]

    def lookup(self, handle: Wanted) -> int:
        """See `Peer.lookup`."""
        found = self._backend.metadata_client.exists(self._rank, handle.keys)
        return next((place for place, one in enumerate(found) if not one), len(found))

    def close(self) -> None:
        """See `Peer.close`."""
        self._backend.close()


def _about(durability: str, note: str) -> About:
    return {
        "version": f"sglang {importlib.metadata.version('sglang')}",
        "durable": False,
        "durability": durability,
        "integrity": "none: only a short read is noticed",
        "note": note,
        "missing": {"tokens": "takes keys"},
    }


def _without_package_inits() -> None:
    """Let its storage modules be imported without the server around them, whose packages need an accelerator."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'sglang'")
    root = spec.submodule_search_locations[0]
    for name in (
        "sglang",
        "sglang.srt",
        "sglang.srt.mem_cache",
        "sglang.srt.mem_cache.storage",
        "sglang.srt.observability",
    ):
        package = types.ModuleType(name)
        package.__path__ = ["/".join([root, *name.split(".")[1:]])]
        sys.modules[name] = package
    # Named in annotations, and in statistics that are not asked for.
    for name, what in (("mem_cache.pool_host", "HostKVCache"), ("observability.metrics_collector", "StorageMetrics")):
        module = types.ModuleType(f"sglang.srt.{name}")
        module.__dict__[what] = object
        sys.modules[module.__name__] = module
