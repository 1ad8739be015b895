# SPDX-License-Identifier: Apache-2.0
"""Compares two profiles: at the peak and in each phase, by category and module.

Also computes the DP tax: the memory that privacy adds to the peak of the same model on the same batch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from msgspec.structs import replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.categories import as_without_dp
from opacus_memprof.profiles.difference import DeviceDiff, DeviceTax, Diff, DiffPeak, DiffPhase, PeakDifference, Tax
from opacus_memprof.profiles.profile import (
    Device,
    Groups,
    Peak,
    PhasePeak,
    Profile,
    Virtual,
    by_innermost_line,
    virtual_gpu_of,
)
from opacus_memprof.profiles.units import format_bytes, parse_size

_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class GrowthLimit:
    """The largest allowed growth of a peak: `percent` of the earlier peak, or `size` bytes."""

    text: str
    percent: Fraction | None = None
    size: int = 0

    @staticmethod
    def parse(text: str) -> "GrowthLimit":
        """Parses a limit: `2%`, or a size as units.parse_size parses it. Raises MemprofError for anything else."""
        if match := _PERCENT.fullmatch(text):
            return GrowthLimit(text.strip(), percent=Fraction(match[1]))
        try:
            return GrowthLimit(text.strip(), size=parse_size(text))
        except MemprofError as error:
            raise MemprofError(
                f"{text!r} is not a limit: write a percentage such as 2%, or a size such as 50MiB"
            ) from error

    def allows(self, before: int, after: int) -> bool:
        """Returns whether growth from `before` to `after` bytes is within the limit."""
        allowed = self.size if self.percent is None else self.percent * before / 100
        return after - before <= allowed


def diff_profiles(before: Profile, after: Profile) -> Diff:
    """Compares two profiles, device by device.

    If each has a single device, of different names, these are compared, and a note says so.

    Raises:
        MemprofError: a profile has no device, or the two have no device in common.
    """
    for which, profile in (("first", before), ("second", after)):
        refuse_without_devices(which, profile)
    notes = [
        f"the {which} run's status is {profile.status.replace('_', ' ')}: its peak may not be a whole run's"
        for which, profile in (("first", before), ("second", after))
        if profile.status != "finished"
    ]
    notes += compare_virtual(("first", "second"), before.virtual, after.virtual)
    old, new = before.devices, after.devices
    pairs = [(name, name, name) for name in new if name in old]
    if not pairs and len(old) == len(new) == 1:
        (first,), (second,) = old, new
        pairs = [(f"{first} → {second}", first, second)]
        notes.append(f"the first run was on {first} and the second on {second}, whose memory differs by more than code")
    if not pairs:
        raise MemprofError(
            f"the first run was on {join_names(old)} and the second on {join_names(new)}: compare the same devices"
        )
    compared_old, compared_new = {pair[1] for pair in pairs}, {pair[2] for pair in pairs}
    single = [f"the first run alone used {name}" for name in old if name not in compared_old]
    single += [f"the second run alone used {name}" for name in new if name not in compared_new]
    return Diff({name: _diff_device(old[first], new[second]) for name, first, second in pairs}, notes + single)


def refuse_without_devices(which: str, profile: Profile) -> None:
    """Raises MemprofError for a profile without devices. The message calls it the `which` profile."""
    if not profile.devices:
        raise MemprofError(f"the {which} profile has no device that allocated memory: profile a training run")


def peak_difference(before: Peak, after: Peak) -> PeakDifference:
    """Returns the difference `after` - `before`."""
    return PeakDifference(
        total=after.requested_bytes - before.requested_bytes,
        categories=_subtract(after.categories, before.categories),
        modules=_subtract_groups(modules_of(after), modules_of(before)),
        lines=_subtract_groups(by_innermost_line(after.lines), by_innermost_line(before.lines)),
    )


def compare_virtual(which: tuple[str, str], first: Virtual, second: Virtual) -> list[str]:
    """Returns notes on the devices of two compared runs, if one of them was on a virtual GPU.

    Args:
        which: names of the two runs, such as ("first", "second").
        first: `virtual` of the first profile.
        second: `virtual` of the second profile.
    """
    names = virtual_gpu_of(first), virtual_gpu_of(second)
    if names == (None, None):
        return []
    if names[0] == names[1]:
        return [f"both runs were on a {names[0]}"]
    places = [f"the {run} run was on a {name or 'real device'}" for run, name in zip(which, names, strict=True)]
    return [f"{places[0]} and {places[1]}: they differ by more than the code"]


def join_names(devices: Iterable[str]) -> str:
    """Joins the devices' names, sorted, with commas."""
    return ", ".join(sorted(devices))


def exceeded_limits(diff: Diff, limit: GrowthLimit) -> list[str]:
    """Returns a sentence for each device whose peak grew beyond the limit."""
    return [
        f"the peak of {name} grew by {format_bytes(device.total)}, more than {limit.text}"
        for name, device in diff.devices.items()
        if not limit.allows(device.before.requested_bytes, device.after.requested_bytes)
    ]


def _diff_device(before: Device, after: Device) -> DeviceDiff:
    return DeviceDiff(
        **peak_difference(before.peak, after.peak),
        before=_diff_peak(before),
        after=_diff_peak(after),
        phases={
            name: _diff_phase(before.phases.get(name), after.phases.get(name))
            for name in {**before.phases, **after.phases}
        },
    )


def _diff_peak(device: Device) -> DiffPeak:
    peak = device.peak
    return DiffPeak(peak.requested_bytes, peak.phase, peak.step, peak.categories, device.reserved_peak)


def _diff_phase(before: PhasePeak | None, after: PhasePeak | None) -> DiffPhase:
    old, new = (0 if moment is None else moment.peak_bytes for moment in (before, after))
    return DiffPhase(
        total=new - old,
        before_bytes=None if before is None else old,
        after_bytes=None if after is None else new,
        categories=_subtract({} if after is None else after.categories, {} if before is None else before.categories),
    )


def modules_of(peak: Peak) -> Groups:
    """Returns the peak's bytes by module. A peak from the live counters has no modules: all of it is under ""."""
    return peak.modules or {"": peak.categories}


def _subtract_groups(groups: Groups, others: Groups) -> Groups:
    differences = {name: _subtract(groups.get(name, {}), others.get(name, {})) for name in {**groups, **others}}
    return {name: categories for name, categories in differences.items() if categories}


def _subtract(sizes: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    differences = {key: sizes.get(key, 0) - others.get(key, 0) for key in {**sizes, **others}}
    return {key: size for key, size in differences.items() if size}


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
