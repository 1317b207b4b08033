"""What tests of benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest


def refusal(main: Callable[[Sequence[str]], int], arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which a benchmark refuses its arguments, with exit code 2."""
    try:
        code: object = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line
