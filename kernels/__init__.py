"""Tensor kernels: record formats, copies, attention. They import none of the other packages."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from duokv.kernels.mla import why_not_flash_mla
from duokv.kernels.moe import why_not_deep_ep

__all__ = ["Choice", "pick"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which kernels serve a device.

    attention: what `mla.attend_records` may use (`flash=choice.attention == "flash_mla"`).
    exchange: `moe.DeepEpExchange` or `moe.LocalExchange`.
    movers: `triton_kernels` or, in plain torch, `copy` and `formats`.
    reason: one line for people: what was chosen, and why not the faster one.
    """

    attention: Literal["flash_mla", "reference"]
    exchange: Literal["deep_ep", "local"]
    movers: Literal["triton", "torch"]
    reason: str


def pick(device: torch.device | str, *, ranks: int = 1) -> Choice:
    """Choose the fastest kernels that work on `device` for an engine of `ranks` processes.

    Imports the optional packages to find out whether they load, and never fails for want of one.
    """
    device = torch.device(device)
    no_attention = why_not_flash_mla(device)
    no_exchange = why_not_deep_ep(device, ranks)
    no_movers = _why_not_triton(device)
    attention: Literal["flash_mla", "reference"] = "reference" if no_attention else "flash_mla"
    exchange: Literal["deep_ep", "local"] = "local" if no_exchange else "deep_ep"
    movers: Literal["triton", "torch"] = "torch" if no_movers else "triton"
    parts = (("attention", attention, no_attention), ("exchange", exchange, no_exchange), ("movers", movers, no_movers))
    said = "; ".join(f"{what} {choice}{f' ({why})' if why else ''}" for what, choice, why in parts)
    return Choice(attention, exchange, movers, f"{device}: {said}")


def _why_not_triton(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type} is no CUDA device"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"
