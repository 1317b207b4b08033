"""kvctl stat, ls, explain, prefix: looking at a store. Nothing is written, whoever else has it open."""

from __future__ import annotations

from typing import Annotated

import typer

from duokv.kvstore.census import ExtentView, SegmentView, State, StoreStat, list_extents, list_segments, read_stat
from duokv.kvstore.errors import UsageError
from duokv.kvstore.explain import Absent, BlockView, ClassUse, PrefixView, explain, find_prefix
from duokv.kvstore.units import format_bytes, parse_count
from duokv.tools.commands_common import (
    ConfigOption,
    GeometryOption,
    JsonOption,
    StoreArgument,
    StoreOption,
    choice,
    facts,
    lines,
    moment,
    relative,
    rule,
    show,
    table,
    target,
)
from duokv.tools.prompt_files import read_namespace, read_prompt

STATES: tuple[State, ...] = ("alive", "expired", "pinned")


def stat(
    store_argument: StoreArgument = None, store: StoreOption = None, config: ConfigOption = None,
    geometry: GeometryOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Sizes, classes, pins, policy, writers and damage of a store."""
    with target(store_argument, store, config, geometry).inspect() as view:
        found = read_stat(view)
    if not show(found, as_json=as_json):
        _print_stat(found)


def ls(
    store_argument: StoreArgument = None,
    segments: Annotated[bool, typer.Option("--segments", help="Segment files instead of extents.")] = False,
    traffic: Annotated[str | None, typer.Option("--class", metavar="NAME", help="Used by this class.")] = None,
    state: Annotated[
        str | None, typer.Option(metavar="|".join(STATES), help="With at least one such block.")
    ] = None,
    segment: Annotated[str | None, typer.Option(metavar="N", help="In this segment.")] = None,
    limit: Annotated[str, typer.Option(metavar="N|unbounded", help="Rows to show.")] = "50",
    store: StoreOption = None, config: ConfigOption = None, geometry: GeometryOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """List extents (runs of blocks that one commit stored), or segment files."""
    most = None if limit == "unbounded" else parse_count(limit)
    number = None if segment is None else parse_count(segment)
    if segments and (traffic or state):
        raise UsageError("--segments lists files, which have no class and no state; leave out --class and --state")
    chosen = None if state is None else choice("--state", state, STATES)
    with target(store_argument, store, config, geometry).inspect() as view:
        now_s = view.clock.wall()
        if segments:
            files = [file for file in list_segments(view) if number in (None, file.number)]
            if not show({"segments": files[:most], "total": len(files)}, as_json=as_json):
                _print_segments(files[:most], len(files))
            return
        extents, total = list_extents(view, traffic=traffic, state=chosen, segment=number, limit=most)
    if not show({"extents": extents, "total": total}, as_json=as_json):
        _print_extents(extents, total, now_s)


def explain_key(
    key: Annotated[str, typer.Argument(metavar="KEY", help="64 or 32 hex digits, or a beginning only one block has.")],
    store: StoreOption = None, config: ConfigOption = None, geometry: GeometryOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Why a block lives, by which class and rule, when it goes and where its bytes are. Exit 1 if it is not there."""
    with target(None, store, config, geometry).inspect() as view:
        now_s = view.clock.wall()
        found = explain(view, key)
    present = isinstance(found, BlockView)
    if not show({"present": present, "block" if present else "absent": found}, as_json=as_json):
        if isinstance(found, BlockView):
            _print_block(found, now_s)
        else:
            lines(f"{found.key} is not in the store", *(f"  {reason}" for reason in why_absent(found)))
    if not present:
        raise typer.Exit(1)


def prefix(  # noqa: PLR0913, PLR0917  one argument an option
    file: Annotated[str, typer.Argument(metavar="FILE", help="Token ids: JSON or plain numbers; '-' is stdin.")],
    model: Annotated[str | None, typer.Option(help="Namespace: model.")] = None,
    weights: Annotated[str | None, typer.Option(help="Namespace: weights revision.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Namespace: tokenizer.")] = None,
    kv_format: Annotated[str | None, typer.Option(help="Namespace: KV format.")] = None,
    layout: Annotated[str | None, typer.Option(help="Namespace: KV layout.")] = None,
    rope: Annotated[str | None, typer.Option(help="Namespace: rope settings.")] = None,
    parallel: Annotated[str | None, typer.Option(help="Namespace: parallel layout and rank.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Namespace: adapter.")] = None,
    salt: Annotated[str | None, typer.Option(metavar="HEX", help="Namespace: tenant salt.")] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Namespace as TOML or JSON; options win over it.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="End the hit at the first approximate block.")] = False,
    store: StoreOption = None, config: ConfigOption = None, geometry: GeometryOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """How much of a prompt is a hit now, and why it ends there. Nothing lives longer for having been asked about."""
    options = {
        "model": model, "weights": weights, "tokenizer": tokenizer, "kv_format": kv_format, "layout": layout,
        "rope": rope, "parallel": parallel, "adapter": adapter, "salt": salt,
    }  # fmt: skip
    named = read_namespace(namespace, {name: value for name, value in options.items() if value is not None})
    prompt = read_prompt(file)
    with target(None, store, config, geometry).inspect() as view:
        now_s = view.clock.wall()
        found = find_prefix(view, named, prompt.tokens, media=prompt.media, exact_only=exact)
        miss = None if found.miss_key is None else explain(view, found.miss_key)
    if not show({"prefix": found, "miss": miss}, as_json=as_json):
        _print_prefix(found, miss, now_s)


def why_absent(absent: Absent) -> list[str]:
    """What is known of a block that is not there, a sentence each."""
    reasons = [
        f"damaged: found on {moment(damage.found_s)} in segment {damage.segment}, slot {damage.slot}: {damage.reason}"
        for damage in absent.damage
    ]
    if absent.cut and not reasons:
        reasons.append("it was stored, and cut off its extent since: expired, evicted or damaged")
    return reasons or ["never stored, or its whole extent went: the index keeps nothing of what it let go"]


def _print_stat(found: StoreStat) -> None:
    policy = f"version {found.policy_version}, default class {found.default_class}"
    writers = ", ".join(f"{w.name} ({_state(w.alive)})" for w in found.writers)
    per_block = f", {found.index_bytes_per_block:.1f} B per block" if found.blocks else ""
    rows = [
        ("store", found.url),
        ("geometry", f"{found.geometry}: {found.payload_bytes:,} B blocks in {found.slot_bytes:,} B slots"),
        ("blocks", f"{found.blocks:,}: {found.alive:,} alive, {found.expired:,} expired, {found.pinned:,} pinned"),
        ("extents", f"{found.extents:,}"),
        ("segments", f"{found.segments:,}, {found.active_segments:,} being written"),
        (
            "physical",
            f"{format_bytes(found.physical_bytes)}: {format_bytes(found.live_bytes)} live, "
            f"{format_bytes(found.dead_bytes)} dead or reserved",
        ),
        ("index", f"{format_bytes(found.index_bytes)}{per_block}"),
        ("policy", policy if found.policy_version else "lost: nothing expires until kvctl ttl set"),
        ("writers", writers or "none"),
        ("damage", f"{found.damage:,} noted; kvctl verify names them" if found.damage else "none noted"),
    ]
    if found.doubtful is not None:
        rows.append(("DOUBT", f"the index: {found.doubtful}; run kvctl rebuild, or open the store"))
    facts(rows)
    lines("")
    classes = (
        (
            one.name if one.in_policy else f"{one.name} (removed)", rule(one.ttl_s, one.mode), f"{one.alive:,}",
            f"{one.expired:,}",
        )
        for one in found.classes
    )  # fmt: skip
    table(("class", "a block lives", ">blocks alive", ">expired"), classes)


def _print_extents(extents: list[ExtentView], total: int, now_s: float) -> None:
    rows = (
        (
            one.key[:12], f"{one.segment}:{one.slot}", str(one.chain_pos), str(one.blocks), str(one.alive), one.origin,
            one.keeper or "none", relative(one.last_use_s, now_s), _goes(one.head_until_s, now_s),
        )
        for one in extents
    )  # fmt: skip
    names = ("key", ">place", ">at", ">blocks", ">alive", "origin", "kept by", "last use", "goes")
    table(names, rows)
    lines(f"{len(extents):,} of {total:,} extents")


def _print_segments(segments: list[SegmentView], total: int) -> None:
    rows = (
        (
            one.file.removeprefix("seg/"), one.stored_by, str(one.slots), str(one.used), str(one.live),
            format_bytes(one.allocated_bytes), "sealed" if one.sealed else f"open, writer {_state(one.writer_alive)}",
        )
        for one in segments
    )  # fmt: skip
    table(("file", "class", ">slots", ">used", ">live", ">size", "state"), rows)
    lines(f"{len(segments):,} of {total:,} segments")


def _print_block(block: BlockView, now_s: float) -> None:
    facts(
        (
            ("key", block.key),
            ("state", f"{'alive' if block.alive else 'expired'}: {_why(block, now_s)}"),
            ("goes", _when(block.until_s, now_s) if block.keeper else "as soon as space is reclaimed"),
            ("pin", "none" if block.pinned_until_s is None else f"until {_when(block.pinned_until_s, now_s)}"),
            ("stored", f"{_when(block.stored_s, now_s)}, by class {block.stored_by}, {block.origin}"),
            ("file", block.file or f"unknown segment {block.segment}"),
            ("slot", f"{block.slot}, at byte {block.file_offset:,}, {block.slot_bytes:,} B: {block.content}"),
            ("position", f"block {block.chain_pos} of its chain, from token {block.first_token:,}"),
            ("extent", f"slots {block.extent_slot} to {block.extent_slot + block.extent_blocks - 1}"),
            ("parent", block.parent or ("none: the first block" if block.chain_pos == 0 else "unknown")),
        )
    )
    lines("")
    table(("class", "a block lives", "last use", "until"), (_use_row(use, now_s) for use in block.uses))


def _why(block: BlockView, now_s: float) -> str:
    if block.keeper is None:
        return "no class ever used it"
    if block.keeper == "(pin)":
        return "a pin holds it" if block.alive else "its pin ended"
    use = next(use for use in block.uses if use.name == block.keeper)
    ttl = rule(use.ttl_s, use.mode)
    if block.alive:
        return f"class {block.keeper} keeps it {ttl}, used {relative(use.last_use_s or 0.0, now_s)}"
    return f"class {block.keeper} kept it longest, {ttl}; it takes space until it is reclaimed"


def _use_row(use: ClassUse, now_s: float) -> tuple[str, str, str, str]:
    if use.last_use_s is None:
        return (use.name, rule(use.ttl_s, use.mode), "never", "")
    return (use.name, rule(use.ttl_s, use.mode), relative(use.last_use_s, now_s), _goes(use.until_s, now_s))


def _print_prefix(found: PrefixView, miss: BlockView | Absent | None, now_s: float) -> None:
    rows = [
        ("prompt", f"{found.tokens:,} tokens, {found.blocks:,} whole blocks that can hit"),
        ("hit", f"{found.hit_tokens:,} tokens, {found.hit_blocks:,} blocks"),
    ]
    if found.miss_key is None:
        rows.append(("miss", "none: the hit is as long as it can be"))
    else:
        at = f"block {found.miss_block}, from token {found.hit_tokens:,}"
        rows += [("miss", f"{found.reason} at {at}"), ("key", found.miss_key)]
    if isinstance(miss, Absent):
        rows += [("why", reason) for reason in why_absent(miss)]
    elif miss is not None:
        rows.append(("why", "it is approximate" if found.reason == "approx" else _why(miss, now_s)))
    if found.stored_blocks > found.hit_blocks:
        rows.append(("beyond", f"{found.stored_blocks - found.hit_blocks:,} more blocks of it are on disk"))
    facts(rows)


def _when(at_s: float | None, now_s: float) -> str:
    return "never by age, only when space is needed" if at_s is None else f"{moment(at_s)} ({relative(at_s, now_s)})"


def _goes(at_s: float | None, now_s: float) -> str:
    return "unbounded" if at_s is None else relative(at_s, now_s)


def _state(alive: bool | None) -> str:
    return {None: "unknown", True: "alive", False: "dead"}[alive]
