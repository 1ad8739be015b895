# SPDX-License-Identifier: Apache-2.0
"""JSON files of experiments: written whole, read with a sentence where they are not what they should be."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import MODES
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.files import read_object, write_text
from opacus_memprof.profiles.json_object import from_plain, refuse_other_format

MANIFEST = "manifest.json"  # of a directory of results: what they share
PROGRESS = "> "  # before a line that a run prints of its progress

_REMEDY = "remove it, or run the experiment again"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an object as `json_text`. Readers see the old file or the new one.

    Raises:
        MemprofError: it cannot be written.
    """
    write_text(path, json_text(content))


def json_text(content: Mapping[str, Any]) -> str:
    """An object, with a key on each line."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, default=to_builtins)}"
        for key, value in content.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_json(path: Path) -> dict[str, Any]:
    """Raises MemprofError where it cannot be read, or holds no object."""
    return read_object(path, _REMEDY)


def read_result(path: Path) -> dict[str, Any]:
    """The result of a run. Raises MemprofError where it cannot be read, is of a newer format, or is not as
    profiles.experiment_result has it, with the field that is wrong."""
    result = read_json(path)
    refuse_other_format(path, result, _REMEDY)
    from_plain(result, ExperimentResult, str(path), _REMEDY)
    return result


def read_results(directory: Path) -> dict[str, dict[str, Any]]:
    """The results in a directory by their files' names without `.json` and `_result`.

    Raises:
        MemprofError: there is none, or one of another version, or a file that is no result.
    """
    if not directory.is_dir():
        raise MemprofError(f"{directory} is no directory: give one with the results of experiments, *.json")
    found = {}
    for path in sorted(directory.glob("*.json")):
        if path.name == MANIFEST:
            continue
        content = read_json(path)
        if content.get("experiment") not in MODES or "breakdown" not in content:
            raise MemprofError(f"{path} is not an experiment's result: give a directory that has only these")
        found[path.stem.removesuffix("_result")] = read_result(path)
    if not found:
        raise MemprofError(f"there is no result in {directory}: run `opacus-memprof experiments` first")
    return found
