# SPDX-License-Identifier: Apache-2.0
"""The two markers: what they fail, what they say, and what they refuse at collection."""

from types import SimpleNamespace
from typing import Any

import pytest

from opacus_memprof.pytest_plugin.limits import check_leaks, check_memory, select
from opacus_memprof.recording import native
from tests.plugin.conftest import Run
from tests.unit.made_profiles import a_device, a_peak


def test_a_peak_above_the_limit_fails_and_is_named(run: Run) -> None:
    result = run(
        """
import opacus_memprof

@pytest.mark.limit_gpu_memory("4 MiB")
def test_below():
    block(4)

@pytest.mark.limit_gpu_memory("4 MiB")
def test_above():
    with opacus_memprof.tag("inputs"):
        kept = block(2)
    block(3)

@pytest.mark.limit_gpu_memory("1 B", category="noise")
def test_nothing_of_the_category():
    block(1)

@pytest.mark.limit_gpu_memory("2 MiB", category="inputs")
def test_above_in_a_category():
    block(8)
    with opacus_memprof.tag("inputs"):
        kept = block(3), block(8)
"""
    )
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_above*",
            "limit_gpu_memory: 5.00 MiB (5242880 bytes) of memory on cpu at the peak, in idle of step 0, which is "
            "1.00 MiB more than the limit of 4.00 MiB (4194304 bytes)",
            "by category:",
            "*3.00 MiB  unattributed",
            "*2.00 MiB  inputs",
            "limit_gpu_memory: 11.00 MiB (11534336 bytes) of inputs on cpu*9.00 MiB more than the limit of 2.00 MiB*",
        ]
    )


def test_a_failure_says_what_to_change(run: Run) -> None:
    """Where the test trains, with the peak that is predicted; a test that allocates by itself has nothing to change."""
    result = run(
        """
@pytest.mark.limit_gpu_memory("10 KiB")
def test_training():
    train(width=256, steps=2)

@pytest.mark.limit_gpu_memory("1 MiB")
def test_by_itself():
    block(2)
"""
    )
    result.assert_outcomes(failed=2)
    # Where the variable CI is set pytest repeats whole failures in its summary.
    text = result.stdout.str().partition("short test summary info")[0]
    training = text.partition("test_by_itself")[0]
    assert text.count("COULD BE") == 1
    place = training.index("limit_gpu_memory: ")
    assert place < training.index("WHAT PRIVACY COSTS") < training.index("COULD BE")
    assert 'grad_sample_mode="flash_clip"' in training[training.index("COULD BE") :]


def test_limits_of_modules_and_phases(run: Run) -> None:
    """At the peak Opacus copies the first layer's weight samples: B·(2·16·32 + 32)·4 bytes; the last has its own."""
    result = run(
        """
FIRST = 8 * (2 * 16 * 32 + 32) * 4
LAST = 8 * (32 * 4 + 4) * 4

@pytest.mark.limit_gpu_memory(FIRST, module="0", category="per_sample_gradients")
def test_at_the_limit(memprof):
    train()
    assert memprof.peak("per_sample_gradients", module="0") == FIRST
    assert memprof.peak("per_sample_gradients") == FIRST + LAST
    assert memprof.peak() > memprof.peak(phase="forward") > 0
    memprof.assert_within(LAST, category="per_sample_gradients", module="2")

@pytest.mark.limit_gpu_memory(FIRST - 1, module="0", category="per_sample_gradients")
def test_above_the_limit():
    train()

@pytest.mark.limit_gpu_memory(1, phase="backward", category="per_sample_gradients")
def test_above_in_a_phase():
    train()

@pytest.mark.limit_gpu_memory("1 GB", module="encodre")
def test_no_such_module():
    train()
"""
    )
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "limit_gpu_memory: * of per_sample_gradients of 0 on cpu at the peak*which is 1 B more*",
            "by module:",
            "*33.00 KiB  0",
            "limit_gpu_memory: * of per_sample_gradients on cpu at the peak of backward, in step 0*",
            "there is no module 'encodre': attach the model*",
        ]
    )


def test_blocks_that_outlive_a_test_are_its_leaks_alone(run: Run) -> None:
    result = run(
        """
kept = []

@pytest.fixture(scope="module")
def wide():
    return block(16)

@pytest.fixture
def model():
    return block(4)

class Cycle:
    def __init__(self):
        self.me, self.block = self, block(8)

@pytest.mark.limit_gpu_leaks("1 MiB")
def test_fixtures_and_cycles_are_none(model, wide):
    Cycle()

@pytest.mark.limit_gpu_leaks("1 MiB")
def test_one_of_3_mib():
    kept.append(block(3))

@pytest.mark.limit_gpu_leaks("1 B")
@pytest.mark.limit_gpu_memory("2 MiB")
def test_next_is_not_told():
    kept.clear()
    block(2)

@pytest.mark.limit_gpu_leaks("1 B")
def test_a_failure_is_no_leak():
    in_use = block(2)
    assert in_use is None

@pytest.mark.limit_gpu_memory("1 MiB")
def test_after_the_failure():
    block(1)
"""
    )
    result.assert_outcomes(passed=4, failed=1, errors=1)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_one_of_3_mib*",
            "limit_gpu_leaks: 3.00 MiB (3145728 bytes, 1 blocks) on cpu outlive the test and its fixtures, which is "
            "2.00 MiB more than the limit of 1.00 MiB (1048576 bytes)",
            "*3.00 MiB  unattributed, made in idle of step 0",
        ]
    )


def test_a_leak_is_said_to_be_its_module_s() -> None:
    item: Any = SimpleNamespace(iter_markers=lambda name: [pytest.mark.limit_gpu_leaks("1 B").mark])
    leaked = {"device": "cpu", "bytes": 3 << 20, "category": "noise", "module": "head", "phase": "noise", "step": 2}
    assert "3.00 MiB  noise of head, made in noise of step 2" in str(check_leaks(item, [leaked]))
    item = SimpleNamespace(iter_markers=lambda name: [pytest.mark.limit_gpu_leaks("3 MiB").mark])
    assert check_leaks(item, [leaked, {**leaked, "device": "cuda:0"}]) is None  # as much on each device


def test_each_limit_is_checked_and_small_categories_are_summed() -> None:
    marks = [pytest.mark.limit_gpu_memory(size).mark for size in ("1 GB", "2 MiB")]
    item: Any = SimpleNamespace(iter_markers=lambda name: marks, get_closest_marker=lambda name: None)
    sizes = {f"category{n}": n << 20 for n in range(1, 8)}
    said = str(check_memory(item, {"cpu": a_device(peak=a_peak(modules={"fc": sizes}))}))
    assert "26.00 MiB more than the limit of 2.00 MiB" in said
    assert "   3.00 MiB  others" in said


def test_a_module_is_not_one_whose_name_begins_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"1": {"noise": 1}, "1.fc": {"noise": 2}, "10": {"noise": 4}}
    monkeypatch.setattr(native, "names", lambda: {"modules": list(modules)})
    used, _, counted, _ = select(a_device(peak=a_peak(modules=modules)), None, "1", None)
    assert (used, counted) == (3, {"1": 1, "1.fc": 2})


WRONG = [
    ('limit_gpu_memory("1.2 XB")', "'1.2 XB' is not a size"),
    ('limit_gpu_memory("0 GB")', "a limit of '0 GB' is 0 bytes"),
    ("limit_gpu_leaks(0)", "a limit of 0 is 0 bytes"),
    ('limit_gpu_memory("1 GB", category="activation")', "there is no category 'activation': use one of *noise*"),
    ('limit_gpu_memory("1 GB", phase="backwards")', "there is no phase 'backwards': use one of *backward*"),
    ('limit_gpu_memory("1 GB", module="a", phase="clip")', "limit the module or the phase, not both"),
    ('limit_gpu_memory("1 GB", layer="a")', "unexpected keyword argument 'layer'"),
    ("limit_gpu_memory", "missing 1 required positional argument: 'limit'"),
]


def test_a_marker_that_cannot_be_meant_fails_the_collection(run: Run, pytester: pytest.Pytester) -> None:
    for number, (marker, _) in enumerate(WRONG):
        pytester.makepyfile(
            **{
                f"test_{number}": f"""
import pytest

class TestModel:
    @pytest.mark.parametrize("n", [1, 2])
    @pytest.mark.{marker}
    def test_it(self, n):
        pass
"""
            }
        )
    result = run("def test_good(): pass")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=len(WRONG))
    for number, (_, sentence) in enumerate(WRONG):
        line = f"*test_{number}.py::TestModel::test_it*@pytest.mark.limit_gpu_*: *{sentence}*"
        result.stdout.fnmatch_lines([line])
    result.stdout.no_fnmatch_line("*Traceback*")
