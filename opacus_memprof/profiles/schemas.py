# SPDX-License-Identifier: Apache-2.0
"""The JSON schemas of the files, made from their structures.

`python -m opacus_memprof.profiles.schemas docs/schemas` writes them.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from opacus_memprof.profiles.difference import BaselineFile, Diff
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import JsonObject
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


def schema_of(kind: type[JsonObject]) -> dict[str, Any]:
    """Returns the JSON Schema 2020-12 of a structure. It allows further keys, which later releases may add."""
    schema = msgspec.json.schema(kind)
    for part in schema["$defs"].values():
        part["description"] = inspect.cleandoc(part["description"])
        if "format" in part["properties"]:  # its default is for writers
            part["required"] = ["format", *part.get("required", ())]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


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
