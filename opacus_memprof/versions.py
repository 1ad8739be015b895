# SPDX-License-Identifier: Apache-2.0
"""Which releases of other packages are installed. Imports none of them."""

import importlib.metadata


def installed(distribution: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
