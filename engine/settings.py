"""How an engine runs, and whether a model, a replay policy and a store go together."""

from __future__ import annotations

from dataclasses import dataclass

from duokv.engine.config import ModelConfig
from duokv.engine.runner import Truncation
from duokv.kvstore import CacheGeometry, Namespace, UsageError
from duokv.replay import ReplayPolicy


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. UsageError for a number that cannot be meant.

    model: a preset with shipped weights, or the path of a checkpoint.
    num_slots: blocks of 128 tokens that engine memory holds. max_batch: requests in it at once.
    chunk_tokens: prompt and replay rows computed in a step, beside one row for each decoding request.
    replay: what a lost SWA state costs and how many decoder rows a prompt keeps; None is the published rule: 128 rows
        replayed, 140 kept.
    truncation: see `Truncation`; "off" computes all decoder rows, so that little of a hit can be skipped.
    load_deadline_s: seconds after which a block that has not come is a miss. load_threads: requests loading at once.
    write_queue_bytes: memory of what waits to be stored; when it is full, more is dropped and counted.
    poison: memory that holds nothing is filled with garbage, for tests.
    """

    model: str = "tiny"
    num_slots: int = 1024
    max_batch: int = 16
    chunk_tokens: int = 512
    replay: ReplayPolicy | None = None
    truncation: Truncation = "compact"
    load_deadline_s: float = 1.0
    load_threads: int = 2
    write_queue_bytes: int = 256 << 20
    poison: bool = False

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_batch", "chunk_tokens", "load_threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"engine: {name} = {getattr(self, name)} leaves nothing to run; give at least 1")
        for name in ("load_deadline_s", "write_queue_bytes"):
            if getattr(self, name) < 0:
                raise UsageError(f"engine: {name} = {getattr(self, name)} is negative; give at least 0")


def namespace_of(model: ModelConfig, revision: str, *, salt: bytes | None = None) -> Namespace:
    """Return the namespace of a model's KV in a store. Truncation and replay change no stored byte, so they are not in.

    revision: of the weights (`weights.weights_revision`). salt: keeps a tenant's blocks from all others.
    """
    kv_format = f"{model.cache.name}/{model.cache.digest.hex()}"
    rope = f"theta={model.rope_theta},dims={model.rope_dim}"
    return Namespace(model.name, revision, "bytes", kv_format, rope=rope, salt=salt)


def check_fit(model: ModelConfig, policy: ReplayPolicy, geometry: CacheGeometry) -> None:
    """UsageError if the policy or the store's geometry is not the model's."""
    if policy.encoder_layers != model.encoder_layers:
        raise UsageError(
            f"replay policy: encoder_layers = {policy.encoder_layers}, model {model.name!r} has another number; "
            f"give {model.encoder_layers}"
        )
    if geometry.digest != model.cache.digest:
        raise UsageError(
            f"store of geometry {geometry.name!r} cannot hold the cache of model {model.name!r}; "
            f"open one of geometry {model.geometry!r}"
        )
