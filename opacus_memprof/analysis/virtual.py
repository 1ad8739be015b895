# SPDX-License-Identifier: Apache-2.0
"""How reports call a run on virtual GPUs, from `virtual` of its profile.json."""

from collections.abc import Mapping
from typing import Any

from opacus_memprof.units import format_bytes


def virtual_gpu_of(profile: Mapping[str, Any]) -> str | None:
    """The virtual GPU of a profile, as `virtual NVIDIA H200 (139.80 GiB)`; None for a run on real devices."""
    virtual = profile.get("virtual")
    if not isinstance(virtual, Mapping):
        return None
    name = f"virtual {virtual.get('name') or virtual.get('gpu') or 'GPU'}"
    size = virtual.get("memory_bytes")
    return name if size is None else f"{name} ({format_bytes(size)})"


def virtual_mark(profile: Mapping[str, Any]) -> str | None:
    """What every report says at its beginning of a run on virtual GPUs; None for one on real devices."""
    name = virtual_gpu_of(profile)
    if name is None:
        return None
    return f"on a {name}: memory is counted as on a real one, and values of large tensors were not computed"


def compare_virtual(which: tuple[str, str], first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """A note on two profiles that are compared, where one was recorded on a virtual GPU.

    `which` names the two runs, as ("first", "second").
    """
    names = virtual_gpu_of(first), virtual_gpu_of(second)
    if names == (None, None):
        return []
    if names[0] == names[1]:
        return [f"both runs were on a {names[0]}"]
    places = [f"the {run} run was on a {name or 'real device'}" for run, name in zip(which, names, strict=True)]
    return [f"{places[0]} and {places[1]}: they differ by more than the code"]
