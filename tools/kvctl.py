"""kvctl: look at a store, decide how long classes live, check it, and simulate traffic before buying disks."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import lmdb
import typer

from duokv.kvstore.errors import DuoKVError
from duokv.tools import commands_change, commands_view
from duokv.tools.commands_simulate import simulate

_EPILOG = (
    "Exit codes: 0 done; 1 something is wrong (verify), or the key is not there (explain); 2 misuse, or a store that "
    "cannot be opened; 130 interrupted. Errors are one line on stderr: --debug, or DUOKV_DEBUG=1, adds the traceback."
)
_INTERRUPTED = 130

app = typer.Typer(
    help="Operate a DuoKV store: a folder or file:// URL, given with --store, DUOKV_STORE or as the last argument. "
    "Commands that only look, and all dry runs, write nothing and may run beside engines.",
    epilog=_EPILOG, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=False,
)  # fmt: skip
ttl = typer.Typer(help="Show or change how long the blocks of a traffic class live.", no_args_is_help=False)

app.command("stat")(commands_view.stat)
app.command("ls")(commands_view.ls)
app.command("explain")(commands_view.explain_key)
app.command("prefix")(commands_view.prefix)
ttl.command("show")(commands_change.ttl_show)
ttl.command("set")(commands_change.ttl_set)
app.add_typer(ttl, name="ttl")
app.command("evict")(commands_change.evict_blocks)
app.command("verify")(commands_change.verify_store)
app.command("rebuild")(commands_change.rebuild)
app.command("simulate")(simulate)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Take what every command takes (main has looked at it already)."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run kvctl and exit with its code. Without `argv` the process is kvctl's own: a closed pipe ends it, as usual."""
    if argv is None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get("DUOKV_DEBUG", "") not in ("", "0")
    try:
        code = app([arg for arg in args if arg != "--debug"], prog_name="kvctl", standalone_mode=False)
        sys.exit(_report("interrupted; run it again", _INTERRUPTED) if code == _INTERRUPTED else code)
    except Exception as error:  # noqa: BLE001  the one place where any error becomes a line
        if debug:
            traceback.print_exc()
        sys.exit(_report(_line(error), 2))


def _line(error: Exception) -> str:
    match error:
        case DuoKVError():
            return str(error)
        case lmdb.Error():
            return f"index: {error}; build it anew with kvctl rebuild"
        case OSError():
            return f"{error.filename or 'store'}: {error.strerror or error}; see to its permissions and its disk"
    usage = getattr(error, "format_message", None)
    if usage is None:
        return f"internal error: {type(error).__name__}: {error}; run it with --debug and report that"
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "kvctl"
    message = str(usage()).rstrip(".")
    # A question names the nearest command already.
    return message if message.endswith("?") else f"{message}; see {command} --help"


def _report(message: str, code: int) -> int:
    sys.stderr.write(f"kvctl: {' '.join(message.split())}\n")
    return code


if __name__ == "__main__":
    main()
