"""The small model's training: its texts, its optimiser, steps that repeat exactly, and what ships in the end."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from duokv.engine.config import BOS, ModelConfig  # noqa: E402
from duokv.engine.model import Model  # noqa: E402
from duokv.engine.training import Pass, batch_forward  # noqa: E402
from duokv.engine.weights import ASSETS, TINY_WEIGHTS, load_model  # noqa: E402
from duokv.kernels.reference import rope_table  # noqa: E402
from duokv.tools.muon import Muon, orthogonal  # noqa: E402
from duokv.tools.tiny_corpus import held_out_slice, manifest, random_crops, read_sources, training_tokens  # noqa: E402
from duokv.tools.train_tiny import (  # noqa: E402
    CONTEXT,
    HELD_OUT,
    MANIFEST,
    SEED,
    Stage,
    Trainer,
    evaluate,
    initial_weights,
)

SMALL = replace(
    ModelConfig.preset("tiny"), hidden=64, heads=2, q_rank=64, top_k=16, engram_rows=64, engram_dim=8, ffn_hidden=64,
    shared_hidden=64, expert_hidden=64,
)  # fmt: skip
STAGE = Stage(steps=6, rows=1, length=192, quantise=True)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for i in range(40):
        (tmp_path / f"module{i:02}.py").write_text(f"value_{i} = {i}\n" * 40)
    for folder in ("test", "encodings", "site-packages"):
        (tmp_path / "package" / folder).mkdir(parents=True)
        (tmp_path / "package" / folder / "left_out.py").write_text("x = 1\n")
    (tmp_path / "empty.py").write_text("")
    return tmp_path


def test_sources_are_sorted_and_leave_out_what_may_be_missing(library: Path) -> None:
    sources = read_sources(library)
    assert [source.path for source in sources] == [f"module{i:02}.py" for i in range(40)]
    assert sources[3].sha256 == hashlib.sha256((library / "module03.py").read_bytes()).hexdigest()


def test_held_out_files_are_never_trained_on(library: Path) -> None:
    sources = read_sources(library)
    held_out = [source for source in sources if source.held_out]
    assert 0 < len(held_out) < len(sources) / 2
    trained = bytes(token for token in training_tokens(sources).tolist() if token != BOS)
    assert trained == b"".join(source.text for source in sources if not source.held_out)
    names = manifest(sources)
    assert names["held_out"] == {source.path: source.sha256 for source in held_out}


def test_held_out_slice_is_whole_windows(library: Path) -> None:
    sources = read_sources(library)
    cut = held_out_slice(sources, windows=3, length=100)
    assert len(cut) == 300
    assert all(any(cut[i : i + 100] in s.text for s in sources if s.held_out) for i in (0, 100, 200))


def test_crops_start_a_text_and_follow_the_generator() -> None:
    tokens = np.arange(1000)
    first = random_crops(tokens, np.random.default_rng(5), rows=3, length=10)
    assert first.shape == (3, 11)
    assert (first[:, 0] == BOS).all()
    assert (np.diff(first[:, 1:]) == 1).all()
    assert (first == random_crops(tokens, np.random.default_rng(5), rows=3, length=10)).all()


def test_orthogonal_brings_singular_values_near_one() -> None:
    stack = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(stack))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_muon_treats_blocks_as_matrices_of_their_own() -> None:
    weight = torch.zeros(64, 32)
    grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    grad[32:] *= 1000
    Muon({"w": weight}, lambda _, m: m.chunk(2, 0)).step({"w": grad}, rate=0.1, momentum=0.0)
    for half in weight.chunk(2, 0):
        values = torch.linalg.svdvals(half)
        assert values.min() > 0.04
        assert values.max() < 0.15


def test_training_learns_and_resumes_as_if_never_stopped(tmp_path: Path) -> None:
    tokens = np.tile(np.frombuffer(b"def value(self): return self._value\n", np.uint8), 50).astype(np.int64)
    whole, first = Trainer(SMALL, tokens), Trainer(SMALL, tokens)
    with ThreadPoolExecutor(2) as pool:
        losses = [whole.step(STAGE, 1.0, pool)[0] for _ in range(STAGE.steps)]
        for _ in range(4):
            first.step(STAGE, 1.0, pool)
        first.save(tmp_path)
        second = Trainer(SMALL, tokens)
        second.resume(tmp_path)
        for _ in range(STAGE.steps - 4):
            second.step(STAGE, 1.0, pool)
    assert losses[-1] < losses[0] - 1
    assert all(torch.equal(weight, second.weights[name]) for name, weight in whole.weights.items())


def test_shipped_weights_are_small_and_whole() -> None:
    assert TINY_WEIGHTS.stat().st_size <= 16_000_000
    assert all(weight.isfinite().all() for weight in load_model().weights.values())


def test_shipped_slice_is_of_files_the_manifest_holds_out() -> None:
    data = HELD_OUT.read_bytes()
    assert 0 < len(data) <= 1_000_000
    assert len(data) % CONTEXT == 0
    listed = json.loads(MANIFEST.read_text())
    assert not set(listed["held_out"]) & set(listed["trained_on"])
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (ASSETS / "held_out.LICENSE.txt").read_text()


def test_shipped_weights_are_good_and_use_what_is_beyond_their_windows(tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.write_bytes(HELD_OUT.read_bytes()[: 8 * CONTEXT])
    found = evaluate(TINY_WEIGHTS, part)
    assert found.bytes == 8 * CONTEXT
    assert found.bits_per_byte <= 1.85
    assert found.windows_only >= found.bits_per_byte + 0.05


def test_a_new_model_copies_what_followed_the_same_words_far_away() -> None:
    """Before any training: from beyond all windows, and not without the planes."""
    config = ModelConfig.preset("tiny")
    weights = initial_weights(config, SEED)
    model = Model(config, weights, rope_table(1024, config.rope_dim, theta=config.rope_theta))
    rng = np.random.default_rng(3)
    phrase, between = rng.integers(97, 122, 60), rng.integers(128, 255, 900)
    tokens = torch.from_numpy(np.concatenate([phrase, between, phrase, [0, 0, 0, 0]]))
    with torch.inference_mode():
        for planes in (True, False):
            hidden = batch_forward(model, tokens.unsqueeze(0), Pass(planes=planes, select=False)).hidden
            guess = model.logits(hidden).argmax(-1)[960:1019]
            right = (guess == tokens[961:1020]).float().mean()
            assert right > 0.5 if planes else right < 0.1
