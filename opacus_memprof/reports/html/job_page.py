# SPDX-License-Identifier: Apache-2.0
"""Builds the HTML report of a job: a table of all ranks, and the whole profiles of a few of them."""

import os
from pathlib import Path
from typing import Any

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.job_summary import JobSummary, Rank
from opacus_memprof.reports.html.page import build_runs_html
from opacus_memprof.reports.html.payload import PageRun

# Ranks whose whole profiles are on the page: those with the highest peaks, and those with the lowest.
_HIGHEST, _LOWEST = 12, 4
_MOST_ROWS = 2000


def write_job_html(summary: JobSummary, directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes the HTML report of a job to `path`, atomically.

    Args:
        summary: from analysis.job_directory.load_ranks.
        directory: that of the job, with the ranks' own directories in it.

    Raises:
        MemprofError: no rank has a peak, or the file cannot be written.
    """
    rows = sorted((row for row in summary.ranks if row.peak), key=_peak_bytes, reverse=True)
    if not rows:
        raise MemprofError("no rank has allocated memory on a device that was profiled: there is nothing to draw")
    chosen = rows if len(rows) <= _HIGHEST + _LOWEST else [*rows[:_HIGHEST], *rows[-_LOWEST:]]
    runs = []
    for row in sorted(chosen, key=lambda row: row.rank):
        folder = Path(directory) / row.directory
        runs.append(PageRun(f"rank {row.rank}", load_profile(folder), folder))
    write_text(path, build_runs_html(runs, job=_job(summary, rows[:_MOST_ROWS])))


def _peak_bytes(row: Rank) -> int:
    return row.peak.requested_bytes if row.peak else 0


def _job(summary: JobSummary, rows: list[Rank]) -> dict[str, Any]:
    return {
        "ranks": [
            {
                **{key: row[key] for key in ("rank", "host", "status", "steps")},
                "peak_bytes": _peak_bytes(row),
                "categories": row.peak.categories if row.peak else {},
            }
            for row in sorted(rows, key=lambda row: row.rank)
        ],
        "world_size": summary.world_size,
        "imbalance": summary.imbalance,
        "warnings": summary.warnings,
    }
