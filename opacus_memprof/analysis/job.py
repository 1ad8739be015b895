# SPDX-License-Identifier: Apache-2.0
"""Summarizes the profiles of a job's ranks: which rank needs the most memory, for what, and contradictions.

Merges the profiles in a job's directory into ranks.json, whose fields docs/format.md documents. Profiles are read one
after the other and only a row of each is kept, so that memory stays small for any number of ranks.
"""

import contextlib
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from opacus_memprof.analysis.profile import is_being_written, load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import LOCK, META, PROFILE, RANKS, ProfileDirectory, lock, rank_directories
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.job_summary import Imbalance, JobSummary, Rank, RankPeak, Spread, Straggler, TotalPeaks
from opacus_memprof.profiles.json_object import read_json_object, to_json
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.profile import Device, Finding, Meta, Profile, Sizes, Virtual, read_meta, virtual_gpu_of
from opacus_memprof.profiles.units import format_count, format_ranks

# A rank whose peak is this many times the median is a straggler: it alone decides which batch fits.
STRAGGLER = 1.05
# The status of a job is the worst one of its ranks. A rank without a profile was killed.
_WORST_FIRST = ("out_of_memory", "failed", "killed", "running", "finished")


class Job:
    """Collects the profiles of a job's ranks one by one, and keeps a row of each.

    Args:
        launch: the launch of any of its processes; None if the profiles do not contain it.
    """

    def __init__(self, launch: Launch | None) -> None:
        self.rows: list[Rank] = []
        self._launch = launch
        self._left_out: list[int] = []
        self._unreadable: list[int] = []
        self._notes: list[str] = []
        self._warnings: dict[str, list[int]] = {}  # a warning of ranks' profiles → the ranks
        self._findings: dict[tuple[str, str], Finding] = {}
        self._versions: dict[tuple[tuple[str, str | None], ...], list[int]] = {}
        self._virtual: dict[str | None, list[int]] = {}  # the virtual GPU, None for a real one
        self._virtual_gpus: Virtual = UNSET
        self._model: tuple[int, frozenset[str]] | None = None
        self._other_models: dict[frozenset[str], list[int]] = {}

    def add(self, rank: int, directory: str, profile: Profile, modules: frozenset[str]) -> None:
        """Adds a rank.

        Args:
            rank: its number.
            directory: the directory of its profile, relative to the job's.
            profile: its profile.
            modules: names of all modules that it has attached.
        """
        self.rows.append(_row(rank, directory, profile))
        self._versions.setdefault(tuple(sorted(profile.versions.items())), []).append(rank)
        self._virtual.setdefault(virtual_gpu_of(profile.virtual), []).append(rank)
        if self._virtual_gpus is UNSET:
            self._virtual_gpus = profile.virtual
        for warning in profile.warnings:
            self._warnings.setdefault(warning, []).append(rank)
        for finding in profile.findings:
            self._add_finding(rank, finding)
        if len(modules) > 1:  # more than "": it has reached its model
            if self._model is None:
                self._model = rank, modules
            elif modules != self._model[1]:
                self._other_models.setdefault(modules, []).append(rank)

    def leave_out(self, rank: int) -> None:
        """Excludes a rank, because its profile belongs to another job."""
        self._left_out.append(rank)

    def add_unreadable(self, rank: int, why: str) -> None:
        """Excludes a rank, because its profile cannot be read."""
        self._unreadable.append(rank)
        self._notes.append(f"rank {rank} is left out: {why}")

    def summary(self) -> JobSummary:
        """Returns the summary of all ranks, for ranks.json."""
        world_size = self._launch.world_size if self._launch is not None else len(self.rows)
        expected = self._launch.ranks if self._launch is not None else range(world_size)
        present = {row.rank for row in self.rows} | set(self._unreadable)
        missing = [rank for rank in expected if rank not in present]
        peaks = {row.rank: row.peak for row in self.rows if row.peak and row.steps}
        peaks = peaks or {row.rank: row.peak for row in self.rows if row.peak}
        stray = _stray_bytes(self.rows)
        statuses = [*(row.status for row in self.rows), *["killed"] * bool(missing)]
        return JobSummary(
            launch=self._launch,
            world_size=world_size,
            status=min(statuses, key=_WORST_FIRST.index),
            versions=dict(next(iter(self._versions))),
            played=UNSET if self._launch is None or self._launch.played is None else self._launch.played,
            virtual=self._virtual_gpus,
            ranks=self.rows,
            missing=missing,
            imbalance=_imbalance(peaks),
            stragglers=_stragglers(peaks),
            total=TotalPeaks(
                sum(peak.requested_bytes for peak in peaks.values()),
                _sums(peak.categories for peak in peaks.values()),
            ),
            findings=[*stray, *self._findings.values()],
            warnings=[*self._inconsistencies(missing), *self._notes, *self._warnings_of_ranks()],
        )

    def _add_finding(self, rank: int, finding: Finding) -> None:
        """Adds a finding. If several ranks have the same finding, the largest is kept, with all ranks."""
        key = finding.kind, finding.module
        other = self._findings.get(key)
        ranks = [*(other.ranks if other and other.ranks else ()), rank]
        largest = finding if other is None or finding.bytes > other.bytes else other
        self._findings[key] = replace(largest, ranks=ranks)

    def _warnings_of_ranks(self) -> list[str]:
        return [f"{format_ranks(ranks)}: {warning}" for warning, ranks in self._warnings.items()]

    def _inconsistencies(self, missing: list[int]) -> list[str]:
        messages = _early_ends(self.rows)
        if missing:
            left = "has" if len(missing) == 1 else "have"
            messages.append(f"{format_ranks(missing)} of {self._launch_size()} {left} no profile here")
        earlier = [rank for rank in self._left_out if rank >= self._launch_size()]
        if earlier:
            messages.append(f"the profiles of {format_ranks(earlier)} are of an earlier job, and are left out")
        if len(self._versions) > 1:
            messages.append(_differing_versions(self._versions))
        if len(self._virtual) > 1:
            places = [f"{format_ranks(ranks)} on a {name or 'real device'}" for name, ranks in self._virtual.items()]
            messages.append(f"the ranks ran on different devices: {'; '.join(places)}")
        for modules, ranks in self._other_models.items():
            assert self._model is not None
            first, reference = self._model
            only = sorted(modules ^ reference)
            messages.append(
                f"{format_ranks(ranks)} trained another model than rank {first}: {len(only)} modules are not in both, "
                f"such as {only[0]!r}"
            )
        return messages + _clock_warnings(self.rows)

    def _launch_size(self) -> int:
        return self._launch.world_size if self._launch is not None else len(self.rows)


def _early_ends(rows: Iterable[Rank]) -> list[str]:
    """Returns messages about ranks that have not finished, and the reasons."""
    same_end: dict[tuple[str, int, str | None], list[int]] = {}
    for row in rows:
        if row.status != "finished":
            same_end.setdefault((row.status, row.steps, row.error), []).append(row.rank)
    messages = []
    for (status, steps, error), ranks in same_end.items():
        several = len(ranks) > 1
        how = {
            "out_of_memory": "ran out of memory",
            "failed": "failed",
            "killed": "were killed" if several else "was killed",
            "running": "are still running" if several else "is still running",
        }[status]
        when = f"after {format_count(steps, 'step')}" if steps else "before the end of the first step"
        why = f" ({error})" if error else ""
        figures = f"{'their' if several else 'its'} figures are those until then"
        messages.append(f"{format_ranks(ranks)} {how} {when}{why}: {figures}")
    return messages


def _row(rank: int, directory: str, profile: Profile) -> Rank:
    devices = profile.devices
    main = max(devices, key=lambda name: devices[name].peak.requested_bytes, default=None)
    device = devices[main] if main is not None else None
    return Rank(
        rank=rank,
        host=None if profile.launch is None else profile.launch.host,
        local_rank=None if profile.launch is None else profile.launch.local_rank,
        directory=directory,
        status=profile.status,
        exit_code=profile.exit_code,
        error=profile.error,
        started_unix_ns=profile.started_unix_ns,
        ended_unix_ns=profile.ended_unix_ns,
        events=profile.events.recorded,
        dropped=profile.events.dropped,
        device=main,
        steps=0 if device is None else _steps(device),
        peak=None if device is None else _peak(device),
        outside_pytorch=None if device is None else _outside(device),
        other_devices={name: _peak(devices[name]) for name in devices if name != main},
    )


def _peak(device: Device) -> RankPeak:
    peak = device.peak
    return RankPeak(
        requested_bytes=peak.requested_bytes,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        step=peak.step,
        phase=peak.phase,
        remainder_bytes=peak.remainder_bytes,
        categories={category: size for category, size in peak.categories.items() if size},
        reserved_peak=device.reserved_peak,
    )


def _steps(device: Device) -> int:
    """Returns the number of completed optimizer steps."""
    return max((step.step + step.complete for step in device.steps), default=0)


def _outside(device: Device) -> int | None:
    """Returns the most bytes outside PyTorch at a snapshot: the CUDA context, NCCL, other processes."""
    seen = [snapshot.get("outside_pytorch") for snapshot in device.snapshots]
    return max((size for size in seen if size is not None), default=None)


def _sums(rows: Iterable[Sizes]) -> Sizes:
    total: Sizes = {}
    for row in rows:
        for category, size in row.items():
            total[category] = total.get(category, 0) + size
    return total


def _imbalance(peaks: Mapping[int, RankPeak]) -> Imbalance | None:
    """Returns the highest peak compared with the mean of all peaks, in total and by category."""
    if not peaks:
        return None
    count = len(peaks)
    rank = max(peaks, key=lambda rank: peaks[rank].requested_bytes)
    highest = peaks[rank]
    total = sum(peak.requested_bytes for peak in peaks.values())
    mean = {category: size / count for category, size in _sums(peak.categories for peak in peaks.values()).items()}
    above = {category: highest.categories.get(category, 0) - mean[category] for category in mean}
    cause = max(above, key=lambda category: above[category], default=None)
    return Imbalance(
        max_bytes=highest.requested_bytes,
        mean_bytes=round(total / count),
        ratio=highest.requested_bytes * count / total if total else 1.0,
        rank=rank,
        cause=cause,
        cause_bytes=0 if cause is None else round(above[cause]),
        categories={category: _spread(category, peaks, mean[category]) for category in mean},
    )


def _spread(category: str, peaks: Mapping[int, RankPeak], mean: float) -> Spread:
    rank = max(peaks, key=lambda rank: peaks[rank].categories.get(category, 0))
    size = peaks[rank].categories.get(category, 0)
    return Spread(max_bytes=size, mean_bytes=round(mean), ratio=size / mean, rank=rank)


def _stragglers(peaks: Mapping[int, RankPeak]) -> list[Straggler]:
    """Returns the ranks whose peak is far above the median, the highest first."""
    if not peaks:
        return []
    median = statistics.median(peak.requested_bytes for peak in peaks.values())
    found = [
        Straggler(rank=rank, bytes=peak.requested_bytes, above_median=round(peak.requested_bytes - median))
        for rank, peak in peaks.items()
        if peak.requested_bytes > STRAGGLER * median
    ]
    return sorted(found, key=lambda row: (-row.bytes, row.rank))


def _stray_bytes(rows: list[Rank]) -> list[Finding]:
    """Finds memory of a rank on the GPU that another rank of its machine trains on."""
    trainers = {(row.host, row.device): row.rank for row in rows if row.device}
    found = []
    for row in rows:
        for device, peak in row.other_devices.items():
            owner = trainers.get((row.host, device))
            if owner is None or not device.startswith("cuda") or not peak.requested_bytes:
                continue
            found.append(
                Finding(
                    kind="stray_gpu_memory",
                    module="",
                    bytes=peak.requested_bytes,
                    evidence=f"rank {row.rank} trains on {row.device} and had {peak.requested_bytes} bytes on "
                    f"{device}, where rank {owner} trains; its CUDA context takes more there",
                    remedy="call torch.cuda.set_device(local_rank) before anything else, and load files with "
                    "map_location",
                    ranks=[row.rank],
                )
            )
    return found


def _differing_versions(versions: Mapping[tuple[tuple[str, str | None], ...], list[int]]) -> str:
    distinct = [dict(items) for items in versions]
    names = [name for name in distinct[0] if len({row.get(name) for row in distinct}) > 1]
    parts = []
    for known, ranks in versions.items():
        listed = ", ".join(f"{name} {dict(known).get(name)}" for name in names)
        parts.append(f"{format_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {listed}")
    return f"the ranks ran different versions: {'; '.join(parts)}"


def _clock_warnings(rows: list[Rank]) -> list[str]:
    """Returns a message if ranks on different machines seem not to have run at the same time: clocks may differ."""
    timed = [row for row in rows if row.started_unix_ns and row.ended_unix_ns]
    if not timed:
        return []
    first = min(timed, key=lambda row: row.ended_unix_ns)
    last = max(timed, key=lambda row: row.started_unix_ns)
    gap = last.started_unix_ns - first.ended_unix_ns
    if gap <= 0 or first.host == last.host:
        return []
    return [
        f"rank {last.rank} on {last.host} began {gap / 1e9:.1f} s after rank {first.rank} on {first.host} "
        "had ended: unless that is so, their clocks disagree, and times of different machines cannot be compared"
    ]


def load_ranks(directory: str | os.PathLike[str]) -> JobSummary:
    """Summarizes all ranks whose profiles are in `directory`.

    A killed rank counts up to its last event. The summary's warnings name ranks of an earlier job, unreadable and
    missing ones.

    Raises:
        MemprofError: no rank has a readable profile.
    """
    path = Path(directory)
    directories = rank_directories(path)
    newest = max(directories.values(), key=_modified_at, default=None)
    launch = None if newest is None else _launch(newest)
    job = Job(launch)
    for rank, folder in directories.items():
        if launch is not None and not launch.same_job(_launch(folder)):
            job.leave_out(rank)
            continue
        try:
            job.add(rank, folder.name, load_profile(folder), _modules(folder))
        except MemprofError as error:
            job.add_unreadable(rank, str(error))
    if not job.rows:
        raise MemprofError(f"{path} holds no readable profile of a rank: give the directory of a profile")
    return job.summary()


def write_job_summary(claimed: ProfileDirectory) -> JobSummary | None:
    """Writes ranks.json and returns its content if this rank is the last of its job to end; otherwise returns None.

    Each rank calls it after writing its own profile.

    Raises:
        MemprofError: ranks.json cannot be written.
    """
    if claimed.launch is None:
        return None
    path, launch = claimed.path.parent, claimed.launch
    others = (path / f"rank_{rank}" for rank in launch.ranks if rank != launch.rank)
    if not all(_has_ended(folder, launch) for folder in others):
        return None
    try:
        descriptor = lock(path)
    except MemprofError:
        return None  # another rank has ended at the same time, and writes it
    try:
        if (path / RANKS).exists() and launch.same_job(read_json_object(path / RANKS, JobSummary).launch):
            return None
        summary = load_ranks(path)
        write_text(path / RANKS, to_json(summary))
        return summary
    finally:
        with contextlib.suppress(OSError):
            (path / LOCK).unlink()
        os.close(descriptor)


def has_started_ranks(claimed: ProfileDirectory) -> bool:
    """Returns whether ranks that this process has started have recorded profiles in its own directory."""
    folders = (folder for folder in claimed.path.glob("rank_*") if folder.is_dir())
    return any(_modified_at(folder) >= claimed.claimed_at for folder in folders)


def write_summary_of_started_ranks(path: Path) -> JobSummary:
    """Writes ranks.json of the ranks that a process has started, and returns its content.

    Raises:
        MemprofError: no rank has a readable profile, or ranks.json cannot be written.
    """
    summary = load_ranks(path)
    write_text(path / RANKS, to_json(summary))
    return summary


def _has_ended(folder: Path, launch: Launch) -> bool:
    """Returns whether the rank took part in the job of `launch` and has ended."""
    if not launch.same_job(_launch(folder)):
        return False
    return (folder / PROFILE).exists() or not is_being_written(folder)


def _meta(folder: Path) -> Meta:
    try:
        return read_meta(folder / META)
    except MemprofError:
        return Meta()


def _launch(folder: Path) -> Launch | None:
    return _meta(folder).launch


def _modules(folder: Path) -> frozenset[str]:
    return frozenset(_meta(folder).names.modules)


def _modified_at(folder: Path) -> float:
    """Returns when the rank's meta.json was last written, in seconds since 1970; 0 without one."""
    try:
        return (folder / META).stat().st_mtime
    except OSError:
        return 0.0
