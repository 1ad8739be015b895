# SPDX-License-Identifier: Apache-2.0
"""The DP tax: what privacy adds to the peak of the same model on the same batch."""

from collections.abc import Mapping
from typing import Any

from opacus_memprof.analysis.diff import listed, modules_of, peak_difference, refuse_incomparable
from opacus_memprof.analysis.names import as_without_dp
from opacus_memprof.analysis.virtual import compare_virtual
from opacus_memprof.errors import MemprofError


def dp_tax(private: Mapping[str, Any], vanilla: Mapping[str, Any]) -> dict[str, Any]:
    """The peak of the private run less the peak of the one without DP, device by device.

    Args:
        private: the content of a profile.json (analysis.profile.load_profile).
        vanilla: likewise, of the same model and batch, trained without Opacus.

    Returns:
        {"devices": {name: {"total", "private_bytes", "vanilla_bytes", "categories": {category: bytes}, "modules":
        {module: {category: bytes}}, "opacus_only"}}, "notes": [sentences]}: signed bytes. Σ `categories` = Σ `modules`
        = `total` = `private_bytes` less `vanilla_bytes`. Categories and modules without a difference are left out.
        Captures that autograd holds as well count as the activations that they are without Opacus; `opacus_only` is
        what Opacus alone holds of them, the private run's share of activation_hooks.

    Raises:
        MemprofError: a profile is of another format or has no device, the two are of different devices, or the second
            one clips or noises gradients as well.
    """
    for which, profile in (("private", private), ("vanilla", vanilla)):
        refuse_incomparable(which, profile)
    here, there = private["devices"], vanilla["devices"]
    if here.keys() != there.keys():
        raise MemprofError(
            f"the private run was on {listed(here)} and the vanilla one on {listed(there)}: "
            "profile both on the same devices"
        )
    if any(phase in device.get("phases", ()) for device in there.values() for phase in ("clip", "noise")):
        raise MemprofError(
            "the vanilla run is private as well, for it clips or noises gradients: profile the same model and batch "
            "without Opacus, or compare two private runs with `opacus-memprof diff`"
        )
    return {
        "devices": {name: _difference(here[name]["peak"], there[name]["peak"]) for name in here},
        "notes": compare_virtual(("private", "vanilla"), private, vanilla),
    }


def _difference(private: Mapping[str, Any], vanilla: Mapping[str, Any]) -> dict[str, Any]:
    shared = private.get("shared_captures", {})  # not in older profiles
    named = {
        **private,
        "categories": as_without_dp(private["categories"], sum(shared.values())),
        "modules": {
            module: as_without_dp(sizes, shared.get(module, 0)) for module, sizes in modules_of(private).items()
        },
    }
    return {
        **peak_difference(vanilla, named),
        "private_bytes": private["requested_bytes"],
        "vanilla_bytes": vanilla["requested_bytes"],
        "opacus_only": private["activation_hooks"]["opacus_only"],
    }
