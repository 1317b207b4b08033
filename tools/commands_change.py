"""kvctl ttl, evict, verify, rebuild: what an operator decides. Dry runs open the store only to look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeAlias

import typer

from duokv.kvstore.errors import UsageError
from duokv.kvstore.index import IndexTxn
from duokv.kvstore.inspection import StoreView
from duokv.kvstore.operation import (
    Evicted,
    TtlChange,
    change_ttl,
    evict,
    plan_all,
    plan_class,
    plan_expired,
    plan_key,
    plan_older,
    plan_oldest,
    rebuild_index,
)
from duokv.kvstore.reclaim import ReclaimPlan
from duokv.kvstore.recovery import Recovered
from duokv.kvstore.units import format_bytes, parse_count, parse_duration
from duokv.kvstore.verification import VerifyReport, clear_noted, repair, verify
from duokv.tools.commands_common import (
    ConfigOption,
    DryRunOption,
    GeometryOption,
    JsonOption,
    StoreArgument,
    StoreOption,
    amount,
    choice,
    facts,
    lines,
    moment,
    progress,
    rule,
    show,
    table,
    target,
)

_MODES: tuple[Literal["sliding", "fixed"], ...] = ("sliding", "fixed")
Plan: TypeAlias = Callable[[StoreView, IndexTxn], ReclaimPlan]


def ttl_show(
    store_argument: StoreArgument = None, store: StoreOption = None, config: ConfigOption = None,
    geometry: GeometryOption = None, as_json: JsonOption = False,
) -> None:  # fmt: skip
    """The store's traffic classes and how long their blocks live."""
    with target(store_argument, store, config, geometry).inspect() as view, view.snapshot() as txn:
        policy = view.policy(txn)
    document = {"classes": policy.classes, "default": policy.default, "version": policy.version}
    if not show(document, as_json=as_json):
        classes = policy.classes.items()
        table(
            ("class", "a block lives", "mode", ""),
            ((name, rule(r.ttl_s, r.mode), r.mode, "default" * (name == policy.default)) for name, r in classes),
        )


def ttl_set(
    name: Annotated[str, typer.Argument(metavar="CLASS", help="A traffic class of the store.")],
    duration: Annotated[str, typer.Argument(metavar="DURATION", help="'3d', '12h', '180s' or 'unbounded'.")],
    mode: Annotated[
        str | None, typer.Option(metavar="|".join(_MODES), help="Count from the last use, or from the store time.")
    ] = None,
    add: Annotated[bool, typer.Option("--add", help="Make a new class if there is none of this name.")] = False,
    dry_run: DryRunOption = False,
    store: StoreOption = None, config: ConfigOption = None, geometry: GeometryOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Change how long a class's blocks live, at once and for blocks stored already; says what that frees."""
    ttl_s = parse_duration(duration)
    chosen = None if mode is None else choice("--mode", mode, _MODES)
    place = target(None, store, config, geometry)
    # Looked at first, so that misuse does not even open the store for changes.
    with place.inspect() as view:
        change = change_ttl(view, name, ttl_s, mode=chosen, add=add, dry_run=True)
    if not dry_run:
        with place.operate() as view:
            change = change_ttl(view, name, ttl_s, mode=chosen, add=add)
    if not show(change, as_json=as_json):
        _print_change(change)


def evict_blocks(  # noqa: PLR0913, PLR0917  one argument an option
    store_argument: StoreArgument = None,
    expired: Annotated[bool, typer.Option("--expired", help="Blocks past their life.")] = False,
    traffic: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="Blocks that only this class keeps.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Blocks no class used for so long.")
    ] = None,
    blocks: Annotated[str | None, typer.Option(metavar="N", help="The N least recently used blocks.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="One block and those after it in its extent, pinned or not.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All blocks, pinned or not.")] = False,
    dry_run: DryRunOption = False,
    store: StoreOption = None, config: ConfigOption = None, geometry: GeometryOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Take blocks out now. Pinned ones stay unless said otherwise."""
    plans: Mapping[str, Plan | None] = {
        "--expired": plan_expired if expired else None,
        "--class": _by_class(traffic),
        "--older-than": _by_age(older_than),
        "--blocks": _by_count(blocks),
        "--key": _by_key(key),
        "--all": (lambda _, txn: plan_all(txn)) if everything else None,
    }
    chosen = [plan for plan in plans.values() if plan is not None]
    if len(chosen) != 1:
        raise UsageError(f"evict takes one of {', '.join(plans)}; {len(chosen)} were given")
    place = target(store_argument, store, config, geometry)
    with place.inspect() as view:
        with view.snapshot() as txn:
            plan = chosen[0](view, txn)
        done = evict(view, plan, dry_run=True)
    if not dry_run:
        with place.operate() as view:
            done = evict(view, plan)
    if not show(done, as_json=as_json):
        _print_evicted(done)


def verify_store(
    store_argument: StoreArgument = None,
    limit: Annotated[str, typer.Option(metavar="N|unbounded", help="Blocks to read.")] = "unbounded",
    mend: Annotated[bool, typer.Option("--repair", help="Take damaged blocks out and set the accounts right.")] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Forget the damage noted so far, once shown.")] = False,
    deadline: Annotated[str, typer.Option(metavar="DURATION", help="For each read of up to 32 blocks.")] = "10s",
    store: StoreOption = None, config: ConfigOption = None, geometry: GeometryOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Read and check every block, and the accounts. Exit 1 if anything is wrong, or was noted earlier."""
    most = None if limit == "unbounded" else parse_count(limit)
    deadline_s = parse_duration(deadline)
    if deadline_s is None:
        raise UsageError("--deadline 'unbounded' could hang for ever; give a duration, as in '10s'")
    place = target(store_argument, store, config, geometry)
    with place.inspect() as view, progress("verify") as advance:
        report = verify(view, limit=most, deadline_s=deadline_s, on_progress=advance)
    taken_out = None
    if (mend and not report.clean) or (clear and report.noted):
        with place.operate() as view:
            taken_out = repair(view, report) if mend else None
            if clear:
                clear_noted(view)
    if not show({"clean": report.clean, "report": report, "taken_out": taken_out}, as_json=as_json):
        _print_report(report, taken_out)
    if not report.clean:
        raise typer.Exit(1)


def rebuild(
    store_argument: StoreArgument = None,
    force: Annotated[bool, typer.Option("--force", help="Give up segment files that cannot be read whole.")] = False,
    store: StoreOption = None, config: ConfigOption = None, geometry: GeometryOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Build the index anew from the segments. Refused while an engine runs."""
    place = target(store_argument, store, config, geometry)
    done = rebuild_index(place.url, config=place.config, geometry=place.geometry, force=force)
    if not show(done, as_json=as_json):
        _print_rebuilt(done)


def _by_class(name: str | None) -> Plan | None:
    return None if name is None else lambda view, txn: plan_class(view, txn, name)


def _by_age(text: str | None) -> Plan | None:
    if text is None:
        return None
    age_s = parse_duration(text)
    if age_s is None:
        raise UsageError("--older-than 'unbounded' means no block; give a duration, as in '12h'")
    return lambda view, txn: plan_older(view, txn, age_s)


def _by_count(text: str | None) -> Plan | None:
    if text is None:
        return None
    blocks = parse_count(text)
    return lambda view, txn: plan_oldest(view, txn, blocks)


def _by_key(key: str | None) -> Plan | None:
    return None if key is None else lambda _, txn: plan_key(txn, key)


def _print_change(change: TtlChange) -> None:
    before = "no such class" if change.before is None else rule(change.before.ttl_s, change.before.mode)
    facts((("class", change.name), ("was", before), ("is" if change.applied else "would be", _after(change))))
    if change.before == change.after:
        lines("that is what it is already: nothing changes")
        return
    verb = "frees" if change.applied else "would free"
    lines(f"{verb} {amount(change.freed_blocks, 'block')}, {format_bytes(change.freed_bytes)}")
    if change.revived_blocks:
        again = "live again" if change.applied else "would live again"
        lines(f"{amount(change.revived_blocks, 'expired block')} still on disk {again}")
    if change.applied:
        lines("running engines follow at their next lookup; kvctl evict --expired gives the space back now")


def _after(change: TtlChange) -> str:
    return rule(change.after.ttl_s, change.after.mode)


def _print_evicted(done: Evicted) -> None:
    verb = "evicted" if done.applied else "would evict"
    lines(f"{verb} {amount(done.blocks, 'block')} of {amount(done.extents, 'extent')}, {format_bytes(done.bytes)}")
    if done.applied:
        lines(f"given back to the file system: {format_bytes(done.returned_bytes)}", *done.notes)


def _print_report(report: VerifyReport, taken_out: int | None) -> None:
    for bad in report.bad:
        kind = "unreadable" if bad.unreadable else "damaged"
        lines(f"{kind}: {bad.key} in {bad.file}, slot {bad.slot}: {bad.reason}")
    for missing in report.missing:
        lines(f"missing: {missing.file} with {amount(missing.blocks, 'block')}")
    for one in report.differences:
        where = "" if one.segment is None else f" of segment {one.segment}"
        lines(f"differs: {one.what}{where}: {one.indexed:,} in the index, {one.counted:,} counted")
    for noted in report.noted:
        place = f"segment {noted.segment}, slot {noted.slot}"
        lines(f"noted {moment(noted.found_s)}: {noted.key} in {place}: {noted.reason}")
    for stray in report.strays:
        lines(f"stray: {stray} is not in the index; the next open sweeps it")
    if report.unread:
        lines(f"unread: {amount(report.unread, 'block')}, the backend did not answer in time")
    if taken_out is not None:
        lines(f"repaired: {amount(taken_out, 'block')} taken out")
    verdict = "all well" if report.clean else "NOT well"
    lines(f"{report.checked:,} of {report.blocks:,} blocks checked: {verdict}")


def _print_rebuilt(done: Recovered) -> None:
    sizes = (amount(done.blocks, "block"), amount(done.extents, "extent"), amount(done.segments, "segment"))
    facts(
        (
            ("rebuilt", ", ".join(sizes)),
            ("last uses", "taken over" if done.lives_known else "lost, set to now"),
            *(("given up", name) for name in done.unreadable),
            *(("swept", name) for name in done.swept),
        )
    )
