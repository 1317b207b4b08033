"""kvctl simulate: what a trace would have hit, by the product's own code under a virtual clock."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import typer

from duokv.bench.cache_hit import SimOptions, SimReport, Simulation, parse_keep
from duokv.bench.generator import generate
from duokv.bench.workload import TraceRequest, read_trace, trace_class
from duokv.kvstore.errors import UsageError, nearest
from duokv.kvstore.policy import ClassRule, Policy
from duokv.kvstore.units import format_bytes, format_duration, parse_bytes, parse_count, parse_duration
from duokv.tools.commands_common import JsonOption, choice, facts, progress, show

_GENERATED_DAYS = 14.0
_GENERATED_A_DAY = 500.0
_KEEP = "prompt-and-output-end+hit-boundary"
_PAYLOADS: tuple[Literal["none", "real"], ...] = ("none", "real")
_KEYS: tuple[Literal["memo", "hashed"], ...] = ("memo", "hashed")


def simulate(  # noqa: PLR0913, PLR0917  one argument an option
    trace: Annotated[
        Path | None,
        typer.Argument(metavar="TRACE", help="Requests as JSON lines, gzip if named .gz; two generated weeks without."),
    ] = None,
    traffic: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="Class of all requests; default by the trace's name.")
    ] = None,
    ttl: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DURATION|unbounded", help="Life of a class, new or standard; may repeat."),
    ] = None,
    capacity_blocks: Annotated[str, typer.Option(metavar="N|unbounded", help="Blocks the store holds.")] = "unbounded",
    capacity: Annotated[
        str, typer.Option(metavar="BYTES|unbounded", help="Physical bytes the store takes, as in 10GiB.")
    ] = "unbounded",
    swa_expiry: Annotated[str, typer.Option(metavar="DURATION|unbounded", help="Life of an SWA state.")] = "180s",
    swa_bytes: Annotated[str, typer.Option(metavar="BYTES|unbounded", help="Memory for SWA states.")] = "unbounded",
    swa_keep: Annotated[str, typer.Option(metavar="WHERE", help="Where SWA states are kept.")] = _KEEP,
    keep_rows: Annotated[int, typer.Option(min=1, help="Rows the decoder computes at every prefill.")] = 140,
    payload: Annotated[
        str, typer.Option(metavar="none|real", help="Keep no bytes, or write, read and verify them.")
    ] = "none",
    keys: Annotated[
        str, typer.Option(metavar="memo|hashed", help="Hash a block once, or in every prompt as engines do.")
    ] = "memo",
    geometry: Annotated[str, typer.Option(metavar="NAME", help="Sizes of blocks and states.")] = "deepseek-v4.1-flash",
    limit: Annotated[str, typer.Option(metavar="N|unbounded", help="Requests to run.")] = "unbounded",
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Run a trace through the store and the planner: hit rates, replays, bytes and evictions."""
    named = "agent" if trace is None else trace_class(trace)
    place, boundary = parse_keep(swa_keep)
    policy = _policy(ttl or [])
    options = SimOptions(
        traffic=_class(traffic or named, policy),
        policy=policy,
        geometry=geometry,
        capacity_blocks=None if capacity_blocks == "unbounded" else parse_count(capacity_blocks),
        capacity=_size(capacity),
        swa_expiry_s=parse_duration(swa_expiry),
        swa_bytes=_size(swa_bytes),
        swa_keep=place,
        keep_hit_boundary=boundary,
        keep_rows=keep_rows,
        payload=choice("--payload", payload, _PAYLOADS),
        keys=choice("--keys", keys, _KEYS),
    )
    simulation = Simulation(options)
    most = None if limit == "unbounded" else parse_count(limit)
    name, requests = _requests(trace, options.traffic, most)
    with progress(name) as advance:
        for done, _ in enumerate(simulation.run(requests), 1):
            advance(done, len(requests))
    report = simulation.report
    settings = {"trace": name, "class": options.traffic, "geometry": geometry, "swa_keep": swa_keep}
    if not show(settings | report.as_json(), as_json=as_json):
        _print(options, report)


def _requests(trace: Path | None, traffic: str, limit: int | None) -> tuple[str, list[TraceRequest]]:
    """A trace's name and requests; without one, generated traffic of the kind nearest to the class."""
    if trace is not None:
        return trace.name, list(read_trace(trace, limit=limit))
    kind = "agent" if traffic == "agent" else "rag" if traffic == "rag" else "chat"
    generated = generate(kind, seed=0, days=_GENERATED_DAYS, requests_per_day=_GENERATED_A_DAY)
    return f"generated {kind} traffic", list(islice(generated, limit))


def _policy(ttls: list[str]) -> Policy:
    policy = Policy.standard()
    for text in ttls:
        name, equals, duration = text.partition("=")
        if not equals:
            raise UsageError(f"--ttl {text!r} names no duration; write it as in 'agent=3d' or 'agent=unbounded'")
        policy = policy.with_rule(name, ClassRule(parse_duration(duration)))
    return policy.numbered()


def _class(name: str, policy: Policy) -> str:
    if name not in policy.classes:
        raise UsageError(f"--class {name!r} has no life; {nearest(name, policy.classes)}; --ttl {name}=3d gives it one")
    return name


def _size(text: str) -> int | None:
    if text == "unbounded":
        return None
    return int(text) if text.isdecimal() else parse_bytes(text)


def _print(options: SimOptions, report: SimReport) -> None:
    life = options.policy.classes[options.traffic].ttl_s
    rates = report.as_json()
    total = max(1, report.input_tokens)
    kept = (
        "unbounded" if options.swa_expiry_s is None else f"for {format_duration(options.swa_expiry_s)} after last use"
    )
    facts(
        (
            ("class", f"{options.traffic}, blocks live {format_duration(life)} after their last use"),
            ("states", f"SWA kept at {options.swa_keep}, {kept}"),
            ("requests", f"{report.requests:,}, {report.input_tokens:,} input tokens"),
            ("hit rate", f"{_percent(rates['token_hit_rate'])} of tokens, {_percent(rates['adopted_rate'])} adopted"),
            *(
                (name.replace("_", " "), f"{tokens:,} tokens, {100 * tokens / total:.1f} %")
                for name, tokens in report.tokens.items()
            ),
            ("replays", f"{_percent(rates['replay_share_of_hits'])} of requests with an adopted hit"),
            ("SWA alive", f"{_percent(rates['swa_alive_share'])} of requests with a hit"),
            ("amplification", f"{rates['amplification']:.2f} tokens served per token computed"),
            *((f"bytes {name}", format_bytes(size)) for name, size in report.bytes.items()),
            *((f"evicted: {reason}", f"{blocks:,} blocks") for reason, blocks in report.evictions.items()),
            ("took", f"{report.seconds:.1f} s"),
        )
    )


def _percent(rate: object) -> str:
    return f"{100 * float(str(rate)):.1f} %"
