"""Records are the published bytes: literals derived by hand, an oracle that knows only the bit layouts, a fixture."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duokv.kernels import formats
from duokv.kernels.formats import RecordFormat
from duokv.kvstore import geometry

GOLDEN = Path(__file__).parents[1] / "golden" / "formats_records.json"

FORMATS = (
    formats.latent_fp8(512),
    formats.latent_fp4(512),
    formats.latent_hopper(512, 64),
    formats.index_fp4(128),
    formats.index_fp8(128),
    formats.index_fp8_ue8m0(128),
    formats.latent_fp8(64),
    formats.latent_fp4(64),
    formats.index_fp4(64),
)
UE8M0 = tuple(fmt for fmt in FORMATS if fmt.scale == "ue8m0")
any_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.tag)
# One of each kind: what random rows are tried on.
small_format = pytest.mark.parametrize("fmt", FORMATS[2:3] + FORMATS[4:], ids=lambda fmt: fmt.tag)
ue8m0_format = pytest.mark.parametrize("fmt", UE8M0, ids=lambda fmt: fmt.tag)
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small operations gain nothing from threads, and threads that wait for each other stall on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows(fmt: RecordFormat, n: int, seed: int = 0) -> Tensor:
    """Rows whose groups differ in size by powers of two; some values are zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, fmt.dim, generator=generator) * torch.randn(n, fmt.dim, generator=generator).mul(3).exp2()
    return x * (torch.rand(n, fmt.dim, generator=generator) > 0.1)


def padded(fmt: RecordFormat, *values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (fmt.dim - len(values))])


def hexes(record: Tensor) -> str:
    return bytes(record.tolist()).hex()


# What a bit pattern is worth, from the definitions alone.


def small_float(code: int, *, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    return sign * (math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias))


def e4m3(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else small_float(code, exponent_bits=4, mantissa_bits=3, bias=7)


def e2m1(code: int) -> float:
    return small_float(code, exponent_bits=2, mantissa_bits=1, bias=1)


def nearest_even(value: float, grid: list[float]) -> float:
    """The nearest grid value; of two equally near ones, that with the even code (its place)."""
    return grid[min(range(len(grid)), key=lambda code: (abs(grid[code] - value), code % 2))]


def values_of(record: list[int], fmt: RecordFormat) -> list[float]:
    """Decode one record by the layout alone."""
    data, scales = record[: fmt.data_bytes], record[fmt.data_bytes :]
    tail = bytes(data[len(data) - 2 * fmt.tail :])
    if fmt.element == "e4m3":
        values = [e4m3(code) for code in data[: fmt.plain]]
    else:
        values = [e2m1(nibble) for byte in data for nibble in (byte & 15, byte >> 4)]
    if fmt.scale == "ue8m0":
        weights = [math.ldexp(1, byte - 127) for byte in scales]
    elif fmt.scale == "e4m3":
        weights = [e4m3(byte) for byte in scales]
    else:
        weights = torch.tensor(scales, dtype=torch.uint8).view(torch.float32).tolist()
    plain = [value * weights[place // fmt.group] for place, value in enumerate(values)]
    # bf16 is the upper half of fp32.
    return plain + [struct.unpack("<f", b"\0\0" + tail[i : i + 2])[0] for i in range(0, len(tail), 2)]


@pytest.mark.parametrize(
    ("fmt", "nbytes", "ours"),
    [
        (formats.latent_fp8(512), 528, geometry.latent_fp8(512)),
        (formats.latent_fp4(512), 288, geometry.latent_fp4(512)),
        (formats.latent_hopper(512, 64), 584, geometry.latent_hopper(512, 64)),
        (formats.index_fp4(128), 68, geometry.index_fp4(128)),
        (formats.index_fp8(128), 132, geometry.index_fp8(128)),
        (formats.index_fp8_ue8m0(128), 132, geometry.index_fp8_ue8m0(128)),
        (formats.latent_fp8(64), 66, geometry.latent_fp8(64)),
        (formats.latent_fp4(64), 36, geometry.latent_fp4(64)),
        (formats.index_fp4(64), 34, geometry.index_fp4(64)),
    ],
    ids=lambda value: getattr(value, "tag", None),
)
def test_sizes_and_tags_are_those_of_the_geometry(fmt: RecordFormat, nbytes: int, ours: geometry.RecordFormat) -> None:
    assert (fmt.tag, fmt.nbytes) == (ours.tag, ours.nbytes)
    assert fmt.nbytes == nbytes == formats.encode(rows(fmt, 1), fmt).shape[-1]


def test_latent_fp8_by_hand() -> None:
    fmt = formats.latent_fp8(64)
    # 448 needs scale 2^0 (byte 127): 448 is 0x7e, 1 is 0x38, -0.5 is 0xb0. 449 needs 2^1: 224.5 rounds to 224 (0x76).
    x = torch.cat([padded(fmt, 448.0, 1.0, -0.5)[:32], padded(fmt, 449.0, 2.0)[:32]])
    record = formats.encode(x, fmt)
    assert hexes(record) == "7e38b0" + "00" * 29 + "7638" + "00" * 30 + "7f80"
    assert formats.decode(record, fmt)[:3].tolist() == [448.0, 1.0, -0.5]
    assert formats.decode(record, fmt)[32:34].tolist() == [448.0, 2.0]


@pytest.mark.parametrize(
    ("fmt", "limit"), [(formats.latent_fp8(32), 448.0), (formats.index_fp4(32), 6.0)], ids=["e4m3", "e2m1"]
)
def test_the_next_scale_starts_right_above_the_limit(fmt: RecordFormat, limit: float) -> None:
    above = torch.tensor(limit).nextafter(torch.tensor(torch.inf)).item()
    largest = torch.tensor([limit, above, limit / 2, 1.0001 * limit / 2])
    records = formats.encode(torch.nn.functional.pad(largest.unsqueeze(1), (0, 31)), fmt)
    assert records[:, -1].tolist() == [127, 128, 126, 127]


def test_latent_fp4_by_hand() -> None:
    fmt = formats.latent_fp4(32)
    # Largest 6 needs scale 1 (0x38). The even index goes into the low nibble: (0.5, 1) are codes 1 and 2, byte 0x21.
    first = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -6.0, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # Largest 1.5 needs scale 0.25 (0x28): 1.5 becomes 6 (code 7), -0.75 becomes -3 (code 13).
    second = [1.5, -0.75, *[0.0] * 14]
    record = formats.encode(torch.tensor(first + second), fmt)
    assert hexes(record) == "214365f709000000" + "d700000000000000" + "3828"
    assert formats.decode(record, fmt).tolist() == first + second


def test_index_fp4_by_hand() -> None:
    fmt = formats.index_fp4(32)
    # 6.5 needs scale 2 (byte 128): 3.25 rounds to 3 (code 5), 1 is a half (code 1), -12 would need the next scale.
    assert hexes(formats.encode(padded(fmt, 6.5, 1.0), fmt)) == "15" + "00" * 15 + "80"


def test_index_fp8_variants_differ_in_their_scales_only() -> None:
    x = padded(formats.index_fp8(128), 448.0, -224.0)
    assert hexes(formats.encode(x, formats.index_fp8(128))) == "7ef6" + "00" * 126 + "0000803f"
    assert hexes(formats.encode(x, formats.index_fp8_ue8m0(128))) == "7ef6" + "00" * 126 + "7f000000"


def test_hopper_latent_by_hand() -> None:
    fmt = formats.latent_hopper(512, 64)
    x = padded(fmt, 448.0)
    x[448:450] = torch.tensor([1.0, 1.0 + 2**-8])  # bf16: 0x3f80, and a tie that goes to the even 0x3f80
    assert hexes(formats.encode(x, fmt)) == "7e" + "00" * 447 + "803f803f" + "00" * 124 + "7f" + "00" * 7


def test_blockwise_formats_store_all_values_then_all_scales() -> None:
    fmt = formats.index_fp4(32)
    records = formats.encode(torch.stack([padded(fmt, 6.0), padded(fmt, 0.0, 12.0)]), fmt)
    block = formats.pack_block(records, fmt)
    assert hexes(block) == "07" + "00" * 15 + "70" + "00" * 15 + "7f80"
    data, scales = formats.block_parts(block, fmt)
    data[1], scales[1] = data[0].clone(), scales[0].clone()  # views: the block changes
    assert formats.unpack_block(block, fmt).tolist() == records[:1].repeat(2, 1).tolist()


@any_format
def test_golden_records(fmt: RecordFormat) -> None:
    """Two rows of values that every machine makes alike, as one stored block."""
    steps = torch.arange(2 * fmt.dim, dtype=torch.int64) * 40503 % 65536 - 32768
    x = (steps.to(torch.float32) / 4096).view(2, fmt.dim)
    assert hexes(formats.pack_block(formats.encode(x, fmt), fmt)) == json.loads(GOLDEN.read_text())[fmt.tag]


@any_format
def test_decode_reads_the_layout(fmt: RecordFormat) -> None:
    records = formats.encode(rows(fmt, 4), fmt)
    for record, decoded in zip(records.tolist(), formats.decode(records, fmt, torch.float32).tolist(), strict=True):
        # fp32 scales round their product once more.
        assert decoded == pytest.approx(values_of(record, fmt), rel=2**-23 if fmt.scale == "fp32" else 0, abs=0)


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
def test_every_value_goes_to_the_nearest_code(element: str) -> None:
    """With the scale held at 1 by the largest value: all codes, their midpoints, and their closest neighbours."""
    fmt = formats.index_fp8_ue8m0(32) if element == "e4m3" else formats.index_fp4(32)
    grid = [e4m3(code) for code in range(0x7F)] if element == "e4m3" else [e2m1(code) for code in range(8)]
    midpoints = torch.tensor([(low + high) / 2 for low, high in itertools.pairwise(grid)])
    infinity = torch.tensor(torch.inf)
    around = torch.cat([midpoints.nextafter(-infinity), midpoints, midpoints.nextafter(infinity), torch.tensor(grid)])
    probes = torch.cat([around, -around])
    probes = probes[: len(probes) // 31 * 31].view(-1, 31)
    x = torch.cat([torch.full((len(probes), 1), grid[-1]), probes], dim=1)
    for row, decoded in zip(x.tolist(), formats.fake_quant(x, fmt).tolist(), strict=True):
        assert decoded == [math.copysign(nearest_even(abs(value), grid), value) for value in row]


@small_format
@given(seed=seeds, exponent=st.integers(-20, 8))
def test_errors_stay_within_half_a_step(fmt: RecordFormat, seed: int, exponent: int) -> None:
    x = rows(fmt, 3, seed) * 2.0**exponent
    error = (formats.fake_quant(x, fmt) - x).abs()
    groups = torch.unflatten(x[:, : fmt.plain], -1, (-1, fmt.group)).abs()
    largest = groups.amax(-1, keepdim=True)
    limit = 448.0 if fmt.element == "e4m3" else 6.0
    if fmt.scale == "e4m3":
        # The scale's own rounding: relative 1/16 where normal, half of 2^-9 below, and saturation above 448.
        scale = largest / limit * (1 + 1 / 16) + 2**-10
        floor = (largest - 6 * 448).clamp(min=0) + largest / 16 + 6 * 2**-10
    else:
        scale, floor = largest / limit * (2 if fmt.scale == "ue8m0" else 1) * (1 + 2**-20), torch.zeros(())
    half_step = scale * 2**-10 + groups / 16 if fmt.element == "e4m3" else scale / 4 + groups / 4
    assert (torch.unflatten(error[:, : fmt.plain], -1, (-1, fmt.group)) <= half_step + floor).all()
    assert (error[:, fmt.plain :] <= x[:, fmt.plain :].abs() / 256).all()


@ue8m0_format
@given(seed=seeds)
def test_a_power_of_two_scale_is_the_smallest_that_fits(fmt: RecordFormat, seed: int) -> None:
    x = rows(fmt, 3, seed)
    _, scales = formats.block_parts(formats.pack_block(formats.encode(x, fmt), fmt), fmt)
    largest = torch.unflatten(x[:, : fmt.plain], -1, (-1, fmt.group)).abs().amax(-1).double()
    capacity = (scales[:, : largest.shape[1]].double() - 127).exp2() * (448 if fmt.element == "e4m3" else 6)
    assert (largest <= capacity).all()
    assert ((largest > capacity / 2) | (largest == 0)).all()


@small_format
@given(seed=seeds, n=st.integers(1, 40), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_record_depends_on_its_row_only(fmt: RecordFormat, seed: int, n: int, dtype: torch.dtype) -> None:
    x = rows(fmt, n, seed).to(dtype)
    together = formats.encode(x, fmt)
    assert torch.equal(together, torch.cat([formats.encode(x[i : i + 1], fmt) for i in range(n)]))
    assert torch.equal(together.flip(0), formats.encode(x.flip(0), fmt))
    decoded = formats.decode(together, fmt, torch.float32)
    assert torch.equal(decoded[n // 2], formats.decode(together[n // 2], fmt, torch.float32))
    assert torch.equal(together, formats.unpack_block(formats.pack_block(together, fmt), fmt))


@small_format
@given(seed=seeds, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_fake_quant_is_the_round_trip(fmt: RecordFormat, seed: int, dtype: torch.dtype) -> None:
    x = rows(fmt, 4, seed).to(dtype).requires_grad_()
    rounded = formats.fake_quant(x, fmt)
    assert torch.equal(rounded, formats.decode(formats.encode(x.detach(), fmt), fmt, dtype))
    torch.autograd.backward(rounded, torch.full_like(x, 3.0))
    assert x.grad is not None
    assert (x.grad == 3.0).all()


@any_format
def test_bf16_holds_what_a_record_says(fmt: RecordFormat) -> None:
    records = formats.encode(rows(fmt, 8), fmt)
    exact = formats.decode(records, fmt, torch.float32)
    assert torch.equal(formats.decode(records, fmt, torch.bfloat16), exact.to(torch.bfloat16))
    if fmt.scale != "fp32":
        assert torch.equal(exact.to(torch.bfloat16).to(torch.float32), exact)


@any_format
def test_zeros_and_no_rows(fmt: RecordFormat) -> None:
    assert not formats.encode(torch.zeros(2, 3, fmt.dim), fmt).any()
    assert not formats.decode(torch.zeros(2, fmt.nbytes, dtype=torch.uint8), fmt).any()
    empty = formats.encode(torch.zeros(0, fmt.dim), fmt)
    assert empty.shape == (0, fmt.nbytes)
    assert formats.decode(empty, fmt).shape == formats.fake_quant(torch.zeros(0, fmt.dim), fmt).shape == (0, fmt.dim)


@any_format
def test_extremes_saturate(fmt: RecordFormat) -> None:
    largest = 2.0**126
    x = padded(fmt, largest, -largest, 1e-38)
    decoded = formats.decode(formats.encode(x, fmt), fmt, torch.float32)
    assert torch.isfinite(decoded).all()
    assert decoded[0] == -decoded[1] > 0
    if fmt.scale != "e4m3":
        assert decoded[0] == pytest.approx(largest, rel=1 / 16)


@any_format
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_decodes_to_a_number(fmt: RecordFormat, value: float) -> None:
    x = torch.ones(2, fmt.dim)
    x[0, 1] = value
    decoded = formats.decode(formats.encode(x, fmt), fmt)
    assert not torch.isfinite(decoded[0, : fmt.group]).any()
    assert torch.isfinite(decoded[1]).all()


@ue8m0_format
def test_smallest_scale_is_read_as_defined(fmt: RecordFormat) -> None:
    record = torch.zeros(fmt.nbytes, dtype=torch.uint8)
    record[0] = 0x7E if fmt.element == "e4m3" else 7  # byte 0 of a scale is 2^-127, not 0
    assert formats.decode(record, fmt, torch.float32)[0] == (448 if fmt.element == "e4m3" else 6) * 2.0**-127


def test_misuse_is_refused_in_one_line() -> None:
    fmt = formats.latent_fp8(64)
    with pytest.raises(ValueError, match=r"latent-fp8-64: rows have 32 values, not 64"):
        formats.encode(torch.zeros(1, 32), fmt)
    with pytest.raises(ValueError, match=r"rows have 64 bytes, not 66"):
        formats.decode(torch.zeros(1, 64, dtype=torch.uint8), fmt)
    with pytest.raises(ValueError, match=r"a block of 67 bytes is not whole records of 66"):
        formats.unpack_block(torch.zeros(67, dtype=torch.uint8), fmt)
    with pytest.raises(ValueError, match=r"40 values are not whole groups of 32"):
        formats.latent_fp8(40)
