# SPDX-License-Identifier: Apache-2.0
"""Builds the page of a profile, and that of a job: a table of all ranks, and the whole profiles of a few of them."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.analysis.view import JobView, ProfileView
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.job_summary import JobSummary, Rank
from opacus_memprof.reports.html.page_builder import build_page
from opacus_memprof.reports.html.payload import build_payload, named_categories

_SCRIPTS = [
    "base.js",
    "data.js",
    "theme.js",
    "table.js",
    "window.js",
    "chart.js",
    "readout.js",
    "pointer.js",
    "timeline.js",
    "meanings.js",
    "breakdown.js",
    "module_tree.js",
    "modules.js",
    "groups.js",
    "tax.js",
    "suggestions.js",
    "history.js",
    "findings.js",
    "job.js",
    "frame.js",
    "header.js",
    "report.js",
]

# Ranks whose whole profiles are on the page: those with the highest peaks, and those with the lowest.
_HIGHEST, _LOWEST = 12, 4
_MOST_ROWS = 2000


def write_html(view: ProfileView | JobView, path: str | os.PathLike[str]) -> None:
    """Writes the page of a profile or a job to `path`, atomically.

    Raises:
        MemprofError: no rank has a peak, a rank's profile cannot be read, or the file cannot be written.
    """
    write_text(path, build_html([view]) if isinstance(view, ProfileView) else _build_job_html(view))


def build_html(views: Sequence[ProfileView], job: Mapping[str, Any] | None = None) -> str:
    """The page of one or several profiles, between which the reader chooses, of at most 5 MB.

    Args:
        views: at least one.
        job: of ranks, what the page shows of the whole job.
    """
    runs = build_payload(views)
    content = {"runs": runs, "job": job}
    return build_page(views[0].name, _SCRIPTS, content, named_categories(runs), "opacus-memprof report DIRECTORY")


def _build_job_html(view: JobView) -> str:
    rows = sorted((row for row in view.summary.ranks if row.peak), key=_peak_bytes, reverse=True)
    if not rows:
        raise MemprofError("no rank has allocated memory on a device that was profiled: there is nothing to draw")
    chosen = rows if len(rows) <= _HIGHEST + _LOWEST else [*rows[:_HIGHEST], *rows[-_LOWEST:]]
    return build_html(list(view.profiles(chosen)), job=_job(view.summary, rows[:_MOST_ROWS]))


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
