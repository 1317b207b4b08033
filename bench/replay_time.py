"""What a replay saves: rows computed and time to the first token, served by an engine from a store in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from duokv.bench.clock import Time
from duokv.engine import Engine, EngineConfig, RequestReport, Sampling, namespace_of
from duokv.engine.model import Model
from duokv.kvstore import StoreConfig, open_store
from duokv.kvstore.keys import BLOCK_TOKENS
from duokv.replay import Mode, ReplayPolicy

WAYS = ("cold", "SWA hit", "bounded replay", "exact replay")
"""How the same prompt is come by, one request after another."""
_EXPIRY_S = 180.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Medians of one way. rows: through the encoder. share: of the cold run's time, paired within a round."""

    rows: int
    first_token_ms: float
    share: float


def measure_first_token(
    model: Model, prompt: list[int], *, rounds: int, done: Callable[[], None]
) -> dict[str, FirstToken]:
    """Serve `prompt` in all `WAYS`, `rounds` times, each on a store of its own; `done` is called after each round."""
    served = []
    for _ in range(rounds):
        served.append(_one_round(model, prompt))
        done()
    return {
        way: FirstToken(
            rows=served[0][way].rows,
            first_token_ms=median(_ms(reports[way]) for reports in served),
            share=median(_ms(reports[way]) / _ms(reports["cold"]) for reports in served),
        )
        for way in WAYS
    }


def _one_round(model: Model, prompt: list[int]) -> dict[str, RequestReport]:
    now = Time()
    clock = now.clock()
    namespace = namespace_of(model.config, "timed")
    config = StoreConfig(swa_bytes=64 << 20, maintenance_interval_s=0, swa_expiry_s=_EXPIRY_S)
    reports = {}
    with open_store("memory://replay-cost", geometry=model.config.cache, config=config, clock=clock) as store:
        for way in WAYS:
            if way.endswith("replay"):
                now.ahead_s += 2 * _EXPIRY_S
            mode: Mode = "exact" if way == "exact replay" else "bounded"
            replay = ReplayPolicy(encoder_layers=model.config.encoder_layers, mode=mode)
            settings = EngineConfig(num_slots=len(prompt) // BLOCK_TOKENS + 2, replay=replay)
            with Engine(model, settings, store=store, clock=clock) as engine:
                (output,) = engine.generate([prompt], ns=namespace, sampling=Sampling(max_tokens=1))
            reports[way] = output.report
    return reports


def _ms(report: RequestReport) -> float:
    assert report.first_token_ms is not None
    return report.first_token_ms
