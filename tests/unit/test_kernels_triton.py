"""The Triton kernels: bit-equal to the torch ones in Triton's interpreter, and compiled ahead of time for Hopper."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton (1 GB) to check its kernels")

ROOT = Path(__file__).parents[2]
INTERPRETED = Path(__file__).with_name("kernels_triton_interpreted.py")


def test_bit_equal_in_the_interpreter() -> None:
    """In a process of its own: triton decides when it is imported whether it interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout.splitlines()[-1]


CODEC = {"dim": 512, "group": 32, "ue8m0": True}
MOVER = {"nbytes": 528, "block": 1024}
MOVED = {"slots": "*u8", "index": "*i64"}


def strides(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


@pytest.mark.parametrize(
    ("name", "pointers", "constants"),
    [
        ("_gather_kernel", {**MOVED, "out": "*u8", **strides("stride", "out_stride")}, MOVER),
        (
            "_scatter_kernel",
            {**MOVED, "rows": "*u8", **strides("stride", "row_stride")},
            MOVER,
        ),
        ("_encode_e4m3_kernel", {"x": "*bf16", "out": "*u8"}, CODEC),
        ("_encode_e2m1_kernel", {"x": "*fp32", "out": "*u8"}, CODEC),
        ("_encode_e2m1_kernel", {"x": "*bf16", "out": "*u8"}, CODEC | {"group": 16, "ue8m0": False}),
        ("_decode_e4m3_kernel", {"rows": "*u8", "out": "*bf16"}, CODEC),
        ("_decode_e2m1_kernel", {"rows": "*u8", "out": "*bf16"}, CODEC | {"group": 16, "ue8m0": False}),
    ],
)
def test_kernels_compile_for_hopper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, pointers: dict[str, str], constants: dict[str, int]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler, backends = importlib.import_module("triton.compiler"), importlib.import_module("triton.backends.compiler")
    kernel = getattr(importlib.import_module("duokv.kernels.triton_kernels"), name)
    source = compiler.ASTSource(kernel, pointers | dict.fromkeys(constants, "constexpr"), constants)
    options = {"enable_fp_fusion": False}
    compiled = compiler.compile(source, target=backends.GPUTarget("cuda", 90, 32), options=options)
    assert b"\x7fELF" in compiled.asm["cubin"][:4]
    assert "div.full" not in compiled.asm["ptx"]  # division is the correctly rounded one
