# SPDX-License-Identifier: Apache-2.0
"""A callback after a module's first import, whoever imports it."""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from opacus_memprof.planning.fork_server import HiddenModules
from opacus_memprof.recording.startup import AfterImport


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that nobody has imported."""
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").write_text("import made_up.part\nready = True\n")
    (tmp_path / "made_up" / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "made_up"
    assert [type(finder) for finder in sys.meta_path] == [type(finder) for finder in finders]
    for name in ("made_up", "made_up.part"):
        sys.modules.pop(name, None)


def test_it_is_called_once_when_the_module_is_ready(module: str) -> None:
    calls = []
    AfterImport(module, lambda: calls.append(sys.modules[module].ready))
    assert calls == []
    importlib.import_module(module)
    importlib.import_module(module)
    assert calls == [True]
    importlib.reload(sys.modules[module])
    assert calls == [True]


def test_it_is_called_immediately_for_an_imported_module(module: str) -> None:
    importlib.import_module(module)
    calls = []
    AfterImport(module, lambda: calls.append(True))
    assert calls == [True]


def test_asking_for_the_spec_is_no_import(module: str) -> None:
    calls = []
    AfterImport(module, lambda: calls.append(True))
    assert importlib.util.find_spec(module) is not None
    assert calls == []
    importlib.import_module(module)
    assert calls == [True]


def test_the_module_has_the_loader_that_it_would_have(module: str) -> None:
    AfterImport(module, lambda: None)
    loaded = importlib.import_module(module)
    fresh = importlib.util.spec_from_file_location("fresh", loaded.__file__)
    assert fresh is not None
    assert type(loaded.__spec__.loader) is type(fresh.loader)


def test_an_import_that_fails_can_be_tried_again(module: str) -> None:
    calls = []
    AfterImport(module, lambda: calls.append(True))
    part = Path(str(importlib.util.find_spec(module).submodule_search_locations[0])) / "part.py"
    part.write_text("raise ImportError('not yet')")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module(module)
    assert calls == []
    part.write_text("# ready now")
    importlib.invalidate_caches()
    importlib.import_module(module)
    assert calls == [True]


def test_what_the_callback_raises_reaches_the_importer(module: str) -> None:
    def refuse() -> None:
        raise ValueError("no")

    AfterImport(module, refuse)
    with pytest.raises(ValueError, match="no"):
        importlib.import_module(module)


def test_a_module_that_does_not_exist(module: str) -> None:
    finder = AfterImport("no_such_module_at_all", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_at_all")
    sys.meta_path.remove(finder)


def test_a_loader_of_several_modules(module: str) -> None:
    """pytest loads all modules whose assertions it rewrites by one loader; a part is imported while the package is."""
    names = (module, f"{module}.part")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    folder = Path(str(spec.origin)).parent

    class OneLoader(importlib.abc.Loader):
        def exec_module(self, loaded: ModuleType) -> None:
            name = "part.py" if loaded.__name__ in names[1:] else "__init__.py"
            exec((folder / name).read_text(), vars(loaded))

    loader = OneLoader()

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
            return ModuleSpec(name, loader, is_package=name == module) if name in names else None

    finder, calls = Finder(), []
    sys.meta_path.insert(0, finder)
    AfterImport(module, lambda: calls.append(sys.modules[module].ready))
    importlib.import_module(module)
    sys.meta_path.remove(finder)
    assert calls == [True]


def test_modules_that_a_forked_process_has_already_call_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton is such a module: torch._dynamo has imported it before the fork, and the program imports torch._dynamo."""
    names = ["hidden_outside", "hidden_inside"]
    (tmp_path / "hidden_outside.py").write_text("import hidden_inside")
    (tmp_path / "hidden_inside.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    finder, calls = HiddenModules(names[:1], lambda name: None), list[str]()
    for name in names:
        AfterImport(name, lambda name=name: calls.append(name))  # type: ignore[misc]
    importlib.import_module(names[0])
    assert sorted(calls) == sorted(names)
    sys.meta_path.remove(finder)
    for name in names:
        monkeypatch.delitem(sys.modules, name)
