# SPDX-License-Identifier: Apache-2.0
"""Joins template, style, scripts and figures to one page."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from opacus_memprof.files import write_text
from opacus_memprof.reports.html.payload import Run, payload
from opacus_memprof.reports.palette import THEMES

_HERE = Path(__file__).parent
# Each uses names of those before it when it is loaded; functions may use names of any.
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
    "advice.js",
    "history.js",
    "findings.js",
    "ranks.js",
    "header.js",
    "report.js",
]


def write_html(
    profile: Mapping[str, Any],
    directory: str | os.PathLike[str] | None,
    path: str | os.PathLike[str],
    without_dp: Mapping[str, Any] | None = None,
) -> None:
    """Writes html_of's page to `path`, atomically. Raises MemprofError as html_of does, and where it cannot."""
    write_text(path, html_of(profile, directory, without_dp))


def html_of(
    profile: Mapping[str, Any],
    directory: str | os.PathLike[str] | None = None,
    without_dp: Mapping[str, Any] | None = None,
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
    style = _theme_variables() + (_HERE / "report.css").read_text(encoding="utf-8")
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    template = Template((_HERE / "template.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(f"{runs[0].name} · opacus-memprof"),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=_embedded({**payload(runs), "job": job}),
    )


def _name(profile: Mapping[str, Any]) -> str:
    command = profile.get("command") or []
    return " ".join([os.path.basename(command[0]), *command[1:]]) if command else "a profile"


def _theme_variables() -> str:
    light, dark = THEMES["light"], THEMES["dark"]
    lines = [f"  --{name}: light-dark({color}, {getattr(dark, name)});\n" for name, color in vars(light).items()]
    return f":root {{\n{''.join(lines)}}}\n"


def _hash(text: str) -> str:
    """For the page's Content-Security-Policy: nothing but these scripts and styles is run, whatever a name contains."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(content: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: no `<` can end it or begin a comment."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
