# SPDX-License-Identifier: Apache-2.0
"""`@pytest.mark.fits` and the fixture `memory_plan`, in processes with virtual GPUs of their own."""

import subprocess

import pytest

from tests.plugin.conftest import LOAD, Run
from tests.warm_python import ENVIRONMENT, ROOT, interpreter

# Processes of tests are forked: test_runs.py and test_on_virtual_gpu.py start theirs as the plugin does.
CONFTEST = """
import subprocess
from types import SimpleNamespace
from opacus_memprof.pytest_plugin import isolation

def run(command, **options):
    options["env"]["PYTHONPATH"] = {root!r}
    options["env"].pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by torch
    return subprocess.run([*{python!r}, *command[1:]], **options)

isolation.subprocess = SimpleNamespace(**vars(subprocess) | {{"run": run}})
"""
TESTS = """
import pytest
import torch
from opacus_memprof.virtual_gpu.devices import GPUS

MIB = 2**20
# Blocks of 64 MiB are reserved as they are.

def hold(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

@pytest.mark.fits("a100-40", below=64 * MIB)
def test_at_the_limit():
    assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-40GB"
    hold(64)

@pytest.mark.fits("a100-40", below=64 * MIB - 1)
def test_above_the_limit():
    hold(64)

@pytest.mark.fits("a100-40")
@pytest.mark.limit_gpu_memory(64 * MIB, reserved=True)
def test_reserves_as_much():
    hold(64)

@pytest.mark.fits("a100-40")
@pytest.mark.limit_gpu_memory(64 * MIB, reserved=True)
def test_reserves_more():
    held = hold(64)
    del held
    hold(65)  # is requested alone, and reserved beside the first

@pytest.mark.fits("t4", below="1 TB")
def test_that_runs_out():
    hold(16 * 1024)

@pytest.mark.fits("t4")
def test_that_catches_it():
    with pytest.raises(torch.OutOfMemoryError):
        hold(16 * 1024)

@pytest.mark.fits("t4")
def test_without_a_gpu():
    torch.empty(8)

def train():
    model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")  # 64 MiB, and as much for its gradient
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    model.weight.grad = hold(64).view(torch.float32).view(4096, 4096)
    optimizer.step()

def test_plans(memory_plan):
    planned = memory_plan(train, gpu="t4")
    assert planned.fits
    needed = GPUS["t4"].context_memory + 2 * 64 * MIB
    assert needed <= planned.needed_bytes < needed + MIB
"""


def test_what_fits(pytester: pytest.Pytester) -> None:
    """Without a virtual GPU in this process, whatever the ini file says of its memory."""
    pytester.makeconftest(CONFTEST.format(root=ROOT, python=interpreter()))
    pytester.makeini("[pytest]\nmemprof_virtual_memory = 3 GiB")
    pytester.makepyfile(test_it=TESTS)
    command = [*interpreter(), "-m", "pytest", *LOAD, "-W", "ignore"]
    environment = ENVIRONMENT | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=pytester.path, env=environment, capture_output=True, text=True)
    result = pytest.RunResult(ran.returncode, ran.stdout.splitlines(), ran.stderr.splitlines(), 0)
    result.assert_outcomes(passed=3, failed=5)
    result.stdout.fnmatch_lines_random(
        [
            "fits: 64.00 MiB (67108864 bytes) reserved on a virtual NVIDIA A100-SXM4-40GB, which is 1 B more than *",
            "*unattributed",
            "limit_gpu_memory: 130.00 MiB (*) reserved on cuda:0 in idle of step 0, which is 66.00 MiB more than *; "
            "at most 65.00 MiB were requested",
            "*OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB*",
            "fits: memory of the virtual Tesla T4 ran out, at 16.00 GiB of * in *, which the test has caught",
            "fits: the test has allocated nothing on the GPU: let it train on cuda",
        ]
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ('"h300"', 'there is no virtual GPU "h300": use one of *'),
        ('"h100", below="much"', "'much' is not a size: *"),
        ("", "*missing 1 required positional argument: 'gpu'"),
    ],
)
def test_markers_that_say_nothing(run: Run, arguments: str, sentence: str) -> None:
    result = run(f"@pytest.mark.fits({arguments})\ndef test_it():\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_it.py::test_it: @pytest.mark.fits: {sentence}"])
