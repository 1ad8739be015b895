# SPDX-License-Identifier: Apache-2.0
"""What a plan leaves in its directory, beside its runs: the profile of one of them, and plan.json."""

import importlib.util
import shutil
from typing import Any

from opacus_memprof.planning.configuration import PlannedConfiguration
from opacus_memprof.planning.runs import PlannedRuns
from opacus_memprof.planning.virtual_run import VirtualRun
from opacus_memprof.profiles.directory import PLAN, PROFILE
from opacus_memprof.profiles.files import read_object, write_text
from opacus_memprof.profiles.json_object import to_json
from opacus_memprof.profiles.plan import Plan
from opacus_memprof.reports.html.plan import write_plan_html
from opacus_memprof.reports.plan_csv import write_plan_csv
from opacus_memprof.reports.plan_picture import write_plan_pictures


def adopt(runs: PlannedRuns, run: VirtualRun) -> dict[str, Any]:
    """Makes the plan's directory also the profile of this run, whose profile.json is returned."""
    shutil.copytree(run.profile, runs.directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    return read_object(runs.directory / PROFILE)


def write_plan(runs: PlannedRuns, base: PlannedConfiguration, **content: Any) -> Plan:
    """Writes plan.json, plan.html, plan.csv and, where matplotlib is installed, plan.png and plan-dark.png.

    `content` are the fields of Plan that are not the configuration's.
    """
    program = base.program
    plan = Plan(program=program.name, arguments=list(program.words), ranks=base.ranks, **content)
    file = runs.directory / PLAN
    write_text(file, to_json(plan, indent=1))
    write_plan_html(plan, file.with_suffix(".html"))
    write_plan_csv(plan, file.with_suffix(".csv"))
    if importlib.util.find_spec("matplotlib") is not None:
        write_plan_pictures(plan, file.with_suffix(".png"))
    return plan
