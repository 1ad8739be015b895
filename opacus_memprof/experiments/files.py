# SPDX-License-Identifier: Apache-2.0
"""JSON files of experiments: written whole, read with a sentence where they are not what they should be."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.files import replacing


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """An object, with a key on each line. Readers see the old file or the new one.

    Raises:
        MemprofError: it cannot be written.
    """
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    with replacing(path) as temporary:
        temporary.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Raises MemprofError where it cannot be read, or holds no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MemprofError(f"{path} cannot be read ({error}): remove it, or run the experiment again") from error
    if not isinstance(content, dict):
        raise MemprofError(f"{path} holds no JSON object: it is not an experiment's result")
    return content
