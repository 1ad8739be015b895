# SPDX-License-Identifier: Apache-2.0
"""The report of profiles as a page."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.reports.html.payload import Run, categories, payload
from opacus_memprof.reports.html.shell import build_page

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
    "ranks.js",
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
    """Writes html_of's page to `path`, atomically. Raises MemprofError as html_of does, and where it cannot."""
    write_text(path, html_of(profile, directory, without_dp))


def html_of(
    profile: Profile,
    directory: str | os.PathLike[str] | None = None,
    without_dp: Profile | None = None,
) -> str:
    """The report of a profile (the content of profile.json) as one page of at most 5 MB.

    Args:
        profile: what load_profile returned.
        directory: where it came from, for more of the timeline than the profile has; None where there is none.
        without_dp: the profile of the same training without privacy, for what privacy costs.

    Raises:
        MemprofError: the two profiles cannot be compared (see analysis.tax.dp_tax).
    """
    return html_of_runs([Run(_name(profile), profile, directory, without_dp)])


def html_of_runs(runs: Sequence[Run], job: Mapping[str, Any] | None = None) -> str:
    """One page of several named profiles, between which the reader chooses. Raises as html_of.

    Args:
        job: of runs that are ranks, what the page says of all of them (reports.html.ranks).
    """
    content = payload(runs)
    return build_page(
        runs[0].name, _SCRIPTS, {"runs": content, "job": job}, categories(content), "opacus-memprof report DIRECTORY"
    )


def _name(profile: Profile) -> str:
    command = profile.command
    return " ".join([os.path.basename(command[0]), *command[1:]]) if command else "a profile"
