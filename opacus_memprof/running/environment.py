# SPDX-License-Identifier: Apache-2.0
"""Checks whether profiling works in this environment: installed and built versions, and how to fix problems.

Torch and the extension are imported inside the checks, so that a broken one gives an answer, too.
"""

import ctypes
import importlib
import importlib.util
import os
import platform
import re
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.versions import (
    LOWEST_OPACUS,
    TORCH_MINORS,
    how_to_build,
    installed_version,
    why_there_is_no_extension,
)
from opacus_memprof.virtual_gpu import requirements
from opacus_memprof.virtual_gpu.devices import GPUS

Level = Literal["ok", "note", "problem"]
_TO_RECORD = "profiles can be read here; to record some, install torch, then opacus-memprof anew"


@dataclass(frozen=True)
class Check:
    """The result of one check. A `problem` prevents profiling; a `note` is additional information."""

    name: str
    found: str
    level: Level = "ok"
    remedy: str = ""


def examine() -> list[Check]:
    """Returns all checks, each after the ones that it depends on. Initialises CUDA where there is a GPU."""
    python = Check("Python", platform.python_version())
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation may raise anything
        if reads_only():
            return [python, Check("torch", _sentence(error), "note", _TO_RECORD), _build(), _directory()]
        lacking = Check("torch", _sentence(error), "problem", "install torch first: `pip install torch`")
        return [python, lacking, _opacus(), _build(), *_rmm(), _directory()]
    cuda = [_driver(torch), *_devices(torch)] if torch.version.cuda else []
    return [
        python,
        _torch(torch),
        *cuda,
        _opacus(),
        _build(),
        *_extension(torch),
        _virtual_gpu(),
        *_variables(),
        *_rmm(),
        _directory(),
    ]


def reads_only() -> bool:
    """Returns whether this installation was built without torch, to read profiles only (OPACUS_MEMPROF_READER=1)."""
    try:
        return importlib.import_module("opacus_memprof._build_info").TORCH_VERSION is None
    except ImportError:
        return False


def _driver(torch: Any) -> Check:
    """Checks that there is a driver for the major version of CUDA that torch was built for, or a later one."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        status = -1
    if status != 0:
        return Check("CUDA driver", "none", "note", "profiles are of the CPU until there is one")
    found = f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    if version.value // 1000 < int(torch.version.cuda.split(".")[0]):
        remedy = (
            f"torch needs one for CUDA {torch.version.cuda}: update the driver, or install a torch for an older CUDA"
        )
        return Check("CUDA driver", found, "note", remedy)
    return Check("CUDA driver", found)


def _devices(torch: Any) -> list[Check]:
    """Checks the GPUs that torch can use."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        except (RuntimeError, AssertionError) as error:
            return [Check("GPUs", _sentence(error), "note", "profiles are of the CPU until torch can use the GPU")]
    if properties:
        return [
            Check(f"cuda:{index}", f"{device.name}, {format_bytes(device.total_memory)}")
            for index, device in enumerate(properties)
        ]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    why = f'CUDA_VISIBLE_DEVICES="{hidden}" leaves none' if hidden is not None else "torch finds none"
    return [Check("GPUs", "; ".join([why, *(_sentence(warning.message) for warning in caught)]), "note")]


def _opacus() -> Check:
    version = installed_version("opacus")
    if version is None:
        remedy = f'only private training needs it: `pip install "opacus>={LOWEST_OPACUS}"`'
        return Check("Opacus", "not installed", "note", remedy)
    if _minor(version) < _minor(LOWEST_OPACUS):
        remedy = f'{LOWEST_OPACUS} or newer is needed: `pip install --upgrade "opacus>={LOWEST_OPACUS}"`'
        return Check("Opacus", version, "problem", remedy)
    return Check("Opacus", version)


def _torch(torch: Any) -> Check:
    """Checks the version of torch, and whether this release was tested with it."""
    cuda = torch.version.cuda
    found = f"{torch.__version__}, built for " + (f"CUDA {cuda}" if cuda else "the CPU only")
    if _minor(torch.__version__) in map(_minor, TORCH_MINORS):
        return Check("torch", found)
    return Check("torch", found, "note", f"tried are {TORCH_MINORS[0]} to {TORCH_MINORS[-1]}")


def _minor(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def _build() -> Check:
    """Checks what the extension was built for. `_extension` checks whether it can be loaded."""
    version = installed_version("opacus-memprof") or "not installed, run from its source tree"
    try:
        build = importlib.import_module("opacus_memprof._build_info")
    except ImportError:
        return Check("opacus-memprof", f"{version}; {why_there_is_no_extension()}")
    if build.TORCH_VERSION is None:
        found = f"{version}; built without torch, to read profiles; Python {build.PYTHON} ({build.COMPILER})"
        return Check("opacus-memprof", found)
    part = f"CUDA {build.TORCH_CUDA}" if build.HAS_CUDA else "the CPU only"
    found = f"{version}; built for torch {build.TORCH_VERSION}, {part}, Python {build.PYTHON} ({build.COMPILER})"
    return Check("opacus-memprof", found)


def _extension(torch: Any) -> list[Check]:
    """Checks whether the extension can be loaded, and which allocator torch would use."""
    try:
        native = importlib.import_module("opacus_memprof.recording.native")
    except ImportError as error:
        return [Check("extension", "cannot be used", "problem", str(error))]
    if not native.HAS_CUDA:
        if torch.version.cuda is None:
            return [Check("extension", "loads; CPU only, as torch is")]
        remedy = f"to profile GPUs, {how_to_build(variables='OPACUS_MEMPROF_CUDA=1 ')}, which says what is missing"
        return [Check("extension", "loads, but was built without CUDA", "note", remedy)]
    name = native.cuda_current_name()
    allocator = Check("CUDA allocator", name)
    if name == "cudaMallocAsync":
        remedy = "the driver does not tell its rounding, which will count as cached"
        allocator = Check("CUDA allocator", name, "note", remedy)
    elif name != "native":
        remedy = "it keeps no statistics that the categories could be reconciled with"
        allocator = Check("CUDA allocator", f"{name}, not torch's own", "note", remedy)
    return [Check("extension", "loads, with CUDA"), allocator]


def _virtual_gpu() -> Check:
    """Checks whether `run --virtual-gpu` works, by a trial, because it depends on the libraries that torch loads."""
    failed = requirements.find_failure()
    if failed is None:
        return Check("virtual GPU", f"works here (`opacus-memprof run --virtual-gpu KIND`): {', '.join(GPUS)}")
    reason, has_remedy = failed
    remedy = "" if has_remedy else "install opacus-memprof again beside this torch; real devices are not affected"
    return Check("virtual GPU", f"does not work here: {reason}", "note", remedy)


def _variables() -> list[Check]:
    """Checks settings of torch's allocator that limit what can be measured."""
    checks = []
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        remedy = "torch then counts nothing itself, so the categories cannot be reconciled: unset it to profile"
        checks.append(Check("PYTORCH_NO_CUDA_MEMORY_CACHING", "set", "note", remedy))
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if setting := os.environ.get(variable):
            checks.append(Check(variable, setting))
    return checks


def _rmm() -> list[Check]:
    if importlib.util.find_spec("rmm") is None:
        return []
    remedy = "if the program gives torch RMM's allocator, it must do so before the profile starts"
    return [Check("RMM", installed_version("rmm") or "installed", "note", remedy)]


def _directory() -> Check:
    """Checks whether a profile can be written here, by a trial, because permissions alone are not enough."""
    here = os.getcwd()
    try:
        with tempfile.NamedTemporaryFile(dir=here):
            return Check("directory", f"{here} can be written")
    except OSError as error:
        return Check("directory", f"{here}: {error.strerror}", "note", "write the profile elsewhere: run with -o DIR")


def _sentence(error: object) -> str:
    """Returns the first line of a message, which in CUDA's errors is the informative one."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
