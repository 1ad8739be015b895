# SPDX-License-Identifier: Apache-2.0
"""Writes privacy_check.json: beside a checkpoint, and into a profile's directory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opacus_memprof.profiles.files import write_text
from opacus_memprof.profiles.json_object import to_json


def write_privacy_checks(checks: Sequence[dict[str, Any]], path: str | os.PathLike[str]) -> Path | None:
    """Writes the models of several engines into one file, atomically.

    Args:
        checks: what ``privacy_check`` of each engine has returned.
        path: of the file.

    Returns:
        The path; None without a check, and on all ranks but the first.

    Raises:
        MemprofError: the file cannot be written.
    """
    if not checks or any(check["rank"] > 0 for check in checks):
        return None
    models = [model for check in checks for model in check["models"]]
    earlier = [each for check in checks for each in check["earlier"]]
    return write_text(path, to_json({**checks[0], "models": models, "earlier": earlier}, indent=1))
