"""The Muon optimiser: momentum whose update is made orthogonal (K. Jordan and others, 2024)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class Muon:
    """Updates matrices in place, those of one shape together.

    matrices: weights by name, changed by every step. blocks: the independent matrices that a weight is made of, as
    views. Not thread-safe.
    """

    def __init__(self, matrices: Mapping[str, Tensor], blocks: Callable[[str, Tensor], tuple[Tensor, ...]]) -> None:
        self.matrices = matrices
        self.momentum = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}
        self._blocks = blocks

    def step(self, grads: Mapping[str, Tensor], *, rate: float, momentum: float) -> None:
        """Move every matrix by `rate` against its Nesterov momentum."""
        groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for name, matrix in self.matrices.items():
            average = self.momentum[name].lerp_(grads[name], 1 - momentum)
            ahead = grads[name].lerp(average, momentum)
            for block, update in zip(self._blocks(name, matrix), self._blocks(name, ahead), strict=True):
                groups.setdefault(tuple(block.shape), []).append((block, update))
        for (rows, columns), pairs in groups.items():
            scale = rate * max(1.0, rows / columns) ** 0.5
            for (block, _), update in zip(pairs, orthogonal(torch.stack([update for _, update in pairs])), strict=True):
                block.sub_(update, alpha=scale)


def orthogonal(stack: Tensor) -> Tensor:
    """Return matrices [n, rows, columns] with singular values brought near 1, fp32, by five Newton-Schulz steps."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    scaled: Tensor = x.transpose(1, 2) if tall else x
    return scaled.float()
