"""The Triton kernels are bit-equal to the torch ones. Not collected by name: `test_kernels_triton.py` runs this file.

Triton decides when it is imported whether it interprets, so this needs TRITON_INTERPRET=1 from the process's start.
"""

from __future__ import annotations

import pytest
import torch

from duokv.kernels import copy, formats
from duokv.kernels import triton_kernels as interpreted
from duokv.kernels.formats import RecordFormat

FORMATS = (
    formats.latent_fp8(64),
    formats.latent_fp4(64),
    formats.index_fp4(64),
    formats.index_fp8_ue8m0(128),
    formats.latent_fp8(512),
    formats.latent_fp4(512),
)
any_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.tag)


def values(fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    """Groups of very different sizes, ties between codes, zeros, and a row that is not finite."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, fmt.dim, generator=generator) * torch.randn(8, fmt.dim, generator=generator).mul(6).exp2()
    x[1] = 0
    x[2] = (torch.arange(fmt.dim) % 97 - 48) / 8  # at scale 1: halves, quarters and eighths
    x[2, :: fmt.group] = 448.0 if fmt.element == "e4m3" else 6.0
    return x.to(dtype)


@any_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_codecs_are_bit_equal(fmt: RecordFormat, dtype: torch.dtype) -> None:
    x = values(fmt, dtype)
    records = formats.encode(x, fmt)
    assert torch.equal(interpreted.encode(x.view(2, 4, -1), fmt), records.view(2, 4, -1))
    assert torch.equal(interpreted.decode(records, fmt, dtype), formats.decode(records, fmt, dtype))


def test_every_byte_decodes_alike() -> None:
    for fmt in (formats.index_fp8_ue8m0(32), formats.index_fp4(32), formats.latent_fp4(32)):
        rows = torch.arange(256, dtype=torch.uint8).repeat_interleave(fmt.nbytes)[: 8 * fmt.nbytes].view(8, -1).clone()
        rows[:, : fmt.data_bytes] = torch.arange(8 * fmt.data_bytes).view(8, -1).to(torch.uint8)
        rows[:, fmt.data_bytes :] = torch.tensor([0, 1, 7, 8, 100, 127, 128, 200], dtype=torch.uint8).unsqueeze(1)
        want, got = formats.decode(rows, fmt, torch.float32), interpreted.decode(rows, fmt, torch.float32)
        assert torch.equal(want.nan_to_num(nan=12345.0), got.nan_to_num(nan=12345.0)), fmt.tag


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, of inf / inf
@any_format
def test_what_is_not_finite_is_poison_here_too(fmt: RecordFormat) -> None:
    x = torch.ones(2, fmt.dim)
    x[0, 1], x[1, 1] = torch.nan, torch.inf
    decoded = formats.decode(interpreted.encode(x, fmt), fmt)
    assert not torch.isfinite(decoded[:, : fmt.group]).any()
    assert torch.isfinite(decoded[:, fmt.group :]).all()


def test_movers_are_equal() -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (9, 3072), generator=generator, dtype=torch.uint8)
    rows = torch.randint(0, 256, (3, 3010), generator=generator, dtype=torch.uint8)[:, :3000]
    index = torch.tensor([3, -1, 8])
    slots = pool[:, 40:3040]  # slices of larger blocks
    assert torch.equal(interpreted.gather_rows(slots, index), copy.gather_rows(slots, index))
    room = torch.full((3, 3010), 7, dtype=torch.uint8)
    assert interpreted.gather_rows(slots, index, room[:, 5:3005]).data_ptr() == room[:, 5:].data_ptr()
    assert torch.equal(room[:, 5:3005], copy.gather_rows(slots, index))
    assert (room[:, 3005:] == 7).all()
    other = pool.clone()
    interpreted.scatter_rows(slots, index, rows)
    copy.scatter_rows(other[:, 40:3040], index, rows)
    assert torch.equal(pool, other)


def test_nothing_to_do_is_no_launch() -> None:
    fmt = FORMATS[0]
    assert interpreted.encode(torch.zeros(0, 64), fmt).shape == (0, fmt.nbytes)
    assert interpreted.gather_rows(torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)).numel() == 0


def test_other_formats_are_refused() -> None:
    for fmt in (formats.latent_hopper(512, 64), formats.index_fp8(128), formats.latent_fp8(96)):
        with pytest.raises(ValueError, match="there is no Triton kernel for it"):
            interpreted.encode(torch.zeros(1, fmt.dim), fmt)
