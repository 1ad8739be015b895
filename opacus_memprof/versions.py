# SPDX-License-Identifier: Apache-2.0
"""The version of this package, and versions of other installed packages. Imports none of them."""

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

VERSION = "0.1.0"  # of opacus-memprof, as in pyproject.toml

# Versions that `make matrix` tests: each of these minors of torch, with the lowest Opacus.
TORCH_MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
LOWEST_OPACUS = "1.6"

# They declare the classes that the extension derives from, which have no stable ABI.
_ALLOCATOR_HEADERS = ("core/Allocator.h", "core/CachingDeviceAllocator.h", "cuda/CUDACachingAllocator.h")


def hash_allocator_headers(torch: Path) -> str:
    """Returns a hash of the headers that declare torch's allocators; empty if torch's folder has none of them."""
    headers = [file for name in _ALLOCATOR_HEADERS if (file := torch / "include" / "c10" / name).is_file()]
    content = b"".join(header.read_bytes() for header in headers)
    return hashlib.sha256(content).hexdigest() if content else ""


def why_torch_does_not_fit(build: Any, version: str, cuda: str | None, folder: Path) -> str | None:
    """Returns why extensions cannot be loaded beside the installed torch; None if they can.

    They fit the torch that they were built for, and others of its minor version whose CUDA has the same major version
    and whose allocator is declared alike.

    Args:
        build: the module `_build_info`.
        version: torch.__version__.
        cuda: torch.version.cuda.
        folder: the folder of the package torch.
    """
    if version == build.TORCH_VERSION:
        return None
    built = f"built for torch {build.TORCH_VERSION}, but torch {version} is installed"
    known = getattr(build, "ALLOCATOR_HEADERS", "")
    if not known or version.split(".")[:2] != build.TORCH_VERSION.split(".")[:2]:
        return built
    if (cuda or "").split(".")[0] != (build.TORCH_CUDA or "").split(".")[0]:
        return built
    return None if known == hash_allocator_headers(folder) else f"{built}, whose allocator is declared otherwise"


def installed_version(distribution: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
