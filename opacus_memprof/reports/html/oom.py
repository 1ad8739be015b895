# SPDX-License-Identifier: Apache-2.0
"""oom_report.json as a page."""

from opacus_memprof.analysis.virtual import virtual_mark
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.reports.html.shell import build_page
from opacus_memprof.reports.oom_text import headline

_SCRIPTS = ["base.js", "data.js", "theme.js", "table.js", "frame.js", "suggestions.js", "oom.js"]


def oom_page(report: OomReport) -> str:
    """The page, from what analysis.oom.build_report returned."""
    categories = {*report.holders.categories, *report.needed.parts}
    content = {"headline": headline(report), "failure": report, "virtual_mark": virtual_mark(report.virtual)}
    return build_page("out of memory", _SCRIPTS, content, categories, elsewhere="oom_report.txt")
