# SPDX-License-Identifier: Apache-2.0
"""The entry point of the pytest plugin: options, markers and the `memprof` fixture.

Imports neither torch nor the profiler until a collected test needs them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opacus_memprof.pytest_plugin import FITS, ISOLATED, LIMITS

if TYPE_CHECKING:
    from opacus_memprof.profiles.plan import PlanVerdict
    from opacus_memprof.pytest_plugin.lifecycle import Memprof

_MARKERS = (
    "limit_gpu_memory(limit, category=None, module=None, phase=None, reserved=False): fail above this peak, such as "
    '"1.2 GB"; of a category, of a module and those inside it, or in a phase; or above this largest reserved memory',
    'limit_gpu_leaks(limit): fail when more than this, such as "1 MB", outlives the test and its fixtures',
    "memprof_isolated: run the test in a new process",
    'fits(gpu, below=None): run the test on a virtual GPU of this kind, such as "h100", in a new process; fail when '
    'memory runs out, or when torch has reserved more than `below`, such as "70 GB"',
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("memprof", "memory of training (opacus-memprof)")
    group.addoption("--memprof", action="store_true", help="profile every test and print a table of their peaks")
    group.addoption("--memprof-report", metavar="DIR", help="profile every test; profiles and tables go to DIR")
    group.addoption(
        "--memprof-baseline-dir",
        metavar="DIR",
        help="where baselines are (default: memprof_baselines beside the test file)",
    )
    group.addoption(
        "--memprof-update-baselines", action="store_true", help="write what is measured as the new baselines"
    )
    group.addoption(
        "--memprof-compare",
        metavar="COMMIT",
        help="compare with the baselines of this commit of git, such as origin/main, instead of the files on disk",
    )
    group.addoption("--memprof-isolated", action="store_true", help="run every profiled test in a new process")
    kind = "run on a virtual GPU of this kind, such as h200: memory is exact, values are not computed"
    group.addoption("--memprof-virtual-gpu", metavar="KIND", help=kind)
    parser.addini("memprof_virtual_gpu", f"{kind} (as --memprof-virtual-gpu)", default="")
    memory = 'memory of the virtual GPU instead of its kind\'s, such as "24 GiB"'
    group.addoption("--memprof-virtual-memory", metavar="SIZE", help=memory)
    parser.addini("memprof_virtual_memory", f"{memory} (as --memprof-virtual-memory)", default="")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Starts the virtual GPU before conftest files import torch."""
    _start_virtual_gpu(early_config)


def _start_virtual_gpu(config: pytest.Config) -> None:
    if config.known_args_namespace.memprof_virtual_gpu or config.getini("memprof_virtual_gpu"):
        from opacus_memprof.pytest_plugin import on_virtual_gpu

        on_virtual_gpu.start(config)


def pytest_configure(config: pytest.Config) -> None:
    _start_virtual_gpu(config)  # if a conftest or a worker of pytest-xdist has loaded this plugin late
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)
    folder = config.getoption("--memprof-baseline-dir")
    if folder is not None and (config.invocation_params.dir / folder).is_file():
        raise pytest.UsageError(f"--memprof-baseline-dir: {folder} is a file: give a directory")
    if config.getoption("--memprof-compare") and config.getoption("--memprof-update-baselines"):
        raise pytest.UsageError("--memprof-compare and --memprof-update-baselines exclude each other: give one")
    if _profiles_all(config) and not hasattr(config, "workerinput"):  # not in workers of pytest-xdist
        from opacus_memprof.pytest_plugin.summary import Summary

        config.pluginmanager.register(Summary(config), "memprof_summary")


def pytest_report_header() -> str | None:
    if "opacus_memprof.virtual_gpu" not in sys.modules:
        return None
    from opacus_memprof.pytest_plugin import on_virtual_gpu

    return on_virtual_gpu.header()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Fails the collection of a file with an invalid marker."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Item) and any(item.get_closest_marker(name) for name in (*LIMITS, FITS)):
            from opacus_memprof.pytest_plugin.limits import check_markers

            check_markers(item)
    return made


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(_wants_profile(item) or _is_isolated(item) for item in session.items):
        from opacus_memprof.pytest_plugin.lifecycle import Lifecycle

        lifecycle = Lifecycle(session.config, _wants_profile, _is_isolated)
        session.config.pluginmanager.register(lifecycle, "memprof_lifecycle")


@pytest.fixture
def memprof(request: pytest.FixtureRequest) -> Memprof:
    """Returns the profile of this test: memory that is allocated from its first fixture on."""
    from opacus_memprof.pytest_plugin.lifecycle import profiled_test_of

    return profiled_test_of(request.node).fixture


@pytest.fixture
def memory_plan(tmp_path: Path) -> Callable[..., PlanVerdict]:
    """Returns `opacus_memprof.plan` with a directory of the test."""
    from opacus_memprof.planning.python import plan

    return functools.partial(plan, directory=tmp_path / "memprof_plan")


def _profiles_all(config: pytest.Config) -> bool:
    return bool(config.getoption("--memprof") or config.getoption("--memprof-report"))


def _wants_profile(item: pytest.Item) -> bool:
    return (
        _profiles_all(item.config)
        or any(item.get_closest_marker(name) for name in (*LIMITS, FITS))
        or "memprof" in getattr(item, "fixturenames", ())
    )


def _is_isolated(item: pytest.Item) -> bool:
    isolates_all = item.config.getoption("--memprof-isolated") and _wants_profile(item)
    return isolates_all or any(item.get_closest_marker(name) for name in (ISOLATED, FITS))
