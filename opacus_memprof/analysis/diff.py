# SPDX-License-Identifier: Apache-2.0
"""What changed between two profiles: at the peak and in each phase, by category and module."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from opacus_memprof.analysis.profile import FORMAT
from opacus_memprof.analysis.virtual import compare_virtual
from opacus_memprof.errors import MemprofError
from opacus_memprof.units import format_bytes, parse_size

_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class Limit:
    """How much a peak may grow: `percent` of what it was, or `size` bytes."""

    text: str
    percent: Fraction | None = None
    size: int = 0

    @staticmethod
    def parse(text: str) -> "Limit":
        """From `2%` or a size as units.parse_size reads it. Raises MemprofError for anything else."""
        if match := _PERCENT.fullmatch(text):
            return Limit(text.strip(), percent=Fraction(match[1]))
        try:
            return Limit(text.strip(), size=parse_size(text))
        except MemprofError as error:
            raise MemprofError(f"{text!r} is no limit: write a percentage, as 2%, or a size, as 50MiB") from error

    def allows(self, before: int, after: int) -> bool:
        """Whether a peak of `after` bytes is within the limit of one of `before`."""
        allowed = self.size if self.percent is None else self.percent * before / 100
        return after - before <= allowed


def diff_profiles(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Two profiles (contents of profile.json), device by device.

    Returns:
        {"devices": {name: {"total", "before", "after", "categories", "modules", "phases"}}, "notes": [sentences]}.
        `before` and `after` are {"requested_bytes", "phase", "step", "categories"} of the peaks. `total`, `categories`
        ({category: bytes}) and `modules` ({module: {category: bytes}}) are after less before, in signed bytes, without
        what did not change: Σ `categories` = Σ `modules` = `total`. `phases` is {phase: {"total", "before_bytes",
        "after_bytes", "categories"}} of the phases' own peaks; bytes are `None` where a run has no such phase.
        Where the two have one device each, of different names, they are compared, and a note says so.

    Raises:
        MemprofError: a profile is of another format or has no device, or the two have no device in common.
    """
    for which, profile in (("first", before), ("second", after)):
        refuse_incomparable(which, profile)
    notes = [
        f"the {which} run's status is {profile['status'].replace('_', ' ')}: its peak may not be a whole run's"
        for which, profile in (("first", before), ("second", after))
        if profile.get("status", "finished") != "finished"
    ]
    notes += compare_virtual(("first", "second"), before, after)
    old, new = before["devices"], after["devices"]
    pairs = [(name, name, name) for name in new if name in old]
    if not pairs and len(old) == len(new) == 1:
        (first,), (second,) = old, new
        pairs = [(f"{first} → {second}", first, second)]
        notes.append(f"the first run was on {first} and the second on {second}, whose memory differs by more than code")
    if not pairs:
        raise MemprofError(
            f"the first run was on {listed(old)} and the second on {listed(new)}: compare the same devices"
        )
    compared_old, compared_new = {pair[1] for pair in pairs}, {pair[2] for pair in pairs}
    alone = [f"the first run alone used {name}" for name in old if name not in compared_old]
    alone += [f"the second run alone used {name}" for name in new if name not in compared_new]
    return {
        "devices": {name: _diff_device(old[first], new[second]) for name, first, second in pairs},
        "notes": notes + alone,
    }


def refuse_incomparable(which: str, profile: Mapping[str, Any]) -> None:
    """Raises MemprofError, with `which` of two profiles it is, for another format or a profile without devices."""
    if profile.get("format") != FORMAT:
        raise MemprofError(
            f"the {which} profile has format {profile.get('format')!r}, and this release reads {FORMAT}: "
            "profile again, or use the release that wrote it"
        )
    if not profile.get("devices"):
        raise MemprofError(f"the {which} profile has no device that allocated memory: profile a training run")


def peak_difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """`total`, `categories` and `modules` of diff_profiles, from two peaks of a profile.json."""
    old, new = modules_of(before), modules_of(after)
    modules = {module: _minus(new.get(module, {}), old.get(module, {})) for module in {**new, **old}}
    return {
        "total": after["requested_bytes"] - before["requested_bytes"],
        "categories": _minus(after["categories"], before["categories"]),
        "modules": {module: categories for module, categories in modules.items() if categories},
    }


def listed(devices: Mapping[str, Any]) -> str:
    return ", ".join(sorted(devices))


def growth(total: int, before: int) -> str:
    """A change of `total` bytes in percent: `+2.3 %`; "" where there was nothing."""
    return f"{100 * total / before:+.1f} %" if before else ""


def exceeded(diff: Mapping[str, Any], limit: Limit) -> list[str]:
    """A sentence for each device whose peak has grown beyond the limit."""
    return [
        f"the peak of {name} grew by {format_bytes(device['total'])}, more than {limit.text}"
        for name, device in diff["devices"].items()
        if not limit.allows(device["before"]["requested_bytes"], device["after"]["requested_bytes"])
    ]


def _diff_device(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    old, new = before["peak"], after["peak"]
    kept = ("requested_bytes", "phase", "step", "categories")
    phases = {**before["phases"], **after["phases"]}
    return {
        "before": {key: old[key] for key in kept},
        "after": {key: new[key] for key in kept},
        **peak_difference(old, new),
        "phases": {name: _diff_phase(before["phases"].get(name), after["phases"].get(name)) for name in phases},
    }


def _diff_phase(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    old, new = (moment or {"peak_bytes": None, "categories": {}} for moment in (before, after))
    return {
        "total": (new["peak_bytes"] or 0) - (old["peak_bytes"] or 0),
        "before_bytes": old["peak_bytes"],
        "after_bytes": new["peak_bytes"],
        "categories": _minus(new["categories"], old["categories"]),
    }


def modules_of(peak: Mapping[str, Any]) -> Mapping[str, Mapping[str, int]]:
    """A peak that only the live counters saw has no modules."""
    return peak["modules"] or {"": peak["categories"]}


def _minus(ours: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
    differences = {key: ours.get(key, 0) - theirs.get(key, 0) for key in {**ours, **theirs}}
    return {key: size for key, size in differences.items() if size}
