# SPDX-License-Identifier: Apache-2.0
"""The extension's one door: what it lets through, and what it says when it cannot."""

import ast
import hashlib
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import opacus_memprof
from opacus_memprof import versions
from opacus_memprof.recording import native

PACKAGE = Path(opacus_memprof.__file__).parent


def load(monkeypatch: pytest.MonkeyPatch, tree: Path, built_for: str | None, extension: ModuleType | None) -> None:
    """Runs native.py anew, as a copy in `tree`, with this build and extension; None is one that is not there."""
    build = None
    if built_for is not None:
        build = ModuleType("opacus_memprof._build_info")
        vars(build).update(TORCH_VERSION=built_for)
    for name, module in (("_build_info", build), ("_C", extension)):
        monkeypatch.setitem(sys.modules, f"opacus_memprof.{name}", module)
        if module is None:
            monkeypatch.delattr(opacus_memprof, name, raising=False)
        else:
            monkeypatch.setattr(opacus_memprof, name, module, raising=False)
    copy = tree / "opacus_memprof" / "recording" / "native.py"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((PACKAGE / "recording" / "native.py").read_bytes())
    spec = importlib.util.spec_from_file_location("native_anew", copy)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def stub_extension() -> ModuleType:
    made = ModuleType("opacus_memprof._C")
    vars(made).update(dict.fromkeys(stub_names()), category_id=lambda name: 0)  # called when it is loaded
    return made


def stub_names() -> set[str]:
    """The public names that _C.pyi declares."""
    names = set()
    for node in ast.parse((PACKAGE / "_C.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            assert isinstance(node.target, ast.Name)
            names.add(node.target.id)
    return names


def test_everything_that_the_stub_declares_is_let_through() -> None:
    assert set(native.__all__) == stub_names()
    assert all(hasattr(native, name) for name in stub_names())


def test_the_matching_torch_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load(monkeypatch, tmp_path, str(torch.__version__), stub_extension())


def test_another_torch_is_refused_before_the_extension_is_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Untouchable(ModuleType):
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"the extension was asked for {name}")

    monkeypatch.setattr(torch, "__version__", "2.15.1+cu132")
    with pytest.raises(ImportError) as raised:
        load(monkeypatch, tmp_path, "2.15.0+cu132", Untouchable("opacus_memprof._C"))
    assert str(raised.value) == (
        "opacus-memprof was built for torch 2.15.0+cu132, but torch 2.15.1+cu132 is installed: in opacus-memprof's "
        "source tree run `pip install --force-reinstall --no-deps --no-cache-dir .`"
    )


@pytest.mark.parametrize(
    ("version", "cuda", "header", "reason"),
    [
        ("2.15.0+cu132", "13.2", "class Allocator;", None),
        ("2.15.1+cu130", "13.0", "class Allocator;", None),
        (
            "2.15.1+cu132",
            "13.2",
            "class Allocator { int other; };",
            "is installed, whose allocator is declared otherwise",
        ),
        ("2.15.1+cu132", "13.2", "", "is installed, whose allocator is declared otherwise"),
        ("2.16.0+cu132", "13.2", "class Allocator;", "but torch 2.16.0+cu132 is installed"),
        ("2.15.0+cu128", "12.8", "class Allocator;", "but torch 2.15.0+cu128 is installed"),
        ("2.15.0+cpu", None, "class Allocator;", "but torch 2.15.0+cpu is installed"),
    ],
)
def test_another_patch_of_torch_fits_if_its_allocator_is_equal(
    version: str, cuda: str | None, header: str, reason: str | None, tmp_path: Path
) -> None:
    for folder, text in (("built", "class Allocator;"), ("installed", header)):
        (tmp_path / folder / "include" / "c10" / "core").mkdir(parents=True)
        (tmp_path / folder / "include" / "c10" / "core" / "Allocator.h").write_text(text)
    build = SimpleNamespace(
        TORCH_VERSION="2.15.0+cu132",
        TORCH_CUDA="13.2",
        ALLOCATOR_HEADERS=versions.hash_allocator_headers(tmp_path / "built"),
    )
    found = versions.why_torch_does_not_fit(build, version, cuda, tmp_path / "installed")
    assert found == reason if reason is None else str(found).endswith(reason)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel's package with extensions for two minors of torch, of which 2.15 is installed as a patch of it."""
    header = tmp_path / "torch" / "include" / "c10" / "core" / "Allocator.h"
    header.parent.mkdir(parents=True)
    header.write_text("class Allocator;")
    digest = hashlib.sha256(b"class Allocator;").hexdigest()[:8]
    for minor in ("2.14", "2.15"):
        (tmp_path / "builds" / f"torch{minor}-cu13-{digest}").mkdir(parents=True)
    monkeypatch.setattr(versions, "PACKAGE", tmp_path)
    monkeypatch.setattr(versions, "BUILDS", tmp_path / "builds")
    spec = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: {"torch": spec}[name])
    install(tmp_path, "2.15.1+cu130", "'13.0'")
    return tmp_path


def install(wheel: Path, version: str, cuda: str) -> None:
    text = f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
    (wheel / "torch" / "version.py").write_text(text)


def test_a_wheel_serves_other_patches_of_torch_and_cuda(wheel: Path) -> None:
    assert versions.folder_of_extensions().parent == wheel / "builds"
    assert versions.folder_of_extensions().name.startswith("torch2.15-cu13-")
    install(wheel, "2.14.0", "'13.2'")
    assert versions.folder_of_extensions().name.startswith("torch2.14-cu13-")


@pytest.mark.parametrize(
    ("version", "cuda", "header", "reason"),
    [
        ("2.13.0+cu130", "'13.0'", "class Allocator;", "torch 2.13.0+cu130 is installed"),
        ("2.15.0+cu128", "'12.8'", "class Allocator;", "torch 2.15.0+cu128 is installed"),
        ("2.15.0+cpu", "None", "class Allocator;", "torch 2.15.0+cpu is installed"),
        (
            "2.15.2+cu132",
            "'13.2'",
            "class Allocator { int other; };",
            "torch 2.15.2+cu132 is installed, whose allocator is declared otherwise",
        ),
    ],
)
def test_a_torch_for_which_a_wheel_has_no_extension(
    version: str, cuda: str, header: str, reason: str, wheel: Path
) -> None:
    install(wheel, version, cuda)
    (wheel / "torch" / "include" / "c10" / "core" / "Allocator.h").write_text(header)
    assert versions.folder_of_extensions() == wheel
    expected = f"opacus-memprof was built for torch2.14-cu13, torch2.15-cu13, but {reason}"
    assert versions.why_there_is_no_extension() == expected
    assert versions.how_to_build(wheel) == (
        "build from source: `pip install --force-reinstall --no-deps --no-binary opacus-memprof opacus-memprof`"
    )


def test_a_wheel_without_torch(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert versions.folder_of_extensions() == wheel
    assert versions.why_there_is_no_extension().endswith(", but torch is not installed")
    assert versions.how_to_build(wheel) == "`pip install torch`"


def test_the_installed_torch_is_read_as_it_describes_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without importing it: the folder's name has to be that of the torch that runs these tests."""
    folder = Path(torch.__file__).parent
    name = versions.name_of_build(torch.__version__, torch.version.cuda, folder)
    (tmp_path / name).mkdir()
    monkeypatch.setattr(versions, "BUILDS", tmp_path)
    assert versions.folder_of_extensions() == tmp_path / name
    assert name.startswith(f"torch{torch.__version__.rsplit('.', 1)[0]}-{'cu' if torch.version.cuda else 'cpu'}")


def test_the_installed_torch_has_the_headers_that_are_compared() -> None:
    assert versions.hash_allocator_headers(Path(torch.__file__).parent)


def test_in_a_source_tree_the_command_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "setup.py").touch()
    with pytest.raises(ImportError, match=r"built for torch 1\.0") as raised:
        load(monkeypatch, tmp_path, "1.0", stub_extension())
    assert str(raised.value).endswith(f"run `pip install --no-deps -e {tmp_path}`")


def test_an_extension_that_was_never_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"^opacus-memprof's extension has not been built: in .* run `pip install"):
        load(monkeypatch, tmp_path, None, None)


def test_an_extension_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"^opacus-memprof's extension cannot be loaded \(.*_C.*\): in .* run `pip"):
        load(monkeypatch, tmp_path, str(torch.__version__), None)


def test_an_extension_of_an_older_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    extension = stub_extension()
    del extension.settle
    with pytest.raises(ImportError, match=r"cannot be loaded \(cannot import name 'settle'.* run `pip"):
        load(monkeypatch, tmp_path, str(torch.__version__), extension)


def test_the_extension_is_of_this_version() -> None:
    from opacus_memprof import _build_info

    assert opacus_memprof.__version__ == _build_info.VERSION


def test_a_thread_name_cut_inside_a_character_is_readable(tmp_path: Path) -> None:
    def work() -> None:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "wb") as name:
            name.write("Datenlader-Käufer".encode()[:13])  # "ä" is bytes 12 and 13
        torch.empty(10)
        session.snapshot("in the thread")

    with opacus_memprof.profile(tmp_path, device="cpu") as session:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert session.peak()["cpu"]["requested_bytes"] > 0
    assert "Datenlader-K" in native.names()["threads"]


@pytest.mark.skipif(not native.HAS_CUDA, reason="built without CUDA")
def test_gpus_that_were_never_profiled_have_nothing_to_refresh() -> None:
    """As in a program that uses a GPU, and profiles the CPU alone."""
    code = "from opacus_memprof.recording import native; assert native.cuda_refresh(0) == 0"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
