"""The model: shapes, row-wise pieces, the plain forward pass and the batched one, weights on disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from duokv.engine.config import LOOK_BACK, ModelConfig, byte_budget, parameter_shapes  # noqa: E402
from duokv.engine.forward import forward  # noqa: E402
from duokv.engine.model import Model, ngram_hashes  # noqa: E402
from duokv.engine.training import Pass, batch_forward  # noqa: E402
from duokv.engine.weights import load_model, save_weights, weights_revision  # noqa: E402
from duokv.kernels.reference import rope_table  # noqa: E402
from duokv.kvstore.errors import UsageError  # noqa: E402
from duokv.kvstore.geometry import CacheGeometry  # noqa: E402

TINY = ModelConfig.preset("tiny")
SMALL = replace(
    TINY, hidden=32, heads=2, q_rank=32, index_heads=2, top_k=16, engram_rows=64, engram_dim=8, ffn_hidden=32,
    shared_hidden=32, expert_hidden=16,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Shapes are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_model(config: ModelConfig = SMALL, positions: int = 2048) -> Model:
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: torch.ones(shape)
        if name.endswith("norm")
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in parameter_shapes(config).items()
    }
    return Model(config, weights, rope_table(positions, config.rope_dim))


def random_tokens(count: int) -> Tensor:
    tokens: Tensor = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(2))
    return tokens


def test_flash_stores_what_the_published_geometry_says() -> None:
    budget = byte_budget(ModelConfig.preset("v4.1-flash"))
    assert (budget.block_bytes, budget.swa_bytes) == (114_048, 1_415_040)


@pytest.mark.parametrize("name", ["tiny", "v4.1-flash"])
def test_budget_equals_the_geometry_of_the_store(name: str) -> None:
    config = ModelConfig.preset(name)
    budget = byte_budget(config)
    geometry = CacheGeometry.preset(config.geometry)
    assert (budget.block_bytes, budget.swa_bytes) == (geometry.payload_bytes, geometry.swa_bytes)


def test_flash_fits_the_meta_device() -> None:
    shapes = parameter_shapes(ModelConfig.preset("v4.1-flash"))
    weights = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in shapes.values()]
    held = sum(weight.numel() * weight.element_size() for weight in weights)
    assert held == byte_budget(ModelConfig.preset("v4.1-flash")).parameter_bytes


def test_flash_layers_read_the_published_planes_and_selections() -> None:
    config = ModelConfig.preset("v4.1-flash")
    planes = [config.plane_of(layer) for layer in range(40)]
    assert planes == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    sources = [config.index_source_of(layer) for layer in range(40)]
    assert sources == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4


def test_dimensions_that_the_geometry_cannot_store_are_refused() -> None:
    with pytest.raises(UsageError, match="choose a geometry"):
        replace(TINY, head_dim=128)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'tiny'"):
        ModelConfig.preset("tinny")


def test_logits_do_not_depend_on_what_follows_and_are_equal_bit_for_bit() -> None:
    model, tokens = random_model(), random_tokens(333)
    whole = forward(model, tokens)
    for cut in (1, 130, 201):
        part = forward(model, tokens[:cut])
        assert torch.equal(part.logits, whole.logits[:cut])
        for owner, plane in part.planes.items():
            assert torch.equal(plane.latent, whole.planes[owner].latent[: plane.latent.shape[0]])
            assert torch.equal(plane.index_k, whole.planes[owner].index_k[: plane.index_k.shape[0]])


def test_planes_reach_beyond_all_windows() -> None:
    model, tokens = random_model(), random_tokens(960)
    before = forward(model, tokens)
    tokens[10] ^= 1
    after = forward(model, tokens)
    beyond = 10 + SMALL.layers * SMALL.window + LOOK_BACK
    assert torch.equal(before.logits[:10], after.logits[:10])
    assert not torch.equal(before.logits[beyond:], after.logits[beyond:])


def test_decoder_truncation_changes_nothing_that_is_stored() -> None:
    model, tokens = random_model(), random_tokens(300)
    whole, cut = forward(model, tokens), forward(model, tokens, decoder_start=160)
    assert cut.logits.shape[0] == 140
    for layer in range(SMALL.encoder_layers):
        assert torch.equal(whole.windows[layer], cut.windows[layer])
    for owner, plane in whole.planes.items():
        assert torch.equal(plane.latent, cut.planes[owner].latent)
    assert not torch.equal(whole.logits[160:], cut.logits)


@pytest.mark.parametrize("select", [True, False])
@pytest.mark.parametrize("quantise", [True, False])
def test_batched_pass_computes_what_the_plain_one_does(quantise: bool, select: bool) -> None:
    # So many entries that every visible one is chosen: a near tie must not decide the comparison.
    model, tokens = random_model(replace(SMALL, top_k=256)), random_tokens(256)
    plain = forward(model, tokens).logits
    texts = torch.stack([random_tokens(256).flip(0), tokens])
    hidden = batch_forward(model, texts, Pass(quantise=quantise, select=select)).hidden
    difference = (model.logits(hidden[256:]) - plain).abs()
    assert difference.mean() < (0.002 if quantise else 0.5)
    assert quantise or difference.mean() > 0.002


def test_batched_pass_without_planes_sees_windows_only() -> None:
    model, tokens = random_model(), random_tokens(1024)
    other = tokens.clone()
    other[10] ^= 1
    first, second = (batch_forward(model, t.unsqueeze(0), Pass(planes=False)).hidden for t in (tokens, other))
    beyond = 10 + SMALL.layers * SMALL.window + LOOK_BACK
    assert torch.equal(first[beyond:], second[beyond:])
    assert not torch.equal(first[10:beyond], second[10:beyond])


@pytest.mark.parametrize("select", [True, False])
def test_hand_written_gradients_match_differences(select: bool) -> None:
    model, tokens = random_model(), random_tokens(192).unsqueeze(0)
    weights = {name: weight.clone().requires_grad_() for name, weight in model.weights.items()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        # With every entry selected and nothing rounded there is nothing to jump.
        probe = Model(replace(SMALL, top_k=192), weights, model.rope)
        return batch_forward(probe, tokens, Pass(quantise=False, select=select)).hidden[:, 0].square().mean()

    names = [f"layers.{n}" for n in ("1.plane.gate", "1.engram.key", "2.q_up", "3.plane.kv", "4.sink", "5.kv_norm")]
    grads = torch.autograd.grad(loss(weights), [weights[name] for name in names])
    for name, grad in zip(names, grads, strict=True):
        step = 0.01 * grad / grad.norm()
        with torch.no_grad():
            ahead, behind = (loss(weights | {name: weights[name] + sign * step}) for sign in (1, -1))
        assert ((ahead - behind) / 0.02).item() == pytest.approx(grad.norm().item(), rel=0.03), name


def test_indexer_learns_from_its_own_loss_alone() -> None:
    model = random_model()
    weights = {name: weight.clone().requires_grad_() for name, weight in model.weights.items()}
    out = batch_forward(
        Model(SMALL, weights, model.rope), random_tokens(256).unsqueeze(0), Pass(learn_rows=slice(128, 160))
    )
    asked = [weights["layers.1.index.q"], weights["layers.3.index.k"]]
    assert all(
        grad is None for grad in torch.autograd.grad(out.hidden.sum(), asked, retain_graph=True, allow_unused=True)
    )
    assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(out.index_loss, asked))


def test_attention_knows_distances_and_no_places() -> None:
    model = random_model()
    hidden = torch.randn(40, SMALL.hidden, generator=torch.Generator().manual_seed(3))

    def attended(first: int) -> Tensor:
        positions = torch.arange(first, first + 40)
        rows = model.qkv_rows(0, hidden, positions)
        shares = torch.softmax(torch.einsum("nhd,md->nhm", rows.query, rows.latent), dim=-1)
        return model.output_rows(0, torch.einsum("nhm,md->nhd", shares, rows.latent), positions)

    assert torch.allclose(attended(0), attended(1000), atol=1e-3)


def test_ngrams_look_back_three_tokens_and_know_the_start() -> None:
    tokens = torch.tensor([[1, 2, 3, 4], [9, 2, 3, 4], [9, 9, 3, 4], [9, 9, 9, 4], [-1, -1, -1, 4]])
    hashes = ngram_hashes(tokens, 1000)
    two, three, four, _, _ = hashes.unbind(1)
    assert two[0] == two[1] == two[2] != two[3]
    assert three[0] == three[1] != three[2]
    assert four[0] != four[1]
    assert len(set(four.tolist())) == 5
    for rows, table in zip(hashes.unbind(1), (0, 1, 2, 0, 1), strict=True):
        assert (rows // 1000 == table).all()


def test_an_ngram_is_found_again_where_it_precedes_a_token() -> None:
    """The row after one has the same table rows for the n-grams before it: a copy is sought by what precedes it."""
    words = torch.arange(50, 60).unfold(0, 4, 1)
    hashes = ngram_hashes(words, 1000)
    assert torch.equal(hashes[1:, 3:], hashes[:-1, :2])


def test_one_expert_is_chosen_and_the_bias_only_chooses() -> None:
    model = random_model()
    hidden = torch.randn(64, SMALL.hidden, generator=torch.Generator().manual_seed(4))
    gates = model.expert_gates(1, hidden)
    assert ((gates > 0).sum(-1) == SMALL.active_experts).all()
    favoured = dict(model.weights) | {"layers.1.router_bias": torch.tensor([0.0, 0.0, 9.0, 0.0])}
    biased = Model(SMALL, favoured, model.rope).expert_gates(1, hidden)
    assert (biased[:, 2] > 0).all()
    assert biased.max() < 1


def test_weights_come_back_as_they_were_stored(tmp_path: Path) -> None:
    model = random_model(TINY, positions=8)
    path = tmp_path / "w.safetensors"
    save_weights(path, TINY, model.weights)
    loaded = load_model(path, max_positions=64)
    assert loaded.config == TINY
    assert loaded.rope.shape == (64, TINY.rope_dim // 2, 2)
    for name, weight in model.weights.items():
        assert torch.equal(loaded.weights[name], weight.bfloat16().float())


def test_revision_follows_the_weights(tmp_path: Path) -> None:
    model = random_model(TINY, positions=8)
    path = tmp_path / "w.safetensors"
    save_weights(path, TINY, model.weights)
    first = weights_revision(path)
    save_weights(path, TINY, dict(model.weights) | {"norm": torch.zeros(TINY.hidden)})
    assert weights_revision(path) != first


@pytest.mark.parametrize("damage", ["missing", "short", "foreign"])
def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "w.safetensors"
    if damage != "missing":
        save_weights(path, TINY, random_model(TINY, positions=8).weights)
    if damage == "short":
        path.write_bytes(path.read_bytes()[:100_000])
    if damage == "foreign":
        from safetensors.torch import save_file

        save_file({"norm": torch.zeros(3)}, path, metadata={"model": "tiny"})
    with pytest.raises(UsageError) as refused:
        load_model(path)
    assert "\n" not in str(refused.value)
