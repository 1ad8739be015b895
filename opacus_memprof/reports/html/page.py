# SPDX-License-Identifier: Apache-2.0
"""Builds the HTML report of one profile, or of several."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.reports.html.page_builder import build_page
from opacus_memprof.reports.html.payload import PageRun, build_payload, named_categories

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


def write_html(
    profile: Profile,
    directory: str | os.PathLike[str] | None,
    path: str | os.PathLike[str],
    without_dp: Profile | None = None,
) -> None:
    """Writes the HTML report of a profile to `path`, atomically. See build_html for arguments and errors."""
    write_text(path, build_html(profile, directory, without_dp))


def build_html(
    profile: Profile,
    directory: str | os.PathLike[str] | None = None,
    without_dp: Profile | None = None,
) -> str:
    """The report of a profile (the content of profile.json) as one page of at most 5 MB.

    Args:
        profile: what load_profile returned.
        directory: that of the profile, for a finer timeline from its events; None if there is none.
        without_dp: the profile of the same training without privacy, for what privacy costs.

    Raises:
        MemprofError: the two profiles cannot be compared (see analysis.tax.dp_tax).
    """
    return build_runs_html([PageRun(_name(profile), profile, directory, without_dp)])


def build_runs_html(runs: Sequence[PageRun], job: Mapping[str, Any] | None = None) -> str:
    """The HTML report of several profiles, between which the reader chooses. Raises MemprofError as build_html does.

    Args:
        runs: the profiles with their names.
        job: of ranks, what the page shows of the whole job (see reports.html.job_page).
    """
    content = build_payload(runs)
    return build_page(
        runs[0].name,
        _SCRIPTS,
        {"runs": content, "job": job},
        named_categories(content),
        "opacus-memprof report DIRECTORY",
    )


def _name(profile: Profile) -> str:
    command = profile.command
    return " ".join([os.path.basename(command[0]), *command[1:]]) if command else "a profile"
