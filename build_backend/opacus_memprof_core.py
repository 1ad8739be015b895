# SPDX-License-Identifier: Apache-2.0
"""_core, which reads profiles and does not use torch, and what every build of extensions shares."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pybind11
from setuptools import Extension
from setuptools.command.build_ext import build_ext

# Each call through a procedure linkage table touches a page of its own, which the hot path finds evicted.
FLAGS = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-fno-plt", "-Wall", "-Wextra", "-Werror"]


# What reads event files. Nothing of it is in _C, which has the rest of csrc/core.
CORE_SOURCES = ["event_reader", "event_rows", "follower", "replay", "replay_survey", "torch_snapshot"]
CORE = ["csrc/bindings/core_module.cpp", *(f"csrc/core/{name}.cpp" for name in CORE_SOURCES)]


def core_extension() -> Extension:
    return Extension(
        "opacus_memprof._core",
        CORE,
        extra_compile_args=[*FLAGS, f"-isystem{pybind11.get_include()}"],
        include_dirs=[str(Path("csrc").resolve())],
        language="c++",
    )


def write_build_info(package: Path, version: str, info: dict[str, Any]) -> None:
    """_build_info.py beside the extensions: what they were built for, which _native.py checks before it loads _C."""
    compiler = subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True)
    info = {
        "VERSION": version,
        **info,
        "PYTHON": platform.python_version(),
        "COMPILER": compiler.stdout.partition("\n")[0],
    }
    lines = ["# Written by setup.py: what the extensions beside this file were built for.\n"]
    lines += [f"{name} = {value!r}\n" for name, value in info.items()]
    (package / "_build_info.py").write_text("".join(lines))


def package_of(command: Any) -> Path:
    """The folder that a build_ext command puts the extensions into."""
    return Path(command.get_ext_fullpath("opacus_memprof._core")).parent


class BuildReader(build_ext):
    """Builds _core alone."""

    def run(self) -> None:
        super().run()
        nothing = {"TORCH_VERSION": None, "TORCH_CUDA": None, "ALLOCATOR_HEADERS": "", "HAS_CUDA": False}
        write_build_info(package_of(self), self.distribution.get_version(), nothing)
