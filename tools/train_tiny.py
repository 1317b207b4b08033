"""Train the small model on the Python standard library, or measure it on the shipped held-out slice.

Two workers of one thread each halve every batch: on a busy machine no operation waits for a core that is elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import ModelConfig, parameter_shapes
from duokv.engine.model import Model
from duokv.engine.training import Attention, batch_forward
from duokv.engine.weights import ASSETS, TINY_WEIGHTS, load_model, save_weights
from duokv.kernels.reference import rope_table
from duokv.tools.tiny_corpus import batches, held_out_slice, read_sources, training_tokens

SEED = 20_260_901
WORKERS = 2
CONTEXT = 4096
WINDOWS = 48


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps on `rows` texts of `length` tokens per worker."""

    steps: int
    rows: int
    length: int
    quantise: bool


STAGES = (Stage(300, 4, 512, False), Stage(500, 2, 1024, False), Stage(300, 1, 4096, True))
DECAY_STEPS = 450


def initial_weights(config: ModelConfig, generator: torch.Generator) -> dict[str, Tensor]:
    """Return fp32 weights to start from: what adds to the residual stream starts at zero."""
    weights = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("norm"):
            weights[name] = torch.ones(shape)
        elif name.endswith(("sink", "bias", ".out", ".down", "head", "engram.value", "index.weight")):
            weights[name] = torch.zeros(shape)
        else:
            scale = 1.0 if name in ("embed",) else 0.5 if name.endswith("table") else shape[-1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * scale
        if name.endswith("index.weight"):
            weights[name] = torch.randn(shape, generator=generator) * 0.02
    return weights


class Muon:
    """Momentum whose update is made orthogonal per matrix; matrices of one shape are done together."""

    def __init__(self, weights: Mapping[str, Tensor], config: ModelConfig) -> None:
        self.weights = weights
        self.config = config
        self.momentum = {name: torch.zeros_like(w) for name, w in weights.items()}

    def step(self, grads: Mapping[str, Tensor], rate: float, momentum: float) -> None:
        groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for name, weight in self.weights.items():
            buffer = self.momentum[name].lerp_(grads[name], 1 - momentum)
            update = grads[name].lerp(buffer, momentum)
            for part, target in zip(self._blocks(name, update), self._blocks(name, weight), strict=True):
                groups.setdefault(tuple(part.shape), []).append((part, target))
        for shape, pairs in groups.items():
            stacked = orthogonal(torch.stack([update for update, _ in pairs]))
            scale = -rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for update, (_, target) in zip(stacked, pairs, strict=True):
                target.add_(update, alpha=scale)

    def _blocks(self, name: str, matrix: Tensor) -> list[Tensor]:
        experts = self.config.experts
        if name.endswith("ffn.up"):
            return list(matrix.chunk(2, 0))
        if name.endswith("experts.up"):
            return list(matrix.chunk(2 * experts, 0))
        if name.endswith("experts.down"):
            return list(matrix.chunk(experts, 1))
        return [matrix]


def orthogonal(stack: Tensor) -> Tensor:
    """Return the nearest orthogonal matrices [n, rows, columns], roughly: five Newton-Schulz steps (K. Jordan, Muon)."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


def learns_by_muon(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and min(shape) >= 64 and not name.endswith(("embed", "head", "table"))


class Trainer:
    def __init__(self, config: ModelConfig, tokens: NDArray[np.int64]) -> None:
        self.config = config
        self.tokens = tokens
        self.weights = initial_weights(config, torch.Generator().manual_seed(SEED))
        self.rope = rope_table(CONTEXT, config.rope_dim, theta=config.rope_theta)
        fixed = [n for n in self.weights if n.endswith("router_bias")]
        self.trained = {n: w.requires_grad_(True) for n, w in self.weights.items() if n not in fixed}
        shapes = parameter_shapes(config)
        matrices = {n: w.detach() for n, w in self.trained.items() if learns_by_muon(n, shapes[n])}
        self.muon = Muon(matrices, config)
        rest = [n for n in self.trained if n not in matrices]
        self.adam_names = rest
        rates = {n: 0.01 if n == "embed" or n.endswith("table") else 0.004 for n in rest}
        self.adam = torch.optim.AdamW(
            [{"params": [self.trained[n]], "lr": rates[n], "rate": rates[n]} for n in rest],
            betas=(0.9, 0.97), eps=1e-10, weight_decay=0.0,
        )
        self.step = 0

    def state(self):
        return {"weights": {k: v.detach() for k, v in self.weights.items()}, "momentum": self.muon.momentum, "adam": self.adam.state_dict(), "step": self.step}

    def restore(self, s):
        with torch.no_grad():
            for k, v in s["weights"].items(): self.weights[k].copy_(v)
            for k, v in s["momentum"].items(): self.muon.momentum[k].copy_(v)
        self.adam.load_state_dict(s["adam"]); self.step = s["step"]

    def _worker(self, crops, attention, chunk):
        torch.set_num_threads(1)
        tokens = torch.from_numpy(crops)
        model = Model(self.config, {n: w.bfloat16() for n, w in self.weights.items()}, self.rope)
        out = batch_forward(model, tokens[:, :-1], attention, sampled_chunk=chunk)
        loss = functional.cross_entropy(model.logits(out.hidden), tokens[:, 1:].flatten())
        names = list(self.trained)
        grads = torch.autograd.grad(loss + out.index_loss, [self.trained[n] for n in names])
        return dict(zip(names, grads)), loss.item(), out.index_loss.item(), out.loads

    def run(self, folder: Path, stages, decay):
        total = sum(s.steps for s in stages)
        began = time.time(); cpu = time.process_time()
        first = 0
        with ThreadPoolExecutor(WORKERS) as pool:
            for s in stages:
                for step in range(first, first + s.steps):
                    if step < self.step: continue
                    rng = np.random.default_rng((SEED, step))
                    attention = Attention(top_k=self.config.top_k, quantise=s.quantise)
                    chunk = int(rng.integers(1, s.length // 128))
                    data = [next(batches(self.tokens, rng, rows=s.rows, length=s.length)) for _ in range(WORKERS)]
                    results = list(pool.map(lambda d: self._worker(d, attention, chunk), data))
                    frac = min(1.0, (total - step) / decay) * min(1.0, (step + 1) / 20)
                    with torch.no_grad():
                        grads = {n: sum(r[0][n] for r in results) / WORKERS for n in self.trained}
                        self.muon.step(grads, 0.02 * frac, min(0.95, 0.85 + 0.1 * step / 200))
                        for g in self.adam.param_groups: g["lr"] = g["rate"] * frac
                        for n in self.adam_names: self.trained[n].grad = grads[n]
                        self.adam.step()
                        for layer in results[0][3]:
                            load = sum(r[3][layer] for r in results) / WORKERS
                            self.weights[f"layers.{layer}.router_bias"].add_(torch.sign(load.mean() - load), alpha=0.003)
                    self.step = step + 1
                    bits = sum(r[1] for r in results) / WORKERS / math.log(2)
                    if step % 10 == 0 or step < 10:
                        print(step, f"bits {bits:.3f} index {sum(r[2] for r in results)/WORKERS:.3f} wall {time.time()-began:.0f} cpu {time.process_time()-cpu:.0f}", [round(x, 2) for x in load.tolist()], flush=True)
                    if self.step % 50 == 0:
                        torch.save(self.state(), folder / "state.part"); (folder / "state.part").rename(folder / "state.pt")
                        save_weights(folder / "tiny.safetensors", self.config, self.weights)
                first += s.steps


if __name__ == "__main__":
    import sys
    folder = Path(sys.argv[1]); folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    sources = read_sources()
    trainer = Trainer(ModelConfig.preset("tiny"), training_tokens(sources))
    print(len(sources), trainer.tokens.size)
    if (folder / "state.pt").exists(): trainer.restore(torch.load(folder / "state.pt"))
    trainer.run(folder, STAGES, DECAY_STEPS)
