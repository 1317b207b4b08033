"""Train the small model on the Python standard library, or measure it on the shipped held-out slice.

    python -m duokv.tools.train_tiny --checkpoints DIR     # resumes from DIR; writes engine/assets when done
    python -m duokv.tools.train_tiny --evaluate --json

Two workers of one thread each take half of every batch: on a busy machine no operation waits for another core.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import BOS, NGRAM_ORDERS, ModelConfig, parameter_shapes
from duokv.engine.model import Model
from duokv.engine.training import Pass, batch_forward
from duokv.engine.weights import ASSETS, TINY_WEIGHTS, load_model, save_weights, weights_revision
from duokv.kernels.reference import rope_table
from duokv.tools.muon import Muon
from duokv.tools.tiny_corpus import Source, held_out_slice, manifest, random_crops, read_sources, training_tokens

SEED = 20_260_901
WORKERS = 2
CONTEXT = 4096
HELD_OUT = ASSETS / "held_out.txt"
MANIFEST = ASSETS / "tiny.json"
_HELD_OUT_WINDOWS = 48
_LEARN_ROWS = 32
_MUON_RATE = 0.02
_COPY_HEADS = ((1.0, 0.3), (0.3, 1.0), (1.0, 1.0), (1.0, 1.0))
"""What heads that start by copying look for: weights of the n-grams of 2 and of 3 tokens."""
_CHECKPOINT_STEPS = 50


@dataclass(frozen=True, slots=True)
class Stage:
    """`steps` on `rows` texts of `length` tokens per worker; `select` and `quantise` as in `training.Pass`."""

    steps: int
    rows: int
    length: int
    select: bool = True
    quantise: bool = False


STAGES = (
    Stage(steps=400, rows=4, length=512, select=False),
    Stage(steps=450, rows=2, length=1024, select=False),
    Stage(steps=320, rows=1, length=CONTEXT, quantise=True),
)
_WARMUP_STEPS = 20
_DECAY_STEPS = 300
"""Last steps, over which rates fall to 0."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Bits per byte on the held-out slice at a context of `context` bytes, records' rounding in the loop.

    windows_only: the same with no entry of a plane visible, so that all a row knows came through 128-token windows.
    """

    bits_per_byte: float
    windows_only: float
    bytes: int
    context: int
    revision: str
    seconds: float


class _Gradients(NamedTuple):
    """One worker's share of a step."""

    by_name: dict[str, Tensor]
    bits: float
    index_loss: float
    loads: dict[int, Tensor]


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return fp32 weights to start from.

    What adds to the residual stream is zero, so that it starts as the tokens, but for what makes the first decoder
    layer copy from afar: see `_start_copying`.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("norm"):
            weights[name] = torch.ones(shape)
        elif name.endswith(("sink", "bias", ".out", ".down", "head")):
            weights[name] = torch.zeros(shape)
        else:
            scale = {"embed": 1.0, "table": 0.5, "weight": 0.02, "value": 0.04}.get(name.split(".")[-1])
            weights[name] = torch.randn(shape, generator=generator) * (scale or shape[-1] ** -0.5)
    _start_copying(config, weights, generator)
    return weights


def _start_copying(config: ModelConfig, weights: dict[str, Tensor], generator: torch.Generator) -> None:
    """Make heads of the first decoder layer induction heads (Olsson et al. 2022, arXiv 2209.11895).

    They look for rows whose token followed the n-gram that ends at their own, and predict that token. Far more text
    than half an hour allows is needed for this to form by itself, and without it the planes go unused.
    The residual stream keeps apart: n-grams here, n-grams one token before, what is copied, and the tokens.
    """
    layer, dim = config.encoder_layers, config.head_dim
    wide = min((dim - config.rope_dim) // 2, config.engram_dim, config.hidden // 10)
    heads = _COPY_HEADS[: config.heads // 2]
    here, before, copied = slice(0, 2 * wide), slice(2 * wide, 4 * wide), slice(4 * wide, 5 * wide)
    tokens = slice(5 * wide, config.hidden)
    weights["embed"][:, : tokens.start] = 0
    value = weights[f"layers.{config.engram_layers[0]}.engram.value"]
    value[: tokens.start] = 0
    width = config.engram_dim
    for place, shifted in ((0, len(NGRAM_ORDERS)), (1, len(NGRAM_ORDERS) + 1)):
        code = _orthogonal(wide, width, generator) * 4
        at = slice(place * wide, (place + 1) * wide)
        value[here][at, place * width : (place + 1) * width] = code
        value[before][at, shifted * width : (shifted + 1) * width] = code
    sought = _orthogonal(wide, 2 * wide, generator)
    token_code = _orthogonal(wide, config.hidden - tokens.start, generator)
    latent = weights[f"layers.{layer}.plane.kv"]
    latent[: 2 * wide] = 0
    latent[:wide, before] = 1.5 * sought
    latent[wide : 2 * wide, tokens] = 0.8 * token_code
    latent[2 * wide :] *= 0.3
    down, up = weights[f"layers.{layer}.q_down"], weights[f"layers.{layer}.q_up"]
    down[here] = 0
    down[here, here] = torch.eye(2 * wide)
    for head, emphasis in enumerate(heads):
        asked = sought * torch.tensor(emphasis).repeat_interleave(wide)
        up[head * dim : (head + 1) * dim] *= 0.1
        up[head * dim : head * dim + wide, here] += asked
        seen = slice(head * dim + wide, head * dim + 2 * wide)
        weights[f"layers.{layer}.out"][copied, seen] = torch.eye(wide) / len(heads)
    weights["head"][:, copied] = 0.2 * weights["embed"][:, tokens] @ token_code.T


def _orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    square: Tensor = torch.linalg.qr(torch.randn(columns, columns, generator=generator)).Q
    return square[:rows]


class Trainer:
    """Weights and optimisers, one step after another; every step's texts follow from the seed and its number."""

    def __init__(self, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
        self.config = config
        self.done = 0
        self.weights = initial_weights(config, SEED)
        self._tokens = tokens
        self._rope = rope_table(CONTEXT, config.rope_dim, theta=config.rope_theta)
        # The routers' biases follow the experts' load, not a gradient.
        self._trained = {n: w.requires_grad_() for n, w in self.weights.items() if not n.endswith("router_bias")}
        matrices = {n: w.detach() for n, w in self._trained.items() if _is_matrix(n, w)}
        self._muon = Muon(matrices, self._blocks)
        rates = {n: 0.01 if n.endswith(("embed", "table")) else 0.004 for n in self._trained if n not in matrices}
        groups = [{"params": [self._trained[n]], "lr": rate, "initial": rate} for n, rate in rates.items()]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0)

    def step(self, stage: Stage, rate: float, pool: ThreadPoolExecutor) -> tuple[float, float]:
        """Take one step at `rate` times the full learning rates; return bits per byte and the indexers' loss."""
        rng = np.random.default_rng((SEED, self.done))
        start = int(rng.integers(128, stage.length - _LEARN_ROWS)) // 2 * 2
        how = Pass(
            quantise=stage.quantise,
            select=stage.select,
            learn_rows=slice(start, start + _LEARN_ROWS),
        )
        crops = [random_crops(self._tokens, rng, rows=stage.rows, length=stage.length) for _ in range(WORKERS)]
        shares = list(pool.map(lambda texts: self._gradients(torch.from_numpy(texts), how), crops))
        with torch.no_grad():
            grads = {n: torch.stack([share.by_name[n] for share in shares]).mean(0) for n in self._trained}
            self._muon.step(grads, rate=_MUON_RATE * rate, momentum=min(0.95, 0.85 + self.done / 2000))
            for name, weight in self._trained.items():
                weight.grad = None if name in self._muon.matrices else grads[name]
            for group in self._adam.param_groups:
                group["lr"] = group["initial"] * rate
            self._adam.step()
            for layer in shares[0].loads:
                load = torch.stack([share.loads[layer] for share in shares]).mean(0)
                self.weights[f"layers.{layer}.router_bias"] += 0.003 * torch.sign(load.mean() - load)
        self.done += 1
        return sum(share.bits for share in shares) / WORKERS, sum(share.index_loss for share in shares) / WORKERS

    def save(self, folder: Path) -> None:
        """Write all it takes to go on, and the weights as they would ship, replacing the last ones at once."""
        state = {
            "weights": {n: w.detach() for n, w in self.weights.items()},
            "momentum": self._muon.momentum,
            "adam": self._adam.state_dict(),
            "step": self.done,
        }
        torch.save(state, folder / "state.part")
        (folder / "state.part").replace(folder / "state.pt")
        save_weights(folder / "tiny.safetensors", self.config, self.weights)

    def resume(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        state = torch.load(folder / "state.pt")
        with torch.no_grad():
            for kept, current in ((state["weights"], self.weights), (state["momentum"], self._muon.momentum)):
                for name, value in kept.items():
                    current[name].copy_(value)
        self._adam.load_state_dict(state["adam"])
        self.done = state["step"]

    def _gradients(self, texts: Tensor, how: Pass) -> _Gradients:
        torch.set_num_threads(1)  # of this worker's thread
        model = Model(self.config, {n: w.bfloat16() for n, w in self.weights.items()}, self._rope)
        out = batch_forward(model, texts[:, :-1], how)
        loss = functional.cross_entropy(model.logits(out.hidden), texts[:, 1:].flatten())
        wanted = list(self._trained.values())
        grads = torch.autograd.grad(loss + out.index_loss, wanted, allow_unused=True, materialize_grads=True)
        bits, index_loss = loss.item() / math.log(2), out.index_loss.item()
        return _Gradients(dict(zip(self._trained, grads, strict=True)), bits, index_loss, out.loads)

    def _blocks(self, name: str, matrix: Tensor) -> tuple[Tensor, ...]:
        """Gate and value halves, and every expert, are matrices of their own."""
        if name.endswith("ffn.up"):
            return matrix.chunk(2, 0)
        if name.endswith("experts.up"):
            return matrix.chunk(2 * self.config.experts, 0)
        return matrix.chunk(self.config.experts, 1) if name.endswith("experts.down") else (matrix,)


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and min(weight.shape) >= 64 and not name.endswith(("embed", "head", "table"))


def _schedule() -> Iterator[tuple[Stage, float]]:
    """Yield every step's stage and its share of the full learning rates."""
    total = sum(stage.steps for stage in STAGES)
    step = 0
    for stage in STAGES:
        for _ in range(stage.steps):
            yield stage, min(1.0, (step + 1) / _WARMUP_STEPS, (total - step) / _DECAY_STEPS)
            step += 1


def train(folder: Path) -> None:
    """Train in `folder`, from its checkpoint if it has one, then write the package's assets."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    sources = read_sources()
    trainer = Trainer(ModelConfig.preset("tiny"), training_tokens(sources))
    if (folder / "state.pt").exists():
        trainer.resume(folder)
    began = time.monotonic()
    with ThreadPoolExecutor(WORKERS) as pool:
        for step, (stage, rate) in enumerate(_schedule()):
            if step < trainer.done:
                continue
            bits, index_loss = trainer.step(stage, rate, pool)
            if trainer.done % 10 == 0:
                seconds = time.monotonic() - began
                print(f"step {trainer.done} bits/byte {bits:.3f} index {index_loss:.3f} {seconds:.0f} s", flush=True)
            if trainer.done % _CHECKPOINT_STEPS == 0:
                trainer.save(folder)
    trainer.save(folder)
    write_data_assets(sources)
    save_weights(TINY_WEIGHTS, trainer.config, trainer.weights)


def write_data_assets(sources: list[Source]) -> None:
    """Write the held-out slice and the manifest of all texts beside the weights."""
    ASSETS.mkdir(exist_ok=True)
    HELD_OUT.write_bytes(held_out_slice(sources, windows=_HELD_OUT_WINDOWS, length=CONTEXT))
    about = {"python": platform.python_version(), "seed": SEED, "stages": [asdict(stage) for stage in STAGES]}
    MANIFEST.write_text(json.dumps(about | manifest(sources), indent=1) + "\n")


def evaluate(weights: Path, held_out: Path = HELD_OUT) -> Evaluation:
    """Measure weights on whole windows of `CONTEXT` bytes of a held-out slice, in bf16."""
    began = time.monotonic()
    model = load_model(weights, max_positions=CONTEXT, dtype=torch.bfloat16)
    data = np.frombuffer(held_out.read_bytes(), np.uint8).reshape(-1, CONTEXT).astype(np.int64)
    texts = torch.from_numpy(np.pad(data, ((0, 0), (1, 0)), constant_values=BOS))

    def bits(text: Tensor, *, planes: bool) -> float:
        torch.set_num_threads(1)
        with torch.inference_mode():
            hidden = batch_forward(model, text[:-1].unsqueeze(0), Pass(planes=planes)).hidden
            return functional.cross_entropy(model.logits(hidden), text[1:]).item() / math.log(2)

    with ThreadPoolExecutor(WORKERS) as pool:
        full = list(pool.map(lambda text: bits(text, planes=True), texts))
        cut = list(pool.map(lambda text: bits(text, planes=False), texts))
    return Evaluation(
        bits_per_byte=round(sum(full) / len(full), 4),
        windows_only=round(sum(cut) / len(cut), 4),
        bytes=data.size,
        context=CONTEXT,
        revision=weights_revision(weights),
        seconds=round(time.monotonic() - began, 1),
    )


def main() -> None:
    """Run the command line above."""
    parser = argparse.ArgumentParser(prog="train_tiny", description="Train or measure the small model.")
    parser.add_argument("--checkpoints", type=Path, help="folder to train in; resumes what it holds")
    parser.add_argument("--evaluate", action="store_true", help="measure instead of training")
    parser.add_argument("--weights", type=Path, default=TINY_WEIGHTS, help="what to measure")
    parser.add_argument("--json", action="store_true", help="print the measurement as JSON")
    args = parser.parse_args()
    if args.evaluate:
        found = asdict(evaluate(args.weights))
        print(json.dumps(found) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    elif args.checkpoints:
        train(args.checkpoints)
    else:
        parser.error("nothing to do; pass --checkpoints DIR to train or --evaluate to measure")


if __name__ == "__main__":
    main()
