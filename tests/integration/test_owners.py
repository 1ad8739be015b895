# SPDX-License-Identifier: Apache-2.0
"""What no hook has claimed has an owner, or the line of the program that made it.

The programs' sizes follow from their source, and line numbers from marks in it.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from opacus_memprof.hooks.owners import OwnerSearch
from opacus_memprof.recording import native
from tests.integration.run_scripts import profile_of, python
from tests.on_virtual_gpu import interpreter
from tests.warm_python import ENVIRONMENT

WIDTH = 1024
MATRIX = 4 * WIDTH * WIDTH
LAYER = MATRIX + 4 * WIDTH
BEGINNING = f"""\
import copy, sys
import torch
from torch import nn

device = sys.argv[1]

def build():
    return nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.ReLU(), nn.Linear({WIDTH}, {WIDTH})).to(device)

def batch():
    return torch.randn(64, {WIDTH}, device=device)

"""
SECOND_MODEL = """
def main():
    teacher, student = build(), build()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = batch()
        with torch.no_grad():
            wanted = teacher(x)
        nn.functional.mse_loss(student(x), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
main()
"""
BY_HAND = """
def update(model, velocity):
    for p, v in zip(model.parameters(), velocity):
        v.mul_(0.9).add_(p.grad)
        p.data.add_(v, alpha=-0.1)
        p.grad = None

def zeros_like(parameters):
    return [
        torch.zeros_like(p)  # velocity
        for p in parameters
    ]

def main():
    model = build()
    velocity = zeros_like(model.parameters())
    for _ in range(3):
        model(batch()).square().mean().backward()
        update(model, velocity)
main()
"""
RAW_TENSORS = f"""
def main():
    tensors = [torch.randn({WIDTH}, {WIDTH}, device=device, requires_grad=True) for _ in range(3)]
    optimizer = torch.optim.Adam(tensors, lr=0.1, foreach=False)
    for _ in range(3):
        x = batch()
        for each in tensors:
            x = torch.tanh(x @ each)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
main()
"""
AVERAGED = """
def main():
    model = build()
    average = copy.deepcopy(model).requires_grad_(False)
    shadow = [p.detach().clone() for p in model.parameters()]  # shadow
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters()):
                a.lerp_(p, 0.1)
main()
"""
TEST_SET = f"""
def load(samples):
    return torch.randn(
        samples, {WIDTH}, device=device
    )

def main():
    model = build()
    tests = load(4096)  # made by
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(tests.mean())
main()
"""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def peak_of(program: str, device: str, folder: Path, name: str = "program.py") -> dict[str, Any]:
    script = folder / name
    script.write_text(BEGINNING + program)
    command = ["-m", "opacus_memprof", "run", "--device", device, "-o", folder / "out", script, device]
    start = python if device == "cpu" else on_gpu
    done = start(*command)
    assert done.returncode == 0, done.stderr
    assert ("UNATTRIBUTED, BY LINE" in done.stdout) == (program not in (SECOND_MODEL, RAW_TENSORS))
    profile = profile_of(folder / "out")
    assert "models_of_earlier_runs" not in [finding["kind"] for finding in profile["findings"]]  # copies are none
    peak = profile["devices"]["cuda:0" if device == "cuda" else "cpu"]["peak"]
    assert sum(peak["categories"].values()) == peak["requested_bytes"]
    return peak


def on_gpu(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [*interpreter(), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)


def unattributed_lines(peak: dict[str, Any]) -> dict[str, int]:
    lines = {line: sizes["unattributed"] for line, sizes in peak["lines"].items() if "unattributed" in sizes}
    assert sum(lines.values()) >= peak["categories"]["unattributed"] - 0.02 * peak["requested_bytes"]
    return {line: size for line, size in lines.items() if size > 0.02 * peak["requested_bytes"]}


def line_of(program: str, text: str) -> int:
    (number,) = [n for n, line in enumerate((BEGINNING + program).splitlines(), 1) if text in line]
    return number


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_model(device: str, tmp_path: Path) -> None:
    peak = peak_of(SECOND_MODEL, device, tmp_path)
    assert peak["categories"]["unattributed"] <= 0.02 * peak["requested_bytes"]
    assert peak["categories"]["model_parameters"] == 4 * LAYER
    assert peak["categories"]["optimizer_states"] == 2 * LAYER
    parameters = {module: sizes.get("model_parameters") for module, sizes in peak["modules"].items()}
    for module in ("0", "2", "Sequential#2.0", "Sequential#2.2"):
        assert parameters[module] == LAYER


@pytest.mark.parametrize("device", DEVICES)
def test_updates_by_hand(device: str, tmp_path: Path) -> None:
    """The parameters and gradients are the model's. Only a line of the program knows the velocity."""
    peak = peak_of(BY_HAND, device, tmp_path)
    assert peak["categories"]["model_parameters"] == 2 * LAYER
    assert 2 * MATRIX <= peak["categories"]["gradients"] <= 2 * LAYER  # the last bias' may be still to come
    assert peak["modules"]["2"]["gradients"] == LAYER
    ((stack, size),) = unattributed_lines(peak).items()
    assert size == 2 * LAYER
    assert re.fullmatch(rf"program.py:{line_of(BY_HAND, '# velocity')} in (<listcomp>|zeros_like) < .*", stack)
    assert f"program.py:{line_of(BY_HAND, 'velocity = zeros')} in main" in stack


@pytest.mark.parametrize("device", DEVICES)
def test_raw_tensors_of_an_optimizer(device: str, tmp_path: Path) -> None:
    peak = peak_of(RAW_TENSORS, device, tmp_path)
    assert peak["categories"]["unattributed"] <= 0.02 * peak["requested_bytes"]
    assert peak["categories"]["model_parameters"] == peak["categories"]["gradients"] == 3 * MATRIX
    assert 6 * MATRIX <= peak["categories"]["optimizer_states"] < 6 * MATRIX + 4096  # and counters of steps
    stack = next(stack for stack, sizes in peak["lines"].items() if "model_parameters" in sizes)
    assert stack.startswith(f"program.py:{line_of(RAW_TENSORS, 'tensors = [')} in ")


def test_small_tensors_of_an_optimizer(tmp_path: Path) -> None:
    """As adapters that are made by hand: below what a search through the heap is worth."""
    matrix = 4 * 8 * 1024
    program = f"""
def main():
    A, B = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((8, {WIDTH}), ({WIDTH}, 8)))
    optimizer = torch.optim.Adam([A, B], foreach=False)
    for _ in range(3):
        (torch.ones(1, {WIDTH}, device=device) @ B @ A).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
main()
"""
    script = tmp_path / "program.py"
    script.write_text(BEGINNING + program)
    done = python("-m", "opacus_memprof", "run", "--device", "cpu", "-o", tmp_path / "out", script, "cpu")
    assert done.returncode == 0, done.stderr
    profile = profile_of(tmp_path / "out")
    (warning,) = profile["warnings"]
    assert warning.startswith("an optimizer updates tensors that are in no module")
    in_step = profile["devices"]["cpu"]["phases"]["optimizer_step"]["categories"]
    assert in_step["model_parameters"] == in_step["gradients"] == 2 * matrix
    assert 4 * matrix <= in_step["optimizer_states"] <= 4 * matrix + 64


@pytest.mark.parametrize("device", DEVICES)
def test_copies_of_averaged_parameters(device: str, tmp_path: Path) -> None:
    """One is a module, which is an owner. The other is a list of tensors."""
    peak = peak_of(AVERAGED, device, tmp_path)
    assert peak["categories"]["model_parameters"] == 4 * LAYER
    assert peak["modules"]["Sequential#2.0"] == {"model_parameters": LAYER}
    ((stack, size),) = unattributed_lines(peak).items()
    assert size == 2 * LAYER
    assert stack.startswith(f"program.py:{line_of(AVERAGED, '# shadow')} in ")


@pytest.mark.parametrize("device", DEVICES)
def test_a_test_set(device: str, tmp_path: Path) -> None:
    peak = peak_of(TEST_SET, device, tmp_path)
    (call,) = unattributed_lines(peak)
    assert unattributed_lines(peak)[call] == 4 * 4096 * WIDTH
    inner, caller, module = call.split(" < ")
    samples = line_of(TEST_SET, "samples, ")
    assert inner == f"program.py:{samples - 1} in load"
    assert caller == f"program.py:{line_of(TEST_SET, '# made by')} in main"
    assert module == f"program.py:{(BEGINNING + TEST_SET).count(chr(10))}"


def test_a_name_that_is_not_ascii(tmp_path: Path) -> None:
    peak = peak_of(AVERAGED.replace("main", "größe_数"), "cpu", tmp_path, "модель😀.py")
    (stack,) = unattributed_lines(peak)
    assert stack.startswith(f"модель😀.py:{line_of(AVERAGED, '# shadow')} in ")
    assert stack.count(" in größe_数") >= 1


@pytest.mark.parametrize(("live", "unclaimed", "searched"), [(2**20, 2**20, 1), (2**30, 2**23, 0), (2**30, 2**24, 1)])
def test_owners_are_searched_from_a_hundredth_of_the_live_bytes(
    live: int, unclaimed: int, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    categories = {"unattributed": unclaimed, "backward_temporaries": 0, "optimizer_temporaries": 0}
    counters = {"devices": {"cuda:0": {"requested_bytes": live, "categories": categories}}}
    monkeypatch.setattr(native, "counters", lambda: counters)
    search, claims = OwnerSearch(list), list[OwnerSearch]()
    monkeypatch.setattr(OwnerSearch, "_claim", lambda search: claims.append(search))
    for _ in range(2):  # what has been searched for is not searched for again
        search.search()
    assert len(claims) == searched
