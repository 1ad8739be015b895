# SPDX-License-Identifier: Apache-2.0
"""PEP 517 backend: setuptools, building against the torch of the environment that is installed into.

The extension subclasses torch's allocator, so it must be compiled against the very torch that it will run
with. Listing torch as a build requirement would make pip download a second one into its isolated build
environment. Instead the environment's own import path is appended to the isolated one: setuptools and the
other build requirements still come from there, torch from where it will be used. Where there is none, or where an
installer's isolation hides it, a build fails with one sentence that says what to do; metadata and source distributions
need no torch. The wheels that torch brings for CUDA 13 lack a folder of headers that their others include (crt/): it
comes as one more build requirement, of 0.1 MB.
"""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from opacus_memprof_finding import NO_TORCH
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not replaced below)


def _environment_path() -> list[str]:
    """The import path of this interpreter without the build environment that pip put in front of it."""
    # -E leaves out PYTHONPATH, which is how pip isolates; the interpreter is the environment's own.
    probe = [sys.executable, "-E", "-c", "import sys; print([p for p in sys.path[1:] if p])"]
    path: list[str] = ast.literal_eval(subprocess.run(probe, check=True, capture_output=True, text=True).stdout)
    return path


sys.path.extend(entry for entry in _environment_path() if entry not in sys.path)


def _cuda_headers() -> list[str]:
    """The package that completes the CUDA headers of torch's wheels; none where they are complete or not there."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (nvidia and nvidia.submodule_search_locations) or []]
    headers = [header for folder in folders for header in folder.glob("cu[1-9]*/include/cuda.h")]
    if not headers or any((header.parent / "crt").is_dir() for header in headers):
        return []
    version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", headers[0].read_text(errors="replace"))
    return [f"nvidia-cuda-crt=={int(version[1]) // 1000}.{int(version[1]) % 1000 // 10}.*"] if version else []


def _requirements(config_settings: Any = None) -> list[str]:
    if os.environ.get("OPACUS_MEMPROF_READER") == "1":  # the part that reads profiles needs no torch
        return []
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(NO_TORCH)
    return _cuda_headers()


get_requires_for_build_wheel = _requirements
get_requires_for_build_editable = _requirements


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    return []
