# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the JSON files of experiments."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from opacus_memprof.analysis.job import load_ranks
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import MODES
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.files import read_object, write_text
from opacus_memprof.profiles.json_object import JsonObject, read_json_object

MANIFEST = "manifest.json"  # of a directory of results: the common settings
PROGRESS = "> "  # begins a line with a run's progress

# The status of the merged result of a job is the first of these that a process has.
_STATUS_ORDER = ("out_of_memory", "failed", "killed", "finished")
_REMEDY = "remove it, or run the experiment again"


def write_json(path: Path, content: Mapping[str, Any] | JsonObject) -> None:
    """Writes an object as `json_text`, atomically. Raises MemprofError if it cannot be written."""
    write_text(path, json_text(content))


def json_text(content: Mapping[str, Any] | JsonObject) -> str:
    """Returns an object as JSON, with one key per line."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, default=to_builtins)}"
        for key, value in content.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises MemprofError if there is none."""
    return read_object(path, _REMEDY)


def read_result(path: Path) -> ExperimentResult:
    """Returns the result of a run.

    Raises:
        MemprofError: the file cannot be read, has a newer format, lacks a field or has one of another type. The message
            names the field.
    """
    return read_json_object(path, ExperimentResult, _REMEDY)


def read_results(directory: Path) -> dict[str, ExperimentResult]:
    """Returns the results in a directory, by file name without `.json` and `_result`.

    Raises:
        MemprofError: there is none, or one of another version, or a JSON file that is not a result.
    """
    if not directory.is_dir():
        raise MemprofError(f"{directory} is not a directory: give one with the results of experiments, *.json")
    results = {}
    for path in sorted(directory.glob("*.json")):
        if path.name == MANIFEST:
            continue
        content = read_json(path)
        if content.get("experiment") not in MODES or "breakdown" not in content:
            raise MemprofError(f"{path} is not the result of an experiment: give a directory with such results only")
        results[path.stem.removesuffix("_result")] = read_result(path)
    if not results:
        raise MemprofError(f"there is no result in {directory}: run `opacus-memprof experiments` first")
    return results


def rank_result_file(name: str) -> str:
    """Returns the name of the file for this process' result: `name` for rank 0, `result_1.json` … for the others."""
    rank = int(os.environ.get("RANK", "0"))
    return name if rank == 0 else f"{Path(name).stem}_{rank}.json"


def merge_results(directory: Path, name: str, profile: Path) -> None:
    """Merges the results of all ranks into the file `name`.

    It is the result with the worst status, with `ranks`, the summary of all ranks (docs/format.md). Writes nothing if
    no rank has left a result.
    """
    results = {path: read_result(path) for path in sorted(directory.glob(f"{Path(name).stem}*.json"))}
    if not results:
        return
    worst = min(results.values(), key=lambda result: _STATUS_ORDER.index(result.status))
    try:
        worst.ranks = load_ranks(profile)
    except MemprofError:
        worst.ranks = None
    write_json(directory / name, worst)
    for path in results:
        if path.name != name:
            path.unlink()
