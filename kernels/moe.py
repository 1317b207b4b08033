"""Rows to their experts and back: DeepEP between the ranks of a group, else within this process.

The package `deep_ep` (DeepEP 2.5.0) is imported in this file only, and only where it may run. An older package of that
name lacks `EPBuffer` and counts as absent.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:  # a torch built without distributed has no such module
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows for this rank's experts, one per row and expert chosen, sorted by expert.

    rows: [m, hidden]. weights: fp32 [m], the router's. counts: rows of each local expert, in order.
    handle: what `combine` needs; opaque.
    """

    rows: Tensor
    weights: Tensor
    counts: tuple[int, ...]
    handle: object


class Exchange(Protocol):
    """Moves rows to experts and back. Not thread-safe."""

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Dispatched:
        """Send rows x [n, hidden] to the experts each chose: int64 [n, k], -1 for none, with fp32 weights [n, k]."""
        ...

    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        """Return [n, hidden]: per row the sum of its experts' results `rows` [m, hidden], weights already applied."""
        ...


class _Sorted(NamedTuple):
    """Where the sorted rows came from: place = row * choices + choice."""

    rows: int
    choices: int
    places: Tensor


class LocalExchange:
    """All experts in this process, on any device.

    A row's results are added in the order of its choices, in fp32, so they depend on nothing beside it.
    """

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Dispatched:
        """Sort by expert, rows of equal expert in order."""
        n, k = experts.shape
        chosen = experts.reshape(-1)
        places = torch.where(chosen < 0, self._num_experts, chosen).argsort(stable=True)
        places = places[: int((chosen >= 0).sum())]
        counts = torch.bincount(chosen[places], minlength=self._num_experts)
        return Dispatched(x[places // k], weights.reshape(-1)[places], tuple(counts.tolist()), _Sorted(n, k, places))

    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        """Put results back in the place of their choice and add."""
        if not isinstance(sent.handle, _Sorted):
            raise TypeError("combine: these rows were dispatched by another exchange; combine them there")
        n, k, places = sent.handle
        spread = torch.zeros((n * k, rows.shape[-1]), dtype=torch.float32, device=rows.device)
        spread[places] = rows.to(torch.float32)
        by_choice = spread.view(n, k, rows.shape[-1])
        total = by_choice[:, 0].clone()
        for choice in range(1, k):
            total += by_choice[:, choice]
        return total.to(rows.dtype)


class DeepEpExchange:
    """Experts spread evenly over the ranks of a group, by DeepEP's `EPBuffer` in its expanded layout; rows are bf16."""

    def __init__(self, group: ProcessGroup, *, num_experts: int, hidden: int, num_topk: int, max_rows: int) -> None:
        deep_ep = importlib.import_module("deep_ep")
        self._num_experts = num_experts
        # deterministic: arrival order must not decide where a row stands.
        self._buffer = deep_ep.EPBuffer(
            group, num_max_tokens_per_rank=max_rows, hidden=hidden, num_topk=num_topk, deterministic=True
        )

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Dispatched:
        """Send bf16 rows; waits until all ranks have sent theirs."""
        rows, _, received, handle, _ = self._buffer.dispatch(
            x, topk_idx=experts, topk_weights=weights, num_experts=self._num_experts, do_expand=True
        )
        return Dispatched(rows, received, tuple(handle.num_recv_tokens_per_expert_list), handle)

    def combine(self, rows: Tensor, sent: Dispatched) -> Tensor:
        """Send bf16 results back; the sum's order is DeepEP's."""
        combined, _, _ = self._buffer.combine(rows, sent.handle)
        result: Tensor = combined
        return result


def why_not_deep_ep(device: torch.device, ranks: int) -> str:
    """Return why DeepEP cannot serve `ranks` processes with devices like `device`, in a few words; "" if it can."""
    if ranks < 2:
        return "one rank has nothing to exchange"
    if device.type != "cuda":
        return f"{device.type} is no CUDA device"
    if torch.cuda.get_device_capability(device)[0] < 9:
        return "the device is older than Hopper"
    try:
        deep_ep = importlib.import_module("deep_ep")
    # Importing it checks the NCCL library that torch has loaded, by assertions.
    except (ImportError, OSError, AssertionError) as error:
        return f"deep_ep does not import: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return "" if hasattr(deep_ep, "EPBuffer") else "deep_ep has no EPBuffer, it is older than 2.5"
