# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, run by Triton's interpreter on the CPU against float64, and compiled for the H200 without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def test_kernels_under_the_interpreter() -> None:
    checks = Path(__file__).with_name("clipping_kernel_checks.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in run.stdout:
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not know this NumPy")
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


@pytest.mark.parametrize("element", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("side", [32, 64, 128])
def test_gram_kernel_compiles_for_the_h200(element: str, side: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from opacus_memprof.clipping.gram_triton import gram_tile

    names = gram_tile.arg_names
    signature = dict.fromkeys(names, "i32") | {"g": f"*{element}", "a": f"*{element}", "parts": "*fp32"}
    constants = {"SIDE": side, "DEPTH": 32 if element == "fp32" else 64, "PRECISION": "tf32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=gram_tile, signature=signature, constexprs=constants)
    kernel = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8 if side == 128 else 4})
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= 227 * 1024  # of one block on an H200
    assert "wgmma" in kernel.asm["ptx"] or "mma" in kernel.asm["ptx"]


def test_sum_kernel_compiles_for_the_h200() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from opacus_memprof.clipping.sum_triton import weighted_sum

    signature = {
        "stack": "*bf16",
        "factors": "*fp32",
        "out": "*fp32",
        "count": "i32",
        "size": "i64",
        "BLOCK": "constexpr",
    }
    source = ASTSource(fn=weighted_sum, signature=signature, constexprs={"BLOCK": 2048})
    assert compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]
