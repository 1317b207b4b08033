"""The movers and codecs of `copy` and `formats` as Triton kernels, for CUDA devices; bit-equal to them.

Import this module only where triton is installed (`pick(...).movers == "triton"`): it defines its kernels on import.
With TRITON_INTERPRET=1 set before that, they run on a CPU, at some 1,500 programs a second: one program is one row.

Rounding is done in integers, by the same code for every small float, because what a device's conversion instructions
do with ties and overflow differs between generations, and division is the correctly rounded one.
"""

from __future__ import annotations

import torch

# Ignored in three ways: where triton is installed it has no types, elsewhere it is missing.
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from duokv.kernels.formats import RecordFormat

_BLOCK = 1024


def gather_rows(slots: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """`copy.gather_rows`; rows of `out` may lie apart, their bytes may not."""
    if out is None:
        out = torch.empty((index.shape[0], slots.shape[1]), dtype=torch.uint8, device=slots.device)
    if out.numel():
        grid = (index.shape[0],)
        _gather_kernel[grid](slots, index, out, slots.stride(0), out.stride(0), slots.shape[1], _BLOCK)
    return out


def scatter_rows(slots: Tensor, index: Tensor, rows: Tensor) -> None:
    """`copy.scatter_rows`; rows may lie apart, their bytes may not."""
    if rows.numel():
        strides = slots.stride(0), rows.stride(0)
        _scatter_kernel[(index.shape[0],)](slots, index, rows, *strides, slots.shape[1], _BLOCK)


def encode(x: Tensor, fmt: RecordFormat) -> Tensor:
    """`formats.encode`, for formats without a tail or fp32 scales and dimensions that are powers of two."""
    _check(x, fmt.dim, fmt)
    flat = x.reshape(-1, fmt.dim)
    out = torch.empty((flat.shape[0], fmt.nbytes), dtype=torch.uint8, device=x.device)
    if out.numel():
        kernel = _encode_e4m3_kernel if fmt.element == "e4m3" else _encode_e2m1_kernel
        kernel[(flat.shape[0],)](flat, out, fmt.dim, fmt.group, fmt.scale == "ue8m0")
    return out.view(*x.shape[:-1], fmt.nbytes)


def decode(rows: Tensor, fmt: RecordFormat, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`formats.decode`, for the formats of `encode`."""
    _check(rows, fmt.nbytes, fmt)
    flat = rows.reshape(-1, fmt.nbytes)
    out = torch.empty((flat.shape[0], fmt.dim), dtype=dtype, device=rows.device)
    if out.numel():
        kernel = _decode_e4m3_kernel if fmt.element == "e4m3" else _decode_e2m1_kernel
        kernel[(flat.shape[0],)](flat, out, fmt.dim, fmt.group, fmt.scale == "ue8m0")
    return out.view(*rows.shape[:-1], fmt.dim)


def _check(tensor: Tensor, last: int, fmt: RecordFormat) -> None:
    if fmt.tail or fmt.pad or fmt.scale == "fp32" or fmt.dim & (fmt.dim - 1):
        raise ValueError(f"format {fmt.tag}: there is no Triton kernel for it; use kernels.formats")
    if tensor.shape[-1] != last:
        raise ValueError(f"format {fmt.tag}: rows have {tensor.shape[-1]} elements, not {last}; pass its own rows")


# Kernels: one program handles one row. They are wrapped below, as a decorator would hide their types.


def _gather(
    slots: tl.tensor,
    index: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    out_stride: tl.tensor,
    nbytes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + row).to(tl.int64)
    for start in range(0, nbytes, block):
        at = start + tl.arange(0, block)
        data = tl.load(slots + slot * stride + at, mask=at < tl.where(slot >= 0, nbytes, 0), other=0)
        tl.store(out + row * out_stride + at, data, mask=at < nbytes)


def _scatter(
    slots: tl.tensor,
    index: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    row_stride: tl.tensor,
    nbytes: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + row).to(tl.int64)
    for start in range(0, nbytes, block):
        at = start + tl.arange(0, block)
        inside = at < tl.where(slot >= 0, nbytes, 0)
        tl.store(slots + slot * stride + at, tl.load(rows + row * row_stride + at, mask=inside, other=0), mask=inside)


def _small_float(
    magnitude: tl.tensor, shift: tl.constexpr, bias: tl.constexpr, least_normal: tl.constexpr, steps: tl.constexpr
) -> tl.tensor:
    """Round fp32 bits without sign to a small float's code, ties to even.

    shift: mantissa bits to drop. bias: what the exponents differ by, in code units. least_normal: bits of the smallest
    normal; below it codes count steps of 1 / steps, which adding 1.5 * 2^23 rounds to.
    """
    normal = ((magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)) >> shift) - bias
    counted = magnitude.to(tl.float32, bitcast=True) * steps + 12582912.0
    return tl.where(magnitude < least_normal, counted.to(tl.int32, bitcast=True) & 0xF, normal)


def _e4m3_code(value: tl.tensor) -> tl.tensor:
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    return _small_float_fn(magnitude, 20, 960, 0x3C800000, 512) | ((bits >> 24) & 0x80)


def _e2m1_code(value: tl.tensor) -> tl.tensor:
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # 6
    code = _small_float_fn(magnitude, 22, 252, 0x3F800000, 2)
    return tl.where((bits < 0) & (code > 0), code | 8, code)


def _e4m3_value(code: tl.tensor) -> tl.tensor:
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


def _e2m1_value(code: tl.tensor) -> tl.tensor:
    magnitude = code & 7
    normal = ((magnitude << 22) + 0x3F000000).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(code >= 8, -value, value)


def _scale_value(code: tl.tensor, ue8m0: tl.constexpr) -> tl.tensor:
    if ue8m0:
        return tl.maximum(code << 23, 0x400000).to(tl.float32, bitcast=True)
    else:  # noqa: RET505  # Triton compiles one of the two
        return _e4m3_value_fn(code)


def _scale_code(
    largest: tl.tensor, limit: tl.constexpr, mantissa: tl.constexpr, exponent: tl.constexpr, ue8m0: tl.constexpr
) -> tl.tensor:
    """Return the stored scale of groups whose largest magnitudes have these bits; a NaN if they are not finite."""
    if ue8m0:
        biased = tl.maximum(((largest + (0x7FFFFF - mantissa)) >> 23) - exponent, 0)
        return tl.where(largest < 0x7F800000, biased, 255)
    else:  # noqa: RET505  # Triton compiles one of the two
        wanted = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, limit, tl.float32))
        return tl.where(largest < 0x7F800000, _e4m3_code_fn(wanted), 0x7F)


def _divide(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return values [groups, n] / scale [groups], 0 where the scale is."""
    divisor = tl.where(scale == 0, float("inf"), scale)[:, None]
    return tl.div_rn(values, tl.broadcast_to(divisor, values.shape))


def _magnitude_bits(values: tl.tensor) -> tl.tensor:
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


def _encode_e4m3(x: tl.tensor, out: tl.tensor, dim: tl.constexpr, group: tl.constexpr, ue8m0: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, dim // group)
    at = groups[:, None] * group + tl.arange(0, group)[None, :]
    values = tl.load(x + row * dim + at).to(tl.float32)
    stored = _scale_code_fn(_magnitude_bits_fn(values), 448.0, 0x600000, 8, ue8m0)
    codes = _e4m3_code_fn(_divide_fn(values, _scale_value_fn(stored, ue8m0)))
    record = out + row * (dim + dim // group)
    tl.store(record + at, codes.to(tl.uint8))
    tl.store(record + dim + groups, stored.to(tl.uint8))


def _encode_e2m1(x: tl.tensor, out: tl.tensor, dim: tl.constexpr, group: tl.constexpr, ue8m0: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, dim // group)
    pair = groups[:, None] * (group // 2) + tl.arange(0, group // 2)[None, :]
    even = tl.load(x + row * dim + 2 * pair).to(tl.float32)
    odd = tl.load(x + row * dim + 2 * pair + 1).to(tl.float32)
    largest = tl.maximum(_magnitude_bits_fn(even), _magnitude_bits_fn(odd))
    stored = _scale_code_fn(largest, 6.0, 0x400000, 2, ue8m0)
    scale = _scale_value_fn(stored, ue8m0)
    codes = _e2m1_code_fn(_divide_fn(even, scale)) | (_e2m1_code_fn(_divide_fn(odd, scale)) << 4)
    record = out + row * (dim // 2 + dim // group)
    tl.store(record + pair, codes.to(tl.uint8))
    tl.store(record + dim // 2 + groups, stored.to(tl.uint8))


def _decode_e4m3(rows: tl.tensor, out: tl.tensor, dim: tl.constexpr, group: tl.constexpr, ue8m0: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, dim // group)
    at = groups[:, None] * group + tl.arange(0, group)[None, :]
    record = rows + row * (dim + dim // group)
    scale = _scale_value_fn(tl.load(record + dim + groups).to(tl.int32), ue8m0)
    values = _e4m3_value_fn(tl.load(record + at).to(tl.int32)) * scale[:, None]
    tl.store(out + row * dim + at, values)


def _decode_e2m1(rows: tl.tensor, out: tl.tensor, dim: tl.constexpr, group: tl.constexpr, ue8m0: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, dim // group)
    pair = groups[:, None] * (group // 2) + tl.arange(0, group // 2)[None, :]
    record = rows + row * (dim // 2 + dim // group)
    scale = _scale_value_fn(tl.load(record + dim // 2 + groups).to(tl.int32), ue8m0)[:, None]
    codes = tl.load(record + pair).to(tl.int32)
    tl.store(out + row * dim + 2 * pair, _e2m1_value_fn(codes & 15) * scale)
    tl.store(out + row * dim + 2 * pair + 1, _e2m1_value_fn(codes >> 4) * scale)


_small_float_fn = triton.jit(_small_float)
_e4m3_code_fn = triton.jit(_e4m3_code)
_e2m1_code_fn = triton.jit(_e2m1_code)
_e4m3_value_fn = triton.jit(_e4m3_value)
_e2m1_value_fn = triton.jit(_e2m1_value)
_scale_value_fn = triton.jit(_scale_value)
_scale_code_fn = triton.jit(_scale_code)
_divide_fn = triton.jit(_divide)
_magnitude_bits_fn = triton.jit(_magnitude_bits)
_gather_kernel = triton.jit(_gather)
_scatter_kernel = triton.jit(_scatter)
_encode_e4m3_kernel = triton.jit(_encode_e4m3)
_encode_e2m1_kernel = triton.jit(_encode_e2m1)
_decode_e4m3_kernel = triton.jit(_decode_e4m3)
_decode_e2m1_kernel = triton.jit(_decode_e2m1)
