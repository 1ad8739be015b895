# SPDX-License-Identifier: Apache-2.0
"""Packages that only some parts need."""

import importlib
from typing import Any

from opacus_memprof.errors import MemprofError


def require(module: str, what: str, extra: str = "") -> Any:
    """The module, imported. Raises MemprofError with the command that installs its package where it is missing.

    Args:
        module: its package is installed under the name of its first part.
        what: needs it, in the plural: "pictures".
        extra: of this project, which has all that is needed with it.
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MemprofError(
            f"{what} need {package}, which cannot be imported ({error}): pip install "
            + (f"'opacus-memprof[{extra}]'" if extra else package)
        ) from error
