"""What all tests share: data that is not the project's own, and hypothesis profiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Derandomised, so that a red run is the change's doing; `--hypothesis-profile torture` looks for new examples.
# No deadline: a slow example on a busy machine is not a fault.
settings.register_profile("quick", deadline=None, max_examples=40, derandomize=True)
settings.register_profile("torture", deadline=None, max_examples=1_000, stateful_step_count=100, print_blob=True)
settings.load_profile("quick")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of data that is not the project's own: `traces/` lies in it."""
    value = os.environ.get("DUOKV_DATA", "")
    if not value:
        pytest.skip("DUOKV_DATA is not set; point it at the folder that holds traces/")
    path = Path(value)
    if not path.is_dir():
        pytest.fail(f"DUOKV_DATA={value!r} is not a folder; point it at the one that holds traces/, or unset it")
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder that can be measured."""
    # Here, as most tests need no benchmark.
    from duokv.bench.io_limits import check_disk
    from duokv.kvstore.errors import UsageError

    try:
        check_disk(tmp_path, 0)
    except UsageError as error:
        pytest.skip(str(error))
    return tmp_path
