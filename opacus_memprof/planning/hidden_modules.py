# SPDX-License-Identifier: Apache-2.0
"""Imports packages before a program does, and hides them until the program imports them. Its import is then fast."""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class HiddenModules(MetaPathFinder):
    """Imported packages that are not in `sys.modules` until a program imports them.

    Modules of the standard library that they have imported stay visible.

    Args:
        packages: imported in this order.
        before: called with the name of the first package before it is revealed.

    Attributes:
        pending: the modules that are hidden, by name.
    """

    def __init__(self, packages: Sequence[str], before: Callable[[str], None]) -> None:
        self.pending: dict[str, ModuleType] = {}
        self._before = before
        self._packages = packages
        self._imported_by: dict[str, str] = {}
        for package in packages:
            known = set(sys.modules)
            importlib.import_module(package)
            for name in set(sys.modules) - known:
                if name.partition(".")[0] not in sys.stdlib_module_names:
                    self._imported_by[name] = package
        for name in self._imported_by:
            self.pending[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds a module for the import system, without revealing it yet."""
        if name not in self.pending:
            return None
        module = self.pending[name]
        is_package = hasattr(module, "__path__")
        spec = ModuleSpec(name, _Loader(self), origin=getattr(module, "__file__", None), is_package=is_package)
        if is_package:
            spec.submodule_search_locations = list(module.__path__)
        return spec

    def reveal(self, name: str) -> None:
        """Puts a hidden module into `sys.modules`, with the other modules of its package.

        For a requested package, these are all modules that its import had imported.
        """
        self._before(name)
        importer, package = self._imported_by[name], name.partition(".")[0]
        for other in [other for other in self.pending if self._imported_by[other] == importer]:
            if name in self._packages or other.partition(".")[0] == package:
                sys.modules[other] = self.pending.pop(other)


class _Loader(Loader):
    """Loads a hidden module by revealing it."""

    def __init__(self, hidden: HiddenModules) -> None:
        self._hidden = hidden
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._hidden.pending[spec.name]
        self._spec = module.__spec__  # which the import system replaces
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        self._hidden.reveal(module.__name__)
