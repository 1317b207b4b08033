"""The replay report: its JSON, its Markdown and plots, another model than ours, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from duokv.bench import replay_cost  # noqa: E402
from duokv.bench.replay_cost import as_json, main  # noqa: E402
from duokv.bench.replay_measure import EXACT, Case, Comparison  # noqa: E402
from duokv.bench.replay_report import ReplayCost, write_report  # noqa: E402
from duokv.bench.replay_time import WAYS, FirstToken  # noqa: E402
from duokv.kvstore.errors import UsageError  # noqa: E402


def keys(value: object) -> object:
    """The shape of a JSON value."""
    return {key: keys(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value).__name__


SPANS = {"0": "float", "64": "float", "128": "float", "exact": "float"}
GROUPS = {"span": SPANS, "earlier_replays": {"1": "float", "16": "float"}}
SHAPE = {
    "bits_per_byte": {"cold": "float", **GROUPS},
    "greedy_agreement": GROUPS,
    "kl_bits": GROUPS,
    "exact_bit_equal": "bool",
}


def test_the_quick_figures_of_the_shipped_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay_cost, "_QUICK_TEXTS", 2)
    assert main(["--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert keys(found) == SHAPE
    bits, kl = found["bits_per_byte"], found["kl_bits"]["span"]
    assert found["exact_bit_equal"]
    assert bits["span"]["exact"] == bits["cold"] < 2.5
    assert kl["0"] > kl["64"] > kl["128"] > abs(kl["exact"])
    assert found["greedy_agreement"]["span"]["exact"] == 1.0
    assert found["kl_bits"]["earlier_replays"]["16"] > 0


def comparison(kl: float) -> Comparison:
    return Comparison(1.5, 1.5 + kl, kl, 0.001, kl, 0.9, kl == 0, 3)


COST = ReplayCost(
    model="toy",
    context=4096,
    trained_context=4096,
    bytes_per_token=2.0,
    found={
        4096: {
            **{Case("replay", span): comparison(0.1 / (1 + span)) for span in (0, 128)},
            Case("replay", EXACT): comparison(0.0),
            Case("encoder", 128): comparison(0.03),
            Case("earlier", 1): comparison(0.01),
            Case("earlier", 16): comparison(0.02),
        },
        16384: {Case("replay", 128): comparison(0.2), Case("replay", EXACT): comparison(0.0)},
    },
    first_token={way: FirstToken(8192, 1000.0, 1.0) for way in WAYS},
    joined_above=8192,
    command="python -m duokv.bench.replay_cost",
)


def test_the_report_says_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "REPLAY.md"
    write_report(path, COST)
    text = path.read_text()
    assert "adds +0.0004 bits per byte, within the 0.001 aimed at" in text
    assert "## Context of 16,384 tokens, beyond the trained length\n\nThese texts are joined" in text
    assert "## Context of 4,096 tokens\n" in text
    assert "| exact: a window per layer | 0.7500 | +0.0000 |" in text
    assert "An exact replay equals the cold run, made from row 0, bit for bit on every text." in text
    assert "Made by `python -m duokv.bench.replay_cost` on" in text
    assert "![plots](REPLAY.svg)" in text
    svg = (tmp_path / "REPLAY.svg").read_bytes()
    assert svg.startswith(b"<?xml")
    write_report(path, COST)
    assert (tmp_path / "REPLAY.svg").read_bytes() == svg


def test_json_is_per_byte_whatever_a_token_is() -> None:
    found = as_json(COST)
    assert isinstance(found["bits_per_byte"], dict)
    assert found["bits_per_byte"]["cold"] == 0.75
    assert found["bits_per_byte"]["earlier_replays"] == {"1": 0.755, "16": 0.76}


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A hybrid with random weights and a byte tokenizer, saved as a user's would be."""
    transformers = pytest.importorskip("transformers", reason="pip install 'duokv[pretrained]'")
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, sliding_window=64, max_position_embeddings=2048,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_pretrained_model_is_measured(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay_cost, "_QUICK_TEXTS", 1)
    assert main(["--model", str(pretrained), "--context", "1024", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kl = found["kl_bits"]["span"]
    assert kl["0"] > kl["64"] > kl["128"] > abs(kl["exact"])
    assert abs(kl["exact"]) < 1e-6
    assert list(found["kl_bits"]["earlier_replays"]) == ["1"]  # there is no room for 16


def test_a_pretrained_cold_run_is_the_library_s_own(pretrained: Path) -> None:
    from duokv.bench.replay_pretrained import Pretrained

    transformers = pytest.importorskip("transformers")
    model = Pretrained.load(pretrained)
    (tokens,) = model.texts("some text, " * 200, 1024, 1)
    with torch.inference_mode():
        logits, _ = model.run(tokens, 0, 0, {})
        own = transformers.AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
        assert torch.allclose(logits, own(tokens.unsqueeze(0)).logits[0], atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "missing"], "cannot be read"),
        (["--model", "."], "not a pretrained model"),
        (["--model", "{hybrid}", "--context", "100"], "give more than 512"),
        (["--model", "{hybrid}", "--context", "4096"], "at most 2048 positions"),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    pretrained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    reason: str,
) -> None:
    (pretrained / "empty").mkdir()
    monkeypatch.chdir(pretrained / "empty")
    assert main([argument.format(hybrid=pretrained) for argument in arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("replay_cost: ")
    assert reason in error


def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name a file in a folder of yours"):
        write_report(tmp_path / "missing" / "REPLAY.md", COST)
