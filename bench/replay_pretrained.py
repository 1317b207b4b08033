"""Replay measured on a pretrained hybrid: a local model of sliding-window and full-attention layers.

The full layers' keys and values of a hit are kept, as Block KV is; the sliding layers' are dropped and replayed.
Any causal model of the `transformers` library whose configuration names its `layer_types` will do (Gemma 3, for one).
Attention is computed here, through that library's registry of attention functions, so that it can be handed a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from duokv.bench.replay_measure import EXACT, SCORED, Case, Scored, score
from duokv.kvstore.errors import UsageError
from duokv.kvstore.keys import BLOCK_TOKENS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NAME = "duokv_replay"
_SLIDING, _FULL = "sliding_attention", "full_attention"

KeysValues = tuple[Tensor, Tensor]
"""Of one layer: two of [1, heads, tokens, dim]."""


class _AttentionLayer(Protocol):
    layer_idx: int


@dataclass(slots=True)
class _Rows:
    """Rows [start, end) on their way through the layers, on top of a hit of `hit` tokens, at least `start`.

    windows: per layer, the tokens a row sees, None for all. held: of full layers, the hit's. made: the same with the
    rows' own after it, filled in by the pass.
    """

    start: int
    end: int
    hit: int
    windows: Sequence[int | None]
    held: dict[int, KeysValues]
    made: dict[int, KeysValues] = field(default_factory=dict)

    def keys_values(self, layer: int, own: KeysValues) -> KeysValues:
        """What the rows attend to: in a sliding layer their own, in a full one the hit's and their own after it."""
        if self.windows[layer] is not None:
            return own
        new = self.hit - self.start
        held = self.held.get(layer)
        joined = own if held is None else (_join(held[0], own[0], self.hit, new), _join(held[1], own[1], self.hit, new))
        self.made[layer] = joined
        return joined

    def mask(self, layer: int) -> Tensor:
        """Which of these each row sees: bool [rows, keys]."""
        window = self.windows[layer]
        rows = torch.arange(self.start, self.end).unsqueeze(1)
        keys = torch.arange(0 if window is None else self.start, self.end)
        seen = keys <= rows
        return seen if window is None else seen & (keys > rows - window)


def _join(held: Tensor, own: Tensor, hit: int, new: int) -> Tensor:
    return torch.cat([held[:, :, :hit], own[:, :, new:]], dim=2)


def _attend(
    module: _AttentionLayer, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    duokv_rows: _Rows, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function as `transformers` calls it; returns [1, rows, heads, dim]."""
    if softcap is not None or s_aux is not None:
        raise UsageError("pretrained model with capped logits or attention sinks: not measured; give another")
    keys, values = duokv_rows.keys_values(module.layer_idx, (key, value))
    mask = duokv_rows.mask(module.layer_idx)
    out = functional.scaled_dot_product_attention(query, keys, values, mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


class Pretrained:
    """A model and its tokenizer. Read only, so safe from any thread.

    shape: its layers, for people. window: of its sliding layers. trained_context: its longest position.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        config = model.config.get_text_config()
        kinds = list(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if set(kinds) != {_SLIDING, _FULL} or not window:
            raise UsageError(f"{name}: its layers are {sorted(set(kinds))}; give a model of sliding and full ones")
        self._model = model
        self._tokenizer = tokenizer
        self.window = int(window)
        self.windows = [self.window if kind == _SLIDING else None for kind in kinds]
        self.trained_context = int(config.max_position_embeddings)
        sliding = kinds.count(_SLIDING)
        self.shape = f"{sliding} sliding layers of {self.window} tokens, {len(kinds) - sliding} full"
        self.exact_rows = sliding * self.window

    @classmethod
    def load(cls, folder: Path) -> Pretrained:
        """Load what `save_pretrained` wrote to `folder`; nothing is downloaded. UsageError if it cannot be used."""
        try:
            from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise UsageError(f"{folder}: needs transformers ({error}); pip install 'duokv[pretrained]'") from error
        AttentionInterface.register(_NAME, _attend)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, attn_implementation=_NAME, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"{folder}: not a pretrained model ({reason}); give a folder of config, weights, tokenizer"
            ) from error
        model.train(False)
        return cls(model, tokenizer, folder.name)

    def texts(self, text: str, context: int, most: int) -> list[Tensor]:
        """Cut up to `most` texts of `context` + 1 tokens, a start token first if there is one. UsageError if none."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        first = [] if self._tokenizer.bos_token_id is None else [self._tokenizer.bos_token_id]
        step = context + 1 - len(first)
        if context <= 2 * BLOCK_TOKENS + SCORED or context > self.trained_context or len(ids) < step:
            raise UsageError(
                f"--context {context}: give more than {2 * BLOCK_TOKENS + SCORED}, at most {self.trained_context} "
                f"positions of the model and at most the text's {len(ids)} tokens"
            )
        starts = range(0, len(ids) - step + 1, step)
        return [torch.tensor(first + ids[start : start + step]) for start in starts][:most]

    def bytes_per_token(self, texts: Sequence[Tensor]) -> float:
        """Mean bytes of the tokens that are scored."""
        decoded = "".join(str(self._tokenizer.decode(text[-SCORED:].tolist())) for text in texts)
        return len(decoded.encode()) / (SCORED * len(texts))

    def fits(self, case: Case, context: int) -> bool:
        """Whether a case asks for no more than a hit has."""
        hit = context - SCORED
        if case.kind == "earlier":
            return (int(case.amount) + 1) * BLOCK_TOKENS <= hit
        return case.amount == EXACT or int(case.amount) < hit

    def subject(self, tokens: Tensor) -> PretrainedSubject:
        """Run a text of [L + 1] tokens cold."""
        return PretrainedSubject(self, tokens)

    def run(
        self, tokens: Tensor, start: int, hit: int, held: dict[int, KeysValues]
    ) -> tuple[Tensor, dict[int, KeysValues]]:
        """Compute rows [start, L) of tokens [L]; return their logits [rows, vocabulary] and what full layers hold."""
        rows = _Rows(start, len(tokens), hit, self.windows, held)
        ids, positions = tokens[start:].unsqueeze(0), torch.arange(start, len(tokens)).unsqueeze(0)
        out = self._model(input_ids=ids, position_ids=positions, use_cache=False, duokv_rows=rows)
        return out.logits[0].float(), rows.made


class PretrainedSubject:
    """A text and its replays; cases are "replay" and "earlier", as there is one stack of layers only."""

    def __init__(self, model: Pretrained, tokens: Tensor) -> None:
        self._model = model
        self._rows, self._targets = tokens[:-1], tokens[1:][-SCORED:]
        self._hit = len(self._rows) - SCORED
        self._cold, self._held = model.run(self._rows, 0, 0, {})

    def run(self, case: Case) -> Scored:
        """Carry a case out; ValueError for a kind it has not."""
        if case.kind == "replay":
            rows = self._model.exact_rows if case.amount == EXACT else int(case.amount)
            return score(self._cold[-SCORED:], self._replay(rows, self._held), self._targets)
        if case.kind == "earlier":
            held = self._held
            for hit in range(self._hit - int(case.amount) * BLOCK_TOKENS, self._hit, BLOCK_TOKENS):
                _, held = self._model.run(self._rows[: hit + BLOCK_TOKENS], hit - BLOCK_TOKENS, hit, held)
            return score(self._cold[-SCORED:], self._replay(BLOCK_TOKENS, held), self._targets)
        raise ValueError(f"case {case.kind!r} needs an encoder and a decoder; give 'replay' or 'earlier'")

    def _replay(self, rows: int, held: dict[int, KeysValues]) -> Tensor:
        logits, _ = self._model.run(self._rows, max(self._hit - rows, 0), self._hit, held)
        return logits[-SCORED:]
