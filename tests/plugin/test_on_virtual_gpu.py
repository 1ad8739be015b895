# SPDX-License-Identifier: Apache-2.0
"""`--memprof-virtual-gpu`: CUDA tests with limits and baselines, without a GPU.

Each run is a process of its own, for a virtual GPU cannot come after torch.
"""

import json

import pytest

from tests.plugin.conftest import LOAD

TESTS = """
import os

import opacus
import pytest
import torch

MIB = 2**20
WIDTH, BATCH = 1024, 16
# Opacus makes the samples of the weight and copies them: twice their bytes are live then, and once those of the bias.
SAMPLES = BATCH * (2 * WIDTH * WIDTH + WIDTH) * 4

def block(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def train(width=WIDTH):
    model = torch.nn.Linear(WIDTH, width).cuda()
    data = torch.utils.data.TensorDataset(torch.randn(BATCH, WIDTH), torch.randint(width, (BATCH,)))
    model, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
        data_loader=torch.utils.data.DataLoader(data, batch_size=BATCH), poisson_sampling=False)
    for features, labels in loader:
        torch.nn.functional.cross_entropy(model(features.cuda()), labels.cuda()).backward()
        optimizer.step()

@pytest.mark.limit_gpu_memory(SAMPLES, category="per_sample_gradients")
def test_samples_at_the_limit():
    train()

@pytest.mark.limit_gpu_memory(SAMPLES - 1, category="per_sample_gradients")
def test_samples_above_the_limit():
    train()

@pytest.mark.limit_gpu_memory(5 * MIB)
def test_block_at_the_limit():
    block(5 * MIB)

@pytest.mark.limit_gpu_memory(5 * MIB - 1)
def test_block_above_the_limit():
    block(5 * MIB)

def test_baseline(memprof):
    train({width})
    memprof.check_baseline("training", rel=0)

@pytest.mark.memprof_isolated
def test_isolated(memprof):
    assert os.getppid() == int(os.environ["FIRST_PROCESS"])
    block(MIB)
    assert torch.cuda.get_device_name() == "NVIDIA H200"
    assert memprof.peak() == MIB

def test_memory():
    assert torch.cuda.get_device_properties(0).total_memory == 3 * 2**30
    in_use = block(2 * 2**30)
    with pytest.raises(torch.OutOfMemoryError):
        block(2**30)
"""
CONFTEST = """
import os
import torch
os.environ.setdefault("FIRST_PROCESS", str(os.getpid()))
"""


def test_cuda_without_a_gpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ini options, then by those of the command line, in two workers that load the plugin by themselves."""
    pytester.makeini("[pytest]\nmemprof_virtual_gpu = h200\nmemprof_virtual_memory = 3 GiB")
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=TESTS.replace("{width}", "WIDTH"))
    result = pytester.runpytest_subprocess(*LOAD, "-W", "ignore", "--memprof-update-baselines")
    result.assert_outcomes(passed=5, failed=2)
    result.stdout.fnmatch_lines(["virtual GPU: h200, 3.00 GiB (memory is exact, values are not computed)"])
    result.stdout.fnmatch_lines_random(
        [
            "limit_gpu_memory: * of per_sample_gradients on cuda:0 at the peak*which is 1 B more*",
            "limit_gpu_memory: 5.00 MiB (5242880 bytes) of memory on cuda:0 at the peak*which is 1 B more*",
        ]
    )
    (entry,) = json.loads((pytester.path / "memprof_baselines" / "training.json").read_text())["baselines"]
    assert entry["key"]["device"] == "NVIDIA H200"
    assert entry["virtual_gpu"] == "h200"
    samples = sum(sizes.get("per_sample_gradients", 0) for sizes in entry["modules"].values())
    assert samples == 16 * (2 * 1024 * 1024 + 1024) * 4

    pytester.makeini("[pytest]")
    pytester.makepyfile(test_it=TESTS.replace("{width}", "WIDTH + 1"))
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    options = (
        "-n2",
        "--memprof-virtual-gpu=h200",
        "--memprof-virtual-memory=3GiB",
        "-k",
        "baseline or at_the",
    )
    result = pytester.runpytest_subprocess(*options, "-p", "no:cacheprovider", "-W", "ignore")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*memory grew by 0 % or more against the baseline *training.json for NVIDIA H200, *, mode hooks (baseline "
            "and this run on a virtual GPU); *",
            # A column more: WIDTH weights and a bias of each sample, the weights copied.
            f"*per_sample_gradients *+{16 * (2 * 1024 + 1) * 4 / 1024:.2f} KiB (*",
        ]
    )


def test_kinds_that_there_are_not(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*LOAD, "--memprof-virtual-gpu", "h2000")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['ERROR: --memprof-virtual-gpu: there is no virtual GPU "h2000": use one of *h200*'])
    result.stderr.no_fnmatch_line("*Traceback*")


def test_sizes_that_are_none(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess(*LOAD, "--memprof-virtual-gpu=h200", "--memprof-virtual-memory=much")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --memprof-virtual-memory: 'much' is not a size: *"])


def test_torch_that_came_first(pytester: pytest.Pytester) -> None:
    """In this process, which has torch; and with a plugin that imports it, by that plugin's name."""
    pytester.makepyfile(early="import torch")
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess("-p", "early", *LOAD, "--memprof-virtual-gpu", "h200")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --memprof-virtual-gpu h200: torch was imported by the plugin early before * -p no:NAME*"]
    )
