"""How many bytes a model's cache takes and where each layer's part lies, computed from its layer and format tables.

Sources: DeepSeek-V4.1 paper (arXiv 2609.19969), DeepSeek-V4 paper (arXiv 2606.19348) and the `compress_ratios` of the
published V4-Flash and V4-Pro configurations, the record layouts of FlashMLA 1.0.0, and the block padding and state ring
of DeepInfer 0.1.0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.keys import BLOCK_TOKENS

PAGE_BYTES = 4096
"""What slots are a multiple of: the strictest logical block size that O_DIRECT meets in practice."""
TRAILER_BYTES = 640
"""Room for a slot's trailer; this much and no more keeps a V4.1 block in 28 pages."""
WINDOW_TOKENS = 128
"""Width of the sliding window in every layer."""
ROLLBACK_TOKENS = 6
"""Ring slots beyond the window, so that rejected drafts never overwrite it (DeepInfer: 5 drafts + 1)."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One token's (or one compressed entry's) record. The tag tells formats of equal size apart.

    A plane of n entries may store its parts block-wise (all data, then all scales); its size is n * nbytes anyway.
    """

    tag: str
    nbytes: int


def latent_fp8(dim: int) -> RecordFormat:
    """Latent of `dim` e4m3 values, then one ue8m0 scale per 32 (528 B at 512)."""
    return RecordFormat(f"latent-fp8-{dim}", dim + dim // 32)


def latent_fp4(dim: int) -> RecordFormat:
    """Latent of `dim` e2m1 values in pairs, even index in the low nibble, then one e4m3 scale per 16 (288 B at 512)."""
    return RecordFormat(f"latent-fp4-{dim}", dim // 2 + dim // 16)


def latent_hopper(dim: int, rope: int) -> RecordFormat:
    """Latent of `dim - rope` e4m3, `rope` bf16, one ue8m0 scale per 64 e4m3, padded to 8 (584 B at 512 and 64)."""
    plain = dim - rope
    return RecordFormat(f"latent-hopper-{dim}-{rope}", _round_up(plain + 2 * rope + plain // 64, 8))


def index_fp4(dim: int) -> RecordFormat:
    """Indexer K of `dim` e2m1 values in pairs, then one ue8m0 scale per 32 (68 B at 128)."""
    return RecordFormat(f"index-fp4-{dim}", dim // 2 + dim // 32)


def index_fp8(dim: int) -> RecordFormat:
    """Indexer K of `dim` e4m3 values and one fp32 scale (132 B at 128)."""
    return RecordFormat(f"index-fp8-f32-{dim}", dim + 4)


def index_fp8_ue8m0(dim: int) -> RecordFormat:
    """Indexer K of `dim` e4m3 values and one ue8m0 scale per 32 (132 B at 128, but not the bytes of `index_fp8`)."""
    return RecordFormat(f"index-fp8-ue8m0-{dim}", dim + dim // 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """What fixes the bytes of one model's cache.

    ratios: tokens per compressed entry for each layer; 0 means sliding window only.
    owners: layers that own a plane of compressed KV, ascending; a layer reads the plane of the last owner up to itself.
    indexed: the owners that own indexer K too.
    window_layers: the first so many layers' windows make up the SWA state (all layers, or the causal encoder's).
    latent, index, window: records of compressed KV, indexer K and the window.
    padding: a block's bytes are padded to a multiple of this.
    carry_bytes: per indexed owner, compressor rows that are not empty at a multiple of 128 and belong to the SWA state.
    """

    ratios: tuple[int, ...]
    owners: tuple[int, ...]
    indexed: tuple[int, ...]
    window_layers: int
    latent: RecordFormat
    index: RecordFormat
    window: RecordFormat
    padding: int = 1
    carry_bytes: int = 0

    def __post_init__(self) -> None:
        if not set(self.indexed) <= set(self.owners) or list(self.owners) != sorted(set(self.owners)):
            raise UsageError(f"layer table: owners {self.owners} do not ascend or lack one of indexed {self.indexed}")
        for layer, ratio in enumerate(self.ratios):
            if ratio and BLOCK_TOKENS % ratio:
                raise UsageError(f"layer table: layer {layer} has ratio {ratio}; choose a divisor of {BLOCK_TOKENS}")
            source = self.source_of(layer)
            if ratio and (source is None or self.ratios[source] != ratio):
                raise UsageError(f"layer table: layer {layer} has ratio {ratio}, its owner has not; complete `owners`")
            if not ratio and layer in self.owners:
                raise UsageError(f"layer table: layer {layer} has ratio 0 and nothing to own; take it out of `owners`")

    def source_of(self, layer: int) -> int | None:
        """Return the owner whose plane `layer` reads, None for a layer with the sliding window only."""
        return max((o for o in self.owners if o <= layer), default=None) if self.ratios[layer] else None

    def canonical(self) -> tuple[str, ...]:
        """Return everything above as strings in a fixed order, for the digest."""
        lists = (self.ratios, self.owners, self.indexed)
        formats = (f"{record.tag}={record.nbytes}" for record in (self.latent, self.index, self.window))
        numbers = (self.window_layers, WINDOW_TOKENS, ROLLBACK_TOKENS, self.padding, self.carry_bytes)
        return (*(",".join(map(str, layers)) for layers in lists), *formats, *map(str, numbers))


@dataclass(frozen=True, slots=True)
class Plane:
    """One owning layer's part of a block: its compressed KV, then its indexer K (0 bytes if it has none)."""

    layer: int
    ratio: int
    offset: int
    latent_bytes: int
    index_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.latent_bytes + self.index_bytes


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The fixed sizes of a store's blocks and SWA windows. Made by `preset`, `from_layers` or `opaque`.

    name: what people call it.
    payload_bytes: bytes of one block of 128 tokens, all owning layers, padding included.
    swa_bytes: bytes of one SWA window, the state at a multiple of 128 tokens; 0 if the model has none.
    planes: where each owning layer's part lies in the block, in order of layer; empty for an opaque geometry.
    layers: the table all this was computed from; None for an opaque geometry.
    digest: 16 bytes that differ when anything that fixes the bytes differs.
    """

    name: str
    payload_bytes: int
    swa_bytes: int
    planes: tuple[Plane, ...] = ()
    layers: LayerTable | None = None
    block_tokens: int = field(default=BLOCK_TOKENS, init=False)

    @classmethod
    def preset(cls, name: str) -> CacheGeometry:
        """Return a geometry shipped with DuoKV; UsageError names the nearest one if there is none."""
        if name not in _PRESETS:
            raise UsageError(f"geometry {name!r} is not a preset; {nearest(name, _PRESETS)}")
        return cls.from_layers(name, _PRESETS[name])

    @classmethod
    def from_layers(cls, name: str, layers: LayerTable) -> CacheGeometry:
        """Compute a geometry from a layer table."""
        planes: list[Plane] = []
        offset = 0
        for layer in layers.owners:
            entries = BLOCK_TOKENS // layers.ratios[layer]
            index_bytes = entries * layers.index.nbytes if layer in layers.indexed else 0
            plane = Plane(layer, layers.ratios[layer], offset, entries * layers.latent.nbytes, index_bytes)
            planes.append(plane)
            offset += plane.nbytes
        ring = (WINDOW_TOKENS + ROLLBACK_TOKENS) * layers.window.nbytes
        swa_bytes = ring * layers.window_layers + layers.carry_bytes * len(layers.indexed)
        return cls(name, _round_up(offset, layers.padding), swa_bytes, tuple(planes), layers)

    @classmethod
    def opaque(cls, name: str, *, payload_bytes: int, swa_bytes: int = 0) -> CacheGeometry:
        """Return a geometry whose inside only the engine knows; `name` alone tells it from others of its size."""
        if not name or payload_bytes <= 0 or swa_bytes < 0:
            raise UsageError(
                f"geometry {name!r} of {payload_bytes} payload and {swa_bytes} SWA bytes cannot be stored; "
                "give a name, a payload above 0 and SWA bytes of at least 0"
            )
        return cls(name, payload_bytes, swa_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot on disk: payload, gap, trailer; a multiple of 4096."""
        return _round_up(self.payload_bytes + TRAILER_BYTES, PAGE_BYTES)

    @property
    def trailer_offset(self) -> int:
        """Where the trailer starts in a slot: it ends where the slot ends."""
        return self.slot_bytes - TRAILER_BYTES

    @property
    def digest(self) -> bytes:
        """First 16 bytes of SHA-256 over the length-prefixed UTF-8 strings of all that fixes the bytes."""
        inside = self.layers.canonical() if self.layers else ("opaque", self.name)
        sizes = (self.block_tokens, self.payload_bytes, self.swa_bytes, self.slot_bytes, TRAILER_BYTES)
        planes = (f"{p.layer}@{p.offset}+{p.latent_bytes}+{p.index_bytes}" for p in self.planes)
        parts = [text.encode() for text in ("duokv-geometry-0", *map(str, sizes), *inside, *planes)]
        return hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()[:16]

    def describe(self) -> str:
        """Return one line for people."""
        inside = f"{len(self.planes)} planes" if self.planes else "opaque"
        slot = f"{self.slot_bytes:,} B = {self.slot_bytes // PAGE_BYTES} pages"
        return (
            f"{self.name}: {self.block_tokens}-token block {self.payload_bytes:,} B ({inside}), slot {slot}, "
            f"SWA window {self.swa_bytes:,} B, digest {self.digest.hex()}"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _v41_table(latent: RecordFormat, index: RecordFormat, window: RecordFormat, padding: int = 1) -> LayerTable:
    """V4.1-Flash: 20 encoder layers with three owners, 20 decoder layers that share layer 20's plane."""
    owners = (2, 8, 14, 20)
    return LayerTable(
        ratios=(0,) * 2 + (2,) * 18 + (1,) * 20,
        owners=owners,
        indexed=owners,
        window_layers=20,
        latent=latent,
        index=index,
        window=window,
        padding=padding,
    )


def _v4_table(first_two: int, layers: int) -> LayerTable:
    """V4: after two layers of one kind, ratio 4 (overlapping entries, indexer) and ratio 128 (neither) take turns.

    No encoder: every layer's window is state. An entry of a ratio-4 layer also reads the 4 tokens before its own, so
    its compressor carries 4 fp32 rows of value and gate across any boundary, for the latent and for the indexer's K.
    """
    ratios = (first_two,) * 2 + tuple(4 if i % 2 == 0 else 128 for i in range(layers - 2))
    latent = latent_hopper(512, 64)
    return LayerTable(
        ratios=ratios,
        owners=tuple(i for i, ratio in enumerate(ratios) if ratio),
        indexed=tuple(i for i, ratio in enumerate(ratios) if ratio == 4),
        window_layers=layers,
        latent=latent,
        index=index_fp4(128),
        window=latent,
        carry_bytes=4 * (512 + 128) * 2 * 4,
    )


def _padding_of(latent: RecordFormat) -> int:
    """DeepInfer pads fp4 blocks to whole fp4 records and to 128 B at once: 1,152 for 288 B."""
    return math.lcm(128, latent.nbytes)


_PRESETS: Mapping[str, LayerTable] = {
    "deepseek-v4.1-flash": _v41_table(latent_fp4(512), index_fp4(128), latent_fp8(512), _padding_of(latent_fp4(512))),
    "deepseek-v4.1-flash-hopper": _v41_table(latent_hopper(512, 64), index_fp8(128), latent_hopper(512, 64)),
    "deepseek-v4-flash": _v4_table(first_two=0, layers=43),
    "deepseek-v4-pro": _v4_table(first_two=128, layers=61),
    # The shipped small model: 3 encoder + 3 decoder layers, head_dim 64, the layouts of V4.1 scaled to 64 dims.
    "tiny": LayerTable(
        ratios=(0, 2, 2, 1, 1, 1),
        owners=(1, 3),
        indexed=(1, 3),
        window_layers=3,
        latent=latent_fp4(64),
        index=index_fp4(64),
        window=latent_fp8(64),
        padding=_padding_of(latent_fp4(64)),
    ),
}
