# SPDX-License-Identifier: Apache-2.0
"""What detectors look at, and how they say what they found."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opacus_memprof.analysis.names import Names
from opacus_memprof.units import format_bytes

# Of the peak. Below it, what is merely wasted is not worth a user's time: one percent is less than the rounding of
# blocks and a smaller change of the batch makes up for it.
MATERIAL = 0.01


@dataclass(frozen=True)
class Run:
    """One profiled run.

    Attributes:
        devices: as in profile.json.
        replayed: core.replay's devices, by the same names.
        facts: what hooks noticed (observations.noted), with ids of modules.
        names: what ids stand for.
    """

    devices: Mapping[str, Any]
    replayed: Mapping[str, Mapping[str, Any]]
    facts: Sequence[Mapping[str, Any]]
    names: Names

    def noted(self, kind: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The facts of a kind, with the names of their modules."""
        return [(self.names.module(fact["module"]), fact) for fact in self.facts if fact["kind"] == kind]

    def material(self, device: str, size: int) -> bool:
        """Whether bytes matter at this device's peak."""
        return size > 0 and size >= MATERIAL * int(self.devices[device]["peak"]["requested_bytes"])


def finding(kind: str, module: str, bytes: int, evidence: str, remedy: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "module": module, "bytes": bytes, "evidence": evidence, "remedy": remedy, **more}


def common_module(modules: Iterable[str]) -> str:
    """The innermost module that holds them all; "" where that is the model itself."""
    paths = [module.split(".") for module in modules]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def largest(sizes: Mapping[str, int], count: int = 3) -> str:
    """The largest modules with their bytes, as words."""
    rows = sorted(((size, name) for name, size in sizes.items() if size), key=lambda row: (-row[0], row[1]))
    shown = [f"{name or '(no module)'} {format_bytes(size)}" for size, name in rows[:count]]
    more = [f"{len(rows) - count} more"] if len(rows) > count else []
    return ", ".join([*shown, *more])
