# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin on a GPU: markers, leaks and baselines mean CUDA's memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from opacus_memprof.pytest_plugin import plugin

ROOT = Path(plugin.__file__).parents[2]

TRAINING = """
import opacus
import opacus_memprof
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MIB = 2**20
kept = []

def block(mib):
    return torch.empty(int(mib * MIB), dtype=torch.uint8, device="cuda")

def train(width=256, steps=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4)).cuda()
    data = TensorDataset(torch.randn(8 * steps, 64), torch.randint(4, (8 * steps,)))
    model, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False)
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features.cuda()), labels.cuda()).backward()
        optimizer.step()
"""

TESTS = (
    TRAINING
    + """
@pytest.mark.limit_gpu_memory("4 MiB")
def test_above():
    block(5)

@pytest.mark.limit_gpu_memory("4 MiB", category="inputs")
def test_in_a_category(memprof):
    other = block(32)
    with opacus_memprof.tag("inputs"):
        in_use = block(4)
    assert memprof.breakdown()["cuda:0"] == {"inputs": 4 * MIB, "unattributed": 32 * MIB}

@pytest.mark.limit_gpu_leaks("1 B")
def test_leaks():
    kept.append(block(3))

@pytest.mark.limit_gpu_leaks("1 B")
def test_training_leaks_nothing(memprof):
    train()

@pytest.mark.parametrize("time", range(5))
def test_the_same_each_time(memprof, time):
    train()
    samples = 8 * (64 * 256 + 256 + 256 * 4 + 4) * 4
    first = 8 * (64 * 256 + 256) * 4  # the layer whose samples Opacus copies, or both, live at the peak
    assert first <= memprof.peak("per_sample_gradients") <= 2 * samples
    assert memprof.snapshot("end")["devices"]["cuda:0"]["remainder"] == 0
    memprof.check_baseline("training", rel=0)

@pytest.mark.parametrize("mib", [1.0199, 1.0201])
def test_growth(memprof, mib):
    in_use = block(16)
    with opacus_memprof.tag("inputs"):
        inputs = block({inputs} or mib)
    memprof.check_baseline("one", rel=0.02)
    del in_use, inputs

def test_runs_out(memprof):
    in_use = block(6)
    block(2**24)

def test_goes_on(memprof):
    assert block(1).is_cuda
    assert memprof.peak() == MIB
"""
)


@pytest.fixture(scope="module", autouse=True)
def _preloaded_torch() -> None:
    """Torch loads parts of itself on their first use, and none of them can be loaded twice."""
    scope: dict[str, Any] = {}
    exec(TRAINING, scope)
    scope["train"]()


@pytest.fixture(autouse=True)
def _without_entry_points(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    torch.cuda.empty_cache()


def test_markers_leaks_and_baselines(pytester: pytest.Pytester) -> None:
    load = ("-p", plugin.__name__, "-p", "no:cacheprovider", "-W", "ignore")
    pytester.makepyfile(test_it=TESTS.replace("{inputs}", "1"))
    written = pytester.runpytest_inprocess(*load, "--memprof-update-baselines", "-k", "same or growth")
    written.assert_outcomes(passed=7, deselected=6)
    (entry,) = json.loads((pytester.path / "memprof_baselines" / "training.json").read_text())["baselines"]
    assert entry["key"]["device"] == torch.cuda.get_device_name(0)
    assert entry["key"]["mode"] == "hooks"
    assert entry["peak_bytes"] == sum(sum(sizes.values()) for sizes in entry["modules"].values())

    pytester.makepyfile(test_it=TESTS.replace("{inputs}", "0"))
    result = pytester.runpytest_inprocess(*load, "--memprof", "--memprof-report=out")
    result.assert_outcomes(passed=10, failed=3, errors=1)
    result.stdout.fnmatch_lines_random(
        [
            "limit_gpu_memory: 5.00 MiB (5242880 bytes) of memory on cuda:0 at the peak*1.00 MiB more*",
            "limit_gpu_leaks: 3.00 MiB (3145728 bytes, 1 blocks) on cuda:0 outlive the test*",
            "*memory grew by 2 % or more against the baseline *one.json for *",
            "*inputs *1.00 MiB -> *1.02 MiB  +20.58 KiB (+2.0 %)",
            "cuda:0 ran out of memory: 16.00 TiB of unattributed in idle of step 0, with 6.00 MiB of the test live",
            "test_it.py::test_above *cuda:0 *5.00 MiB *failed",
        ]
    )
