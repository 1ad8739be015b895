# SPDX-License-Identifier: Apache-2.0
"""Finds what a build needs around it: the CUDA of the installed torch, nlohmann/json, what torch's headers declare."""

import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

NO_TORCH = (
    "opacus-memprof is built against the torch that it will run with, and there is none to be seen: install torch "
    "first; uv and `python -m build` hide it from a build, so install `setuptools pybind11 ninja nlohmann-json` too "
    "and use `uv pip install --no-build-isolation` or `python -m build --no-isolation`; OPACUS_MEMPROF_READER=1 builds "
    "the part that reads profiles, which needs no torch"
)

# Virtuals of c10::cuda::CUDACachingAllocator::CUDAAllocator that come and go with torch's minors. The ones that the
# installed header declares are compiled in, as OPACUS_MEMPROF_HAS_<name>.
OPTIONAL_VIRTUALS = [
    "allocateWithAddress",
    "annotateMemory",
    "attachOomRejectionObserver",
    "getContextForPointer",
    "markCaptureBegin",
    "markCaptureEnd",
    "supportsUserMetadata",
]


class Cuda(NamedTuple):
    """CUDA's headers and runtime library, from one place. No nvcc is needed: there is no device code."""

    include: list[Path]
    libcudart: Path


def package_folders(name: str) -> list[Path]:
    """The folders of an installed package, without importing it; empty where it is not installed."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]


def cuda_at(include: list[Path], libraries: list[Path], major: str) -> Cuda | None:
    """CUDA from these folders, if they hold the headers and the runtime library of this major version."""
    header = next((folder / "cuda.h" for folder in include if (folder / "cuda.h").is_file()), None)
    complete = any((folder / "crt" / "host_defines.h").is_file() for folder in include)
    library = next((found for folder in libraries for found in folder.glob(f"libcudart.so.{major}")), None)
    if header is None or library is None or not complete:
        return None
    version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return Cuda(include, library) if version and int(version[1]) // 1000 == int(major) else None


def find_cuda(torch_version: str, cuda_version: str | None) -> Cuda | str:
    """CUDA as torch was built with, or why there is none. Torch's own wheels bring it; a toolkit serves as well.

    Args:
        torch_version: torch.__version__.
        cuda_version: torch.version.cuda.
    """
    if not cuda_version:
        return f"torch {torch_version} is a build without CUDA"
    major = cuda_version.split(".")[0]
    wheels = package_folders("nvidia")  # of the environment and, under isolation, of the build
    places = [
        (
            [path for folder in wheels for path in sorted(folder.glob("*/include"))],
            [path for folder in wheels for path in sorted(folder.glob("*/lib"))],
        )
    ]
    for home in filter(None, [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]):
        places.append(([Path(home, "include")], [Path(home, "lib64"), Path(home, "lib")]))
    for include, libraries in places:
        if cuda := cuda_at(include, libraries, major):
            return cuda
    minor = ".".join(cuda_version.split(".")[:2])
    return (
        f"no complete headers with libcudart.so of CUDA {major} beside torch, in $CUDA_HOME or in /usr/local/cuda "
        f"(`pip install nvidia-cuda-crt=={minor}.*` completes those of torch's wheels)"
    )


def choose_cuda(torch_version: str, cuda_version: str | None) -> Cuda | None:
    """What OPACUS_MEMPROF_CUDA asks for."""
    wanted = os.environ.get("OPACUS_MEMPROF_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"OPACUS_MEMPROF_CUDA is {wanted!r}; it can be auto, 0 or 1")
    cuda = "OPACUS_MEMPROF_CUDA is 0" if wanted == "0" else find_cuda(torch_version, cuda_version)
    if isinstance(cuda, Cuda):
        return cuda
    if wanted == "1":
        raise SystemExit(f"OPACUS_MEMPROF_CUDA is 1, but CUDA cannot be built: {cuda}")
    print(f"opacus-memprof: building the CPU part only: {cuda}")
    return None


def json_include() -> Path:
    """Where nlohmann/json.hpp is."""
    places = [Path(os.environ["NLOHMANN_JSON_INCLUDE"])] if "NLOHMANN_JSON_INCLUDE" in os.environ else []
    places += [folder / "include" for folder in package_folders("nlohmann_json")]
    places += [Path("/usr/local/include"), Path("/usr/include")]
    for place in places:
        if (place / "nlohmann" / "json.hpp").is_file():
            return place
    raise SystemExit(
        "nlohmann/json.hpp is not found: `pip install nlohmann-json`, install the system's nlohmann-json3-dev, "
        "or name its folder in NLOHMANN_JSON_INCLUDE"
    )


def torch_has(torch_include: Path) -> list[tuple[str, str]]:
    """A macro for each of OPTIONAL_VIRTUALS, and for what else comes and goes, that the installed headers declare."""
    header = (torch_include / "c10" / "cuda" / "CUDACachingAllocator.h").read_text()
    declared = [name for name in OPTIONAL_VIRTUALS if re.search(rf"virtual\b[^;{{}}]*?\b{name}\(", header)]
    # Whether ATen keeps cuBLAS' workspaces in maps that can be read.
    context = (torch_include / "ATen" / "cuda" / "CUDAContextLight.h").read_text()
    if "struct WorkspaceMapWithMutex" in context:
        declared.append("WorkspaceMapWithMutex")
    return [(f"OPACUS_MEMPROF_HAS_{name}", "1") for name in declared]
