# SPDX-License-Identifier: Apache-2.0
"""Tests on a virtual GPU: the option `--memprof-virtual-gpu`, and the marker `fits`."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import pytest

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.profile import Device
from opacus_memprof.profiles.units import format_bytes, parse_size
from opacus_memprof.pytest_plugin import FITS
from opacus_memprof.virtual_gpu.devices import find_gpu

OPTION = "memprof_virtual_gpu"
MEMORY_OPTION = "memprof_virtual_memory"


def kind_of(config: pytest.Config) -> str:
    """Returns the kind of GPU from the command line or, by default, from the ini file; empty for none."""
    option = getattr(config.known_args_namespace, OPTION, None)
    return str(config.getini(OPTION) if option is None else option)


def start(config: pytest.Config) -> None:
    """Starts the virtual GPU that the options name, unless it is running.

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
    """Returns the line of pytest's header that names the virtual GPU."""
    running = virtual_gpu.active()
    if running is None:
        return None
    size = format_bytes(running.gpu.total_memory)
    return f"virtual GPU: {running.kind}, {size} (memory is exact, values are not computed)"


def _torch_came_first(config: pytest.Config) -> str:
    """Returns the message if torch has been imported, with the names of plugins that have imported it."""
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


_TOP = 5  # categories in a message


@dataclass(frozen=True)
class Fits:
    """The marker's arguments: the kind of GPU, and the most bytes that torch may reserve there, if limited."""

    gpu: str
    below: int | None = None

    @classmethod
    def from_item(cls, item: pytest.Item) -> "Fits | None":
        """Reads the closest marker of a test; None without one."""
        mark = item.get_closest_marker(FITS)
        return None if mark is None else cls.read(mark)

    @classmethod
    def read(cls, mark: pytest.Mark) -> "Fits":
        """Reads a marker.

        Raises:
            MemprofError: the kind or the size `below` is invalid.
            TypeError: there are other arguments.
        """
        return cls._of_arguments(*mark.args, **mark.kwargs)

    @classmethod
    def _of_arguments(cls, gpu: str, below: str | int | None = None) -> "Fits":
        find_gpu(gpu)
        return cls(gpu, None if below is None else parse_size(below))

    def check(self, devices: Mapping[str, Device]) -> str | None:
        """Returns a message if memory ran out on a device of the test, or torch has reserved more than `below`.

        Raises:
            MemprofError: the test has allocated nothing on the GPU.
        """
        name = find_gpu(self.gpu).name
        for device in devices.values():
            if device.out_of_memory:
                request = device.out_of_memory[0]
                return (
                    f"fits: memory of the virtual {name} ran out, at {format_bytes(request.requested_bytes)} of "
                    f"{request.category} in {request.phase}, which the test has caught"
                )
        if not any(device.peak.requested_bytes for key, device in devices.items() if key.startswith("cuda")):
            raise MemprofError("fits: the test has allocated nothing on the GPU: let it train on cuda")
        for device in devices.values():
            reserved = 0 if device.reserved_peak is None else device.reserved_peak.bytes
            if self.below is not None and reserved > self.below:
                sizes = sorted(device.peak.categories.items(), key=lambda pair: -pair[1])[:_TOP]
                rows = [f"  {format_bytes(size):>11}  {category}" for category, size in sizes if size]
                return "\n".join(
                    [
                        f"fits: {format_bytes(reserved)} ({reserved} bytes) reserved on a virtual {name}, which is "
                        f"{format_bytes(reserved - self.below)} more than the limit of {format_bytes(self.below)}",
                        f"at the peak, in {device.peak.phase} of step {device.peak.step}:",
                        *rows,
                    ]
                )
        return None
