"""A row's bits are its own: the same in any batch, chunk, place, padding, and with one thread or two.

Matrix libraries promise none of this for a call of fixed shape, so what `rows` builds on is measured here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duokv.kernels import reference
from duokv.kernels.rows import ROW_TILE, linear, row_tiled, row_tiled_linear

ROWS = 75
cuts = st.lists(st.integers(0, ROWS), max_size=6).map(lambda at: sorted({0, *at, ROWS}))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"], scope="module")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def on_one_thread(fn: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return fn()
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chunked(fn: Callable[[slice], Tensor], at: list[int]) -> Tensor:
    return torch.cat([fn(slice(start, stop)) for start, stop in itertools.pairwise(at)])


@dtypes
@pytest.mark.parametrize("width", [64, 256, 683, 1024, 1365])
@pytest.mark.parametrize("out", [1, 72, 256])
def test_linear_rows_do_not_depend_on_company(threads: int, dtype: torch.dtype, width: int, out: int) -> None:
    x, weight, bias = normal(ROWS, width, dtype=dtype), normal(out, width, dtype=dtype), normal(out, dtype=dtype)
    whole = row_tiled_linear(x, weight, bias)
    assert torch.equal(whole, on_one_thread(lambda: row_tiled_linear(x, weight, bias)))
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert torch.equal(row_tiled_linear(x[order], weight, bias), whole[order])
    for at in ([0, 1, 2, 34, ROWS], [0, 31, 63, ROWS], [0, 5, 69, ROWS]):
        assert torch.equal(chunked(lambda rows: row_tiled_linear(x[rows], weight, bias), at), whole), at
    assert torch.allclose(whole.double(), x.double() @ weight.double().T + bias.double(), rtol=0.02, atol=0.2)


def test_row_tiled_calls_with_one_shape_and_pads_with_zeros() -> None:
    seen: list[tuple[int, ...]] = []

    def double(x: Tensor, index: Tensor) -> Tensor:
        seen.append((*x.shape, *index.shape))
        assert not x[(index == 0)].any()
        return 2 * x

    for n in (0, 1, 32, 33, 70):
        x = normal(n, 6)
        assert torch.equal(row_tiled(double, x, torch.arange(1, n + 1)), 2 * x)
    assert set(seen) == {(ROW_TILE, 6, ROW_TILE)}
    assert len(seen) == 1 + 1 + 1 + 2 + 3
    with pytest.raises(ValueError, match=r"tensors of \[2, 3\] rows cannot be tiled together"):
        row_tiled(double, torch.zeros(2, 6), torch.zeros(3))


def test_row_tiled_takes_views_at_any_offset() -> None:
    x, weight = normal(ROWS, 97), normal(64, 96)
    shifted = x[3:, 1:]
    assert torch.equal(row_tiled_linear(shifted, weight), row_tiled_linear(shifted.clone(), weight))


@dtypes
@settings(max_examples=6)
@given(at=cuts)
def test_a_whole_layer_in_chunks(threads: int, dtype: torch.dtype, at: list[int]) -> None:
    """Norm, matrices and activation in one tiled function, as an engine would compute a layer's row-wise part."""
    up, down = normal(384, 256, seed=1, dtype=dtype), normal(256, 384, seed=2, dtype=dtype)

    def layer(x: Tensor) -> Tensor:
        normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
        return x + linear(torch.nn.functional.silu(linear(normed, up)), down)

    x = normal(ROWS, 256, dtype=dtype)
    whole = on_one_thread(lambda: row_tiled(layer, x))
    assert torch.equal(chunked(lambda rows: row_tiled(layer, x[rows]), at), whole)


@dtypes
@pytest.mark.parametrize(("heads", "dim", "slots", "k"), [(8, 64, 128, 64), (3, 32, 128, 33), (1, 64, 128, 0)])
@settings(max_examples=6)
@given(at=cuts)
def test_attention_in_chunks(
    threads: int, dtype: torch.dtype, heads: int, dim: int, slots: int, k: int, at: list[int]
) -> None:
    q, window, entries = normal(ROWS, heads, dim, dtype=dtype), normal(300, dim, seed=1), normal(90, dim, seed=2)
    generator = torch.Generator().manual_seed(3)
    window_index = torch.randint(-1, 300, (ROWS, slots), generator=generator)
    entry_index = torch.randint(-1, 90, (ROWS, k), generator=generator)
    sink = normal(heads, seed=4)

    def attend(rows: slice, *, batched: bool = False) -> Tensor:
        # The same rows as one sequence, or as a batch of sequences of one row.
        shape = (-1, 1) if batched else (1, -1)
        n = len(q[rows])
        out, lse = reference.attend(
            q[rows].reshape(*shape, heads, dim),
            window,
            window_index[rows].reshape(*shape, slots),
            sink,
            scale=dim**-0.5,
            entries=entries if k else None,
            entry_index=entry_index[rows].reshape(*shape, k) if k else None,
        )
        lse_by_row = lse.transpose(1, 2).reshape(n, heads, 1)
        return torch.cat([out.reshape(n, heads, dim).float(), lse_by_row], dim=-1)

    whole = on_one_thread(lambda: attend(slice(0, ROWS)))
    assert torch.equal(chunked(attend, at), whole)
    assert torch.equal(attend(slice(0, ROWS), batched=True), whole)


@dtypes
@settings(max_examples=6)
@given(at=cuts, later=st.integers(0, 700))
def test_selection_in_chunks_and_among_later_keys(threads: int, dtype: torch.dtype, at: list[int], later: int) -> None:
    q, keys, weights = normal(ROWS, 4, 64, dtype=dtype), normal(1300, 64, seed=1, dtype=dtype), normal(ROWS, 4, seed=2)
    visible = torch.arange(ROWS) * 8 + 3
    scores = on_one_thread(lambda: reference.index_scores(q, keys[:600], weights))
    chosen = on_one_thread(lambda: reference.select_entries(q, keys[:600], weights, visible, k=64))
    more = keys[: 600 + later]
    assert torch.equal(chunked(lambda r: reference.index_scores(q[r], more, weights[r])[:, :600], at), scores)
    again = chunked(lambda r: reference.select_entries(q[r], more, weights[r], visible[r], k=64), at)
    assert torch.equal(again, chosen)


@dtypes
@settings(max_examples=6)
@given(at=cuts)
def test_compression_and_rotation_in_chunks(threads: int, dtype: torch.dtype, at: list[int]) -> None:
    values, gates = normal(ROWS, 2, 48, dtype=dtype), normal(ROWS, 2, 48, seed=1, dtype=dtype)
    bias, table = normal(2, 48, seed=2), on_one_thread(lambda: reference.rope_table(ROWS, 16))
    whole = on_one_thread(lambda: reference.apply_rope(reference.compress(values, gates, bias), table))
    assert torch.equal(reference.rope_table(1000, 16)[:ROWS], table)
    assert torch.equal(
        chunked(lambda r: reference.apply_rope(reference.compress(values[r], gates[r], bias), table[r]), at), whole
    )
