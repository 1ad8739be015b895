# SPDX-License-Identifier: Apache-2.0
"""The marker `fits`, of a test that runs on a virtual GPU in a process of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.profile import Device
from opacus_memprof.profiles.units import format_bytes, parse_size
from opacus_memprof.pytest_plugin.marker_names import FITS
from opacus_memprof.virtual_gpu.devices import find_gpu

_TOP = 5  # categories in a message


@dataclass(frozen=True)
class Fits:
    """What the marker says: the kind of the GPU, and the most bytes that torch may reserve there, if not all."""

    gpu: str
    below: int | None = None

    @classmethod
    def from_item(cls, item: pytest.Item) -> "Fits | None":
        """Reads the closest marker of a test; None without one."""
        mark = item.get_closest_marker(FITS)
        return None if mark is None else cls.read(mark)

    @classmethod
    def read(cls, mark: pytest.Mark) -> "Fits":
        """Raises MemprofError if there is no such kind, or `below` is not a size; TypeError for other arguments."""
        return cls._of_arguments(*mark.args, **mark.kwargs)

    @classmethod
    def _of_arguments(cls, gpu: str, below: str | int | None = None) -> "Fits":
        find_gpu(gpu)
        return cls(gpu, None if below is None else parse_size(below))

    def check(self, devices: Mapping[str, Device]) -> str | None:
        """Returns a message if memory ran out, or torch has reserved more than `below`, on a device of a test that has
        run on a virtual GPU.

        Raises:
            MemprofError: the test has allocated nothing on the GPU.
        """
        import torch

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
        for key, device in devices.items():
            reserved = torch.cuda.max_memory_reserved(key) if key.startswith("cuda") else 0
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
