"""The model's shape: what fixes its parameters, and through the cache geometry the bytes it leaves in the store.

Sources: DeepSeek-V4.1 paper (arXiv 2609.19969) for the layer pattern, the latent, the indexer and the n-gram layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from duokv.kernels.formats import RecordFormat, index_fp4, latent_fp4, latent_fp8
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.geometry import ROLLBACK_TOKENS, WINDOW_TOKENS, CacheGeometry, LayerTable
from duokv.kvstore.keys import BLOCK_TOKENS

LOOK_BACK = 3
"""Token ids before its own that an n-gram row reads, wherever a computation restarts."""
NGRAM_ORDERS = (2, 3, 4)
"""Tokens of the hashed n-grams, each order with a table of its own; the longest looks `LOOK_BACK` tokens back."""
NGRAM_LOOKUPS = len(NGRAM_ORDERS) + sum(order <= LOOK_BACK for order in NGRAM_ORDERS)
"""N-grams of a row: all that end with its token, then those that end with the one before, as far as it looks back."""
BOS = 256
"""Token id that starts a text. Ids below are bytes; ids from 257 are reserved."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of one causal encoder-decoder in a single stack. Immutable; safe from any thread.

    geometry: name of the `CacheGeometry` preset with the compression ratios, the owners of planes and the encoder.
    heads, head_dim, rope_dim: query heads over one latent of `head_dim` that is both K and V and whose last `rope_dim`
        values are rotated.
    q_rank: width of the query's low-rank bottleneck, from which the indexer's queries are made too.
    index_sources: layers that select `top_k` entries of the plane they read; others use the last source before them.
    engram_layers: layers that add embeddings of hashed n-grams; `engram_rows` per order, each `engram_dim` wide.
    ffn_hidden: width of the feed-forward of `dense_layers`; in the others the shared expert's is `shared_hidden`, and
        `active_experts` of `experts`, each `expert_hidden` wide, are added to it.
    """

    name: str
    geometry: str
    vocab_size: int
    hidden: int
    heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    index_heads: int
    index_dim: int
    index_sources: tuple[int, ...]
    top_k: int
    engram_layers: tuple[int, ...]
    engram_rows: int
    engram_dim: int
    dense_layers: tuple[int, ...]
    ffn_hidden: int
    shared_hidden: int
    experts: int
    active_experts: int
    expert_hidden: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        own = tuple(record.nbytes for record in (self.latent_format, self.index_format, self.window_format))
        if own != (self.table.latent.nbytes, self.table.index.nbytes, self.table.window.nbytes):
            raise UsageError(
                f"model {self.name!r}: head_dim {self.head_dim} and index_dim {self.index_dim} make records of {own} "
                f"bytes, and geometry {self.geometry!r} has others; choose a geometry of these dimensions"
            )

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """Return a model shipped with DuoKV; UsageError names the nearest one if there is none."""
        if name not in _PRESETS:
            raise UsageError(f"model {name!r} is not a preset; {nearest(name, _PRESETS)}")
        return _PRESETS[name]

    @cached_property
    def cache(self) -> CacheGeometry:
        """Sizes of the blocks and SWA windows this model stores."""
        return CacheGeometry.preset(self.geometry)

    @cached_property
    def table(self) -> LayerTable:
        """Compression ratios, owners of planes and encoder layers."""
        table = self.cache.layers
        if table is None:
            raise UsageError(f"model {self.name!r}: geometry {self.geometry!r} has no layers; choose one that has")
        return table

    @property
    def layers(self) -> int:
        """All layers."""
        return len(self.table.ratios)

    @property
    def encoder_layers(self) -> int:
        """Causal encoder layers, the first ones; the next one's plane is projected from their output."""
        return self.table.window_layers

    @property
    def window(self) -> int:
        """Positions a row sees through its layer's window, its own included."""
        return WINDOW_TOKENS

    @property
    def latent_format(self) -> RecordFormat:
        """Records of a plane's compressed KV."""
        return latent_fp4(self.head_dim)

    @property
    def index_format(self) -> RecordFormat:
        """Records of a plane's indexer K."""
        return index_fp4(self.index_dim)

    @property
    def window_format(self) -> RecordFormat:
        """Records of a layer's window."""
        return latent_fp8(self.head_dim)

    def plane_of(self, layer: int) -> int | None:
        """Return the layer whose plane `layer` reads, None for a layer with the window only."""
        return self.table.source_of(layer)

    def index_source_of(self, layer: int) -> int | None:
        """Return the layer whose selection of entries `layer` attends to, None for a layer with the window only."""
        if self.plane_of(layer) is None:
            return None
        return max(source for source in self.index_sources if source <= layer)


@dataclass(frozen=True, slots=True)
class ByteBudget:
    """What a model takes.

    parameters: their number; parameter_bytes: as bf16. block_bytes: a block of 128 tokens. swa_bytes: the state at one
    boundary.
    """

    parameters: int
    parameter_bytes: int
    block_bytes: int
    swa_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.parameters / 1e6:,.1f} M parameters ({self.parameter_bytes / 1e6:,.1f} MB), "
            f"block {self.block_bytes:,} B, SWA window {self.swa_bytes:,} B"
        )


def byte_budget(config: ModelConfig) -> ByteBudget:
    """Count a model's parameters and what it stores, from its own shapes and formats; nothing is allocated."""
    parameters = sum(math.prod(shape) for shape in parameter_shapes(config).values())
    table = config.table
    entries = sum(BLOCK_TOKENS // table.ratios[layer] for layer in table.owners)
    block = entries * (config.latent_format.nbytes + config.index_format.nbytes)
    ring = (config.window + ROLLBACK_TOKENS) * config.window_format.nbytes
    return ByteBudget(
        parameters=parameters,
        parameter_bytes=2 * parameters,
        block_bytes=-(-block // table.padding) * table.padding,
        swa_bytes=ring * config.encoder_layers,
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape, in a fixed order."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden)}
    for layer in range(c.layers):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (c.hidden,),
            "q_down": (c.q_rank, c.hidden),
            "q_norm": (c.q_rank,),
            "q_up": (c.heads * c.head_dim, c.q_rank),
            "kv": (c.head_dim, c.hidden),
            "kv_norm": (c.head_dim,),
            "sink": (c.heads,),
            "out": (c.hidden, c.heads * c.head_dim),
            "ffn_norm": (c.hidden,),
        }
        own |= _plane_shapes(c, layer) | _index_shapes(c, layer) | _engram_shapes(c, layer) | _ffn_shapes(c, layer)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes | {"norm": (c.hidden,), "head": (c.vocab_size, c.hidden)}


def _plane_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer not in c.table.owners:
        return {}
    ratio = c.table.ratios[layer]
    shapes: dict[str, tuple[int, ...]] = {"plane.kv": (c.head_dim, c.hidden), "plane.norm": (c.head_dim,)}
    if ratio > 1:
        shapes |= {"plane.gate": (c.head_dim, c.hidden), "plane.bias": (ratio, c.head_dim)}
    return shapes | {"index.k": (c.index_dim, c.head_dim), "index.k_norm": (c.index_dim,)}


def _index_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer not in c.index_sources:
        return {}
    return {"index.q": (c.index_heads * c.index_dim, c.q_rank), "index.weight": (c.index_heads, c.hidden)}


def _engram_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer not in c.engram_layers:
        return {}
    width = NGRAM_LOOKUPS * c.engram_dim
    return {
        "engram.table": (len(NGRAM_ORDERS) * c.engram_rows, c.engram_dim),
        "engram.norm": (c.hidden,),
        "engram.key": (c.hidden, width),
        "engram.value": (c.hidden, width),
    }


def _ffn_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer in c.dense_layers:
        return {"ffn.up": (2 * c.ffn_hidden, c.hidden), "ffn.down": (c.hidden, c.ffn_hidden)}
    return {
        "ffn.up": (2 * c.shared_hidden, c.hidden),
        "ffn.down": (c.hidden, c.shared_hidden),
        "router": (c.experts, c.hidden),
        "router_bias": (c.experts,),
        "experts.up": (2 * c.experts * c.expert_hidden, c.hidden),
        "experts.down": (c.hidden, c.experts * c.expert_hidden),
    }


_PRESETS: Mapping[str, ModelConfig] = {
    # Bytes as tokens, 6.0 M parameters: trained by `tools/train_tiny.py`, shipped in `engine/assets`.
    "tiny": ModelConfig(
        name="tiny",
        geometry="tiny",
        vocab_size=264,
        hidden=256,
        heads=8,
        head_dim=64,
        rope_dim=16,
        q_rank=128,
        index_heads=4,
        index_dim=64,
        index_sources=(1, 3),
        top_k=64,
        engram_layers=(1,),
        engram_rows=16384,
        engram_dim=32,
        dense_layers=(0,),
        ffn_hidden=512,
        shared_hidden=320,
        experts=4,
        active_experts=1,
        expert_hidden=64,
    ),
    # Shapes only. Widths of the feed-forward and the n-gram tables and the vocabulary are not in the sources: those
    # here are V4-Flash's published ones or, for the tables, a guess; none of them touches a byte of the cache.
    "v4.1-flash": ModelConfig(
        name="v4.1-flash",
        geometry="deepseek-v4.1-flash",
        vocab_size=129_280,
        hidden=5120,
        heads=64,
        head_dim=512,
        rope_dim=64,
        q_rank=1024,
        index_heads=32,
        index_dim=128,
        index_sources=(2, 8, 14, 20, 24, 28, 32, 36),
        top_k=512,
        engram_layers=(1, 14),
        engram_rows=2**20,
        engram_dim=512,
        dense_layers=(),
        ffn_hidden=0,
        shared_hidden=2048,
        experts=256,
        active_experts=6,
        expert_hidden=2048,
    ),
}
