# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file that needs nothing else: no network, no server, no library."""

from opacus_memprof.reports.html.page import html_of, html_of_runs, write_html
from opacus_memprof.reports.html.payload import Run
from opacus_memprof.reports.html.ranks import write_ranks_html

__all__ = ["Run", "html_of", "html_of_runs", "write_html", "write_ranks_html"]
