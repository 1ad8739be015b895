# SPDX-License-Identifier: Apache-2.0
"""Prepares a profile for reports and exports. Every output is a function of the view alone."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from opacus_memprof.analysis.diff import dp_tax
from opacus_memprof.analysis.events import Events
from opacus_memprof.analysis.profile import read_timelines
from opacus_memprof.analysis.verdict_view import VerdictView, device_verdict, failure_verdict, privacy_sentences
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.difference import Tax
from opacus_memprof.profiles.directory import OOM_REPORTS
from opacus_memprof.profiles.json_object import read_json_object
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.plan import add_trials
from opacus_memprof.profiles.profile import (
    Device,
    DeviceSnapshot,
    Groups,
    Peak,
    PhasePeak,
    Profile,
    ReservedPeak,
    Timeline,
    by_innermost_line,
    virtual_gpu_of,
    virtual_mark,
)
from opacus_memprof.profiles.units import format_bytes, format_count, format_moment, format_share

_UNATTRIBUTED = "unattributed"
_MATERIAL = 0.05  # the fraction of the peak above which unattributed bytes are listed by line
_LARGE_LINE = 0.01  # the fraction of the peak above which a line is listed
_TOP = 10  # number of parts of a peak that tables name; the others are summed up
_TOTALS = {
    "requested_bytes": ("requested", "what the program asked for"),
    "rounding": ("+ rounding", "blocks are larger than what was asked for"),
    "allocated_bytes": ("= allocated", "what the allocator had handed out"),
    "cached": ("+ cached", "kept by the allocator for later"),
    "reserved_bytes": ("= reserved", "what the allocator had taken from the device by then"),
}
_HOLDERS = {"shared_with_autograd": "autograd holds them as well", "opacus_only": "only Opacus holds them"}
_STEPS = "Steps count from 0."
_LOGICAL_STEPS = (
    "Steps count from 0. Each is a physical batch; a logical step, of one or more of them, updates the parameters."
)
_IDLE = "Idle is the time outside forward, backward, clipping and the optimizer's step."


@dataclass(frozen=True)
class Part:
    """A part of a peak: a category, component or module, or several small ones.

    Attributes:
        name: the name; "" means no module.
        bytes: bytes of the part; `size` and `share` are the same for people: `1.50 MiB`, and `12.3 %` of the whole.
        mostly: its largest category; "" for a category.
        categories: bytes by category.
        is_rest: whether this is the sum of all parts that are not named.
    """

    name: str
    bytes: int
    size: str
    share: str
    mostly: str
    categories: Mapping[str, int]
    is_rest: bool = False


@dataclass(frozen=True)
class PhaseRow:
    """The peak of a phase; `mostly` is its largest category."""

    name: str
    bytes: int
    size: str
    step: int
    mostly: str


@dataclass(frozen=True)
class Check:
    """A comparison of figures that must agree.

    `agrees` is None if they differ for a known reason. `details` follows the claim.
    """

    agrees: bool | None
    claim: str
    details: str = ""


@dataclass(frozen=True)
class DeviceView:
    """One device of a profile.

    Attributes:
        title: its name and, for a virtual GPU, the GPU that it simulates.
        device: its entry in profile.json.
        peak_size: the highest requested bytes; `peak_moment` says when they were live.
        totals: label, size and meaning of the requested, allocated and reserved bytes at the peak.
        categories, components, modules: the parts of the peak, the largest first.
        lines: the parts of the peak by the innermost line of the user's own code that made them, as far as known.
        unattributed: the unattributed bytes at the peak by the same lines; the last part is of small and unknown lines.
            Empty if they are less than a twentieth of the peak.
        holders: who holds the captured activations, and how much.
        phases: in the order of profile.json; `phases_note` says how their steps are counted.
        steps_note: the same for a page that shows steps as well.
        failure: a sentence on the last allocation that failed; "" without one.
        checks: whether the figures of the peak and of snapshots agree.
    """

    title: str
    device: Device
    peak_size: str
    peak_moment: str
    totals: Sequence[tuple[str, str, str]]
    categories: Sequence[Part]
    components: Sequence[Part]
    modules: Sequence[Part]
    lines: Sequence[Part]
    unattributed: Sequence[Part]
    holders: Sequence[tuple[str, str]]
    phases: Sequence[PhaseRow]
    phases_note: str
    steps_note: str
    failure: str
    checks: Sequence[Check]


@dataclass(frozen=True)
class ProfileView:
    """One profile. Every event, which may be more than memory holds, is read when an export needs it.

    Attributes:
        name: the name of the run.
        profile: the content of profile.json.
        directory: the directory of the profile; None if there is none.
        devices: the devices by name.
        virtual_gpu: the kind and memory of the virtual GPU; `virtual_mark` is the sentence on it. None for a real one.
        privacy: a sentence for each model in privacy_check.json.
        out_of_memory: oom_report.json; None without one.
        verdicts: of the failure if memory ran out, otherwise of each device.
        tax: the cost of privacy, if the profile of the same training without it is known.
    """

    name: str
    profile: Profile
    directory: Path | None
    devices: Mapping[str, DeviceView]
    virtual_gpu: str | None
    virtual_mark: str | None
    privacy: Sequence[str]
    out_of_memory: OomReport | None
    verdicts: Sequence[VerdictView]
    tax: Tax | None

    def events(self) -> Events:
        """Returns the events of the profile. Raises MemprofError if meta.json cannot be read."""
        return Events(self._directory())

    def timelines(self, points: int) -> dict[str, Timeline]:
        """Returns the timelines by device, with up to `points` rows. Raises MemprofError if events cannot be read."""
        return read_timelines(self._directory(), points)

    def _directory(self) -> Path:
        if self.directory is None:
            raise MemprofError("a profile without a directory has no events: give the directory of a profile")
        return self.directory


def view_profile(
    profile: Profile,
    directory: str | os.PathLike[str] | None = None,
    vanilla: Profile | None = None,
    name: str = "",
) -> ProfileView:
    """Returns the view of a profile.

    Args:
        profile: the content of profile.json.
        directory: the directory of the profile, for its events and other files; None if there is none.
        vanilla: the profile of the same training without privacy, for the cost of privacy.
        name: the name of the run; "" is its command.

    Raises:
        MemprofError: the two profiles cannot be compared (see analysis.diff.dp_tax).
    """
    path = None if directory is None else Path(directory)
    gpu, command = virtual_gpu_of(profile.virtual), profile.command
    failure = _read_oom_report(path)
    if profile.status == "out_of_memory" and failure is None and path is not None:
        lacks = f"{OOM_REPORTS[1]} is missing or cannot be read: there are no suggestions of what to change"
        profile = replace(profile, warnings=[*profile.warnings, lacks])
    return ProfileView(
        name=name or (" ".join([os.path.basename(command[0]), *command[1:]]) if command else "a profile"),
        profile=profile,
        directory=path,
        devices={
            key: view_device(device, key if gpu is None else f"{key}, a {gpu}")
            for key, device in profile.devices.items()
        },
        virtual_gpu=gpu,
        virtual_mark=virtual_mark(profile.virtual),
        privacy=privacy_sentences(path),
        out_of_memory=failure,
        verdicts=[failure_verdict(failure)]
        if failure is not None and profile.status == "out_of_memory"
        else [device_verdict(key, device) for key, device in profile.devices.items()],
        tax=None if vanilla is None else dp_tax(profile, vanilla),
    )


def view_device(device: Device, title: str) -> DeviceView:
    """Returns the view of one device of a profile."""
    peak, whole, phases = device.peak, device.peak.requested_bytes, device.phases.values()
    times = [(phase.step, phase.logical_step) for phase in phases]
    return DeviceView(
        title=title,
        device=device,
        peak_size=format_bytes(whole),
        peak_moment=format_moment(peak.phase, peak.step, peak.logical_step),
        totals=[
            (label, format_bytes(size), meaning)
            for key, (label, meaning) in _TOTALS.items()
            if (size := getattr(peak, key)) is not None
        ]
        + _largest_reserved(device.reserved_peak),
        categories=parts_of(peak.categories, whole),
        components=groups_of(peak.components, whole),
        modules=groups_of(peak.modules, whole),
        lines=groups_of(by_innermost_line(peak.lines), whole),
        unattributed=unattributed_parts(peak.categories, _unattributed_by_line(peak), whole),
        holders=[
            (_HOLDERS.get(holder, holder), format_bytes(size))
            for holder, size in largest_first(dict(peak.activation_hooks))
        ],
        phases=[_phase_row(name, phase) for name, phase in device.phases.items()],
        phases_note=_steps_note(device.phases, times),
        steps_note=_steps_note(device.phases, [*times, *((step.step, step.logical_step) for step in device.steps)]),
        failure=_last_failure(device),
        checks=[*_check_peak(peak), *_check_snapshots(device.snapshots)],
    )


def parts_of(sizes: Mapping[str, int], whole: int) -> list[Part]:
    """Returns categories with their bytes, the largest first, without empty ones."""
    return [_part(name, {name: size}, whole) for name, size in largest_first(sizes)]


def groups_of(groups: Groups, whole: int, count: int = _TOP) -> list[Part]:
    """Returns the `count` largest modules or components, and one part for all others, without empty ones."""
    names = [name for name, _ in largest_first({name: sum(sizes.values()) for name, sizes in groups.items()})]
    parts = [_part(name, groups[name], whole, largest_first(groups[name])[0][0]) for name in names[:count]]
    if rest := names[count:]:
        total: dict[str, int] = {}
        for name in rest:
            for category, size in groups[name].items():
                total[category] = total.get(category, 0) + size
        parts.append(_part(f"{len(rest)} more", total, whole, is_rest=True))
    return parts


def unattributed_parts(categories: Mapping[str, int], by_line: Mapping[str, int], whole: int) -> list[Part]:
    """Returns unattributed bytes by line, and a last part for small and unknown lines.

    Empty if they are less than a twentieth of the `whole`.
    """
    total = categories.get(_UNATTRIBUTED, 0)
    if total <= _MATERIAL * whole:
        return []
    rows = [(name, size) for name, size in largest_first(by_line) if size >= _LARGE_LINE * whole][:_TOP]
    parts = [_part(name, {_UNATTRIBUTED: size}, whole) for name, size in rows]
    if rest := total - sum(part.bytes for part in parts):
        parts.append(_part("elsewhere", {_UNATTRIBUTED: rest}, whole, is_rest=True))
    return parts


def _unattributed_by_line(peak: Peak) -> dict[str, int]:
    return {name: sizes.get(_UNATTRIBUTED, 0) for name, sizes in by_innermost_line(peak.lines).items()}


def largest_first(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the items with the largest size first, without zeros."""
    return sorted(((key, size) for key, size in sizes.items() if size), key=lambda item: (-item[1], item[0]))


def _part(name: str, categories: Mapping[str, int], whole: int, mostly: str = "", is_rest: bool = False) -> Part:
    size = sum(categories.values())
    return Part(name, size, format_bytes(size), format_share(size, whole), mostly, categories, is_rest)


def _phase_row(name: str, phase: PhasePeak) -> PhaseRow:
    categories = largest_first(phase.categories)
    mostly = categories[0][0] if categories else ""
    return PhaseRow(name, phase.peak_bytes, format_bytes(phase.peak_bytes), phase.step, mostly)


def _steps_note(phases: Iterable[str], steps: Iterable[tuple[int, int]]) -> str:
    """Returns a sentence that says how the steps of a table are counted, and explains the phase idle if it occurs.

    The steps are (physical, logical) pairs.
    """
    differ = any(logical != step for step, logical in steps)
    return " ".join([_LOGICAL_STEPS if differ else _STEPS, *([_IDLE] if "idle" in phases else [])])


def _largest_reserved(peak: ReservedPeak | None) -> list[tuple[str, str, str]]:
    if peak is None:
        return []
    when = format_moment(peak.phase, peak.step)
    return [("largest reserved", format_bytes(peak.bytes), f"in {when}: the memory that the whole run needed")]


def _last_failure(device: Device) -> str:
    failures = device.out_of_memory
    if not failures:
        return ""
    last = failures[-1]
    where = f" for {last.module}" if last.module else ""
    more = f" ({len(failures)} allocations failed; this is the last)" if len(failures) > 1 else ""
    return (
        f"{format_bytes(last.requested_bytes)} of {last.category}{where} in "
        f"{format_moment(last.phase, last.step, last.logical_step)}, with {format_bytes(last.live_bytes)} live{more}"
    )


def _check_peak(peak: Peak) -> Iterator[Check]:
    """Yields the checks that the categories add up, and that the allocator's own count is the same."""
    if remainder := peak.remainder_bytes:
        yield Check(False, f"Σ categories misses {remainder} bytes of the requested ones")
    else:
        yield Check(True, "Σ categories = requested bytes: exact")
    if peak.counted_bytes is None:
        return
    excess = peak.counted_bytes - peak.requested_bytes
    if excess == 0:
        yield Check(True, "and what the allocator itself counts, at the peak: exact")
    else:
        yield Check(
            None,
            f"the allocator itself counts {excess:+} bytes at the peak",
            ": what the program has freed and a side stream still uses counts there",
        )


def _check_snapshots(snapshots: Sequence[DeviceSnapshot]) -> Iterator[Check]:
    compared = [(snapshot.remainder, snapshot.name) for snapshot in snapshots if isinstance(snapshot.remainder, int)]
    wrong = [row for row in compared if row[0]]
    if wrong:
        worst, name = max(wrong, key=lambda row: abs(row[0]))
        claim = f"{len(wrong)} of {len(compared)} snapshots differ from what the allocator counts"
        yield Check(False, claim, f', "{name}" by {worst} bytes')
    elif compared:
        instants = format_count(len(compared), "snapshot")
        yield Check(True, f"and what the allocator itself counts, at {instants}: exact")


def _read_oom_report(directory: Path | None) -> OomReport | None:
    """Returns the profile's oom_report.json; None without one that can be read."""
    path = None if directory is None else directory / OOM_REPORTS[1]
    if path is not None and path.is_file():
        with contextlib.suppress(MemprofError):
            report = read_json_object(path, OomReport)
            add_trials(report)  # a plan may have tried its suggestions since
            return report
    return None
