# SPDX-License-Identifier: Apache-2.0
"""JSON files of experiments: written whole, read with a sentence where they are not what they should be."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.files import read_object, write_text

# What tables and pictures read of a result, and within its parts where it has them.
_READ: Mapping[str, type | tuple[type, ...]] = {
    "status": str,
    "error": (str, NoneType),
    "config": dict,
    "progress": dict,
    "environment": dict,
    "data": (dict, NoneType),
    "avg_time_ms": (int, float, NoneType),
    "peak_memory_mb": (int, float, NoneType),
    "peak": (dict, NoneType),
    "phases": dict,
    "snapshots": list,
    "timeline": dict,
    "out_of_memory": list,
}
_READ_WITHIN = {
    "config": ("model", "mode", "dtype", "seq_length", "batch_size", "max_physical_batch_size", "lora_rank"),
    "progress": ("stage", "steps_completed"),
    "environment": ("device_name",),
    "peak": ("requested_bytes", "categories", "components", "activation_hooks", "born_in"),
}
_REMEDY = "remove it, or run the experiment again"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """An object, with a key on each line. Readers see the old file or the new one.

    Raises:
        MemprofError: it cannot be written.
    """
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_json(path: Path) -> dict[str, Any]:
    """Raises MemprofError where it cannot be read, or holds no object."""
    return read_object(path, _REMEDY)


def refuse_damaged(path: Path, result: Mapping[str, Any]) -> None:
    """Raises MemprofError with the first key that the result in `path` lacks."""
    lacking = [key for key, kind in _READ.items() if key not in result or not isinstance(result[key], kind)]
    lacking = lacking or [
        f"{part}.{key}"
        for part, keys in _READ_WITHIN.items()
        for key in keys
        if result[part] is not None and key not in result[part]
    ]
    if lacking:
        raise MemprofError(f"{path} is damaged, for it lacks {lacking[0]}: {_REMEDY}")
