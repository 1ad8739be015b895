# SPDX-License-Identifier: Apache-2.0
"""plan.json as a page."""

import os
from typing import Any

from msgspec import UNSET

from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.plan import Plan
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.reports.html.page_builder import build_page
from opacus_memprof.reports.plan import Candidate, candidates, cell_label, cells, title

_SCRIPTS = ["base.js", "data.js", "theme.js", "table.js", "frame.js", "plan_draws.js", "plan.js"]
_OF_CELL = ("mode", "settings", "gpu", "fixed", "largest", "error")


def write_plan_html(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes the page to `path`, atomically. Raises MemprofError where it cannot."""
    write_text(path, plan_page(plan))


def plan_page(plan: Plan) -> str:
    """A plan as one page: candidates against what may be reserved, the largest values, advice and drawn batches."""
    shown = candidates(plan)
    content = {
        "title": title(plan),
        "virtual_mark": "on virtual GPUs: memory is counted as on real ones",
        "lead": _lead(plan),
        "candidates": [_candidate(candidate) for candidate in shown],
        "search": None if plan.search is UNSET else plan.search,
        "cells": [{"label": cell_label(cell), **{key: cell[key] for key in _OF_CELL}} for cell in cells(plan)],
        "advice": [] if plan.verdict is UNSET else plan.verdict.advice,
        "draws": None if plan.draws is UNSET else plan.draws,
    }
    categories = {category for candidate in shown for category in candidate.run.categories}
    return build_page(f"plan of {plan.program}", _SCRIPTS, content, categories, fallback="plan.json")


def _candidate(candidate: Candidate) -> dict[str, Any]:
    keys = ("fits", "requested_bytes", "reserved_bytes", "categories", "phase")
    room = None if candidate.gpu == "1 TiB" else candidate.run.may_reserve_bytes
    return {
        "label": candidate.label,
        "value": candidate.value,
        "room": room,
        **{key: candidate.run[key] for key in keys},
    }


def _lead(plan: Plan) -> str:
    """The answer in a sentence."""
    if plan.verdict is not UNSET:
        verdict = plan.verdict
        if verdict.fits:
            return f"It fits on {verdict.gpu}, with {format_bytes(verdict.spare_bytes)} to spare."
        lacking = f": {format_bytes(-verdict.spare_bytes)} too much" if verdict.spare_bytes < 0 else ""
        return f"It does not fit on {verdict.gpu}{lacking}."
    fitting = [cell for cell in cells(plan) if any(run.fits for run in cell.runs)]
    return f"{len(fitting)} of {len(cells(plan))} candidates fit."
