# SPDX-License-Identifier: Apache-2.0
"""The published JSON schemas agree with the structures and, by jsonschema, with files."""

import json
import runpy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import to_builtins
from random_profile import write_random_profile

from opacus_memprof.experiments.files import read_result
from tests.unit.sweep_results import assert_contains

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "schemas"
DATA = ROOT / "tests" / "data"
NAMES = {"profile.json": "profile", "meta.json": "meta", "oom_report.json": "oom_report", "ranks.json": "ranks"}
# plan.json: tests/integration/test_plan.py
OLDER = [file for file in sorted(DATA.rglob("*.json*")) if file.name in {*NAMES, "snapshots.jsonl"}]
OLDER += sorted((ROOT / "docs" / "results").rglob("*_result.json"))


def refuse_invalid(file: Path) -> None:
    """Raises jsonschema's ValidationError."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    name = "experiment_result" if file.name.endswith("_result.json") else NAMES.get(file.name, "snapshots.line")
    for line in lines:
        validator(name).validate(json.loads(line))


def validator(name: str) -> Any:
    schema = json.loads((PUBLISHED / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_they_are_current() -> None:
    """`python tools/schemas.py docs/schemas` writes them anew."""
    schema_files = runpy.run_path(str(ROOT / "tools" / "schemas.py"))["schema_files"]
    assert {file.name: file.read_text(encoding="utf-8") for file in PUBLISHED.iterdir()} == schema_files()


@pytest.mark.parametrize("file", OLDER, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_files_that_are_kept_are_valid(file: Path) -> None:
    refuse_invalid(file)
    if file.name.endswith("_result.json"):
        assert_contains(to_builtins(read_result(file)), json.loads(file.read_text()))


def test_new_profiles_are_valid_and_damaged_ones_are_not(tmp_path: Path) -> None:
    file = write_random_profile(tmp_path, 500) / "profile.json"
    refuse_invalid(file)
    content = json.loads(file.read_text())
    content["devices"]["cuda:0"]["peak"]["requested_bytes"] = "many"
    with pytest.raises(jsonschema.ValidationError, match="'many' is not of type 'integer'"):
        validator("profile").validate(content)
    del content["devices"]["cuda:0"]["peak"]["requested_bytes"]
    with pytest.raises(jsonschema.ValidationError, match="'requested_bytes' is a required property"):
        validator("profile").validate(content)
    with pytest.raises(jsonschema.ValidationError, match="'format' is a required property"):
        validator("ranks").validate({key: value for key, value in content.items() if key != "format"})
