# SPDX-License-Identifier: Apache-2.0
"""True values of small tensors on a virtual GPU: what programs decide by is what the CPU computes.

Each program runs in a process of its own (scripts/virtual_values.py).
"""

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opacus_memprof.virtual_gpu import no_weights
from tests.warm_python import ENVIRONMENT, interpreter

PROGRAM = Path(__file__).parent / "scripts" / "virtual_values.py"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
)


@cache
def run(*names: str, python: tuple[str, ...] = ()) -> dict[str, Any]:
    completed = subprocess.run(
        [*(python or interpreter()), PROGRAM, *names], capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def without_models() -> dict[str, Any]:
    return run("operations", "results", "attention", "scaler", "unknown", "blocks")


def line_of(text: str) -> str:
    (line,) = [index for index, line in enumerate(PROGRAM.read_text().splitlines(), 1) if text in line]
    return str(line)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def assert_close_lists(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for each, like in zip(found, expected, strict=True):
            assert_close_lists(each, like)
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_operations_give_what_the_cpu_gives() -> None:
    found = without_models()["operations"]
    assert found["cuda"] == found["cpu"]
    assert found["reads"] == []  # all of it is known


def test_a_training_computes_what_it_computes_on_the_cpu() -> None:
    found = without_models()["results"]
    assert_close(found["cuda"]["losses"], found["cpu"]["losses"])
    assert_close(found["cuda"]["mean"], found["cpu"]["mean"])
    assert found["cuda"]["gradients"].keys() == found["cpu"]["gradients"].keys()
    for name, gradient in found["cuda"]["gradients"].items():
        assert_close(gradient, found["cpu"]["gradients"][name])
    assert found["reads"] == []


def test_fused_attention_and_its_gradients_are_those_of_the_cpu() -> None:
    found = without_models()["attention"]
    for on_cuda, on_cpu in zip(found["cuda"], found["cpu"], strict=True):
        for each, expected in zip(on_cuda, on_cpu, strict=True):
            assert_close(each, expected)


def test_distributions_of_parameters_that_were_not_computed_are_accepted() -> None:
    found = run("distributions")["distributions"]
    assert found["shape"] == [1500, 300]
    assert "aten::item" in found["reads"]  # of torch's check, which zeros do not pass
    assert found["refused"] == "ValueError"  # known scales are still checked


def test_sparse_nested_and_quantized_tensors_and_subclasses_are_computed() -> None:
    found = run("compounds")["compounds"]
    assert found["cpu"][1][0][0] == 3  # three different indices
    assert_close_lists(found["cuda"], found["cpu"])
    assert found["reads"] == []


def test_the_rows_of_large_sparse_gradients_are_counted() -> None:
    found = run("sparse_gradients")["sparse_gradients"]
    assert found["rows"] == 2500
    assert found["indices"] == 2499
    values, indices = 2500 * 1024 * 4, 2500 * 8
    assert values + indices <= found["taken"] <= values + indices + 2**20
    assert found["reads"] == found["shapes"] == []


def test_replays_of_a_cuda_graph_compute_what_was_captured() -> None:
    found = run("graphs")["graphs"]
    assert found["captured"] == 0
    assert found["replays"] == 7
    for step, (made, product) in enumerate(found["results"]):
        expected = max(2 * (step - 1) + step + 1, 0)
        assert made == [expected] * 4
        assert product == [[2 * expected] * 2] * 2
    assert len({tuple(draw) for draw in found["draws"]}) == 3
    assert found["known"] == []
    difference, gradient = found["graphed"]
    assert difference < 1e-5
    assert gradient == [[4, 6, 8, 10]] * 3
    assert found["reads"] == ["aten::item"]


def test_higher_order_operators_work_without_a_compiler() -> None:
    # Dynamo's C++ objects need Python's end, which a forked process leaves out.
    found = run("higher_order", "dtensor", python=(sys.executable,))
    assert_close_lists(found["higher_order"]["cuda"], found["higher_order"]["cpu"])
    assert found["higher_order"]["reads"] == []
    assert 0.9 < found["dtensor"]["deviation"] < 1.1
    assert found["dtensor"]["reads"] == []


def test_what_triton_kernels_write_is_unknown() -> None:
    found = run("kernels", python=(sys.executable,))["kernels"]
    assert found == {
        "added": [True, False, False],
        "in_turn": [True, True, False],
        "one_of": [True, True, False],
        "part": [True, False],
        "compiled": [True, False, True],
        "graph": [False, True],
    }


@pytest.mark.parametrize(
    ("script", "differ"),
    [
        # What the compilers of torch.jit launch past the dispatcher is not computed.
        ("virtual_programs.py", {"scripted"}),
        # cuSPARSELt's product has no kernel for the CPU, and two tensors are large.
        ("virtual_more_programs.py", {"semi_structured", "large_index", "averages_of_large_batches"}),
        # What kernels of the program's own write, and copies of what is unknown.
        (
            "virtual_past_operators.py",
            {
                *("copy_of_what_is_unknown", "unknown_copy_to_the_host", "compiled_ahead_of_time"),
                *("kernel_in_place", "kernel_in_a_graph"),
            },
        ),
    ],
)
def test_gpu_programs_give_the_cpu_s_values_or_say_why(script: str, differ: set[str]) -> None:
    program = PROGRAM.with_name(script)
    done = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["programs"] >= 14
    assert found["unsaid"] == []
    assert found["needless"] == []
    assert set(found["different"]) <= differ


def test_a_scaler_finds_the_overflow_and_grows_after_it() -> None:
    found = without_models()["scaler"]
    assert found["scales"] == [65536, 32768, 32768, 65536, 65536]
    assert found["stepped"] == [False, True, True, True]


def test_memory_that_is_used_again_holds_no_rubbish() -> None:
    found = without_models()["blocks"]
    assert found["reused"]
    assert found["read"] == [0]


def test_other_threads_and_generators() -> None:
    found = without_models()["blocks"]
    assert found["thread"] == [36]
    assert found["repeats"]  # the same seed gives the same values
    assert found["dropped"] == [0.0, 2.0]
    assert found["permutation"]
    assert found["untouched"]  # the CPU's own generator


def test_values_that_are_not_computed_are_zeros_and_named() -> None:
    found = without_models()["unknown"]
    assert found["finite"] is True
    assert found["read"] == 0
    assert found["host"] == [0, True]
    reads = {line: (operation, count) for operation, line, count in found["reads"]}
    assert reads[line_of("# here")] == ("aten::item", 1)
    assert reads[line_of("# and here")] == ("aten::copy_", 1)
    # These of NaN raise an error, as on a GPU, and are counted besides.
    assert found["failures"] == {"aten::_linalg_eigh": 1, "aten::_linalg_svd": 1}


def test_shapes_of_what_is_not_computed_are_bounds() -> None:
    found = without_models()["unknown"]
    assert found["rows"] == [1500 * 1500, 2]
    assert found["counts"] == [3, 3]  # 1500 rows choose 3 of 1500 each, in turn
    assert {operation for operation, _ in found["shapes"]} == {"aten::nonzero", "aten::topk"}


@pytest.mark.parametrize("mode", ["hooks", "ghost", "flash_clip"])
def test_nothing_else_is_allocated(mode: str) -> None:
    """Ghost clipping's embedding counts token ids, and flash_clip checks its norms: these run with values alone."""
    found = run(mode)[mode]
    assert found.pop("failures") == {}
    assert math.prod(found.values()) > 0
    if mode == "hooks":
        without = run("without", mode)[mode]
        without.pop("failures")
        assert found == without


def test_a_small_mixture_of_experts_is_computed() -> None:
    found = run("small_mixtral", "gpt2")["small_mixtral"]
    assert all(4.5 < loss < 7 for loss in found["losses"])  # log(200) is 5.3
    assert found["reads"] == found["shapes"] == []
    assert found["failures"] == {}


@pytest.mark.slow
def test_a_large_mixture_of_experts_balances_its_load() -> None:
    found = run("mixtral")["mixtral"]
    assert len(found["routes"]) >= 2 * 2  # layers and steps
    for route in found["routes"]:
        assert route == [4 * 512 * 2 // 4] * 4  # every token chooses two of four experts
    assert "aten::topk" in found["shapes"]


def test_gpt2_learns_and_writes() -> None:
    found = run("small_mixtral", "gpt2")["gpt2"]
    assert found["losses"][-1] < 0.5 * found["losses"][0]
    assert found["tokens"][0][:6] == [3, 4, 5, 6, 7, 3]
    assert found["reads"] == []


TTIR = """tt.func public @kernel(%table: !tt.ptr<i64> loc(#a), %in: !tt.ptr<f32>, %out: !tt.ptr<f32>, %n: i32) {{
  %c0 = arith.constant 0 : i32
  {}
  tt.return
}}
"""


@pytest.mark.parametrize(
    ("lines", "written"),
    [
        (["%x = tt.load %in", "%p = tt.addptr %out, %n", "tt.store %p, %x"], {2, 3}),
        (["%x = tt.load %table", "%p = tt.addptr %out, %x", "tt.store %p, %x"], {2}),
        (["%x = tt.atomic_rmw fadd, acq_rel, gpu, %in, %c0"], {1}),
        (['%x = tt.elementwise_inline_asm "st" %out, %c0 : !tt.ptr<f32>, i32 -> i32'], {2}),
        (
            ["%p = scf.if %c0 -> (!tt.ptr) {", "scf.yield %in", "} else {", "scf.yield %out", "}", "tt.store %p, %c0"],
            {1, 2},
        ),
        (["%p = scf.for %i = %c0 to %c0 iter_args(%q = %in) {", "tt.store %q, %c0", "scf.yield %out", "}"], {1, 2}),
        (["%x = tt.call @other(%out)"], None),
        (["cf.br ^bb1(%out : !tt.ptr<f32>)"], None),
    ],
)
def test_what_a_kernel_writes_is_what_it_stores_through(lines: list[str], written: set[int] | None) -> None:
    from opacus_memprof.virtual_gpu.values import written_parameters

    assert written_parameters(TTIR.format("\n  ".join(lines))) == written


def test_large_parameters_stay_unwritten_and_small_ones_do_not() -> None:
    small, large = torch.zeros(2**18), torch.zeros(2**18 + 1)  # of a MiB, and of more
    with no_weights.UnwrittenTensors():
        for each in (small, large):
            each.fill_(3)
        large.resize_(2**19)
        like = torch.ones_like(torch.empty(2**20, device="meta"))
        assert ((torch.arange(2**18) << 1)[:3] == torch.tensor([0, 2, 4])).all()  # is not in place
    assert (small == 3).all()
    assert large.shape == (2**19,)
    assert not large[: 2**18].any()
    assert like.device.type == "meta"


def test_a_model_without_weights_has_the_requested_dtype() -> None:
    half, none = SimpleNamespace(dtype=torch.float16), SimpleNamespace()
    asked = [(half, None), (half, "auto"), (half, torch.bfloat16), (none, None), (none, "auto")]
    assert [no_weights._dtype(*each) for each in asked] == [
        *[torch.float16] * 2,
        torch.bfloat16,
        *[torch.float32] * 2,
    ]


def test_transformers_says_again_what_it_said_before() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_info()
    with no_weights._quiet():
        assert logging.get_verbosity() == logging.ERROR
    assert logging.get_verbosity() == logging.INFO
    logging.set_verbosity(before)


def test_weights_that_a_program_gives_itself_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    load = classmethod(lambda cls, path, config=None, **options: (path, options))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    no_weights.patch_from_pretrained()
    for path, options in (("gpt2", {"state_dict": {"a": 1}}), (None, {"dtype": "auto"})):
        assert PreTrainedModel.from_pretrained(path, **options) == (path, options)
