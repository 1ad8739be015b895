# SPDX-License-Identifier: Apache-2.0
"""The DP tax: what privacy adds to the peak of the same model on the same batch."""

from collections.abc import Mapping
from typing import Any

from opacus_memprof.analysis.profile import FORMAT
from opacus_memprof.errors import MemprofError


def dp_tax(private: Mapping[str, Any], vanilla: Mapping[str, Any]) -> dict[str, Any]:
    """The peak of the private run less the peak of the one without DP, device by device.

    Args:
        private: the content of a profile.json (analysis.profile.load_profile).
        vanilla: likewise, of the same model and batch, trained without Opacus.

    Returns:
        {"devices": {name: {"total", "private_bytes", "vanilla_bytes", "categories": {category: bytes}, "modules":
        {module: {category: bytes}}, "opacus_only"}}}: signed bytes. Σ `categories` = Σ `modules` = `total` =
        `private_bytes` less `vanilla_bytes`. Categories and modules without a difference are left out. `opacus_only` is
        the part of the private run's activation_hooks that Opacus alone holds.

    Raises:
        MemprofError: a profile is of another format or has no device, or the two are of different devices.
    """
    for which, profile in (("private", private), ("vanilla", vanilla)):
        if profile.get("format") != FORMAT:
            raise MemprofError(
                f"the {which} profile has format {profile.get('format')!r}, and this release reads {FORMAT}: "
                "profile again, or use the release that wrote it"
            )
        if not profile.get("devices"):
            raise MemprofError(f"the {which} profile has no device that allocated memory: profile a training run")
    here, there = private["devices"], vanilla["devices"]
    if here.keys() != there.keys():
        raise MemprofError(
            f"the private run was on {_listed(here)} and the vanilla one on {_listed(there)}: "
            "profile both on the same devices"
        )
    return {"devices": {name: _difference(here[name]["peak"], there[name]["peak"]) for name in here}}


def _difference(private: Mapping[str, Any], vanilla: Mapping[str, Any]) -> dict[str, Any]:
    ours, theirs = _modules(private), _modules(vanilla)
    modules = {module: _minus(ours.get(module, {}), theirs.get(module, {})) for module in {**ours, **theirs}}
    return {
        "total": private["requested_bytes"] - vanilla["requested_bytes"],
        "private_bytes": private["requested_bytes"],
        "vanilla_bytes": vanilla["requested_bytes"],
        "categories": _minus(private["categories"], vanilla["categories"]),
        "modules": {module: categories for module, categories in modules.items() if categories},
        "opacus_only": private["activation_hooks"]["opacus_only"],
    }


def _modules(peak: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
    """A peak that only the live counters saw has no modules."""
    return peak["modules"] or {"": peak["categories"]}


def _minus(ours: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
    differences = {key: ours.get(key, 0) - theirs.get(key, 0) for key in {**ours, **theirs}}
    return {key: size for key, size in differences.items() if size}


def _listed(devices: Mapping[str, Any]) -> str:
    return ", ".join(sorted(devices))
