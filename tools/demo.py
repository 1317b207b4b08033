"""What DuoKV does, shown in a minute: `python -m duokv.tools.demo` (`make demo`).

A trace through the store's own code with a report, real bytes across a killed process, the operator's view of them, and
a conversation that the engine serves from a store.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from duokv.bench.cache_hit import Served, SimOptions, SimReport, simulate
from duokv.bench.command_line import progress_bar, terminal
from duokv.bench.generator import generate
from duokv.bench.observer import Observer
from duokv.bench.report import PARTS, Figure, Source, figures, write_report
from duokv.bench.table import trace_name
from duokv.bench.workload import TraceRequest, read_trace, trace_class, traces_dir
from duokv.kvstore.config import StoreConfig
from duokv.kvstore.errors import DuoKVError, StoreError, UsageError
from duokv.kvstore.geometry import CacheGeometry
from duokv.kvstore.keys import BLOCK_TOKENS, Namespace, chain_keys
from duokv.kvstore.opening import open_store
from duokv.kvstore.origin import Origin
from duokv.kvstore.store import KVStore
from duokv.kvstore.swa import SwaWindow
from duokv.kvstore.units import format_bytes, format_duration
from duokv.replay.plan import ReplayPolicy, plan_replay, swa_candidates
from duokv.tools.demo_process import Send, in_new_process, milliseconds

REQUESTS = 5_000
"""Requests shown unless more are asked for: enough for steady rates, in a few seconds."""
BLOCKS = 601
"""Whole blocks of a prompt of 77,000 tokens, the published mean input."""
GEOMETRY = "deepseek-v4.1-flash"
MODULE = "sched.py"
"""The standard library's module to talk about: small, and among the files that the model was not trained on."""
REPLY_TOKENS = 16
MAX_REPLY_TOKENS = 512
MIN_BYTES, MAX_BYTES = 512, 7 << 10
"""Of a file to talk about: enough for a hit that saves something, little enough to prefill in seconds."""

_TAIL_TOKENS = 72
_NAMESPACE = Namespace(model=GEOMETRY, weights="demo", tokenizer="demo", kv_format="fp4")
_CONFIG = StoreConfig(swa_bytes=8 << 20, maintenance_interval_s=0)
_PLAIN_WIDTH = 110
_DEADLINE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0, or 2 for what cannot be done."""
    given = _arguments(argv)
    console = terminal(_PLAIN_WIDTH)
    started = time.perf_counter()
    try:
        if given.blocks < 2:
            raise UsageError(f"--blocks {given.blocks}: a hit of one block saves nothing; give at least 2")
        if not 1 <= given.reply <= MAX_REPLY_TOKENS:
            raise UsageError(f"--reply {given.reply}: no such reply; give 1 to {MAX_REPLY_TOKENS} tokens")
        text = _read_file(given.file)
        replay_trace(console, given.trace, None if given.full else given.limit, given.out)
        restart(console, given.blocks)
        # Not at the top: the engine takes seconds to import, and the processes started so far do without.
        from duokv.tools.demo_conversation import conversation

        conversation(console, given.file, text, reply=given.reply)
    except DuoKVError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    console.print(f"\nDone in {time.perf_counter() - started:.0f} s; the temporary stores are removed.")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m duokv.tools.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="trace file; default: weka_agent of $DUOKV_DATA, else the generator")
    parser.add_argument("--full", action="store_true", help="all requests of the trace")
    parser.add_argument("--limit", type=int, default=REQUESTS, help="how many requests; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of report.html; default: %(default)s")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="blocks of the real prompt; default: %(default)s")
    module = Path(sysconfig.get_path("stdlib"), MODULE)
    parser.add_argument("--file", type=Path, default=module, help="text to talk about; default: Python's own sched.py")
    parser.add_argument(
        "--reply", type=int, default=REPLY_TOKENS, help="tokens of a reply about it; default: %(default)s"
    )
    return parser.parse_args(argv)


def _read_file(path: Path) -> bytes:
    """The beginning of a file that is long enough to talk about."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; name another text with --file") from error
    if len(text) < MIN_BYTES:
        raise UsageError(f"{path}: only {len(text)} bytes; name a text of at least {MIN_BYTES} with --file")
    return text


# -- 1. a trace ------------------------------------------------------------------------------------------------------


def replay_trace(console: Console, trace: Path | None, limit: int | None, out: Path) -> None:
    """Simulate a trace's first `limit` requests (None: all), print the results and write `out`/report.html."""
    requests, source, traffic = _requests(trace, limit)
    options = SimOptions(traffic=traffic)
    life = format_duration(options.policy.classes[traffic].ttl_s)
    console.rule("1. A request trace through the store", align="left")
    console.print(
        "Every prompt is looked up, planned and stored by the store's own code under a virtual clock; only the blocks' "
        f"bytes are left out.\n[bold]{escape(source.name)}[/]: {len(requests):,} requests of class {traffic}. A "
        f"block lives {life} after its last use, a sliding-window (SWA) state 180 s.\n"
    )
    observer = Observer()
    with progress_bar("simulated requests", len(requests)) as advance:

        def note(served: Served) -> None:
            observer(served)
            advance()

        report = simulate(requests, options, on_request=note)
    console.print(_results(figures(observer, report, options, source)))
    console.print(_partition(report))
    path = out / "report.html"
    write_report(path, observer, report, options, source)
    console.print(
        "The published production rate of live SWA states, over 98 % at 180 s, is not reached by human-paced public "
        f"traces.\nThe store would hold {format_bytes(report.bytes['stored'])} of Block KV now."
    )
    console.print(f"\nThe same with charts: [bold]{escape(str(path))}[/] (open it in a browser)\n")


def _requests(trace: Path | None, limit: int | None) -> tuple[list[TraceRequest], Source, str]:
    """The requests to show, what they are, and their traffic class."""
    if limit is not None and limit < 1:
        raise UsageError(f"--limit {limit}: nothing to show; give at least 1, or --full")
    folder = traces_dir()
    path = trace or (folder / "weka_agent.jsonl.gz" if folder else None)
    # One more than shown tells whether the trace goes on.
    ahead = None if limit is None else limit + 1
    if path is None:
        found = list(itertools.islice(generate("agent", seed=1, days=7, requests_per_day=REQUESTS), limit))
        return found, Source("generated agent traffic, as DUOKV_DATA names no traces"), "agent"
    found = list(read_trace(path, limit=ahead))
    if not found:
        raise UsageError(f"{path}: no requests; name another trace with --trace")
    if limit is None or len(found) <= limit:
        return found, Source(f"{trace_name(path)}, the whole trace", path, whole=True), trace_class(path)
    return found[:limit], Source(f"{trace_name(path)}, the beginning", path), trace_class(path)


def _results(rows: Sequence[Figure]) -> Table:
    table = Table()
    table.add_column("result", no_wrap=True)
    table.add_column("here", justify="right", no_wrap=True)
    table.add_column("published", no_wrap=True)
    table.add_column("meaning")
    for row in rows:
        table.add_row(row.name, f"[bold]{row.here}[/]", row.published, row.meaning)
    return table


def _partition(report: SimReport) -> Table:
    table = Table()
    table.add_column("where the prompt tokens came from", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    table.add_column("meaning")
    for name, meaning in PARTS.items():
        tokens = report.tokens[name]
        table.add_row(name, f"{tokens:,}", f"{tokens / max(1, report.input_tokens):.2%}", meaning)
    return table


# -- 2. real bytes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """What the writing process measured, in seconds."""

    commit_s: float
    durable_s: float
    window_kept: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the reading process measured, in seconds; `equal` blocks came back as written."""

    open_s: float
    lookup_s: float
    load_s: float
    hit_tokens: int
    equal: int
    window_kept: bool
    last_key: str


def restart(console: Console, blocks: int) -> None:
    """Store a prompt, kill the process, read it back in another, and look at the store with kvctl."""
    size = blocks * CacheGeometry.preset(GEOMETRY).payload_bytes
    length = blocks * BLOCK_TOKENS + _TAIL_TOKENS
    console.rule("2. Real bytes across a killed process", align="left")
    console.print(
        f"One process stores a prompt of {length:,} tokens: {blocks} blocks of {GEOMETRY}, {format_bytes(size)}. When "
        "they are durable it is killed, with nothing closed. Another one opens the store and reads the prompt back.\n"
    )
    with tempfile.TemporaryDirectory(prefix="duokv-demo-") as folder:
        url = f"file://{folder}"
        (written,) = in_new_process(partial(_write, url, blocks), Written)
        (loaded,) = in_new_process(partial(_read, url, blocks), Loaded)
        table = Table(show_header=False)
        durable = milliseconds(written.durable_s)
        table.add_row("write", f"{_rate(size, written.commit_s)}, durable {durable} later; then killed")
        table.add_row("open", f"{milliseconds(loaded.open_s)}")
        table.add_row("lookup", f"{loaded.hit_tokens:,} of {length:,} tokens found in {milliseconds(loaded.lookup_s)}")
        table.add_row("load", f"{_rate(size, loaded.load_s)}, every block's identity and checksum verified")
        table.add_row("compare", f"all {loaded.equal} blocks equal what was written, byte by byte")
        console.print(table)
        console.print(_fate_of_window(written, loaded, length))
        console.rule("3. The operator's view of that store", align="left")
        console.print("What it holds, and why the prompt's last block is still there:")
        _kvctl(console, "stat", url)
        _kvctl(console, "explain", loaded.last_key, "--store", url)


def _write(url: str, blocks: int, send: Send) -> None:
    store = open_store(url, geometry=GEOMETRY, config=_CONFIG)
    tokens = _tokens(blocks)
    payloads = [_payload(block, store.geometry.payload_bytes) for block in range(blocks)]
    started = time.perf_counter()
    commit = store.commit(_NAMESPACE, tokens, payloads, traffic="agent")
    committed = time.perf_counter()
    commit.wait_durable()
    durable = time.perf_counter()
    if commit.new < blocks:
        raise StoreError(f"{url}: only {commit.new} of {blocks} blocks were stored; free space there, or set TMPDIR")
    boundary = _boundary(blocks)
    key = chain_keys(_NAMESPACE, tokens)[boundary // BLOCK_TOKENS - 1]
    state = memoryview(bytes(store.geometry.swa_bytes))
    store.put_window(key, SwaWindow(boundary, state, boundary - BLOCK_TOKENS, Origin.EXACT))
    send(Written(committed - started, durable - committed, _has_window(store, key)))
    os.kill(os.getpid(), signal.SIGKILL)


def _read(url: str, blocks: int, send: Send) -> None:
    started = time.perf_counter()
    with open_store(url, config=_CONFIG, create=False) as store:
        opened = time.perf_counter()
        hit = store.lookup(_NAMESPACE, _tokens(blocks), "agent")
        looked_up = time.perf_counter()
        with store.buffers(len(hit.keys)) as lent:
            lending = time.perf_counter()
            count = store.load(hit, lent.rows, deadline_s=_DEADLINE_S)
            loaded = time.perf_counter()
            width = store.geometry.payload_bytes
            equal = sum(lent.rows[block, :width].tobytes() == _payload(block, width) for block in range(count))
        if equal < blocks:
            raise StoreError(f"{url}: {equal} of {blocks} blocks came back as written; run kvctl verify on the store")
        kept = _has_window(store, hit.keys[_boundary(blocks) // BLOCK_TOKENS - 1])
    last = hit.keys[-1].hex()
    send(Loaded(opened - started, looked_up - opened, loaded - lending, hit.tokens, equal, kept, last))


def _tokens(blocks: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, 1 << 17, blocks * BLOCK_TOKENS + _TAIL_TOKENS)


def _payload(block: int, nbytes: int) -> bytes:
    """Bytes that any process can make again."""
    return np.random.default_rng(block).bytes(nbytes)


def _boundary(blocks: int) -> int:
    """Where an engine would look for the prompt's SWA state."""
    hit = blocks * BLOCK_TOKENS
    return swa_candidates(hit_tokens=hit, prompt_tokens=hit + _TAIL_TOKENS, policy=ReplayPolicy())[0]


def _has_window(store: KVStore, key: bytes) -> bool:
    with store.lease_window(key) as window:
        return window is not None


def _fate_of_window(written: Written, loaded: Loaded, length: int) -> str:
    swa_at = _boundary(loaded.equal) if loaded.window_kept else None
    plan = plan_replay(hit_tokens=loaded.hit_tokens, prompt_tokens=length, swa_at=swa_at, policy=ReplayPolicy())
    part = plan.partition(length)
    return (
        f"\nThe prompt's SWA state was in host memory only ({_there(written.window_kept)} before, "
        f"{_there(loaded.window_kept)} after). Its loss costs a short replay, not the prefix: of {length:,} tokens "
        f"{part.swa_hit + part.block_hit:,} need no work, {part.replayed} are replayed, {part.computed} are new.\n"
    )


def _there(kept: bool) -> str:
    return "there" if kept else "gone"


def _rate(size: int, seconds: float) -> str:
    return f"{format_bytes(size)} in {milliseconds(seconds)} ({size / seconds / 2**20:,.0f} MiB/s)"


# -- 3. the operator -------------------------------------------------------------------------------------------------


def _kvctl(console: Console, *arguments: str) -> None:
    command = [sys.executable, "-m", "duokv.tools.kvctl", *arguments]
    environ = {**os.environ, "COLUMNS": str(console.width)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise StoreError(f"kvctl {arguments[0]} failed with {done.returncode}: {reason}")
    console.print(f"\n$ kvctl {' '.join(arguments)}", style="bold", markup=False, soft_wrap=True)
    console.print(done.stdout.rstrip(), markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
