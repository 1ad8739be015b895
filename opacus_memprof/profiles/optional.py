# SPDX-License-Identifier: Apache-2.0
"""Imports optional packages."""

import importlib
from typing import Any

from opacus_memprof.errors import MemprofError


def require(module: str, what: str, extra: str = "") -> Any:
    """Imports a module. Raises MemprofError with the command that installs its package if it is missing.

    Args:
        module: its package is installed under the name of its first part.
        what: the parts that need it, in the plural: "pictures".
        extra: the extra of this project that installs it.
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MemprofError(
            f"{what} need {package}, which cannot be imported ({error}): pip install "
            + (f"'opacus-memprof[{extra}]'" if extra else package)
        ) from error
