# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, run by Triton's interpreter on the CPU against float64, and compiled for the H200 without one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")


def _each(*cases: object, nightly: tuple[object, ...] = ()) -> list[Any]:
    """Returns the cases, with those of `nightly` marked.

    A kernel takes other registers and shared memory by its sizes, so that the largest compile first; and one of each
    kind of types.
    """
    return [*cases, *(pytest.param(case, marks=pytest.mark.nightly) for case in nightly)]


@pytest.mark.parametrize("which", _each("not nightly", nightly=("nightly",)))
def test_kernels_under_the_interpreter(which: str) -> None:
    checks = [str(Path(__file__).with_name(f"clipping_{name}_checks.py")) for name in ("kernel", "lost")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *checks],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    if "only 0-dimensional arrays can be converted" in run.stdout:
        pytest.skip(f"the interpreter of Triton {triton.__version__} does not know this NumPy")
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def _compile(function: Any, signature: dict[str, str], constants: dict[str, Any], warps: int) -> Any:
    """The kernel for an H200; the arguments that ``signature`` does not name are 32-bit integers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    types = dict.fromkeys(function.arg_names, "i32") | signature | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


@pytest.mark.parametrize("element", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("side", _each(128, nightly=(32, 64)))
@pytest.mark.parametrize("name", ["gram_tile", "gram_tiles"])
def test_gram_kernels_compile_for_the_h200(name: str, element: str, side: int) -> None:
    import triton.language as tl

    from opacus_memprof.clipping.kernels import gram as gram_triton

    constants: dict[str, Any] = {"SIDE": side, "DEPTH": 32 if element == "fp32" else 64, "PRECISION": "tf32"}
    signature = {"g": f"*{element}", "a": f"*{element}", "parts": "*fp32"}
    if name == "gram_tiles":
        types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
        constants |= {"TYPE": types[element], "ALIGNMENT": 16}
        signature = {"operands": "*i64", "parts": "*fp32"}
    kernel = _compile(getattr(gram_triton, name), signature, constants, 8 if side == 128 else 4)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= 227 * 1024  # of one block on an H200
    assert "wgmma" in kernel.asm["ptx"] or "mma" in kernel.asm["ptx"]


@pytest.mark.parametrize("element", _each("fp64", "bf16", nightly=("fp32", "fp16")))
@pytest.mark.parametrize("name", ["norms_of_layer", "norms_of_layers", "with_embedding"])
def test_kernels_that_form_gradients_compile_for_the_h200(name: str, element: str) -> None:
    import triton.language as tl

    from opacus_memprof.clipping.kernels import formed as formed_triton

    number = "fp64" if element == "fp64" else "fp32"
    signature = {"parts": f"*{number}", "out": f"*{number}", "lost": "*u8", "share": "fp32", "floor": "fp32"}
    constants: dict[str, Any] = {"ROWS": 32, "COLUMNS": 64}
    if name == "norms_of_layers":
        types = {"fp64": tl.float64, "fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
        constants |= {"TYPE": types[element], "ALIGNMENT": 16}
        signature |= {"operands": "*i64"}
    else:
        has_picked = name == "with_embedding"
        signature |= {"g": f"*{element}", "a": f"*{element}", "d": f"*{element}"}
        signature["ids"] = "*i64" if has_picked else f"*{number}"
        constants = {"HAS_PICKED": has_picked, **constants}
    function = formed_triton.norms_of_layers if name == "norms_of_layers" else formed_triton.norms_of_layer
    kernel = _compile(function, signature, constants, 4)
    assert kernel.asm["cubin"]
    assert "f64" in kernel.asm["ptx"]  # gradients accumulate in float64


def test_the_kernel_of_outer_products_compiles_for_the_h200() -> None:
    import triton.language as tl

    from opacus_memprof.clipping.kernels import formed as formed_triton

    constants = {"BLOCK": 512, "SOURCE": tl.bfloat16}
    signature = {"table": "*i64", "out": "*fp32"}
    assert _compile(formed_triton.norms_of_outer_products, signature, constants, 4).asm["cubin"]


@pytest.mark.parametrize("element", _each("fp32", "bf16", nightly=("fp16",)))
def test_kernels_that_add_lost_gradients_compile_for_the_h200(element: str) -> None:
    import triton.language as tl

    from opacus_memprof.clipping.kernels import formed as formed_triton

    types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
    constants = {"ROWS": 32, "COLUMNS": 64, "TYPE": types[element], "TARGET": tl.float32}
    kernel = _compile(formed_triton.add_products, {"table": "*i64", "factors": "*fp32"}, constants, 4)
    assert "f64" in kernel.asm["ptx"]  # gradients accumulate in float64
    signature = {"ids": "*i64", "g": f"*{element}", "factors": "*fp32", "out": "*fp32"}
    assert "f64" in _compile(formed_triton.add_rows, signature, {"BLOCK": 128}, 4).asm["ptx"]


def test_stack_kernels_compile_for_the_h200() -> None:
    import triton.language as tl

    from opacus_memprof.clipping.kernels import stacks as stacks_triton

    signature = {"stack": "*bf16", "factors": "*fp32", "out": "*fp32", "size": "i64"}
    assert _compile(stacks_triton.weighted_sum, signature, {"BLOCK": 2048}, 8).asm["cubin"]
    constants = {"BLOCK": 1024, "SOURCE": tl.bfloat16, "TARGET": tl.float32}
    assert _compile(stacks_triton.weighted_sums, {"table": "*i64", "factors": "*fp32"}, constants, 4).asm["cubin"]
    constants = {"BLOCK": 512, "SOURCE": tl.bfloat16}
    assert _compile(stacks_triton.squared_norms, {"table": "*i64", "out": "*fp32"}, constants, 4).asm["cubin"]


@pytest.mark.parametrize("by_power_of_2", _each(False, nightly=(True,)))
@pytest.mark.parametrize("adds_squares", _each(True, nightly=(False,)))
@pytest.mark.parametrize(
    ("element", "target"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_the_noise_kernel_compiles_for_the_h200(
    element: str, target: str, adds_squares: bool, by_power_of_2: bool
) -> None:
    import triton.language as tl

    from opacus_memprof.clipping.kernels import noise as noise_triton

    types = {"TYPE": getattr(tl, element), "TARGET": getattr(tl, target)}
    constants = {"BLOCK": 512, **types, "STEP": 1, "BY_POWER_OF_2": by_power_of_2, "ADDS_SQUARES": adds_squares}
    signature = {"table": "*i64", "targets": "*i64", "squares": "*fp64", "std": "fp32", "divisor": "fp32"}
    assert _compile(noise_triton.add_normals, signature, constants, 4).asm["cubin"]


@pytest.mark.parametrize("element", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", _each(1024, nightly=(64, 256)))
def test_the_group_norm_kernel_compiles_for_the_h200(element: str, tokens: int) -> None:
    from opacus_memprof.clipping.kernels import stacks as stacks_triton

    signature = {"x": f"*{element}", "g": f"*{element}", "weight": "*fp32", "bias": "*fp32", "eps": "fp32"}
    constants = {"CHANNELS": 2048 // tokens, "TOKENS": tokens}
    assert _compile(stacks_triton.group_gradients, signature, constants, 8).asm["cubin"]


@pytest.mark.parametrize("element", ["fp32", "bf16"])
@pytest.mark.parametrize("features", _each(16384, nightly=(64, 2048)))
@pytest.mark.parametrize("has_mean", [True, False])
def test_the_token_norm_kernel_compiles_for_the_h200(element: str, features: int, has_mean: bool) -> None:
    from opacus_memprof.clipping.kernels import stacks as stacks_triton

    signature = {"x": f"*{element}", "g": f"*{element}", "out": "*fp32", "eps": "fp32"}
    constants = {"OWN": 32, "TOKENS": max(1, min(4096 // features, 32)), "FEATURES": features, "MEAN": has_mean}
    assert _compile(stacks_triton.token_gradients, signature, constants, 8).asm["cubin"]
