"""Byte counts and offsets of the shipped geometries, as the published systems have them."""

from __future__ import annotations

import dataclasses

import pytest

from duokv.kvstore.errors import UsageError
from duokv.kvstore.geometry import (
    PAGE_BYTES,
    TRAILER_BYTES,
    CacheGeometry,
    LayerTable,
    index_fp4,
    index_fp8,
    index_fp8_ue8m0,
    latent_fp4,
    latent_fp8,
    latent_hopper,
)

PRESETS = ["deepseek-v4.1-flash", "deepseek-v4.1-flash-hopper", "deepseek-v4-flash", "deepseek-v4-pro", "tiny"]


def table(**changes: object) -> LayerTable:
    layers = CacheGeometry.preset("tiny").layers
    assert layers is not None
    return dataclasses.replace(layers, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "nbytes"),
    [
        (latent_fp8(512), 528),
        (latent_fp4(512), 288),
        (index_fp4(128), 68),
        (index_fp8(128), 132),
        (index_fp8_ue8m0(128), 132),
        (latent_hopper(512, 64), 584),
        (latent_fp8(64), 66),
        (latent_fp4(64), 36),
    ],
)
def test_record_sizes_follow_from_their_layouts(record: object, nbytes: int) -> None:
    assert record.nbytes == nbytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "payload", "swa", "pages"),
    [
        ("deepseek-v4.1-flash", 114_048, 1_415_040, 28),
        ("deepseek-v4.1-flash-hopper", 229_120, 134 * 584 * 20, 57),
        ("deepseek-v4-flash", 449_824, 134 * 584 * 43 + 21 * 20_480, 110),
        ("deepseek-v4-pro", 644_024, 134 * 584 * 61 + 30 * 20_480, 158),
        ("tiny", 13_824, 134 * 66 * 3, 4),
    ],
)
def test_preset_sizes(name: str, payload: int, swa: int, pages: int) -> None:
    geometry = CacheGeometry.preset(name)
    assert (geometry.payload_bytes, geometry.swa_bytes) == (payload, swa)
    assert geometry.slot_bytes == pages * PAGE_BYTES
    assert geometry.block_tokens == 128


def test_v41_planes_lie_where_deepinfer_puts_them() -> None:
    planes = CacheGeometry.preset("deepseek-v4.1-flash").planes
    assert [(p.layer, p.offset, p.latent_bytes, p.index_bytes) for p in planes] == [
        (2, 0, 64 * 288, 64 * 68),
        (8, 22_784, 64 * 288, 64 * 68),
        (14, 45_568, 64 * 288, 64 * 68),
        (20, 68_352, 128 * 288, 128 * 68),
    ]


def test_v4_ratio_128_layers_have_no_indexer() -> None:
    planes = CacheGeometry.preset("deepseek-v4-flash").planes
    assert {p.ratio: p.index_bytes for p in planes} == {4: 32 * 68, 128: 0}


@pytest.mark.parametrize("name", PRESETS)
def test_planes_are_contiguous_and_the_rest_is_padding(name: str) -> None:
    geometry = CacheGeometry.preset(name)
    assert geometry.layers is not None
    end = 0
    for plane in geometry.planes:
        assert plane.offset == end
        end += plane.nbytes
    assert 0 <= geometry.payload_bytes - end < geometry.layers.padding


@pytest.mark.parametrize("name", PRESETS)
def test_trailer_is_the_end_of_the_slot_and_clear_of_the_payload(name: str) -> None:
    geometry = CacheGeometry.preset(name)
    assert geometry.trailer_offset + TRAILER_BYTES == geometry.slot_bytes
    assert geometry.payload_bytes <= geometry.trailer_offset
    assert geometry.slot_bytes - geometry.payload_bytes - TRAILER_BYTES < PAGE_BYTES


def test_layers_read_the_last_owner_before_them() -> None:
    layers = CacheGeometry.preset("deepseek-v4.1-flash").layers
    assert layers is not None
    sources = [layers.source_of(layer) for layer in range(40)]
    assert sources == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'deepseek-v4\.1-flsh'.*did you mean 'deepseek-v4\.1-flash'"):
        CacheGeometry.preset("deepseek-v4.1-flsh")


# Pinned: a change here orphans every store of the geometry.
@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("deepseek-v4.1-flash", "538f75556734599a0c55a15803a09615"),
        ("deepseek-v4.1-flash-hopper", "42180bc6e372dfa1b4d97634d7e31b79"),
        ("deepseek-v4-flash", "aaa56c36aaa1f3380cf73ad853d5b0fc"),
        ("deepseek-v4-pro", "6c8579b7ecbb67101c906baa9d8b6c49"),
        ("tiny", "6e0f514a0a377d4e9052b3130840622e"),
    ],
)
def test_preset_digests_are_stable(name: str, digest: str) -> None:
    assert CacheGeometry.preset(name).digest.hex() == digest


def test_opaque_digest_is_stable() -> None:
    assert CacheGeometry.opaque("llama", payload_bytes=4096).digest.hex() == "8c1ae73d87b112dd44d43aa15a23525a"


def test_digest_tells_apart_all_that_fixes_the_bytes() -> None:
    variants = [
        table(),
        table(latent=latent_fp8(64)),
        table(index=index_fp8(64)),
        table(window=latent_fp4(64)),
        table(window_layers=2),
        table(padding=1),
        table(padding=256),
        table(indexed=(1,)),
        table(owners=(1, 2, 3), indexed=(1, 2, 3)),
        table(carry_bytes=8),
    ]
    digests = {CacheGeometry.from_layers("x", layers).digest for layers in variants}
    digests |= {CacheGeometry.preset(name).digest for name in PRESETS}
    digests |= {
        CacheGeometry.opaque(name, payload_bytes=payload, swa_bytes=swa).digest
        for name, payload, swa in [("a", 4096, 0), ("b", 4096, 0), ("a", 8192, 0), ("a", 4096, 64)]
    }
    assert len(digests) == len(variants) + len(PRESETS) - 1 + 4  # the unchanged table is the preset `tiny`


def test_equal_sized_index_formats_differ_in_digest() -> None:
    one, other = index_fp8(128), index_fp8_ue8m0(128)
    assert one.nbytes == other.nbytes
    digests = {CacheGeometry.from_layers("x", table(index=index)).digest for index in (one, other)}
    assert len(digests) == 2


def test_a_layered_geometry_is_known_by_its_table_not_its_name() -> None:
    assert CacheGeometry.from_layers("mine", table()).digest == CacheGeometry.preset("tiny").digest


def test_opaque_geometry_has_sizes_only() -> None:
    geometry = CacheGeometry.opaque("llama", payload_bytes=3456, swa_bytes=0)
    assert (geometry.slot_bytes, geometry.trailer_offset, geometry.planes) == (4096, 3456, ())
    assert CacheGeometry.opaque("llama", payload_bytes=3457).slot_bytes == 8192


@pytest.mark.parametrize(("name", "payload", "swa"), [("", 1, 0), ("x", 0, 0), ("x", 1, -1)])
def test_opaque_geometry_without_bytes_is_refused(name: str, payload: int, swa: int) -> None:
    with pytest.raises(UsageError):
        CacheGeometry.opaque(name, payload_bytes=payload, swa_bytes=swa)


@pytest.mark.parametrize(
    "changes",
    [
        {"owners": (3, 1)},
        {"owners": (1, 1, 3)},
        {"indexed": (2,)},
        {"owners": (0, 1, 3)},
        {"owners": (2, 3), "indexed": ()},
        {"owners": (1,), "indexed": ()},
        {"ratios": (0, 3, 3, 1, 1, 1)},
    ],
)
def test_inconsistent_layer_table_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="layer table"):
        table(**changes)


def test_description_is_one_line_with_the_sizes() -> None:
    line = CacheGeometry.preset("deepseek-v4.1-flash").describe()
    assert "\n" not in line
    for part in ("deepseek-v4.1-flash", "114,048 B", "114,688 B = 28 pages", "1,415,040 B"):
        assert part in line
