"""The model: its weights and the row-wise pieces of each layer.

A row is one token's state at one layer. Every piece takes any rows, in any order, with their absolute positions, and
computes each from itself alone: nothing crosses rows but attention and the n-gram look-back, whose inputs are
arguments. Run in tiles of a fixed number of rows, as `engine.forward` does, a text computed in chunks, or from a
restored prefix, is bit-identical to one computed at once.

The residual stream is fp32; what enters a matrix is in the weights' dtype. Weights are only read, so one model serves
any number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from duokv.engine.config import LOOK_BACK, NGRAM_ORDERS, ModelConfig
from duokv.kernels.reference import apply_rope, compress
from duokv.kernels.rows import linear

_HASH_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


class SavedTensors(Protocol):
    """What a hand-written gradient keeps between its two directions: torch's context, which it types only in part."""

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """What `save_for_backward` kept."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors."""


class Projections(NamedTuple):
    """What a layer's attention makes of n rows.

    normed: [n, hidden], input of the indexer. query_latent: [n, q_rank]. query: [n, heads, head_dim], rotated.
    latent: [n, head_dim], the row's own K and V, rotated: what the window stores.
    """

    normed: Tensor
    query_latent: Tensor
    query: Tensor
    latent: Tensor


class PlaneEntries(NamedTuple):
    """m entries of a plane: compressed KV [m, head_dim] and indexer K [m, index_dim], both rotated, not yet records."""

    latent: Tensor
    index_k: Tensor


class IndexQuery(NamedTuple):
    """Indexer queries [n, index_heads, index_dim], rotated and scaled, and their heads' weights [n, index_heads]."""

    query: Tensor
    weight: Tensor


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration, its weights named as in `parameter_shapes`, and the rotations of the positions it is used at.

    rope: `kernels.reference.rope_table` of `config.rope_dim` dimensions; its length bounds the positions.
    """

    config: ModelConfig
    weights: Mapping[str, Tensor]
    rope: Tensor

    def embed_rows(self, tokens: Tensor) -> Tensor:
        """Return the residual stream [n, hidden], fp32, that token ids [n] enter the first layer with."""
        return functional.embedding(tokens, self.weights["embed"]).float()

    def engram_rows(self, layer: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return what n-grams add to the residual stream [n, hidden] before `layer`'s attention; fp32.

        tokens: [n, LOOK_BACK + 1], each row its token id last and the ones before it, -1 before the text's start.
        """
        hashes = ngram_hashes(tokens, self.config.engram_rows)
        grams = functional.embedding(hashes, self._weight(layer, "engram.table")).flatten(1)
        key = self._norm(linear(grams, self._weight(layer, "engram.key")))
        query = self._norm(hidden, self._weight(layer, "engram.norm"))
        gate = torch.sigmoid((key * query).float().sum(-1, keepdim=True) * self.config.hidden**-0.5)
        return gate * linear(grams, self._weight(layer, "engram.value")).float()

    def qkv_rows(self, layer: int, hidden: Tensor, positions: Tensor) -> Projections:
        """Project rows [n, hidden] of the residual stream at positions [n] for `layer`'s attention."""
        c = self.config
        normed = self._norm(hidden, self._weight(layer, "attn_norm"))
        query_latent = self._norm(linear(normed, self._weight(layer, "q_down")), self._weight(layer, "q_norm"))
        query = self._norm(
            torch.unflatten(linear(query_latent, self._weight(layer, "q_up")), -1, (c.heads, c.head_dim))
        )
        latent = self._norm(linear(normed, self._weight(layer, "kv")), self._weight(layer, "kv_norm"))
        rope = self.rope[positions]
        return Projections(normed, query_latent, apply_rope(query, rope.unsqueeze(1)), apply_rope(latent, rope))

    def plane_rows(self, layer: int, hidden: Tensor) -> Tensor:
        """Return what the compressor takes of rows [n, hidden] of the residual stream at an owner of a plane.

        [n, width]: a value per dimension and, above ratio 1, a gate; what is kept of a row while its entry is pending.
        """
        normed = self._norm(hidden, self._weight(layer, "attn_norm"))
        values = linear(normed, self._weight(layer, "plane.kv"))
        if self.config.table.ratios[layer] == 1:
            return values
        return torch.cat([values, linear(normed, self._weight(layer, "plane.gate"))], dim=-1)

    def compress(self, layer: int, rows: Tensor, entries: Tensor) -> PlaneEntries:
        """Make the plane's entries [m], by number, of their tokens' `plane_rows` [m, ratio, width].

        An entry is the mean of its tokens' values, weighted in each dimension by a softmax of their gates, and has the
        position of its first token. The indexer's K is taken from the compressed KV.
        """
        ratio = self.config.table.ratios[layer]
        values, gates = rows.chunk(2, dim=-1) if ratio > 1 else (rows, rows)
        bias = self._weight(layer, "plane.bias") if ratio > 1 else rows.new_zeros(1)
        mixed = compress(values, gates, bias)
        latent = self._norm(mixed, self._weight(layer, "plane.norm"))
        index = self._norm(linear(latent, self._weight(layer, "index.k")), self._weight(layer, "index.k_norm"))
        rope = self.rope[entries * ratio]
        return PlaneEntries(apply_rope(latent, rope), apply_rope(index, rope))

    def index_q(self, layer: int, rows: Projections, positions: Tensor) -> IndexQuery:
        """Return the queries with which source `layer` scores its plane's entries: sum of weight * relu(query . K)."""
        dim = self.config.index_dim
        query = torch.unflatten(linear(rows.query_latent, self._weight(layer, "index.q")), -1, (-1, dim))
        weight = linear(rows.normed, self._weight(layer, "index.weight")).float()
        return IndexQuery(apply_rope(query * dim**-0.5, self.rope[positions].unsqueeze(1)), weight)

    def output_rows(self, layer: int, attended: Tensor, positions: Tensor) -> Tensor:
        """Return what attention's result [n, heads, head_dim] adds to the residual stream, [n, hidden] fp32.

        V carries K's rotation; what is left after turning back is relative to the row's own position.
        """
        weight = self._weight(layer, "out")
        upright = apply_rope(attended.to(weight.dtype), self.rope[positions].unsqueeze(1), inverse=True)
        return linear(upright.flatten(1), weight).float()

    def ffn_rows(self, layer: int, hidden: Tensor) -> Tensor:
        """Return what the feed-forward adds to rows [n, hidden] of the residual stream, fp32."""
        normed = self._norm(hidden, self._weight(layer, "ffn_norm"))
        out = linear(_swiglu(linear(normed, self._weight(layer, "ffn.up"))), self._weight(layer, "ffn.down")).float()
        if layer in self.config.dense_layers:
            return out
        # A few small experts: computing them all and multiplying by zero costs less than sorting rows by expert, and
        # no row's arithmetic depends on where its neighbours go.
        inner = _swiglu(linear(normed, self._weight(layer, "experts.up")))
        gates = self._route(layer, normed).to(inner.dtype).unsqueeze(-1)
        inner = (torch.unflatten(inner, -1, (self.config.experts, -1)) * gates).flatten(-2)
        return out + linear(inner, self._weight(layer, "experts.down")).float()

    def expert_gates(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the gates [n, experts], fp32, of rows [n, hidden] of the residual stream, 0 for experts not chosen."""
        return self._route(layer, self._norm(hidden, self._weight(layer, "ffn_norm")))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, vocab_size], fp32, of rows [n, hidden] of the residual stream after the last layer."""
        return linear(self._norm(hidden, self.weights["norm"]), self.weights["head"]).float()

    def sink(self, layer: int) -> Tensor:
        """Return the attention sinks [heads], fp32."""
        return self._weight(layer, "sink").float()

    def _route(self, layer: int, normed: Tensor) -> Tensor:
        """The bias, which balances the experts' load in training, takes part in the choice and not in the gate."""
        scores = torch.sigmoid(linear(normed, self._weight(layer, "router")).float())
        biased = scores.detach() + self._weight(layer, "router_bias").float()
        chosen = biased.topk(self.config.active_experts, dim=-1).indices
        return scores * torch.zeros_like(scores).scatter_(-1, chosen, 1.0)

    def _weight(self, layer: int, name: str) -> Tensor:
        return self.weights[f"layers.{layer}.{name}"]

    def _norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return RMSNorm over the last dimension, computed in fp32, in the weights' dtype."""
        eps, dtype = self.config.norm_eps, self.weights["norm"].dtype
        normed: Tensor
        if torch.is_grad_enabled():
            normed = _RmsNorm.apply(x, eps, dtype)  # type: ignore[no-untyped-call]
        else:
            normed, _ = _rms_norm(x, eps, dtype)
        return normed if weight is None else normed * weight


def _rms_norm(x: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x over its root mean square, and the inverse of that."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = torch.rsqrt(length.square() / x.shape[-1] + eps)
    return (x * inverse).to(dtype), inverse


class _RmsNorm(torch.autograd.Function):
    """Written out because it is a large part of training, and autograd would pass over the rows far more often."""

    @staticmethod
    def forward(ctx: SavedTensors, x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        out, inverse = _rms_norm(x, eps, dtype)
        ctx.save_for_backward(out, inverse)
        return out

    @staticmethod
    def backward(ctx: SavedTensors, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        out, inverse = ctx.saved_tensors
        along = (grad * out).mean(-1, keepdim=True, dtype=torch.float32)
        return torch.addcmul(grad, out, along.to(grad.dtype), value=-1) * inverse, None, None


def ngram_hashes(tokens: Tensor, rows: int) -> Tensor:
    """Return table rows [n, NGRAM_LOOKUPS] of the n-grams of rows of token ids [n, LOOK_BACK + 1]; -1 is an id too.

    A multiply-xor hash, modulo `rows` and offset by order. An n-gram has the same row where it ends with a row's own
    token and where it ends with the one before: what followed it earlier can then be found by what precedes it.
    """
    ids = tokens.to(torch.int64) + 1
    hashes = []
    for end in (LOOK_BACK, LOOK_BACK - 1):
        mixed = torch.zeros_like(ids[:, 0])
        for distance in range(end + 1):
            mixed = mixed ^ (ids[:, end - distance] * _HASH_FACTORS[distance])
            if distance + 1 in NGRAM_ORDERS:
                table = NGRAM_ORDERS.index(distance + 1) * rows
                hashes.append((mixed ^ (mixed >> 15)) % rows + table)
    return torch.stack(hashes, dim=1)


def _swiglu(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return functional.silu(gate) * value
