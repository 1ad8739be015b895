# SPDX-License-Identifier: Apache-2.0
"""The DP tax: the memory that privacy adds to the peak of the same model on the same batch."""

from msgspec.structs import replace

from opacus_memprof.analysis.diff import (
    compare_virtual,
    join_names,
    modules_of,
    peak_difference,
    refuse_without_devices,
)
from opacus_memprof.analysis.names import as_without_dp
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import DeviceTax, Tax
from opacus_memprof.profiles.profile import Peak, Profile


def dp_tax(private: Profile, vanilla: Profile) -> Tax:
    """Returns the peak of the private run minus the peak of the run without DP, device by device.

    Args:
        private: the profile of the private run.
        vanilla: the profile of the same model and batch, trained without Opacus.

    Raises:
        MemprofError: a profile has no device, the two are of different devices, or the second one clips or noises
            gradients as well.
    """
    for which, profile in (("private", private), ("vanilla", vanilla)):
        refuse_without_devices(which, profile)
    private_devices, vanilla_devices = private.devices, vanilla.devices
    if private_devices.keys() != vanilla_devices.keys():
        raise MemprofError(
            f"the private run was on {join_names(private_devices)} and the vanilla one on "
            f"{join_names(vanilla_devices)}: profile both on the same devices"
        )
    if any(phase in device.phases for device in vanilla_devices.values() for phase in ("clip", "noise")):
        raise MemprofError(
            "the vanilla run is private as well: it clips or noises gradients. Profile the same model and batch "
            "without Opacus, or compare two private runs with `opacus-memprof diff`"
        )
    return Tax(
        {name: peak_tax(private_devices[name].peak, vanilla_devices[name].peak) for name in private_devices},
        compare_virtual(("private", "vanilla"), private.virtual, vanilla.virtual),
    )


def peak_tax(private: Peak, vanilla: Peak) -> DeviceTax:
    """Returns the bytes that privacy adds to the peak of one device."""
    shared = private.shared_captures
    without_dp = replace(
        private,
        categories=as_without_dp(private.categories, sum(shared.values())),
        modules={module: as_without_dp(sizes, shared.get(module, 0)) for module, sizes in modules_of(private).items()},
    )
    return DeviceTax(
        **peak_difference(vanilla, without_dp),
        private_bytes=private.requested_bytes,
        vanilla_bytes=vanilla.requested_bytes,
        opacus_only=private.activation_hooks.opacus_only,
    )
