# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job as one page: all of them in a table, and some with all that their profiles have."""

import os
from pathlib import Path
from typing import Any

from opacus_memprof.analysis.profile import load_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.job_summary import JobSummary, Rank
from opacus_memprof.reports.html.page import html_of_runs
from opacus_memprof.reports.html.payload import Run

# Whole profiles on a page: the ranks with the highest peaks, and of those with the lowest a few.
_HIGHEST, _LOWEST = 12, 4
_MOST_ROWS = 2000


def write_ranks_html(summary: JobSummary, directory: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Writes one page of all ranks to `path`, atomically.

    Args:
        summary: what load_ranks returned.
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
        runs.append(Run(f"rank {row.rank}", load_profile(folder), folder))
    write_text(path, html_of_runs(runs, job=_job(summary, rows[:_MOST_ROWS])))


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
