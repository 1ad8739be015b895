# SPDX-License-Identifier: Apache-2.0
"""The line of the user's own code that made a block. Python's own frames say which it is."""

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import opacus_memprof
from opacus_memprof.recording import native

LARGE = 300_000  # numbers; more than 1 MiB


@pytest.fixture(autouse=True)
def _recorded(tmp_path: Path) -> Iterator[None]:
    with opacus_memprof.profile(tmp_path / "profile", device="cpu"):
        yield


def op_of(tensor: torch.Tensor) -> str:
    (op,) = [block["op"] for block in native.live_blocks() if block["address"] == tensor.data_ptr()]
    return op


def here(back: int = 0) -> str:
    """The line of the caller, `back` lines before the call of this function, as a report names it."""
    frame = inspect.currentframe().f_back
    return f"{Path(__file__).relative_to(Path.cwd())}:{frame.f_lineno - back} in {frame.f_code.co_name}"


def innermost(tensor: torch.Tensor) -> str:
    return op_of(tensor).split(" < ")[0]


def test_a_large_block_and_one_that_is_not_claimed() -> None:
    large, line = torch.ones(LARGE), here()
    small, next_line = torch.ones(3), here()
    assert (innermost(large), innermost(small)) == (line, next_line)


def test_a_small_block_of_a_forward_has_none() -> None:
    found = []
    small, large = nn.Linear(4, 4), nn.Linear(4, LARGE)
    opacus_memprof.session.current().attach(small, large)

    def forward(model: nn.Module) -> torch.Tensor:
        result, line = model(torch.ones(1, 4)), here()
        found.append(line)
        return result

    assert op_of(forward(small)) == ""
    assert innermost(forward(large)) == found[-1]


def test_three_calls_at_most() -> None:
    def deep(depth: int) -> torch.Tensor:
        return deep(depth - 1) if depth else torch.ones(LARGE)

    calls = op_of(deep(300)).split(" < ")
    assert [call.partition(" in ")[2] for call in calls] == ["deep"] * 3


def test_a_thread_and_a_generator() -> None:
    made: list[torch.Tensor] = []
    lines: list[str] = []

    def make() -> Iterator[torch.Tensor]:
        lines.append(here(-1))
        yield torch.ones(LARGE)

    def work() -> None:
        made.extend(make())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert innermost(made[0]) == lines[0]
    assert " in work" in op_of(made[0])  # and nothing of threading.py
    assert "threading" not in op_of(made[0])


def test_code_that_another_replaces() -> None:
    """The next code often has the address of the one before."""
    for number in range(200):
        names: dict[str, torch.Tensor] = {}
        source = "\n" * (number % 7) + f"made = torch.ones({LARGE})"
        exec(compile(source, f"made_{number // 3}.py", "exec"), {"torch": torch}, names)
        assert innermost(names["made"]) == f"made_{number // 3}.py:{number % 7 + 1}"
        names.clear()


def test_an_error_that_is_being_handled_stays() -> None:
    class Maker:
        def __del__(self) -> None:
            torch.ones(LARGE)

    def fail() -> None:
        maker = Maker()  # noqa: F841
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()


def test_what_autograd_makes_has_its_node() -> None:
    parameter = torch.ones(LARGE, requires_grad=True)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None
    assert ".py" not in op_of(parameter.grad)


def test_a_failed_allocation_has_the_line(tmp_path: Path) -> None:
    native.cpu_limit(native.cpu_reported_bytes() + 4 * LARGE)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(2 * LARGE)
        line = here(1)
    finally:
        native.cpu_limit(0)
    assert native.failures()[-1]["op"].split(" < ")[0] == line
