# SPDX-License-Identifier: Apache-2.0
"""Builds the HTML page of an oom_report.json."""

from opacus_memprof.analysis.virtual import virtual_mark
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.reports.html.page_builder import build_page
from opacus_memprof.reports.oom_text import headline

_SCRIPTS = ["base.js", "data.js", "theme.js", "table.js", "frame.js", "suggestions.js", "oom.js"]


def build_oom_page(report: OomReport) -> str:
    """The HTML page of a report of an allocation that failed, from analysis.oom.build_report."""
    categories = {*report.holders.categories, *report.needed.parts}
    content = {"headline": headline(report), "failure": report, "virtual_mark": virtual_mark(report.virtual)}
    return build_page("out of memory", _SCRIPTS, content, categories, fallback="oom_report.txt")
