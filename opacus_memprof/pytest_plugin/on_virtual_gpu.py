# SPDX-License-Identifier: Apache-2.0
"""`--memprof-virtual-gpu`: starts a virtual GPU in pytest's process before a conftest or a test imports torch."""

import sys
from types import ModuleType

import pytest

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.units import format_bytes, parse_size

OPTION = "memprof_virtual_gpu"
MEMORY_OPTION = "memprof_virtual_memory"


def kind_of(config: pytest.Config) -> str:
    """The kind of GPU from the command line or, by default, from the ini file; empty for none."""
    option = getattr(config.known_args_namespace, OPTION, None)
    return str(config.getini(OPTION) if option is None else option)


def start(config: pytest.Config) -> None:
    """Starts the virtual GPU that the options ask for, unless it is running.

    Raises:
        pytest.UsageError: the kind or the size is unknown, another kind is running, or torch has been imported.
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
    """The message if torch has been imported, with the names of the plugins that have imported it."""
    importers = [
        name
        for name, plugin in config.pluginmanager.list_name_plugin()
        if isinstance(plugin, ModuleType) and isinstance(vars(plugin).get("torch"), ModuleType)
    ]
    by = f" by the plugin {', '.join(importers)}" if importers else ""
    return (
        f"torch was imported{by} before the virtual GPU could start: let plugins import torch inside their hooks or "
        "leave them out with -p no:NAME, and let pytest load this plugin by itself or with -p opacus_memprof, not from "
        "a conftest.py"
    )
