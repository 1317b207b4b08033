"""kvctl among other processes: a shell's permissions, pipes and interrupts, and an engine at work on the same store."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from kvctl_kit import (
    AGENT,
    NAMED,
    Result,
    Run,
    bare_environment,  # noqa: F401
    key_of,
    one_line,
    run_fixture,  # noqa: F401
    store_fixture,  # noqa: F401
    tree,
)


def spawn(*args: object, caps: bool = True, **pipes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from duokv.tools.kvctl import main; main()", *map(str, args)]
    return subprocess.Popen(
        command, text=True, stdout=pipes.get("stdout", subprocess.PIPE), stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts if caps else give_up_root, env=without_settings(os.environ),  # noqa: PLW1509
    )  # fmt: skip


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith("DUOKV_")}


def heed_interrupts() -> None:
    """As a command at a terminal does: tests that run in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def give_up_root() -> None:
    """Let permissions hold for root too: drop CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH from what exec may give."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails where they are not held anyway


def finish(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=60)
    return Result(process.returncode, out, err)


def test_a_folder_that_may_only_be_read(store: Path) -> None:
    """Looking works and leaves no trace; changing is refused in one line."""
    before = tree(store)
    folders = [store, *(path for path in store.rglob("*") if path.is_dir())]
    files = [path for path in store.rglob("*") if path.is_file()]
    for path in (*folders, *files):
        path.chmod(0o555 if path in folders else 0o444)
    try:
        assert '"blocks": 5' in finish(spawn("stat", store, "--json", caps=False)).out
        assert finish(spawn("verify", store, caps=False)).code == 0
        refused = one_line(finish(spawn("evict", store, "--all", caps=False)))
        assert "EACCES" in refused
        store.chmod(0o000)
        assert "EACCES" in one_line(finish(spawn("stat", store, caps=False)))
    finally:
        for path in (*folders, *files):
            path.chmod(0o755)
    assert tree(store) == before


def test_a_closed_pipe_is_no_error(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = spawn("ls", store, stdout=writing)
    os.close(writing)
    result = finish(process)
    assert (result.code, result.err) == (-signal.SIGPIPE, "")


def test_an_interrupt_is_one_line(store: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    process = spawn("prefix", fifo, "--store", store, *NAMED)
    with fifo.open("w"):  # opens once kvctl reads, and then it waits for us
        for _ in range(6):  # an interrupt that falls into a finaliser is lost, as any is in Python
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
                break
        result = finish(process)
    assert (result.code, result.out, result.err) == (130, "", "kvctl: interrupted; run it again\n")


ENGINE = """
import sys, threading
from duokv.kvstore import Namespace, StoreConfig, open_store

store = open_store(sys.argv[1], config=StoreConfig(swa_bytes=0, maintenance_interval_s=0.0, fsync="none"))
ns = Namespace("m", "w", "t", "fp4")
stop = threading.Event()

def commit():
    number = 0
    while not stop.is_set():
        number = (number + 1) % 500
        store.commit(ns, [1000 + number] * 129, [bytes(3000)], traffic="chat")

thread = threading.Thread(target=commit)
thread.start()
print("ready", flush=True)
prompt = [number for number in (1, 2, 3) for _ in range(128)] + [9]
for _ in sys.stdin:
    print(store.lookup(ns, prompt, traffic="agent").tokens, flush=True)
stop.set()
thread.join()
store.close()
"""


@contextmanager
def engine(store: Path) -> Iterator[Callable[[], int]]:
    """Another process that has the store open and commits without pause; call what this yields to look `AGENT` up."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=without_settings(os.environ),
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def lookup() -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    try:
        yield lookup
    finally:
        process.stdin.close()
        code = process.wait(timeout=60)
        process.stdout.close()
    assert code == 0


def test_looking_at_a_store_in_use(run: Run, store: Path) -> None:
    with engine(store) as lookup:
        for _ in range(5):
            found = run("stat", store, "--json").document
            assert cast("int", found["blocks"]) >= 5
            ((writer),) = cast("list[dict[str, object]]", found["writers"])
            assert writer["alive"] is True
            assert run("explain", key_of(AGENT), "--store", store, "--json").code == 0
        assert run("verify", store).code == 0
        assert lookup() == 384
    assert run("verify", store).code == 0


def test_changing_a_store_in_use(run: Run, store: Path) -> None:
    with engine(store) as lookup:
        assert lookup() == 384
        refused = run("rebuild", store)
        assert "is running; stop that engine, then rebuild" in one_line(refused)
        run("ttl", "set", "agent", "0s", "--store", store)
        assert lookup() == 0, "the engine follows at its next lookup"
        run("ttl", "set", "agent", "3d", "--store", store)
        assert lookup() == 384, "nothing was deleted yet"
        evicted = run("evict", store, "--key", key_of(AGENT[:2])[:32])
        assert (evicted.code, evicted.err) == (0, "")
        assert lookup() == 128
    assert run("verify", store).code == 0
