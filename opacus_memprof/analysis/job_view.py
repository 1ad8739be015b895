# SPDX-License-Identifier: Apache-2.0
"""Prepares a job's ranks for reports. `load_view` loads a profile or a job, whichever a directory holds."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

from opacus_memprof.analysis.job import load_ranks
from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.analysis.profile_view import Check, ProfileView, view_profile
from opacus_memprof.analysis.verdict_view import privacy_sentences
from opacus_memprof.profiles.directory import rank_directories
from opacus_memprof.profiles.job_summary import Imbalance, JobSummary, Rank, RankPeak, Straggler
from opacus_memprof.profiles.profile import Finding, virtual_mark
from opacus_memprof.profiles.units import format_bytes, format_ranks, format_share

_MOST_ROWS, _LOWEST_ROWS = 16, 4  # of ranks; with more, the highest and these many of the lowest are shown
_HIGHEST_PROFILES, _LOWEST_PROFILES = 12, 4  # ranks whose whole profiles are read
_EVEN = 1.0005  # as printed, max / mean is 1.000

Columns = Mapping[str, Sequence[str]]  # the cells of a table, by the titles of columns


@dataclass(frozen=True)
class JobView:
    """The profiles of a job's ranks.

    Attributes:
        directory: the directory of the job.
        summary: the content of ranks.json.
        title: the ranks in words.
        virtual_mark: the sentence on virtual GPUs; None for real ones.
        privacy: a sentence for each model in privacy_check.json, which the first rank writes.
        ranks: the peak of each rank; `left_out` says which are not shown. Empty if no memory was allocated.
        categories: each category at the peaks of the ranks.
        imbalance: the highest peak divided by the mean, and its cause.
        stragglers: the ranks far above the median, and their effect; "" and "" if there are none.
        total: the ranks whose peaks are added up, and the sum.
        check: whether each rank's categories add up.
        findings: the findings of all ranks, with the ranks in their evidence.
        profiles: the ranks with the highest and lowest peaks, in order; empty unless requested.
    """

    directory: Path
    summary: JobSummary
    title: str
    virtual_mark: str | None
    privacy: Sequence[str]
    ranks: Columns
    left_out: str
    categories: Columns
    imbalance: tuple[str, str]
    stragglers: tuple[str, str]
    total: tuple[str, str]
    check: Check
    findings: Sequence[Finding]
    profiles: Sequence[ProfileView] = ()


def load_view(
    directory: str | os.PathLike[str], vanilla: str | os.PathLike[str] | None = None, *, whole: bool = True
) -> ProfileView | JobView:
    """Returns the view of a profile, or of a job whose directory holds the profiles of its ranks.

    Args:
        directory: the directory of the profile or job.
        vanilla: the directory of the profile of the same training without privacy.
        whole: whether the view of a job has whole profiles, for a page.

    Raises:
        MemprofError: there is no readable profile, or the two cannot be compared.
    """
    path = Path(directory)
    if ranks := rank_directories(path):
        summary = load_ranks(path)
        profiles = _load_profiles(summary.ranks, path) if whole else ()
        return view_job(summary, path, privacy_sentences(ranks[min(ranks)]), profiles)
    return view_profile(load_profile(path), path, load_profile(vanilla) if vanilla else None)


def view_job(
    summary: JobSummary,
    directory: str | os.PathLike[str],
    privacy: Sequence[str] = (),
    profiles: Sequence[ProfileView] = (),
) -> JobView:
    """Returns the view of a job; the attributes of JobView describe the arguments."""
    simulated = summary.played  # UNSET, or the only ranks that ran
    everything = simulated is UNSET
    rows, imbalance = summary.ranks, summary.imbalance
    ranks, left_out = ({}, "") if imbalance is None else _rank_columns(rows, imbalance.mean_bytes)
    wrong = [row.rank for row in rows if row.peak and row.peak.remainder_bytes]
    return JobView(
        directory=Path(directory),
        summary=summary,
        title=f"{summary.world_size} ranks"
        if simulated is UNSET
        else f"{format_ranks(simulated)} of {summary.world_size}",
        virtual_mark=virtual_mark(summary.virtual),
        privacy=privacy,
        ranks=ranks,
        left_out=left_out,
        categories={} if imbalance is None else _category_columns(imbalance),
        imbalance=("", "") if imbalance is None else (f"{imbalance.ratio:.3f}", _cause(imbalance)),
        stragglers=_stragglers(summary.stragglers),
        total=("All peaks" if everything else "The peaks of these ranks", format_bytes(summary.total.peaks_bytes)),
        check=Check(False, f"Σ categories misses bytes of the requested ones on {format_ranks(wrong)}")
        if wrong
        else Check(True, "Σ categories = requested bytes on every rank: exact"),
        findings=[
            replace(finding, evidence=f"{format_ranks(finding.ranks or ())}: {finding.evidence}")
            for finding in summary.findings
        ],
        profiles=profiles,
    )


def _load_profiles(ranks: Sequence[Rank], directory: Path) -> list[ProfileView]:
    rows = [row for row, peak in sorted(_measured(ranks), key=lambda pair: pair[1].requested_bytes, reverse=True)]
    if len(rows) > _HIGHEST_PROFILES + _LOWEST_PROFILES:
        rows = [*rows[:_HIGHEST_PROFILES], *rows[-_LOWEST_PROFILES:]]
    folders = {row.rank: directory / row.directory for row in sorted(rows, key=lambda row: row.rank)}
    return [view_profile(load_profile(folder), folder, name=f"rank {rank}") for rank, folder in folders.items()]


def _measured(ranks: Sequence[Rank]) -> list[tuple[Rank, RankPeak]]:
    return [(row, row.peak) for row in ranks if row.peak]


def _rank_columns(ranks: Sequence[Rank], mean: int) -> tuple[Columns, str]:
    """Returns the peak of each rank.

    With more than _MOST_ROWS ranks, returns the highest and the lowest, and a sentence that says so.
    """
    measured, left_out = _measured(ranks), ""
    if len(measured) > _MOST_ROWS:
        measured.sort(key=lambda pair: (-pair[1].requested_bytes, pair[0].rank))
        highest, count = _MOST_ROWS - _LOWEST_ROWS, len(measured) - _MOST_ROWS
        left_out = f"the {highest} highest and the {_LOWEST_ROWS} lowest; {count} more lie between"
        del measured[highest:-_LOWEST_ROWS]
    several_hosts = len({row.host for row in ranks}) > 1
    shown, peaks = [row for row, _ in measured], [peak for _, peak in measured]
    columns = {
        "rank": [str(row.rank) for row in shown],
        "peak": [format_bytes(peak.requested_bytes) for peak in peaks],
        "of mean": [format_share(peak.requested_bytes, mean) for peak in peaks],
        "reserved": [_format_known(peak.reserved_peak.bytes if peak.reserved_peak else None) for peak in peaks],
        "outside": [_format_known(row.outside_pytorch) for row in shown],
        "steps": [str(row.steps) for row in shown],
        "phase": [peak.phase for peak in peaks],
        "mostly": [max(peak.categories, key=peak.categories.__getitem__, default="") for peak in peaks],
        "device": [str(row.device) for row in shown],
        "host": [str(row.host) if several_hosts else "" for row in shown],
        "": ["" if row.status == "finished" else row.status.replace("_", " ") for row in shown],
    }
    return columns, left_out


def _format_known(size: int | None) -> str:
    return "" if size is None else format_bytes(size)


def _category_columns(imbalance: Imbalance) -> Columns:
    rows = sorted(imbalance.categories.items(), key=lambda item: (-item[1].mean_bytes, item[0]))
    return {
        "at the peak": [category for category, _ in rows],
        "mean": [format_bytes(spread.mean_bytes) for _, spread in rows],
        "max": [format_bytes(spread.max_bytes) for _, spread in rows],
        "max / mean": [f"{spread.ratio:.3f}" for _, spread in rows],
        "on rank": [str(spread.rank) if spread.ratio > _EVEN else "" for _, spread in rows],
    }


def _cause(imbalance: Imbalance) -> str:
    above = imbalance.max_bytes - imbalance.mean_bytes
    if above <= 0 or imbalance.cause_bytes <= 0:
        return ""
    return (
        f", rank {imbalance.rank} has {format_bytes(above)} more than the mean; of {imbalance.cause} it has "
        f"{format_bytes(imbalance.cause_bytes)} more"
    )


def _stragglers(stragglers: Sequence[Straggler]) -> tuple[str, str]:
    if not stragglers:
        return "", ""
    verb = "set" if len(stragglers) > 1 else "sets"
    return format_ranks(row.rank for row in stragglers), (
        f"{verb} what batch fits everywhere: the highest has {format_bytes(stragglers[0].above_median)} more than the "
        "median rank"
    )
