# SPDX-License-Identifier: Apache-2.0
"""The exception for errors that the caller can fix, such as a package that is missing."""

import importlib
from typing import Any


class MemprofError(Exception):
    """Bad input, or a machine that is not set up for it: one sentence with the problem and the remedy.

    The command line prints it and exits with `exit_code`.
    """

    exit_code = 2


def require(module: str, what: str) -> Any:
    """Imports a module. Raises MemprofError with the command that installs its package if it is missing.

    Args:
        module: the module; its first part is the name of its package.
        what: the features that need it, in the plural: "pictures".

    Returns:
        The module.

    Raises:
        MemprofError: the package is missing.
    """
    package = module.split(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MemprofError(
            f"{what} need {package}, which cannot be imported ({error}): pip install {package}"
        ) from error
