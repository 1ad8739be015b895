# SPDX-License-Identifier: Apache-2.0
"""`--memprof-virtual-gpu`: gives pytest's process a virtual GPU before a conftest or a test imports torch."""

import sys
from types import ModuleType

import pytest

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.units import format_bytes, parse_size

OPTION = "memprof_virtual_gpu"
MEMORY_OPTION = "memprof_virtual_memory"


def kind_of(config: pytest.Config) -> str:
    """The kind of GPU that the command line or, without it, the ini file asks for; empty for none."""
    given = getattr(config.known_args_namespace, OPTION, None)
    return str(config.getini(OPTION) if given is None else given)


def start(config: pytest.Config) -> None:
    """Starts the virtual GPU that is asked for, unless it runs already.

    Raises:
        pytest.UsageError: an unknown kind or size, another kind runs already, or torch is imported already.
    """
    kind = kind_of(config)
    running = virtual_gpu.active()
    if running is not None and running.kind == kind:
        return
    if running is not None:
        raise pytest.UsageError(f"--memprof-virtual-gpu {kind}: this process has a virtual GPU {running.kind} already")
    if "torch" in sys.modules:
        raise pytest.UsageError(f"--memprof-virtual-gpu {kind}: {_torch_came_first(config)}")
    size = getattr(config.known_args_namespace, MEMORY_OPTION, None) or config.getini(MEMORY_OPTION)
    try:
        memory = parse_size(size) if size else None
    except MemprofError as error:
        raise pytest.UsageError(f"--memprof-virtual-memory: {error}") from error
    try:
        virtual_gpu.start(kind, memory=memory)
    except MemprofError as error:
        raise pytest.UsageError(f"--memprof-virtual-gpu: {error}") from error


def header() -> str | None:
    """The line of pytest's header that names the virtual GPU."""
    running = virtual_gpu.active()
    if running is None:
        return None
    size = format_bytes(running.gpu.total_memory)
    return f"virtual GPU: {running.kind}, {size} (memory is exact, values are not computed)"


def _torch_came_first(config: pytest.Config) -> str:
    """What is wrong and what to do, with the plugins that hold torch by name."""
    holders = [
        name
        for name, plugin in config.pluginmanager.list_name_plugin()
        if isinstance(plugin, ModuleType) and isinstance(vars(plugin).get("torch"), ModuleType)
    ]
    by = f" by the plugin {', '.join(holders)}" if holders else ""
    return (
        f"torch was imported{by} before the virtual GPU could start: let plugins import torch inside their hooks or "
        "leave them out with -p no:NAME, and let pytest load this plugin by itself or with -p opacus_memprof, not from "
        "a conftest.py"
    )
