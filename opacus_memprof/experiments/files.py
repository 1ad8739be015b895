# SPDX-License-Identifier: Apache-2.0
"""JSON files of experiments: written whole, read with a sentence where they are not what they should be."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opacus_memprof.files import read_object, write_text


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """An object, with a key on each line. Readers see the old file or the new one.

    Raises:
        MemprofError: it cannot be written.
    """
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_json(path: Path) -> dict[str, Any]:
    """Raises MemprofError where it cannot be read, or holds no object."""
    return read_object(path, "remove it, or run the experiment again")
