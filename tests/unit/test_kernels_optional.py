"""What is optional may be absent, broken or too old and stops no one; what is there is called by its contract."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from duokv.kernels import mla, moe, pick, reference
from duokv.kernels.formats import RecordFormat, decode, encode, index_fp4, latent_fp4, latent_fp8

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Pretend that the CUDA device has a capability."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    return pretend


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def break_import(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Have `import name` raise, as a package does whose libraries are missing."""
    monkeypatch.delitem(sys.modules, name, raising=False)

    class Finder:
        @staticmethod
        def find_spec(fullname: str, path: object = None, target: object = None) -> None:
            if fullname == name:
                raise error

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


def test_pick_on_a_cpu_says_so_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_mla", "deep_ep", "triton"):
        break_import(monkeypatch, name, AssertionError("imported"))
    choice = pick("cpu", ranks=4)
    assert (choice.attention, choice.exchange, choice.movers) == ("reference", "local", "torch")
    assert choice.reason.startswith("cpu: attention reference (cpu is no CUDA device); exchange local (")
    assert "\n" not in choice.reason


def test_pick_takes_what_works(monkeypatch: pytest.MonkeyPatch, device: Callable[[int, int], None]) -> None:
    device(10, 0)
    install(monkeypatch, "flash_mla")
    install(monkeypatch, "deep_ep", EPBuffer=object)
    choice = pick(CUDA, ranks=8)
    assert (choice.attention, choice.exchange) == ("flash_mla", "deep_ep")
    assert choice.reason.startswith("cuda:0: attention flash_mla; exchange deep_ep; movers ")


@pytest.mark.parametrize("error", [ImportError("no such package"), OSError("libcudart.so.13: cannot open\nmore")])
def test_a_package_that_does_not_load_is_absent(
    monkeypatch: pytest.MonkeyPatch, device: Callable[[int, int], None], error: Exception
) -> None:
    device(10, 3)
    for name in ("flash_mla", "deep_ep"):
        break_import(monkeypatch, name, error)
    choice = pick(CUDA, ranks=8)
    assert (choice.attention, choice.exchange) == ("reference", "local")
    assert choice.reason.count(str(error).splitlines()[0]) == 2
    assert "more" not in choice.reason


def test_each_kernel_asks_for_its_device(monkeypatch: pytest.MonkeyPatch, device: Callable[[int, int], None]) -> None:
    install(monkeypatch, "flash_mla")
    install(monkeypatch, "deep_ep", EPBuffer=object)
    device(9, 0)
    assert mla.why_not_flash_mla(CUDA) == "the device is not SM100 or SM103"
    assert moe.why_not_deep_ep(CUDA, 2) == ""
    assert moe.why_not_deep_ep(CUDA, 1) == "one rank has nothing to exchange"
    device(8, 0)
    assert moe.why_not_deep_ep(CUDA, 2) == "the device is older than Hopper"


def test_an_older_deep_ep_is_absent(monkeypatch: pytest.MonkeyPatch, device: Callable[[int, int], None]) -> None:
    device(9, 0)
    install(monkeypatch, "deep_ep", Buffer=object, ElasticBuffer=object)
    assert moe.why_not_deep_ep(CUDA, 2) == "deep_ep has no EPBuffer, it is older than 2.5"
    break_import(monkeypatch, "deep_ep", AssertionError("No libnccl.so found"))
    assert moe.why_not_deep_ep(CUDA, 2) == "deep_ep does not import: No libnccl.so found"


def paged(fmt: RecordFormat, pages: int, page: int, seed: int) -> tuple[Tensor, Tensor]:
    """Records in pages that are slices of larger blocks, and their latents by flat index."""
    x = torch.randn(pages * page, fmt.dim, generator=torch.Generator().manual_seed(seed))
    records = encode(x, fmt)
    blocks = torch.full((pages, page * fmt.nbytes + 96), 0xFF, dtype=torch.uint8)
    blocks[:, 32:-64] = records.view(pages, -1)
    return torch.unflatten(blocks[:, 32:-64], 1, (page, fmt.nbytes)), decode(records, fmt, torch.float32)


def test_attend_records_decodes_what_the_indices_name() -> None:
    window, window_latents = paged(latent_fp8(64), 3, 8, seed=1)
    entries, entry_latents = paged(latent_fp4(64), 5, 4, seed=2)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 3, 4, 64, generator=generator)
    window_index = torch.randint(-1, 24, (2, 3, 6), generator=generator, dtype=torch.int32)
    entry_index = torch.randint(-1, 20, (2, 3, 5), generator=generator, dtype=torch.int32)
    window_index[1, 1], entry_index[1, 1] = -1, -1
    sink = torch.randn(4, generator=generator)
    got = mla.attend_records(
        q, window, window_index, sink, scale=0.125, window_format=latent_fp8(64),
        entries=entries, entry_index=entry_index, entry_format=latent_fp4(64),
    )  # fmt: skip
    want = reference.attend(
        q, window_latents, window_index, sink, scale=0.125, entries=entry_latents, entry_index=entry_index
    )
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    alone = mla.attend_records(q, window, window_index, sink, scale=0.125, window_format=latent_fp8(64))
    assert torch.equal(alone.out, reference.attend(q, window_latents, window_index, sink, scale=0.125).out)
    with pytest.raises(ValueError, match="belong together"):
        mla.attend_records(q, window, window_index, sink, scale=1.0, window_format=latent_fp8(64), entries=entries)


def test_flash_mla_is_called_by_its_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []

    def flash_mla_with_kvcache(  # noqa: PLR0913, PLR0917  # the signature of 1.0.0
        q: Tensor,
        k_cache: Tensor,
        block_table: None,
        cache_seqlens: None,
        head_dim_v: int,
        tile_scheduler_metadata: str,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool = True,
        indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
        enable_batch_invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        calls.append(dict(locals()))
        return q, torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    install(
        monkeypatch,
        "flash_mla",
        flash_mla_with_kvcache=flash_mla_with_kvcache,
        get_mla_metadata=lambda: ("schedule", None),
    )
    window, _ = paged(latent_fp8(512), 2, 4, seed=1)
    entries, _ = paged(latent_fp4(512), 2, 4, seed=2)
    q = torch.zeros(1, 2, 64, 512, dtype=torch.bfloat16)
    index, sink = torch.zeros(1, 2, 3, dtype=torch.int64), torch.zeros(64, dtype=torch.bfloat16)

    def call(q: Tensor, window_format: RecordFormat, entry_format: RecordFormat | None) -> reference.Attention:
        return mla.attend_records(
            q, window, index, sink, scale=0.5, window_format=window_format, flash=True,
            entries=None if entry_format is None else entries, entry_index=None if entry_format is None else index,
            entry_format=entry_format,
        )  # fmt: skip

    assert call(q, latent_fp8(512), latent_fp4(512)).out is q
    (seen,) = calls
    assert cast(Tensor, seen["k_cache"]).shape == (2, 4, 1, 528)
    assert cast(Tensor, seen["extra_k_cache"]).shape == (2, 4, 1, 288)
    assert cast(Tensor, seen["indices"]).dtype == cast(Tensor, seen["extra_indices_in_kvcache"]).dtype == torch.int32
    assert cast(Tensor, seen["attn_sink"]).dtype == torch.float32
    assert (seen["head_dim_v"], seen["tile_scheduler_metadata"], seen["softmax_scale"]) == (512, "schedule", 0.5)
    assert seen["enable_batch_invariant"] is True
    call(q, latent_fp8(512), None)
    for wrong in ((q.float(), latent_fp8(512), None), (q[:, :, :8], latent_fp8(512), None), (q, latent_fp4(512), None)):
        with pytest.raises(ValueError, match="FlashMLA does not take"):
            call(*wrong)
    with pytest.raises(ValueError, match="index-fp4-128"):
        call(q, latent_fp8(512), index_fp4(128))


def test_local_exchange_sorts_by_expert_and_adds_by_choice() -> None:
    exchange = moe.LocalExchange(4)
    x = torch.tensor([[1.0], [2.0], [3.0]])
    experts = torch.tensor([[3, 0], [0, -1], [1, 3]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 9.0], [2.0, 4.0]])
    sent = exchange.dispatch(x, experts, weights)
    assert sent.rows.flatten().tolist() == [1.0, 2.0, 3.0, 1.0, 3.0]
    assert sent.weights.tolist() == [0.25, 1.0, 2.0, 0.5, 4.0]
    assert sent.counts == (2, 1, 0, 2)
    assert exchange.combine(sent.rows * sent.weights[:, None], sent).flatten().tolist() == [0.75, 2.0, 18.0]
    with pytest.raises(TypeError, match="dispatched by another exchange"):
        exchange.combine(sent.rows, moe.Dispatched(sent.rows, sent.weights, sent.counts, None))


def test_local_exchange_of_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    exchange = moe.LocalExchange(8)
    x, weights = torch.randn(50, 16, generator=generator), torch.rand(50, 3, generator=generator)
    experts = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(50)])

    def through(rows: slice) -> Tensor:
        sent = exchange.dispatch(x[rows], experts[rows], weights[rows])
        return exchange.combine(sent.rows.sin() * sent.weights[:, None], sent)

    assert torch.equal(
        through(slice(None)), torch.cat([through(slice(0, 7)), through(slice(7, 8)), through(slice(8, 50))])
    )
    assert through(slice(0, 0)).shape == (0, 16)


def test_deep_ep_is_called_by_its_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []

    class EPBuffer:
        def __init__(
            self, group: object, *, num_max_tokens_per_rank: int, hidden: int, num_topk: int, deterministic: bool
        ) -> None:
            seen.append((group, num_max_tokens_per_rank, hidden, num_topk, deterministic))

        def dispatch(
            self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor, num_experts: int, do_expand: bool
        ) -> tuple[object, ...]:
            seen.append((num_experts, do_expand))
            handle = SimpleNamespace(num_recv_tokens_per_expert_list=[2, 1])
            return x.repeat(2, 1), None, topk_weights.flatten(), handle, None

        def combine(self, x: Tensor, handle: object) -> tuple[object, ...]:
            seen.append((handle,))
            return x[:1], None, None

    install(monkeypatch, "deep_ep", EPBuffer=EPBuffer)
    group = cast(ProcessGroup, object())
    exchange = moe.DeepEpExchange(group, num_experts=16, hidden=8, num_topk=2, max_rows=128)
    sent = exchange.dispatch(torch.ones(1, 8), torch.tensor([[3, 4]]), torch.tensor([[0.5, 0.5]]))
    assert sent.counts == (2, 1)
    assert exchange.combine(sent.rows, sent).shape == (1, 8)
    assert seen == [(group, 128, 8, 2, True), (16, True), (sent.handle,)]
