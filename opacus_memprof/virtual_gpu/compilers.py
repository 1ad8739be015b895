# SPDX-License-Identifier: Apache-2.0
"""Lets Triton and torch.compile work on the virtual GPU: what they link to, and where they keep what they measured."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def prepare(libraries: Path) -> None:
    """Sets up Triton and Inductor when the program imports them. Children inherit nothing of it."""
    sys.meta_path.insert(
        0,
        _AfterImport(
            {
                "triton.knobs": lambda module: _link_to(module, libraries),
                "torch._inductor.runtime.cache_dir_utils": _separate_cache,
                "torch._inductor.config": _compile_in_this_process,
            }
        ),
    )


def _link_to(knobs: Any, libraries: Path) -> None:
    """Triton links what it compiles to libcuda.so.1, which it would look for where ldconfig finds it."""
    propagate, knobs.propagate_env = knobs.propagate_env, False  # to the environment
    knobs.nvidia.libcuda_path = str(libraries)
    knobs.propagate_env = propagate


def _separate_cache(cache: Any) -> None:
    """Inductor keeps which kernel was the fastest, and here none is: a real GPU must not be given what was kept.

    Where the program names no folder, torch itself puts its own into this variable.
    """
    default = cache.default_cache_dir
    cache.default_cache_dir = lambda: default() + "_virtual_gpu"
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = chosen.removesuffix("_virtual_gpu") + "_virtual_gpu"


def _compile_in_this_process(config: Any) -> None:
    """Inductor's workers are programs of their own, which have no GPU where there is no real one."""
    config.compile_threads = 1


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once when a module has been imported; the module itself is found as ever."""

    def __init__(self, calls: dict[str, Callable[[Any], None]]) -> None:
        self.calls = calls

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        call = self.calls.pop(name, None)
        if call is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            call(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
