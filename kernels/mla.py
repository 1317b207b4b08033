"""Attention over records: FlashMLA where it runs, else the reference.

The package `flash_mla` (FlashMLA 1.0.0) is imported in this file only, and only for a device that it may run on.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from duokv.kernels.formats import RecordFormat, decode, latent_fp4, latent_fp8
from duokv.kernels.reference import Attention, attend

_DIM = 512
_HEADS = (64, 128)


def why_not_flash_mla(device: torch.device) -> str:
    """Return why FlashMLA cannot serve `device`, in a few words; "" if it can.

    FlashMLA 1.0.0 runs on SM100 and SM103; a package that is there but does not load counts as absent.
    """
    if device.type != "cuda":
        return f"{device.type} is no CUDA device"
    if torch.cuda.get_device_capability(device)[0] != 10:
        return "the device is not SM100 or SM103"
    try:
        importlib.import_module("flash_mla")
    except (ImportError, OSError) as error:
        return f"flash_mla does not import: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return ""


def attend_records(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    sink: Tensor,
    *,
    scale: float,
    window_format: RecordFormat,
    entries: Tensor | None = None,
    entry_index: Tensor | None = None,
    entry_format: RecordFormat | None = None,
    flash: bool = False,
) -> Attention:
    """Attend to paged records of the window and of the compressed entries under one softmax: `reference.attend`.

    q: [b, s_q, h, D].
    window, entries: uint8 [pages, page, nbytes], records whole (not block-wise) and adjacent in a page; pages may be
        slices of larger blocks.
    window_index, entry_index: int32 [b, s_q, slots], page * page_size + offset, exactly -1 for none.
    flash: use FlashMLA, which wants bf16 q, D = 512, 64 or 128 heads, window records of 528 bytes and entries of 528 or
        288; ValueError for other shapes. Its results are within its tolerance of the reference, not bit-equal.

    Results do not depend on the batch in either case: FlashMLA is asked for its batch-invariant mode.
    """
    if (entries is None) != (entry_index is None) or (entries is None) != (entry_format is None):
        raise ValueError("attend_records: entries, entry_index and entry_format belong together; pass all or none")
    if flash:
        _check_flash(q, window_format, entry_format)
        return _flash(q, window, window_index, sink, scale, entries, entry_index)
    window_rows, window_at = _decode_named(window, window_index, window_format)
    if entries is None or entry_index is None or entry_format is None:
        return attend(q, window_rows, window_at, sink, scale=scale)
    entry_rows, entry_at = _decode_named(entries, entry_index, entry_format)
    return attend(q, window_rows, window_at, sink, scale=scale, entries=entry_rows, entry_index=entry_at)


def _decode_named(pages: Tensor, index: Tensor, fmt: RecordFormat) -> tuple[Tensor, Tensor]:
    """Return the latents of the records that `index` names, each decoded once, and the index into them."""
    named, places = torch.unique(index.clamp(min=0), return_inverse=True)
    records = pages[named // pages.shape[1], named % pages.shape[1]]
    return decode(records, fmt, torch.float32), places.masked_fill(index < 0, -1)


def _check_flash(q: Tensor, window_format: RecordFormat, entry_format: RecordFormat | None) -> None:
    latents = (latent_fp8(_DIM), latent_fp4(_DIM))
    fits = window_format == latents[0] and (entry_format is None or entry_format in latents)
    if not fits or q.dtype != torch.bfloat16 or q.shape[-1] != _DIM or q.shape[-2] not in _HEADS:
        raise ValueError(
            f"FlashMLA does not take {q.dtype} queries of {q.shape[-2]} heads x {q.shape[-1]} with "
            f"{window_format.tag} and {entry_format.tag if entry_format else 'no'} records; call with flash=False"
        )


def _flash(
    q: Tensor,
    window: Tensor,
    window_index: Tensor,
    sink: Tensor,
    scale: float,
    entries: Tensor | None,
    entry_index: Tensor | None,
) -> Attention:
    flash_mla = importlib.import_module("flash_mla")
    # Its schedule depends on shapes and is made on the first call with an empty one.
    schedule, _ = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        window.unsqueeze(2),
        None,
        None,
        _DIM,
        schedule,
        softmax_scale=scale,
        indices=window_index.to(torch.int32),
        attn_sink=sink.to(torch.float32),
        extra_k_cache=None if entries is None else entries.unsqueeze(2),
        extra_indices_in_kvcache=None if entry_index is None else entry_index.to(torch.int32),
        enable_batch_invariant=True,
    )
    return Attention(out, lse)
