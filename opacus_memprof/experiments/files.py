# SPDX-License-Identifier: Apache-2.0
"""JSON files that are whole: readers see the old one or the new one."""

import json
import os
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError


def write_json(path: Path, content: object) -> None:
    """Raises OSError."""
    write_text(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Raises MemprofError where it cannot be read, or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MemprofError(f"{path} cannot be read ({error}): remove it, or run the experiment again") from error
    if not isinstance(content, dict):
        raise MemprofError(f"{path} holds no JSON object: it is not an experiment's result")
    return content
