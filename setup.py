# SPDX-License-Identifier: Apache-2.0
"""Builds the extension modules of opacus_memprof. The metadata is in pyproject.toml, everything else in build_backend/.

Environment: OPACUS_MEMPROF_READER=1 (_core alone, which needs no torch), OPACUS_MEMPROF_CUDA=auto|0|1 (1 fails where
CUDA cannot be built), CUDA_HOME, NLOHMANN_JSON_INCLUDE (a folder that holds nlohmann/json.hpp), MAX_JOBS (compilers at
once, 2 by default).
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

READER = os.environ.get("OPACUS_MEMPROF_READER", "0")
if READER not in ("0", "1"):
    raise SystemExit(f"OPACUS_MEMPROF_READER is {READER!r}; it can be 0 or 1")
os.environ.setdefault("MAX_JOBS", "2")

if {"egg_info", "dist_info", "sdist"} & set(sys.argv):  # needs neither torch nor a compiler
    setup(ext_modules=[Extension("opacus_memprof._core", [])])
elif READER == "1":
    from opacus_memprof_core import BuildReader, core_extension

    setup(
        ext_modules=[core_extension()],
        cmdclass={"build_ext": BuildReader},
        options={"build": {"build_base": "build/reader"}},
    )
else:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        from opacus_memprof_finding import NO_TORCH

        raise SystemExit(f"{NO_TORCH} ({error})") from None
    import opacus_memprof_extensions as extensions

    setup(
        ext_modules=extensions.all_extensions(),
        cmdclass={"build_ext": extensions.BuildExtension, "test_flags": extensions.TestFlags},
        options={"build": {"build_base": extensions.BUILD}},
    )
