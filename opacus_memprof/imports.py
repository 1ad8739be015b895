# SPDX-License-Identifier: Apache-2.0
"""Runs a callback right after a module has been imported for the first time, whoever imports it.

So the profiler loads torch neither earlier than the script does nor at all where the script does not: variables that
a script sets before its imports (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES …) hold as they would without the profiler.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Calls `callback` once, when the module `name` has been executed; at once if it has been already."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback
        self._asking_others = False
        if name in sys.modules:
            callback()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The others' spec, with a loader that calls back. Programs also ask for a spec without importing."""
        if fullname != self._name or self._asking_others:
            return None
        self._asking_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking_others = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._callback()

        # On the module's own loader, so that it stays what it is to whoever asks the module for it.
        vars(spec.loader)["exec_module"] = execute_and_call
        return spec
