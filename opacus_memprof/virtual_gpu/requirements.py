# SPDX-License-Identifier: Apache-2.0
"""Checks the requirements of a virtual GPU: Linux, and a torch with the CUDA version that the libraries were built for.
Does not import torch."""

import importlib.util
import json
import re
import sys
from pathlib import Path

from opacus_memprof.errors import MemprofError

LIBRARIES = Path(__file__).with_name("lib")
BUILT_FOR = "built_for.json"  # beside the libraries, from csrc/virtual_gpu/build.py: {"torch", "cuda", "kernels"}

_WHEEL = "the wheel of `pip install torch` from PyPI for Linux has CUDA"
_RUNTIME = re.compile(rb"libcudart(?:-[0-9a-f]+)?\.so\.(\d+)")


def check_machine() -> list[int]:
    """Checks that a virtual GPU works here.

    Returns:
        The architectures that torch has kernels for, such as 90.

    Raises:
        MemprofError: the system is not Linux; torch is missing, or a build without CUDA or with a statically linked
        CUDA;
            or the libraries were not built, or were built for another CUDA.
    """
    if sys.platform != "linux":
        raise MemprofError(
            f"a virtual GPU takes the place of CUDA's libraries for Linux, and this is {sys.platform}: use Linux, or a "
            "container or virtual machine with it"
        )
    major = _cuda_of_torch()
    if not (LIBRARIES / "libcuda.so.1").is_file():
        raise MemprofError(
            "the libraries of the virtual GPU have not been built: install opacus-memprof again beside this torch, and "
            "`opacus-memprof doctor` says what the build misses"
        )
    built_for = json.loads((LIBRARIES / BUILT_FOR).read_text(encoding="utf-8"))
    if int(built_for["cuda"].split(".")[0]) != major:
        raise MemprofError(
            f"the virtual GPU was built for torch {built_for['torch']} with CUDA {built_for['cuda']}, and this torch "
            f"uses CUDA {major}: install opacus-memprof again beside it"
        )
    return list(built_for.get("kernels", []))


def _cuda_of_torch() -> int:
    """The major version of the CUDA runtime library that torch loads."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise MemprofError(f"a virtual GPU needs torch, which is not installed: {_WHEEL}")
    library = Path(next(iter(spec.submodule_search_locations))) / "lib" / "libc10_cuda.so"
    if not library.is_file():
        raise MemprofError(f"the installed torch is a build without CUDA, which no virtual GPU can serve: {_WHEEL}")
    match = _RUNTIME.search(library.read_bytes())
    if match is None:
        raise MemprofError(
            "the installed torch has CUDA's runtime linked into it, where no virtual GPU can take its place: "
            f"{_WHEEL} as libraries of its own"
        )
    return int(match[1])
