# SPDX-License-Identifier: Apache-2.0
"""Writes the JSON schemas of the files, made from their structures: `python tools/schemas.py docs/schemas`."""

import json
import sys
from pathlib import Path

from opacus_memprof.profiles.difference import BaselineFile, Diff
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import JsonObject, schema_of
from opacus_memprof.profiles.live_memory import Snapshot
from opacus_memprof.profiles.oom_report import OomReport
from opacus_memprof.profiles.plan import Plan
from opacus_memprof.profiles.privacy_check import PrivacyCheck
from opacus_memprof.profiles.profile import Meta, Profile

STRUCTURES: dict[str, type[JsonObject]] = {
    "profile": Profile,
    "meta": Meta,
    "snapshots.line": Snapshot,
    "ranks": JobSummary,
    "oom_report": OomReport,
    "plan": Plan,
    "privacy_check": PrivacyCheck,
    "experiment_result": ExperimentResult,
    "baseline": BaselineFile,
    "diff": Diff,
}


def schema_files() -> dict[str, str]:
    """Returns the contents of all schema files, by file name."""
    return {
        f"{name}.schema.json": json.dumps(schema_of(kind), indent=1, ensure_ascii=False) + "\n"
        for name, kind in STRUCTURES.items()
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in schema_files().items():
        (folder / name).write_text(content, encoding="utf-8")
