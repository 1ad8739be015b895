# SPDX-License-Identifier: Apache-2.0
"""Profiles of torch's snapshots, compared with torch's own counts in the process that has written them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.torch_snapshot import profile_of
from opacus_memprof.planning.replay import read_recording, replay
from tests.on_virtual_gpu import interpreter
from tests.warm_python import ENVIRONMENT

pytestmark = pytest.mark.cuda

PROGRAM = """
import json, sys, torch

path, context, stacks, entries, optimizer = sys.argv[1:]
options = {"context": None if context == "none" else context, "stacks": stacks, "max_entries": int(entries)}
torch.cuda.memory._record_memory_history(**options)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 16)).cuda()
trained = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
side = torch.cuda.Stream()
for _ in range(3):
    batch = torch.randn(512, 256, device="cuda")
    with torch.cuda.stream(side):
        batch.record_stream(side)
    loss = model(batch).square().mean()
    loss.backward()
    trained.step()
    trained.zero_grad()
torch.cuda.synchronize()
torch.cuda.memory._dump_snapshot(path)
stats = torch.cuda.memory_stats()
parameters = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({**{name: size for name, size in stats.items() if isinstance(size, int)}, "parameters": parameters}))
"""


def recorded(path: Path, context: str, stacks: str, entries: int = 10**6, optimizer: str = "Adam") -> dict[str, Any]:
    """Torch's counts, in a process that has written a snapshot."""
    command = [*interpreter(), "-c", PROGRAM, str(path), context, stacks, str(entries), optimizer]
    ran = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    assert ran.returncode == 0, ran.stderr
    counted: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return counted


@pytest.mark.parametrize(
    ("context", "stacks"), [("all", "python"), ("all", "all"), ("alloc", "python"), ("none", "python")]
)
def test_figures_are_torch_s(tmp_path: Path, context: str, stacks: str) -> None:
    counted = recorded(tmp_path / "a.pickle", context, stacks)
    profile = load_profile(profile_of(tmp_path / "a.pickle"))
    device = profile.devices["cuda:0"]
    assert device.peak.requested_bytes == counted["requested_bytes.all.peak"]
    assert device.peak.reserved_bytes is not None
    assert device.peak.requested_bytes < device.peak.reserved_bytes <= counted["reserved_bytes.all.peak"]
    assert device.end_bytes == counted["requested_bytes.all.current"]
    end = device.snapshots[-1]
    assert (end.reserved_bytes, end.remainder) == (counted["reserved_bytes.all.current"], 0)
    assert end.allocated_bytes == counted["allocated_bytes.all.current"]
    if context == "none":
        return
    parameters = counted["parameters"]
    assert device.peak.categories["model_parameters"] == parameters
    # Adam has two moments; its step counts are on the CPU.
    assert device.phases["optimizer_step"].categories["optimizer_states"] == 2 * parameters
    assert device.phases["optimizer_step"].categories["gradients"] == parameters
    assert [step.step for step in device.steps] == [0, 1, 2]


def test_an_optimizer_that_allocates_nothing_has_steps_too(tmp_path: Path) -> None:
    recorded(tmp_path / "a.pickle", "all", "python", optimizer="SGD")
    device = load_profile(profile_of(tmp_path / "a.pickle")).devices["cuda:0"]
    assert [step.step for step in device.steps] == [0, 1, 2]


def test_a_trace_that_lost_its_beginning(tmp_path: Path) -> None:
    counted = recorded(tmp_path / "a.pickle", "all", "python", entries=100)
    device = load_profile(profile_of(tmp_path / "a.pickle")).devices["cuda:0"]
    assert device.peak.requested_bytes <= counted["requested_bytes.all.peak"]
    assert device.end_bytes == counted["requested_bytes.all.current"]
    assert device.peak.categories["model_parameters"] == counted["parameters"]


def test_a_replay_reserves_what_the_process_did(tmp_path: Path) -> None:
    counted = recorded(tmp_path / "a.pickle", "all", "python")
    directory = profile_of(tmp_path / "a.pickle")
    same, expandable = replay(read_recording(directory, "h200", None), ["", "expandable_segments:True"])
    assert same.requested == counted["requested_bytes.all.peak"]
    assert same.reserved == counted["reserved_bytes.all.peak"]
    assert expandable.fits
