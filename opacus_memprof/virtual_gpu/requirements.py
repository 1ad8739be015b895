# SPDX-License-Identifier: Apache-2.0
"""Checks whether a virtual GPU works here: its requirements, and a trial in a new process. Does not import torch.

It requires Linux, and a torch with the CUDA version that its libraries were built for.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

from opacus_memprof.errors import MemprofError
from opacus_memprof.versions import folder_of_extensions

LIBRARIES = folder_of_extensions() / "virtual_gpu" / "lib"
BUILT_FOR = "built_for.json"  # next to the libraries, from csrc/virtual_gpu/build.py: {"torch", "cuda", "kernels"}

_WHEEL = "the wheel of `pip install torch` from PyPI for Linux has CUDA"
_RUNTIME = re.compile(rb"libcudart(?:-[0-9a-f]+)?\.so\.(\d+)")

_TRIAL_TIMEOUT_S = 120
_TRIAL_REFUSED = 2  # exit code
_TRIAL = f"""
import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
try:
    virtual_gpu.start("h200")
except MemprofError as error:
    sys.exit(print(error) or {_TRIAL_REFUSED})
import torch
matrix = torch.ones(512, 512, device="cuda")
product = matrix @ matrix
requested = torch.cuda.memory_stats()["requested_bytes.all.current"]
assert torch.cuda.get_device_name() == "NVIDIA H200", torch.cuda.get_device_name()
assert product.shape == matrix.shape
assert requested >= 2 * matrix.nbytes, f"two matrices of 1 MiB are counted as {{requested}} bytes"
"""


def check_machine() -> list[int]:
    """Checks that a virtual GPU works here.

    Returns:
        The architectures for which torch has kernels, such as 90.

    Raises:
        MemprofError: the system is not Linux; torch is missing, was built without CUDA or has CUDA linked statically;
            or the libraries were not built, or were built for another CUDA.
    """
    if sys.platform != "linux":
        raise MemprofError(
            f"a virtual GPU replaces CUDA's libraries for Linux, and this is {sys.platform}: use Linux, or a "
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
    """Returns the major version of the CUDA runtime library that torch loads."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise MemprofError(f"a virtual GPU needs torch, which is not installed: {_WHEEL}")
    library = Path(next(iter(spec.submodule_search_locations))) / "lib" / "libc10_cuda.so"
    if not library.is_file():
        raise MemprofError(
            f"the installed torch is a build without CUDA, for which a virtual GPU cannot work: {_WHEEL}"
        )
    match = _RUNTIME.search(library.read_bytes())
    if match is None:
        raise MemprofError(
            "the installed torch has CUDA's runtime linked into it, which a virtual GPU cannot replace: "
            f"{_WHEEL} as libraries of its own"
        )
    return int(match[1])


def find_failure() -> tuple[str, bool] | None:
    """Runs a small computation on a virtual GPU, in a new process, where torch is not imported yet.

    Returns:
        None if it works. Otherwise a sentence, and whether it comes from a MemprofError and so contains a remedy.
    """
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _TRIAL],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"a trial did not end within {_TRIAL_TIMEOUT_S} s", False
    if ran.returncode == 0:
        return None
    if ran.returncode == _TRIAL_REFUSED and ran.stdout.strip():
        return ran.stdout.strip(), True
    last = ran.stderr.strip().rpartition("\n")[2]
    return f"a trial ended with exit code {ran.returncode}" + (f" ({last})" if last else ""), False
