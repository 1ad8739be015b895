# SPDX-License-Identifier: Apache-2.0
"""JSON files of experiments: written whole, read with a sentence where they are not what they should be."""

import json
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.files import replacing


def write_json(path: Path, content: object) -> None:
    """Readers see the old file or the new one. Raises MemprofError where it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Raises MemprofError where it cannot be read, or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MemprofError(f"{path} cannot be read ({error}): remove it, or run the experiment again") from error
    if not isinstance(content, dict):
        raise MemprofError(f"{path} holds no JSON object: it is not an experiment's result")
    return content
