# SPDX-License-Identifier: Apache-2.0
"""Phrases for reports about runs on virtual GPUs, from `virtual` of their profile.json."""

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.profile import VirtualGpus
from opacus_memprof.profiles.units import format_bytes

Virtual = VirtualGpus | UnsetType  # UNSET for a run on real devices


def virtual_gpu_of(virtual: Virtual) -> str | None:
    """A phrase such as `virtual NVIDIA H200 (139.80 GiB)`; None for a run on real devices."""
    return None if virtual is UNSET else f"virtual {virtual.name} ({format_bytes(virtual.memory_bytes)})"


def virtual_mark(virtual: Virtual) -> str | None:
    """The sentence at the beginning of every report on a run on virtual GPUs; None for a run on real devices."""
    name = virtual_gpu_of(virtual)
    if name is None:
        return None
    return f"on a {name}: memory is counted as on a real one, and values of large tensors were not computed"


def compare_virtual(which: tuple[str, str], first: Virtual, second: Virtual) -> list[str]:
    """Notes about two runs that are compared, if one of them was on a virtual GPU.

    Args:
        which: names of the two runs, such as ("first", "second").
        first, second: `virtual` of their profiles.
    """
    names = virtual_gpu_of(first), virtual_gpu_of(second)
    if names == (None, None):
        return []
    if names[0] == names[1]:
        return [f"both runs were on a {names[0]}"]
    places = [f"the {run} run was on a {name or 'real device'}" for run, name in zip(which, names, strict=True)]
    return [f"{places[0]} and {places[1]}: they differ by more than the code"]
