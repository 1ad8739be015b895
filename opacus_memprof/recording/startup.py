# SPDX-License-Identifier: Apache-2.0
"""Runs code right after a module's first import, by any code, or at the start of processes that multiprocessing starts.

This way the profiler never imports torch before the program does. Environment variables that a program sets before its
imports (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES …) have the same effect as without the profiler.
"""

import importlib.util
import sys
from collections.abc import Callable, Collection, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = str(Path(__file__).parents[2])
# The beginning of the code that multiprocessing passes to `python -c`.
_CODE_PREFIXES = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")

_code: list[str] = []


class AfterImport(MetaPathFinder):
    """Calls `callback` once, when the module `name` has been imported; immediately if it has been already."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback
        self._finding_spec = False
        if name in sys.modules:
            callback()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of the other finders, with a loader that calls `callback` after executing the module.

        `callback` is not called here, because programs also look for specs without importing.
        """
        if fullname != self._name or self._finding_spec:
            return None
        self._finding_spec = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding_spec = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self._name and self in sys.meta_path:  # a loader may have other modules, too
                sys.meta_path.remove(self)
                self._callback()

        # Set on the module's own loader, so that `module.__loader__` keeps its type.
        vars(spec.loader)["exec_module"] = execute_and_call
        return spec


def note_modules(names: Collection[str]) -> None:
    """Calls the callbacks of modules that were put into `sys.modules` without being imported."""
    for finder in [each for each in sys.meta_path if isinstance(each, AfterImport) and each._name in names]:
        sys.meta_path.remove(finder)
        finder._callback()


def run_in_children(code: str) -> None:
    """Runs a line of Python in every process that multiprocessing starts from now on, after earlier calls' lines.

    No environment variable is used, so other programs that this process starts are as they are.
    """
    if not _code:
        _code.append(f"import sys; sys.path.append({_PACKAGES!r})")
        spawn = util.spawnv_passfds

        def spawn_with_code(path: Any, args: Sequence[Any], passfds: Sequence[int]) -> int:
            begin = "; ".join([*_code, ""])
            args = [begin + arg if isinstance(arg, str) and arg.startswith(_CODE_PREFIXES) else arg for arg in args]
            return spawn(path, args, passfds)

        vars(util)["spawnv_passfds"] = spawn_with_code
    _code.append(code)
