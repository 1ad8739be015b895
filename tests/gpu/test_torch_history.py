# SPDX-License-Identifier: Apache-2.0
"""What torch's own memory history says of blocks while a session records."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import opacus_memprof

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not hasattr(torch._C, "_cuda_memoryMetadataSupported"), reason="torch before 2.15 has no tags"),
]

MIB = 2**20


@pytest.fixture
def history() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(context=None)
    yield
    torch.cuda.memory._set_memory_metadata("")
    torch.cuda.memory._record_memory_history(enabled=None)


def entries(tensor: torch.Tensor, *actions: str) -> list[str]:
    """The metadata of torch's records of a tensor's block, oldest first."""
    trace: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return [
        entry.get("user_metadata", "")
        for entry in trace
        if entry["addr"] == tensor.data_ptr() and entry["action"] in actions
    ]


@pytest.mark.parametrize("started", ["before the session", "during the session"])
def test_the_history_has_category_and_module(started: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if started == "before the session":
        request.getfixturevalue("history")
    with opacus_memprof.profile(tmp_path, device="cuda") as session:
        if started == "during the session":
            request.getfixturevalue("history")
        with opacus_memprof.tag("teacher"):
            in_use = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.memory._set_memory_metadata("of the program")
        with opacus_memprof.tag("teacher"):
            both = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory._get_memory_metadata() == "of the program"
        torch.cuda.memory._set_memory_metadata("")
        opacus_memprof.retag(in_use, "student")
        model = torch.nn.ModuleDict({"head": torch.nn.Linear(1024, 1024, device="cuda")})
        session.attach(model)
        assert session.snapshot("now").devices["cuda:0"].remainder == 0
    after = torch.empty(7 * MIB, dtype=torch.uint8, device="cuda")
    assert entries(in_use, "alloc") == ["category=teacher"]
    assert entries(in_use, "annotate") == ["category=student"]
    assert entries(both, "alloc") == ["of the program category=teacher"]
    assert entries(model["head"].weight, "annotate") == ["category=model_parameters module=head"]
    assert entries(after, "alloc") == [""]


def test_a_workspace_of_a_library_is_one_under_any_tag(history: None, tmp_path: Path) -> None:
    left = torch.empty(512, 512, device="cuda")
    torch.cuda.synchronize()
    with opacus_memprof.profile(tmp_path, device="cuda"):
        before = len(torch.cuda.memory._snapshot()["device_traces"][0])
        # cuBLAS has a workspace for each stream.
        with torch.cuda.stream(torch.cuda.Stream()), opacus_memprof.tag("teacher"):
            product = left @ left
        trace: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0][before:]
    made = {entry["addr"]: entry["user_metadata"] for entry in trace if entry["action"] == "alloc"}
    assert made.pop(product.data_ptr()) == "category=teacher"
    assert set(made.values()) == {"category=library_workspace"}


def test_without_a_session_the_history_is_the_programs(history: None) -> None:
    torch.cuda.memory._set_memory_metadata("of the program")
    in_use = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert entries(in_use, "alloc") == ["of the program"]
