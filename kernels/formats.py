"""Record formats of KV caches: how a latent or an indexer key becomes bytes, and back.

One codec serves all formats: values are scaled per group, rounded to e4m3 or e2m1, and the scales follow the values.
It works in any dimension that the groups divide, on any device, in at most a few elementwise operations, and needs no
state: safe from any thread. Every record depends on its own row only, whatever is encoded beside it, because all
arithmetic is elementwise IEEE and the one reduction, a group's largest magnitude, is exact in any order.

Rounding is to nearest, ties to even, saturating at the format's largest value. Zeros are all-zero bytes. A NaN or an
infinity makes its whole group decode to values that are not finite. ue8m0 scales are the smallest power of two that
needs no saturation; e4m3 scales are rounded to nearest, so that a group's largest value may saturate by a 16th.

Layouts and group sizes are those of FlashMLA 1.0.0 and DeepGEMM, at 512 and 128 dimensions; tags and sizes are those
of `duokv.kvstore.geometry`, which lays out the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT = 0x7F800000


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One token's (or one compressed entry's) record.

    tag: tells formats of equal size apart.
    dim: values per record; the last `tail` of them stay bf16.
    element: what the other values are rounded to; e2m1 go in pairs, the even index in the low nibble.
    group: values that share a scale.
    scale: what scales are rounded to; fp32 are little-endian.
    pad: zero bytes after the scales.
    blockwise: whether a stored block holds all its entries' values, then all their scales (`pack_block`); else it holds
        whole records.
    """

    tag: str
    dim: int
    element: Literal["e4m3", "e2m1"]
    group: int
    scale: Literal["ue8m0", "e4m3", "fp32"]
    tail: int = 0
    pad: int = 0
    blockwise: bool = False

    def __post_init__(self) -> None:
        if self.plain <= 0 or self.plain % self.group or self.group % 2:
            raise ValueError(
                f"format {self.tag}: {self.plain} values are not whole groups of {self.group}; choose another dimension"
            )

    @property
    def plain(self) -> int:
        """Values that are scaled."""
        return self.dim - self.tail

    @property
    def data_bytes(self) -> int:
        """Bytes of the values."""
        return self.plain // (2 if self.element == "e2m1" else 1) + 2 * self.tail

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and the pad."""
        return self.plain // self.group * (4 if self.scale == "fp32" else 1) + self.pad

    @property
    def nbytes(self) -> int:
        """Bytes of a record."""
        return self.data_bytes + self.scale_bytes


def latent_fp8(dim: int) -> RecordFormat:
    """`dim` e4m3 values, then one ue8m0 scale per 32 (528 B at 512)."""
    return RecordFormat(f"latent-fp8-{dim}", dim, "e4m3", 32, "ue8m0")


def latent_fp4(dim: int) -> RecordFormat:
    """`dim` e2m1 values, then one e4m3 scale per 16 (288 B at 512)."""
    return RecordFormat(f"latent-fp4-{dim}", dim, "e2m1", 16, "e4m3")


def latent_hopper(dim: int, rope: int) -> RecordFormat:
    """`dim - rope` e4m3 and `rope` bf16 values, then one ue8m0 scale per 64 e4m3, padded to 8 (584 B at 512 and 64)."""
    plain = dim - rope
    pad = -(plain + 2 * rope + plain // 64) % 8
    return RecordFormat(f"latent-hopper-{dim}-{rope}", dim, "e4m3", 64, "ue8m0", rope, pad, blockwise=True)


def index_fp4(dim: int) -> RecordFormat:
    """Indexer K of `dim` e2m1 values, then one ue8m0 scale per 32 (68 B at 128)."""
    return RecordFormat(f"index-fp4-{dim}", dim, "e2m1", 32, "ue8m0", blockwise=True)


def index_fp8(dim: int) -> RecordFormat:
    """Indexer K of `dim` e4m3 values, then one fp32 scale (132 B at 128)."""
    return RecordFormat(f"index-fp8-f32-{dim}", dim, "e4m3", dim, "fp32", blockwise=True)


def index_fp8_ue8m0(dim: int) -> RecordFormat:
    """Indexer K of `dim` e4m3 values, then one ue8m0 scale per 32 (132 B at 128, not the bytes of `index_fp8`)."""
    return RecordFormat(f"index-fp8-ue8m0-{dim}", dim, "e4m3", 32, "ue8m0", blockwise=True)


def encode(x: Tensor, fmt: RecordFormat) -> Tensor:
    """Encode bf16 or fp32 values [..., dim] into records, uint8 [..., nbytes]; ValueError for another `dim`."""
    _check(x, fmt.dim, fmt, "values")
    if not x.numel():
        return torch.empty((*x.shape[:-1], fmt.nbytes), dtype=torch.uint8, device=x.device)
    body, tail = torch.split(x, [fmt.plain, fmt.tail], dim=-1)
    values, scales, _ = _quantize(body, fmt)
    data = values.flatten(-2).view(torch.uint8) if fmt.element == "e4m3" else _pack_e2m1(values.flatten(-2))
    raw_tail = tail.to(torch.bfloat16).contiguous().view(torch.uint8)
    pad = data.new_zeros((*x.shape[:-1], fmt.pad))
    return torch.cat([data, raw_tail, scales.flatten(-2).view(torch.uint8), pad], dim=-1)


def decode(rows: Tensor, fmt: RecordFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode records, uint8 [..., nbytes], into values [..., dim]; exact in fp32, and in bf16 but for fp32 scales."""
    _check(rows, fmt.nbytes, fmt, "bytes")
    values_end = fmt.data_bytes - 2 * fmt.tail
    data, tail, scales, _ = torch.split(rows, [values_end, 2 * fmt.tail, fmt.scale_bytes - fmt.pad, fmt.pad], dim=-1)
    values = _lookup(_e4m3_values(rows.device), data) if fmt.element == "e4m3" else _unpack_e2m1(data)
    groups = torch.unflatten(values, -1, (-1, fmt.group)).mul_(_scale_values(scales, fmt).unsqueeze(-1))
    body = groups.flatten(-2).to(dtype)
    if not fmt.tail:
        return body
    return torch.cat([body, tail.contiguous().view(torch.bfloat16).to(dtype)], dim=-1)


def fake_quant(x: Tensor, fmt: RecordFormat) -> Tensor:
    """Return `decode(encode(x))` in the dtype of `x`, bit for bit, its gradient passed straight through."""
    _check(x, fmt.dim, fmt, "values")
    rounded: Tensor = _FakeQuant.apply(x, fmt)  # type: ignore[no-untyped-call]  # torch leaves `apply` untyped
    return rounded


def block_parts(block: Tensor, fmt: RecordFormat) -> tuple[Tensor, Tensor]:
    """Return writable views of a stored block, uint8 [..., n * nbytes]: values [..., n, data_bytes], scales likewise.

    The block's last dimension must be contiguous. ValueError unless it holds whole records.
    """
    count, rest = divmod(block.shape[-1], fmt.nbytes)
    if rest:
        raise ValueError(f"format {fmt.tag}: a block of {block.shape[-1]} bytes is not whole records of {fmt.nbytes}")
    if not fmt.blockwise:
        records = torch.unflatten(block, -1, (count, fmt.nbytes))
        return records[..., : fmt.data_bytes], records[..., fmt.data_bytes :]
    data, scales = torch.split(block, [count * fmt.data_bytes, count * fmt.scale_bytes], dim=-1)
    return torch.unflatten(data, -1, (count, fmt.data_bytes)), torch.unflatten(scales, -1, (count, fmt.scale_bytes))


def pack_block(rows: Tensor, fmt: RecordFormat) -> Tensor:
    """Lay out records, uint8 [..., n, nbytes], as they are stored in a block, uint8 [..., n * nbytes]."""
    _check(rows, fmt.nbytes, fmt, "bytes")
    if not fmt.blockwise:
        return rows.flatten(-2)
    data, scales = torch.split(rows, [fmt.data_bytes, fmt.scale_bytes], dim=-1)
    return torch.cat([data.flatten(-2), scales.flatten(-2)], dim=-1)


def unpack_block(block: Tensor, fmt: RecordFormat) -> Tensor:
    """Return the records, uint8 [..., n, nbytes], of a stored block, uint8 [..., n * nbytes]."""
    return torch.cat(block_parts(block, fmt), dim=-1)


class _FakeQuant(torch.autograd.Function):
    """x + (q - x) would pass gradients too, but its sum need not be q."""

    @staticmethod
    def forward(ctx: object, x: Tensor, fmt: RecordFormat) -> Tensor:
        body, tail = torch.split(x, [fmt.plain, fmt.tail], dim=-1)
        values, _, scale = _quantize(body, fmt)
        if values.dtype == torch.float8_e4m3fn:
            values = _lookup(_e4m3_values(x.device), values.view(torch.uint8))
        out = values.mul_(scale).flatten(-2).to(x.dtype)
        return torch.cat([out, tail.to(torch.bfloat16).to(x.dtype)], dim=-1) if fmt.tail else out

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _check(tensor: Tensor, last: int, fmt: RecordFormat, what: str) -> None:
    if tensor.shape[-1] != last:
        raise ValueError(f"format {fmt.tag}: rows have {tensor.shape[-1]} {what}, not {last}; pass its own rows")


def _quantize(body: Tensor, fmt: RecordFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Return rounded values [..., groups, group], stored scales [..., groups, 1] and the same scales as fp32.

    Values are float8_e4m3fn, or fp32 on the e2m1 grid; scales are uint8 (ue8m0), float8_e4m3fn or fp32.
    """
    groups = torch.unflatten(body.to(torch.float32), -1, (-1, fmt.group))
    largest = groups.abs().amax(-1, keepdim=True)
    limit = E4M3_MAX if fmt.element == "e4m3" else E2M1_MAX
    if fmt.scale == "ue8m0":
        stored = _ue8m0(largest, limit)
    elif fmt.scale == "e4m3":
        # amax - amax is 0, or NaN where a value is not finite.
        stored = ((largest / limit).clamp(max=E4M3_MAX) + (largest - largest)).to(torch.float8_e4m3fn)
    else:
        stored = largest / limit
    scale = stored if fmt.scale == "fp32" else _scale_values(stored.view(torch.uint8), fmt)
    # A scale that underflowed to 0 stands for a group of zeros: dividing by infinity makes them.
    scaled = groups / scale.masked_fill(scale == 0, torch.inf)
    if fmt.element == "e4m3":
        # Clamped here: whether the cast itself saturates has changed between versions of torch.
        return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), stored, scale
    return _round_e2m1(scaled), stored, scale


def _ue8m0(largest: Tensor, limit: float) -> Tensor:
    """Return the biased exponent of the smallest power of two that is at least largest / limit; 255 for non-finite.

    In integers: fp32 bits are exponent and mantissa side by side, so adding what the limit's mantissa lacks to 2^23 - 1
    carries into the exponent exactly when the mantissa of `largest` is above the limit's.
    """
    bits = largest.view(torch.int32)
    # 448 = 1.75 * 2^8 and 6 = 1.5 * 2^2
    mantissa, exponent = (0x600000, 8) if limit == E4M3_MAX else (0x400000, 2)
    biased = ((bits + (0x7FFFFF - mantissa)) >> 23).sub_(exponent).clamp_(min=0)
    return torch.where(bits < _EXPONENT, biased, 255).to(torch.uint8)


def _scale_values(scales: Tensor, fmt: RecordFormat) -> Tensor:
    """Return stored scales, uint8 [..., bytes], as fp32 [..., scales]."""
    if fmt.scale == "fp32":
        return scales.contiguous().view(torch.float32)
    if fmt.scale == "e4m3":
        return _lookup(_e4m3_values(scales.device), scales)
    # Byte 0 is 2^-127, a subnormal whose bits are not an exponent's.
    return (scales.to(torch.int32) << 23).clamp_(min=0x400000).view(torch.float32)


def _round_e2m1(y: Tensor) -> Tensor:
    """Round fp32 to the e2m1 grid; zeros lose their sign.

    Adding 1.5 * 2^23 steps rounds to whole steps, ties to even, and subtracting them again is exact. The step is half
    the power of two below the value, and 0.5 below 2.
    """
    clamped = y.clamp(-E2M1_MAX, E2M1_MAX)
    power = (clamped.view(torch.int32) & _EXPONENT).view(torch.float32)
    magic = power.clamp_(min=1.0).mul_(1.5 * 2**22)
    return clamped.add_(magic).sub_(magic)


def _pack_e2m1(values: Tensor) -> Tensor:
    magnitude = values.abs()
    # The codes of the grid lie on three lines, of slope 2, 1 and 1/2, each the lowest where it applies.
    lines = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude / 2 + 4)
    codes = lines.to(torch.uint8) | ((values < 0).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _unpack_e2m1(data: Tensor) -> Tensor:
    signed = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=data.device)
    # A byte's two values are looked up as one 8-byte word: rows are bytes, the low nibble's value comes first.
    pairs = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], dim=-1)
    return _lookup(pairs.view(torch.int64).squeeze(-1), data).view(torch.float32)


def _e4m3_values(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).to(torch.float32)


def _lookup(table: Tensor, codes: Tensor) -> Tensor:
    """Return `table[codes]`: several times as fast on a CPU as torch's own conversion from e4m3."""
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)
