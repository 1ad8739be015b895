# SPDX-License-Identifier: Apache-2.0
"""Run, the input of all detectors, and phrases that they share."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.names import Names
from opacus_memprof.profiles.profile import Device
from opacus_memprof.profiles.units import format_bytes

# Wasted memory is reported from this share of the peak on: a smaller part is less than the rounding of blocks, and
# equals a small change of the batch.
MATERIAL = 0.01


@dataclass(frozen=True)
class Run:
    """One profiled run.

    Attributes:
        devices: as in profile.json.
        replayed: core.replay's devices, by the same names.
        facts: what hooks have recorded (hook_facts.recorded()), with ids of modules.
        names: of the ids.
    """

    devices: Mapping[str, Device]
    replayed: Mapping[str, Mapping[str, Any]]
    facts: Sequence[Mapping[str, Any]]
    names: Names

    def facts_of(self, kind: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The facts of a kind, with the names of their modules."""
        return [(self.names.module(fact["module"]), fact) for fact in self.facts if fact["kind"] == kind]

    def is_material(self, device: str, size: int) -> bool:
        """Whether `size` bytes are a material part of this device's peak."""
        return size > 0 and size >= MATERIAL * self.devices[device].peak.requested_bytes


def common_module(modules: Iterable[str]) -> str:
    """The innermost module that contains all of them; "" for the model itself."""
    paths = [module.split(".") for module in modules]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def largest(sizes: Mapping[str, int], count: int = 3) -> str:
    """A phrase with the largest modules and their bytes."""
    rows = sorted(((size, name) for name, size in sizes.items() if size), key=lambda row: (-row[0], row[1]))
    shown = [f"{name or '(no module)'} {format_bytes(size)}" for size, name in rows[:count]]
    more = [f"{len(rows) - count} more"] if len(rows) > count else []
    return ", ".join([*shown, *more])
