# SPDX-License-Identifier: Apache-2.0
"""Tests marked `cuda` need a GPU: skipped where there is none, but failed there with MEMPROF_REQUIRE_CUDA=1.

A machine that was set up to test CUDA must not report success because its driver has gone. `--memprof-virtual-gpu h200`
runs them on a virtual GPU, which keeps no such promise; those marked `true_numbers` as well are skipped there.
"""

import gc
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from opacus_memprof import virtual_gpu

if not torch.cuda.is_available():
    # torch.manual_seed keeps the seed, with a traceback, for each kind of device that may come: 3 ms in a test.
    for _kind in (torch.cuda, torch.xpu, torch.mtia):
        _kind.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]

_SECONDS: Counter[str] = Counter()
"""Seconds that the tests of each file took, fixtures included."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --durations N, also prints the N slowest files."""
    count = config.getoption("durations")
    if count is not None:
        terminalreporter.section(f"slowest files, of {_SECONDS.total():.0f} s in all")
        for file, seconds in _SECONDS.most_common(count or None):
            terminalreporter.write_line(f"{seconds:8.1f} s  {file}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Under `-n auto`: two processes, but one where tests fill a GPU; a virtual one is each process' own."""
    return 0 if torch.cuda.is_available() and virtual_gpu.active() is None else 2


@pytest.hookimpl(tryfirst=True)  # before fixtures touch the device
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None:
        return
    is_virtual = virtual_gpu.active() is not None
    if os.environ.get("MEMPROF_REQUIRE_CUDA") == "1" and (is_virtual or not torch.cuda.is_available()):
        pytest.fail("needs a GPU that torch can use, which MEMPROF_REQUIRE_CUDA=1 promises", pytrace=False)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    if is_virtual and item.get_closest_marker("true_numbers") is not None:
        pytest.skip("needs what a kernel computes, or its time, which a virtual GPU does not have")
    gc.collect()  # an earlier test's models, which torch's own allocator would free in the midst of this one


@pytest.fixture(scope="module", autouse=True)
def _frozen_garbage() -> None:
    """Collections pass over what there is before a file's tests, for good: all of torch takes them 0.3 s each time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries report what is left when Python ends


@pytest.fixture(scope="module", autouse=True)
def _nothing_attached_left() -> Iterator[None]:
    """A model that a test leaves attached does not change the names of a later file's modules; pytest tells of it."""
    yield
    hooks = sys.modules.get("opacus_memprof.hooks")
    for left, attachment in list(hooks._attached.items()) if hooks is not None else ():
        warnings.warn(f"{type(left).__name__} is still attached after the tests of a file", stacklevel=1)
        attachment.detach()


@pytest.fixture(autouse=True)
def _nothing_followed_left() -> Iterator[None]:
    """What follows a loss that a test never computed, of a model that pytest or frozen garbage keeps, ends with it."""
    yield
    followed = sys.modules.get("opacus_memprof.clipping.module.read_numbers")
    for mode in followed.following_modes() if followed is not None else ():
        mode.leave()


@pytest.fixture(autouse=True)
def _no_captures_left() -> Iterator[None]:
    """A planted leak of captured activations is no later test's."""
    yield
    core = sys.modules.get("opacus_memprof._C")
    if core is not None:
        for module, count in core.captures().items():
            for _ in range(count):
                core.release(module)


@pytest.fixture(scope="module")
def no_workspaces() -> Iterator[None]:
    """cuBLAS' workspaces stay out of peaks.

    From torch 2.12 on one lives as long as its product, so that none may be asked for; before, each thread takes one at
    its first product: here, in forward and in backward.
    """
    can_choose = hasattr(torch._C, "_cuda_setCublasWorkspaceSize")
    if can_choose:
        torch._C._cuda_setCublasWorkspaceSize(0)
        torch._C._cuda_setCublasLtWorkspaceSize(0)
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    yield
    if can_choose:
        torch._C._cuda_resetCublasWorkspaceSize()
        torch._C._cuda_resetCublasLtWorkspaceSize()


@pytest.fixture
def set_fp32_precision() -> Iterator[Callable[[Any, str], None]]:
    """Sets `fp32_precision` of a part of torch.backends, such as `cudnn.conv`, until the test ends.

    monkeypatch cannot undo it: it would delete the attribute, which torch computes in `__getattr__`. A setting that
    stays makes torch refuse to read `allow_tf32` in later tests.
    """
    earlier: list[tuple[Any, str]] = []

    def set_precision(part: Any, precision: str) -> None:
        earlier.append((part, part.fp32_precision))
        part.fp32_precision = precision

    yield set_precision
    for part, precision in reversed(earlier):
        part.fp32_precision = precision
