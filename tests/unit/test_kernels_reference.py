"""The reference against an fp64 oracle and its contract's edges."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from duokv.kernels import reference

seeds = st.integers(0, 2**32 - 1)


def oracle(q: Tensor, latents: Tensor, sink: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One row's attention to its valid latents [n, D] in fp64, written as the sums it is: out [h, D], lse [h]."""
    scores = q.double() @ latents.double().T * scale
    lse = torch.logsumexp(scores, -1)
    out = (scores - lse[:, None]).exp() @ latents.double()
    return out * (lse.exp() / (lse.exp() + sink.double().exp()))[:, None], lse


def attention_inputs(seed: int, *, b: int = 2, s_q: int = 5, h: int = 3, dim: int = 32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "q": torch.randn(b, s_q, h, dim, generator=generator),
        "window": torch.randn(40, dim, generator=generator),
        "window_index": torch.randint(-1, 40, (b, s_q, 16), generator=generator),
        "entries": torch.randn(70, dim, generator=generator),
        "entry_index": torch.randint(-1, 70, (b, s_q, 8), generator=generator, dtype=torch.int32),
        "sink": torch.randn(h, generator=generator),
    }


def attend(inputs: dict[str, Tensor]) -> reference.Attention:
    return reference.attend(
        inputs["q"],
        inputs["window"],
        inputs["window_index"],
        inputs["sink"],
        scale=0.2,
        entries=inputs.get("entries"),
        entry_index=inputs.get("entry_index"),
    )


@given(seed=seeds)
def test_attention_is_one_softmax_over_both_sources(seed: int) -> None:
    inputs = attention_inputs(seed)
    out, lse = attend(inputs)
    assert out.shape == (2, 5, 3, 32)
    assert lse.shape == (2, 3, 5)
    for b in range(2):
        for row in range(5):
            window, entries = inputs["window_index"][b, row], inputs["entry_index"][b, row]
            latents = torch.cat([inputs["window"][window[window >= 0]], inputs["entries"][entries[entries >= 0]]])
            want_out, want_lse = oracle(inputs["q"][b, row], latents, inputs["sink"], 0.2)
            assert torch.allclose(out[b, row].double(), want_out, atol=1e-5)
            assert torch.allclose(lse[b, :, row].double(), want_lse, atol=1e-5)


def test_a_row_without_slots_gives_zero_and_infinity() -> None:
    inputs = attention_inputs(1)
    inputs["window_index"][0, 2] = -1
    inputs["entry_index"][0, 2] = -1
    out, lse = attend(inputs)
    assert not out[0, 2].any()
    assert (lse[0, :, 2] == math.inf).all()
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse[1]).all()


def test_the_sink_scales_out_and_leaves_lse_alone() -> None:
    inputs = attention_inputs(2)
    with_sink = attend(inputs)
    without = attend(inputs | {"sink": torch.full((3,), -math.inf)})
    assert torch.equal(with_sink.lse, without.lse)
    share = torch.sigmoid(without.lse - inputs["sink"].view(1, -1, 1)).transpose(1, 2).unsqueeze(-1)
    assert torch.allclose(with_sink.out, without.out * share, atol=1e-6)
    assert not attend(inputs | {"sink": torch.full((3,), 1e30)}).out.any()


def test_scores_beyond_the_range_of_exp() -> None:
    inputs = attention_inputs(3)
    inputs["q"] *= 1e4
    out, lse = attend(inputs)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


def test_rows_that_no_index_names_may_hold_anything() -> None:
    inputs = attention_inputs(4)
    for index in ("window_index", "entry_index"):
        inputs[index][inputs[index] == 0] = -1  # row 0, too: -1 must not lead there
    clean = attend(inputs)
    for source, index in (("window", "window_index"), ("entries", "entry_index")):
        named = torch.unique(inputs[index][inputs[index] >= 0].long())
        garbage = torch.full_like(inputs[source], math.nan)
        garbage[named] = inputs[source][named]
        inputs[source] = garbage
    dirty = attend(inputs)
    assert torch.equal(clean.out, dirty.out)
    assert torch.equal(clean.lse, dirty.lse)


def test_window_alone_and_no_entries_yet() -> None:
    inputs = attention_inputs(5)
    alone = {name: value for name, value in inputs.items() if name not in ("entries", "entry_index")}
    none_valid = inputs | {"entries": torch.zeros(0, 32), "entry_index": torch.full((2, 5, 8), -1)}
    assert torch.allclose(attend(alone).out, attend(none_valid).out, atol=1e-6)
    with pytest.raises(ValueError, match="belong together"):
        attend(alone | {"entries": inputs["entries"]})


def test_out_has_the_dtype_of_q_and_is_rounded_once() -> None:
    inputs = attention_inputs(6)
    rounded = inputs | {"q": inputs["q"].bfloat16()}
    exact = attend(rounded | {"q": rounded["q"].float()})
    assert torch.equal(attend(rounded).out, exact.out.bfloat16())
    assert torch.equal(attend(rounded).lse, exact.lse)


def test_window_positions_end_at_the_row_and_start_at_the_floor() -> None:
    seen = reference.window_positions(torch.tensor([0, 3, 10]), floor=2, window=4)
    assert seen.tolist() == [[-1, -1, -1, -1], [-1, -1, 2, 3], [7, 8, 9, 10]]
    assert reference.window_positions(torch.tensor([200])).tolist() == [list(range(73, 201))]


def by_hand(scores: list[float], visible: int, k: int) -> list[int]:
    best = sorted(range(min(visible, len(scores))), key=lambda i: (-scores[i], i))[:k]
    return sorted(best) + [-1] * (k - len(best))


@given(
    scores=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-40, math.inf, -math.inf]), max_size=40),
    visible=st.integers(0, 45),
    k=st.integers(1, 12),
)
@example(scores=[-0.0, 0.0, -0.0, 0.0], visible=4, k=1)
@example(scores=[-1.0, -2.5, -1.0, -math.inf], visible=4, k=2)
def test_top_k_with_ties(scores: list[float], visible: int, k: int) -> None:
    """Few distinct scores, so most choices are between equals: the lowest index wins."""
    chosen = reference.top_k(torch.tensor([scores, scores]), torch.tensor([visible, 0]), k=k)
    assert chosen.tolist() == [by_hand(scores, visible, k), [-1] * k]
    assert chosen.dtype == torch.int32


@given(seed=seeds, n=st.integers(1, 1100), k=st.sampled_from([4, 64]))
def test_select_entries_is_top_k_of_index_scores(seed: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, keys = torch.randn(40, 2, 16, generator=generator), torch.randn(n, 16, generator=generator)
    weights, visible = torch.rand(40, 2, generator=generator), torch.randint(0, n + 1, (40,), generator=generator)
    scores = reference.index_scores(q, keys, weights)
    want = (torch.einsum("shd,nd->shn", q.double(), keys.double()).relu() * weights.double()[..., None]).sum(1)
    assert torch.allclose(scores.double(), want, atol=1e-4)
    assert torch.equal(reference.select_entries(q, keys, weights, visible, k=k), reference.top_k(scores, visible, k=k))


def test_index_scores_without_keys() -> None:
    assert reference.index_scores(torch.zeros(3, 2, 16), torch.zeros(0, 16), torch.zeros(3, 2)).shape == (3, 0)


def test_compress_weighs_a_pair_by_its_gates() -> None:
    values = torch.tensor([[[1.0, 10.0], [3.0, 30.0]]])
    gates = torch.tensor([[[0.0, 5.0], [math.log(3.0), 5.0]]])
    bias = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    # Weights 1:3 in the first dimension by the gates, 3:1 in the second by the bias.
    assert reference.compress(values, gates, bias).tolist() == [pytest.approx([2.5, 15.0])]
    one_sided = reference.compress(values, torch.tensor([[[-1e9, 1e9], [1e9, -1e9]]]), bias)
    assert one_sided.tolist() == [[3.0, 10.0]]


def test_compress_at_ratio_one_is_the_row() -> None:
    values = torch.randn(5, 1, 8)
    assert torch.equal(reference.compress(values, torch.randn(5, 1, 8), torch.randn(1, 8)), values[:, 0])


def test_rope_turns_interleaved_pairs_by_position() -> None:
    table = reference.rope_table(50, 4, theta=100.0)
    assert table.shape == (50, 2, 2)
    x = torch.tensor([[9.0, 9.0, 1.0, 0.0, 0.0, 1.0]])
    # Pair 0 turns by 1 a position, pair 1 by 100 ** -0.5 = 0.1; the dimensions in front stay.
    want = [9.0, 9.0, math.cos(7), math.sin(7), -math.sin(0.7), math.cos(0.7)]
    assert reference.apply_rope(x, table[[7]])[0].tolist() == pytest.approx(want, abs=1e-6)


@given(seed=seeds)
def test_rope_inverse_and_relativity(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 3, 24, generator=generator)
    table = reference.rope_table(400, 16)
    at = [table[[position]] for position in (11, 31, 311, 331)]
    assert torch.allclose(reference.apply_rope(reference.apply_rope(q, at[0]), at[0], inverse=True), q, atol=1e-5)
    near = reference.apply_rope(q, at[1]) * reference.apply_rope(k, at[0])
    far = reference.apply_rope(q, at[3]) * reference.apply_rope(k, at[2])
    assert torch.allclose(near.sum(-1), far.sum(-1), atol=1e-3)


def test_rope_keeps_the_dtype_and_does_not_touch_plain_dimensions() -> None:
    x = torch.randn(4, 2, 24, dtype=torch.bfloat16)
    turned = reference.apply_rope(x, reference.rope_table(4, 16).unsqueeze(1))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned[..., :8], x[..., :8])
    assert torch.equal(turned[0], x[0])
    assert not torch.equal(turned[1, :, 8:], x[1, :, 8:])


def test_no_rows() -> None:
    inputs = attention_inputs(7)
    out, lse = attend(inputs | {name: inputs[name][:, :0] for name in ("q", "window_index", "entry_index")})
    assert (out.shape, lse.shape) == ((2, 0, 3, 32), (2, 3, 0))
    chosen = reference.select_entries(torch.zeros(0, 2, 16), torch.zeros(9, 16), torch.zeros(0, 2), torch.zeros(0), k=4)
    assert chosen.shape == (0, 4)
