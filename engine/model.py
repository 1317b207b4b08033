"""The model: its parameters, the row-wise pieces of each layer, and the plain forward pass over a whole text.

A row is one token's state at one layer. Every piece takes any rows, in any order, with their absolute positions, and
computes each from itself alone: nothing crosses rows but attention and the n-gram look-back, whose inputs are
arguments. With a `linear` that computes each row alike whatever rows come with it, a text computed in chunks, or from a
restored prefix, is bit-identical to one computed at once.

The residual stream is fp32; what enters a matrix is in the weights' dtype. Functions are pure; weights are only read,
so one model serves any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import LOOK_BACK, NGRAM_ORDERS, ModelConfig

Linear = Callable[[Tensor, Tensor], Tensor]
"""(rows [n, in], weight [out, in]) -> [n, out]."""

_HASH_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


class Projections(NamedTuple):
    """What a layer's attention makes of n rows.

    normed: [n, hidden], input of the plane and the indexer. query_latent: [n, q_rank]. query: [n, heads, head_dim],
    rotated and scaled. latent: [n, head_dim], the row's own K and V, rotated: what the window stores.
    """

    normed: Tensor
    query_latent: Tensor
    query: Tensor
    latent: Tensor


class PlaneEntries(NamedTuple):
    """m entries of a plane: compressed KV [m, head_dim] and indexer K [m, index_dim], both rotated, not yet records."""

    latent: Tensor
    index: Tensor


class IndexQuery(NamedTuple):
    """Indexer queries [n, index_heads, index_dim], rotated and scaled, and their heads' weights [n, index_heads]."""

    query: Tensor
    weight: Tensor


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every parameter's name and shape, in a fixed order."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden)}
    for layer in range(c.layers):
        own: dict[str, tuple[int, ...]] = {
            "attn_norm": (c.hidden,),
            "q_down": (c.q_rank, c.hidden),
            "q_norm": (c.q_rank,),
            "q_up": (c.heads * c.head_dim, c.q_rank),
            "kv": (c.head_dim, c.hidden),
            "kv_norm": (c.head_dim,),
            "sink": (c.heads,),
            "out": (c.hidden, c.heads * c.head_dim),
            "ffn_norm": (c.hidden,),
        }
        own |= _plane_shapes(c, layer) | _index_shapes(c, layer) | _engram_shapes(c, layer) | _ffn_shapes(c, layer)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes | {"norm": (c.hidden,), "head": (c.vocab_size, c.hidden)}


def _plane_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer not in c.table.owners:
        return {}
    ratio = c.table.ratios[layer]
    shapes: dict[str, tuple[int, ...]] = {"plane.kv": (c.head_dim, c.hidden), "plane.norm": (c.head_dim,)}
    if ratio > 1:
        shapes |= {"plane.gate": (c.head_dim, c.hidden), "plane.bias": (ratio, c.head_dim)}
    return shapes | {"index.k": (c.index_dim, c.head_dim), "index.k_norm": (c.index_dim,)}


def _index_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer not in c.index_sources:
        return {}
    return {"index.q": (c.index_heads * c.index_dim, c.q_rank), "index.weight": (c.index_heads, c.hidden)}


def _engram_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer not in c.engram_layers:
        return {}
    width = len(NGRAM_ORDERS) * c.engram_dim
    return {
        "engram.table": (len(NGRAM_ORDERS) * c.engram_rows, c.engram_dim),
        "engram.norm": (c.hidden,),
        "engram.key": (c.hidden, width),
        "engram.value": (c.hidden, width),
    }


def _ffn_shapes(c: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    if layer in c.dense_layers:
        return {"ffn.up": (2 * c.ffn_hidden, c.hidden), "ffn.down": (c.hidden, c.ffn_hidden)}
    return {
        "ffn.up": (2 * c.shared_hidden, c.hidden),
        "ffn.down": (c.hidden, c.shared_hidden),
        "router": (c.experts, c.hidden),
        "router_bias": (c.experts,),
        "experts.up": (2 * c.experts * c.expert_hidden, c.hidden),
        "experts.down": (c.hidden, c.experts * c.expert_hidden),
    }


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration with its weights, named as in `parameter_shapes`, and the product that multiplies rows by them."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    linear: Linear = functional.linear

    def embed_rows(self, tokens: Tensor) -> Tensor:
        """Return the residual stream [n, hidden], fp32, that token ids [n] enter the first layer with."""
        return functional.embedding(tokens, self.weights["embed"]).float()

    def engram_rows(self, layer: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return what n-grams add to the residual stream [n, hidden] before `layer`'s attention; fp32.

        tokens: [n, LOOK_BACK + 1], each row its token id last and the ones before it, -1 before the text's start.
        """
        hashes = ngram_rows(tokens, self.config.engram_rows)
        grams = functional.embedding(hashes, self._weight(layer, "engram.table")).flatten(1)
        key = self._norm(self.linear(grams, self._weight(layer, "engram.key")))
        query = self._norm(hidden, self._weight(layer, "engram.norm"))
        gate = torch.sigmoid((key.float() * query.float()).sum(-1, keepdim=True) * self.config.hidden**-0.5)
        return gate * self.linear(grams, self._weight(layer, "engram.value")).float()

    def qkv_rows(self, layer: int, hidden: Tensor, positions: Tensor) -> Projections:
        """Project rows of the residual stream [n, hidden] at positions [n] for `layer`'s attention."""
        c = self.config
        normed = self._norm(hidden, self._weight(layer, "attn_norm"))
        latent_q = self._norm(self.linear(normed, self._weight(layer, "q_down")), self._weight(layer, "q_norm"))
        query = self._norm(self.linear(latent_q, self._weight(layer, "q_up")).unflatten(-1, (c.heads, c.head_dim)))
        latent = self._norm(self.linear(normed, self._weight(layer, "kv")), self._weight(layer, "kv_norm"))
        query = self._rotate(query, positions) * c.head_dim**-0.5
        return Projections(normed, latent_q, query, self._rotate(latent, positions))

    def plane_rows(self, layer: int, normed: Tensor) -> Tensor:
        """Return the compressor's input [n, width] of rows `Projections.normed`: the pending row's state of an odd cut."""
        values = self.linear(normed, self._weight(layer, "plane.kv"))
        if self.config.table.ratios[layer] == 1:
            return values
        return torch.cat([values, self.linear(normed, self._weight(layer, "plane.gate"))], dim=-1)

    def compress(self, layer: int, rows: Tensor, entries: Tensor) -> PlaneEntries:
        """Make the plane's entries [m] of their tokens' `plane_rows` [m, ratio, width].

        An entry is the mean of its tokens' values, weighted in each dimension by a softmax of their gates, and has the
        position of its first token.
        """
        ratio = self.config.table.ratios[layer]
        mixed = rows.squeeze(1)
        if ratio > 1:
            values, gates = rows.float().chunk(2, dim=-1)
            shares = torch.softmax(gates + self._weight(layer, "plane.bias").float(), dim=1)
            mixed = (values * shares).sum(1)
        latent = self._norm(mixed, self._weight(layer, "plane.norm"))
        index = self._norm(self.linear(latent, self._weight(layer, "index.k")), self._weight(layer, "index.k_norm"))
        positions = entries * ratio
        return PlaneEntries(self._rotate(latent, positions), self._rotate(index, positions))

    def index_q(self, layer: int, rows: Projections, positions: Tensor) -> IndexQuery:
        """Return the queries with which source `layer` scores its plane's entries: sum of weight * relu(query . K)."""
        c = self.config
        query = self.linear(rows.query_latent, self._weight(layer, "index.q")).unflatten(-1, (-1, c.index_dim))
        weight = self.linear(rows.normed, self._weight(layer, "index.weight")).float()
        return IndexQuery(self._rotate(query, positions) * c.index_dim**-0.5, weight)

    def output_rows(self, layer: int, attended: Tensor, positions: Tensor) -> Tensor:
        """Return what attention's result [n, heads, head_dim] adds to the residual stream, [n, hidden] fp32.

        V carries K's rotation, which is taken back relative to the row's own position.
        """
        upright = self._rotate(attended, -positions).flatten(1).to(self._weight(layer, "out").dtype)
        return self.linear(upright, self._weight(layer, "out")).float()

    def ffn_rows(self, layer: int, hidden: Tensor) -> Tensor:
        """Return what the feed-forward adds to rows [n, hidden] of the residual stream, fp32."""
        normed = self._norm(hidden, self._weight(layer, "ffn_norm"))
        out = self.linear(_swiglu(self.linear(normed, self._weight(layer, "ffn.up"))), self._weight(layer, "ffn.down"))
        if layer in self.config.dense_layers:
            return out.float()
        # A few small experts: computing them all and multiplying by zero costs less than sorting rows by expert, and
        # no row's arithmetic depends on where its neighbours go.
        inner = _swiglu(self.linear(normed, self._weight(layer, "experts.up")))
        gates = self.route(layer, normed).to(inner.dtype).unsqueeze(-1)
        inner = (inner.unflatten(-1, (self.config.experts, -1)) * gates).flatten(-2)
        return out.float() + self.linear(inner, self._weight(layer, "experts.down")).float()

    def route(self, layer: int, normed: Tensor) -> Tensor:
        """Return the experts' gates [n, experts], fp32, 0 for those not chosen.

        The bias, which balances the experts' load in training, takes part in the choice and not in the gate.
        """
        scores = torch.sigmoid(self.linear(normed, self._weight(layer, "router")).float())
        chosen = (scores.detach() + self._weight(layer, "router_bias").float()).topk(self.config.active_experts).indices
        return scores * torch.zeros_like(scores).scatter_(-1, chosen, 1.0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size], fp32, of rows [n, hidden] of the residual stream after the last layer."""
        return self.linear(self._norm(hidden, self.weights["norm"]), self.weights["head"]).float()

    def sink(self, layer: int) -> Tensor:
        """Return the attention sinks [heads], fp32."""
        return self._weight(layer, "sink").float()

    def _weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"layers.{layer}.{name}"]

    def _norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return RMSNorm over the last dimension, computed in fp32, in the weights' dtype."""
        x = x.float()
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps)
        dtype = self.weights["norm"].dtype
        return normed.to(dtype) if weight is None else (normed * weight.float()).to(dtype)
    def _rotate(self, x, positions):
        from duokv.engine.training import rotate
        return rotate(x, positions, self.config)


def ngram_rows(tokens: Tensor, rows: int) -> Tensor:
    """Return the table rows [n, orders] of the n-grams that end at each row of token ids [n, LOOK_BACK + 1].

    A multiply-xor hash, modulo `rows` and offset by order; ids of -1 hash as a token of their own.
    """
    mixed = (tokens.long() + 1) * torch.tensor(_HASH_FACTORS, device=tokens.device)
    out = []
    total = mixed[:, LOOK_BACK]
    for i, order in enumerate(NGRAM_ORDERS):
        total = total ^ (mixed[:, LOOK_BACK + 1 - order] << (order - 1))
        out.append(((total ^ (total >> 15)) % rows) + i * rows)
    return torch.stack(out, dim=1)


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return functional.silu(gate) * value
