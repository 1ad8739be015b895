# SPDX-License-Identifier: Apache-2.0
"""The version of this package, and versions of other installed packages. Imports none of them."""

import importlib.metadata

VERSION = "0.1.0"  # of opacus-memprof, as in pyproject.toml

# Versions that `make matrix` tests: each of these minors of torch, with the lowest Opacus.
TORCH_MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
LOWEST_OPACUS = "1.6"


def installed_version(distribution: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
