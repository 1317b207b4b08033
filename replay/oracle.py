"""A float64 toy of the DeepSeek-V4.1 shape, small enough to run every plan to the end and compare.

It has what replay depends on and nothing else: causal encoder layers with sliding-window attention, compressed global
entries of ratio 2 owned by a few encoder layers and read by those after them, decoder layers that share one plane of
ratio 1 projected from the encoder's output, window and global attention under one softmax with a sink, top-k over the
entries, a look-back of three token ids, and rotary positions baked into what is stored. Every row is computed by
definition; there are no rings, chunks or slots. What a run was not given is NaN, so a plan that lets a row see too much
ends in NaN and one that lets it see too little ends in other numbers.

For tests and for trying out policies; the numbers mean nothing outside a comparison of two runs of one toy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from duokv.replay.plan import Reason, ReplayPlan
from duokv.replay.window import visible_entries, window_span, writes_entry

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

LOOK_BACK = 3
LOOK_BACK_LAYER = 1


@dataclass(frozen=True, slots=True)
class ToyShape:
    """Dimensions of a toy. Layers before the first owner have a window only; the others read the nearest owner's plane.

    encoder_owners: encoder layers with a plane of their own; the first decoder layer always has one.
    """

    encoder_layers: int = 3
    decoder_layers: int = 2
    encoder_owners: tuple[int, ...] = (1, 2)
    window: int = 8
    hidden: int = 12
    heads: int = 2
    latent: int = 8
    index: int = 4
    top_k: int = 6
    vocab: int = 40

    @property
    def layers(self) -> int:
        """All layers."""
        return self.encoder_layers + self.decoder_layers

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers with a plane of global entries, in the order of `Memory.planes`."""
        return (*self.encoder_owners, self.encoder_layers)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Tokens per entry of each plane."""
        return (*(2 for _ in self.encoder_owners), 1)


@dataclass(frozen=True, slots=True)
class Memory:
    """What is held of one request of L tokens, NaN where it is not.

    swa: [encoder layers, L, latent], by position. planes: per owner [L // ratio, latent + index], by entry.
    """

    swa: Floats
    planes: tuple[Floats, ...]

    def copy(self) -> Memory:
        """Return an independent copy."""
        return Memory(self.swa.copy(), tuple(plane.copy() for plane in self.planes))


@dataclass(frozen=True, slots=True)
class Run:
    """Outcome of one run. output: last hidden states [L - decoder_start, hidden]; memory: what is held afterwards."""

    output: Floats
    memory: Memory


class Toy:
    """Random weights and the forward pass. Immutable after construction, so safe on any thread."""

    def __init__(self, shape: ToyShape, seed: int = 0) -> None:
        self.shape = shape
        rng = np.random.default_rng(seed)

        def weights(*dims: int) -> Floats:
            return rng.normal(0, dims[-2] ** -0.5, dims)

        layers, hidden, entry = shape.layers, shape.hidden, shape.latent + shape.index
        self._embedding = rng.normal(size=(shape.vocab, hidden))
        self._look_back = rng.normal(size=(LOOK_BACK, shape.vocab, hidden))
        self._query = weights(layers, hidden, shape.heads * shape.latent)
        self._latent = weights(layers, hidden, shape.latent)
        self._index_query = weights(layers, hidden, shape.index)
        self._entry = [weights(ratio, hidden, entry) for ratio in shape.ratios]
        self._out = weights(layers, shape.heads * shape.latent, hidden)
        self._sink = rng.normal(size=(layers, shape.heads))
        self._up, self._down = weights(layers, hidden, 2 * hidden), weights(layers, 2 * hidden, hidden)

    def cold(self, tokens: Ints, *, decoder_start: int) -> Run:
        """Compute every row of `tokens` [L] with nothing held."""
        return self.run(tokens, ReplayPlan(0, 0, 0, decoder_start, Reason.NO_HIT), self.nothing_held(len(tokens)))

    def nothing_held(self, tokens: int) -> Memory:
        """Return the memory of a request of `tokens` tokens before it ran."""
        shape = self.shape
        planes = (np.full((tokens // ratio, shape.latent + shape.index), np.nan) for ratio in shape.ratios)
        return Memory(np.full((shape.encoder_layers, tokens, shape.latent), np.nan), tuple(planes))

    def stored(self, memory: Memory, tokens: int, *, adopted: int, swa: tuple[int, int] = (0, 0)) -> Memory:
        """Return what a request of `tokens` tokens finds of an earlier one: blocks [0, adopted), SWA rows [lo, hi)."""
        found = self.nothing_held(tokens)
        found.swa[:, slice(*swa)] = memory.swa[:, slice(*swa)]
        for mine, theirs, ratio in zip(found.planes, memory.planes, self.shape.ratios, strict=True):
            mine[: adopted // ratio] = theirs[: adopted // ratio]
        return found

    def run(self, tokens: Ints, plan: ReplayPlan, held: Memory) -> Run:
        """Compute rows [plan.start, L) of `tokens` [L] by the plan's floors, on top of what is `held`.

        Rows below plan.floor, if there are any, see a whole window: with start = 0 this is the definition of a
        replay over two streams, rows from the floor on clipped and stored entries taken from `held`.
        """
        shape = self.shape
        memory = held.copy()
        swa = [*memory.swa, *np.full((shape.decoder_layers, len(tokens), shape.latent), np.nan)]
        rows = np.arange(plan.start, len(tokens))
        seen = self._windows(rows, plan.floor, len(tokens))
        x = self._embedding[tokens[rows]]
        for layer in range(shape.layers):
            if layer == LOOK_BACK_LAYER:
                x = x + self._looked_back(tokens, rows)
            if layer in shape.owners:
                self._write_entries(memory, shape.owners.index(layer), x, rows, plan.write_floor)
            if layer == shape.encoder_layers:
                x, rows = x[rows >= plan.decoder_start], rows[rows >= plan.decoder_start]
                seen = self._windows(rows, plan.decoder_start, len(tokens))
            swa[layer][rows] = _rotate(_norm(x) @ self._latent[layer], rows)
            x = x + self._attend(layer, x, rows, seen, swa[layer], memory.planes)
            x = x + np.tanh(_norm(x) @ self._up[layer]) @ self._down[layer]
        return Run(x, memory)

    def _windows(self, rows: Ints, floor: int, total: int) -> Mask:
        """Which positions each row sees through its window: [rows, total]."""
        seen = np.zeros((len(rows), total), np.bool_)
        for line, pos in zip(seen, rows.tolist(), strict=True):
            line[slice(*window_span(pos, floor if pos >= floor else 0, window_tokens=self.shape.window))] = True
        return seen

    def _looked_back(self, tokens: Ints, rows: Ints) -> Floats:
        total = np.zeros((len(rows), self.shape.hidden))
        for back in range(1, LOOK_BACK + 1):
            there = rows >= back
            total[there] += self._look_back[back - 1, tokens[rows[there] - back]]
        return total

    def _write_entries(self, memory: Memory, owner: int, x: Floats, rows: Ints, write_floor: int) -> None:
        ratio, plane, latent = self.shape.ratios[owner], memory.planes[owner], self.shape.latent
        inputs = np.full((len(plane) * ratio, self.shape.hidden), np.nan)
        whole = rows < len(inputs)
        inputs[rows[whole]] = _norm(x[whole])
        written = np.array([e for e in range(len(plane)) if writes_entry(e, ratio, write_floor)], np.int64)
        grouped = inputs.reshape(len(plane), ratio, -1)[written]
        entries = np.tanh(np.einsum("erh,rhc->ec", grouped, self._entry[owner]))
        plane[written] = np.hstack([_rotate(entries[:, :latent], written * ratio), entries[:, latent:]])

    def _attend(self, layer: int, x: Floats, rows: Ints, seen: Mask, swa: Floats, planes: tuple[Floats, ...]) -> Floats:
        shape, normed, keys = self.shape, _norm(x), swa
        owner = sum(layer >= first for first in shape.owners) - 1
        if owner >= 0:
            index_scores = normed @ self._index_query[layer] @ planes[owner][:, shape.latent :].T
            seen = np.hstack([seen, self._chosen(index_scores, rows, shape.ratios[owner])])
            keys = np.vstack([swa, planes[owner][:, : shape.latent]])
        query = _rotate((normed @ self._query[layer]).reshape(len(rows), shape.heads, shape.latent), rows)
        scores = np.where(seen[:, None], query @ keys.T, -np.inf)
        exps = np.exp(scores)
        weights = exps / (exps.sum(axis=-1, keepdims=True) + np.exp(self._sink[layer])[:, None])
        # A NaN key that is seen has made its row's weights NaN already; the others must not leak through 0 * NaN.
        mixed = (weights @ np.nan_to_num(keys)).reshape(len(rows), -1)
        out: Floats = mixed @ self._out[layer]
        return out

    def _chosen(self, scores: Floats, rows: Ints, ratio: int) -> Mask:
        """The top-k of each row's visible entries. NaN sorts last, so a missing entry is chosen and shows."""
        visible = np.array([[visible_entries(pos, ratio)] for pos in rows.tolist()]) > np.arange(scores.shape[1])
        best = np.argsort(np.where(visible, scores, -np.inf), axis=-1)[:, -self.shape.top_k :]
        chosen = np.zeros(scores.shape, np.bool_)
        np.put_along_axis(chosen, best, True, axis=-1)
        return chosen & visible


def _norm(x: Floats) -> Floats:
    scale: Floats = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
    return x / scale


def _rotate(latents: Floats, positions: Ints) -> Floats:
    """Turn the second half of the last axis by its rotary position; positions [n] go with axis 0."""
    half = latents.shape[-1] // 2
    angles = positions.reshape(-1, *[1] * (latents.ndim - 1)) * 0.7 ** np.arange(half // 2)
    even, odd = latents[..., half::2], latents[..., half + 1 :: 2]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([latents[..., :half], even * cos - odd * sin, even * sin + odd * cos], axis=-1)
