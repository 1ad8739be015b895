# SPDX-License-Identifier: Apache-2.0
"""The version of this package, versions of other installed packages, and what differs between those of Python.

Imports none of the packages.
"""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

VERSION = "0.1.0"  # of opacus-memprof, as in pyproject.toml

# Versions that `make matrix` tests: each of these minors of torch, with the lowest Opacus.
TORCH_MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")
LOWEST_OPACUS = "1.6"

PACKAGE = Path(__file__).parent
# A wheel has a folder of extensions for each torch that it was built for. Builds from source have none.
BUILDS = PACKAGE / "builds"

# They declare the classes that the extension derives from, which have no stable ABI.
_ALLOCATOR_HEADERS = ("core/Allocator.h", "core/CachingDeviceAllocator.h", "cuda/CUDACachingAllocator.h")


def hash_allocator_headers(torch: Path) -> str:
    """Returns a hash of the headers that declare torch's allocators; empty if torch's folder has none of them."""
    import hashlib

    headers = [file for name in _ALLOCATOR_HEADERS if (file := torch / "include" / "c10" / name).is_file()]
    content = b"".join(header.read_bytes() for header in headers)
    return hashlib.sha256(content).hexdigest() if content else ""


def name_of_build(version: str, cuda: str | None, folder: Path) -> str:
    """Returns the name of a wheel's folder of extensions for a torch, such as torch2.15-cu13-22705b50.

    Args:
        version: torch.__version__.
        cuda: torch.version.cuda.
        folder: the folder of the package torch.
    """
    minor = ".".join(version.split(".")[:2])
    toolkit = f"cu{cuda.split('.')[0]}" if cuda else "cpu"
    return f"torch{minor}-{toolkit}-{hash_allocator_headers(folder)[:8]}"


def _installed_torch() -> tuple[str, str | None, Path] | None:
    """Returns version, CUDA and folder of the torch that would be imported; None if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    said = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= '([^']+)'", text, re.MULTILINE))
    return said["__version__"], said.get("cuda"), folder


def folder_of_extensions() -> Path:
    """Returns the folder with the extensions for the installed torch: the package's own, except in a wheel."""
    if not BUILDS.is_dir() or (torch := _installed_torch()) is None:
        return PACKAGE
    build = BUILDS / name_of_build(*torch)
    return build if build.is_dir() else PACKAGE


def why_there_is_no_extension() -> str:
    """Returns why this package has no extension for the installed torch."""
    if not BUILDS.is_dir():
        return "opacus-memprof's extension has not been built"
    fits = sorted(folder.name.rpartition("-")[0] for folder in BUILDS.iterdir())
    built = ", ".join(fits)
    if (torch := _installed_torch()) is None:
        return f"opacus-memprof was built for {built}, but torch is not installed"
    reason = f"opacus-memprof was built for {built}, but torch {torch[0]} is installed"
    alike = name_of_build(*torch).rpartition("-")[0] in fits
    return f"{reason}, whose allocator is declared otherwise" if alike else reason


def how_to_build(package: Path = PACKAGE, variables: str = "") -> str:
    """Returns the command that builds the extensions for the installed torch, as a part of a sentence.

    Args:
        package: the folder of opacus_memprof.
        variables: environment variables before the command, such as "OPACUS_MEMPROF_CUDA=1 ".
    """
    if (package / BUILDS.name).is_dir():
        if _installed_torch() is None:
            return "`pip install torch`"
        command = "pip install --force-reinstall --no-deps --no-binary opacus-memprof opacus-memprof"
        return f"build from source: `{variables}{command}`"
    if (package.parent / "setup.py").is_file():
        command = f"pip install --no-deps -e {package.parent}"
    else:
        command = "pip install --force-reinstall --no-deps --no-cache-dir ."
    return f"in opacus-memprof's source tree run `{variables}{command}`"


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
    from importlib import metadata  # takes longer than the rest of this package's import

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Returns what the variables of a running function refer to.

    Up to Python 3.12, frame.f_locals is a copy that the frame keeps, with which a tensor would live on that the
    program deletes. It is emptied, unless the program has it, too: then it called locals().
    """
    variables = frame.f_locals
    found = dict(variables)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        ours = 3  # references: the frame's, and two here
        if sys.getrefcount(variables) <= ours:
            variables.clear()
    return found
