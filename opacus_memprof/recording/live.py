# SPDX-License-Identifier: Apache-2.0
"""Reads the live counters, for everything that shows memory while it is recorded. It costs microseconds and writes no
event."""

import os
from collections.abc import Mapping

from opacus_memprof.profiles.categories import PARTS, add_parts
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.live_memory import LiveDevice, LiveMemory, LivePeak
from opacus_memprof.profiles.profile import HookedActivations, Sizes
from opacus_memprof.recording import native


def read_live() -> LiveMemory:
    """What is live now, on every device that has had a block."""
    launch = Launch.from_environment()
    counters = native.counters()
    return LiveMemory(
        unix_ns=counters["unix_ns"],
        pid=os.getpid(),
        rank=None if launch is None else launch.rank,
        step=counters["step"],
        logical_step=counters["logical_step"],
        devices={
            name: LiveDevice(
                requested_bytes=counts["requested_bytes"],
                peak_bytes=counts["peak_bytes"],
                phase=counts["phase"],
                categories=add_parts(counts["categories"]),
                activation_hooks=hooked_activations(counts["categories"]),
            )
            for name, counts in counters["devices"].items()
        },
    )


def read_breakdown() -> dict[str, Sizes]:
    """The live bytes by device and category, without those that have none."""
    devices = read_live().devices.items()
    live = {name: {key: size for key, size in device.categories.items() if size} for name, device in devices}
    return {name: categories for name, categories in live.items() if categories}


def read_peaks() -> dict[str, LivePeak]:
    """The highest instant of each device since recording began."""
    return {
        name: LivePeak(
            requested_bytes=counts["requested_bytes"],
            counted_bytes=_known(counts["upstream_requested_bytes"]),
            allocated_bytes=_known(counts["allocated_bytes"]),
            reserved_bytes=_known(counts["reserved_bytes"]),
            unix_ns=counts["unix_ns"],
            step=counts["step"],
            phase=counts["phase"],
            categories=add_parts(counts["categories"]),
            activation_hooks=hooked_activations(counts["categories"]),
        )
        for name, counts in native.peaks().items()
    }


def hooked_activations(counted: Mapping[str, int]) -> HookedActivations:
    """The parts of activation_hooks, from the bytes by the counters' own categories."""
    return HookedActivations(**{part: counted.get(category, 0) for category, part in PARTS.items()})


def _known(size: int) -> int | None:
    """None for -1, which the counters have for unknown sizes."""
    return None if size < 0 else size
