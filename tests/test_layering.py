# SPDX-License-Identifier: Apache-2.0
"""Data flows one way, and so do imports and includes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "opacus_memprof"

# From left to right. A module imports from its own part (a module or folder of the package) and from layers to its
# left only. `analysis` reads files and counters, so that the session can write a profile when it closes.
LAYERS = [
    {"_build_info", "errors"},
    {"profiles"},
    {"_native", "core", "files", "imports", "launch", "optional", "units", "versions"},
    {"directory", "hub", "observations", "tracing", "virtual_gpu"},
    {"clipping", "workload"},
    {"adaptors", "analysis", "hooks", "snapshots"},
    {"attaching", "conditions", "reports", "stream"},
    {"forensics"},
    {"session"},
    {"engine"},
    {"experiments", "integrations", "toolkit"},
    {"cli", "pytest_plugin"},
    {"__init__", "__main__"},  # __init__ loads what it names on demand; its __version__ is for everybody
]

# The module that imports each extension, and explains why one cannot be loaded.
EXTENSIONS = {"_C": "_native", "_core": "core", "_virtual": "virtual_gpu.values"}

CORE_MAY_INCLUDE = re.compile(
    r"<[a-z_]+>|"  # C++
    r"<(?:fcntl|pthread|unistd|sys/mman|sys/stat|sys/types)\.h>|"  # POSIX
    r"<(?:immintrin|x86intrin)\.h>|"  # the processor's clock
    r"<nlohmann/[a-z_]+\.hpp>|"
    r'"core/[a-z_]+\.h"'
)


def part(module: str) -> str:
    """`hooks` of `opacus_memprof.hooks.modules`."""
    return [*module.split("."), "__init__"][1]


def layer(name: str) -> int:
    found = [index for index, names in enumerate(LAYERS) if name in names]
    assert found, f"say in LAYERS which layer opacus_memprof/{name} belongs to"
    return found[0]


def imported(source: str, package: str) -> Iterator[str]:
    """The modules of ours that this module of `package` imports, wherever in it that stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "opacus_memprof" else [base]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "opacus_memprof" and name != "opacus_memprof")


def modules() -> list[str]:
    files = [file.relative_to(ROOT) for file in PACKAGE.rglob("*.py")]
    return sorted(".".join(file.with_suffix("").parts) for file in files)


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_from_the_left_only(module: str) -> None:
    file = ROOT / Path(*module.split(".")).with_suffix(".py")
    here = part(module)
    for name in imported(file.read_text(), module.rpartition(".")[0]):
        if part(name) in EXTENSIONS:
            importer = f"opacus_memprof.{EXTENSIONS[part(name)]}"
            assert module == importer, f"{module} imports the extension {name} past {importer}"
        elif part(name) != here:
            assert layer(part(name)) < layer(here), f"{module} imports {name}, which is not to its left"


def test_the_command_line_leaves_torch_to_the_program() -> None:
    """`run` starts when the script has imported torch: loaded before, the session would begin before the script."""
    script = "import sys, opacus_memprof.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0


def includes(folder: str) -> list[tuple[Path, str]]:
    files = [file for file in (ROOT / "csrc" / folder).iterdir() if file.suffix in (".h", ".cpp")]
    assert files
    directive = re.compile(r'^\s*#\s*include\s*(<[^>]+>|"[^"]+")', re.MULTILINE)
    return [(file, name) for file in files for name in directive.findall(file.read_text())]


def test_the_core_includes_nothing_of_torch_or_python() -> None:
    assert not [(file.name, name) for file, name in includes("core") if not CORE_MAY_INCLUDE.fullmatch(name)]


def test_the_adaptors_do_not_know_the_bindings() -> None:
    outside = re.compile(r'"bindings/|<pybind11/')
    assert not [(file.name, name) for file, name in includes("adaptors") if outside.match(name)]


def test_the_virtual_gpu_includes_nothing_of_torch_or_python() -> None:
    """It is what torch runs on, and knows of nobody who runs on it."""
    others = re.compile(r'<(?:torch|ATen|c10|caffe2|pybind11)/|<Python\.h>|"(?:core|adaptors|bindings)/')
    assert not [(file.name, name) for file, name in includes("virtual_gpu") if others.match(name)]


def test_there_are_no_other_sources() -> None:
    """What is not in one of these folders would escape the checks above, and the build."""
    folders = {path.relative_to(ROOT / "csrc").parts[0] for path in (ROOT / "csrc").rglob("*.*") if path.is_file()}
    assert folders == {"adaptors", "bindings", "core", "virtual_gpu", "virtual_values"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch, os", []),
        ("import opacus_memprof", []),
        ("import opacus_memprof.cli.run as r", ["opacus_memprof.cli.run"]),
        ("from opacus_memprof import _native, units", ["opacus_memprof._native", "opacus_memprof.units"]),
        ("def f():\n    from opacus_memprof.cli.run import run", ["opacus_memprof.cli.run"]),
        ("from . import capture", ["opacus_memprof.hooks"]),
        ("from .. import _C", ["opacus_memprof._C"]),
        ("from ..cli.run import run", ["opacus_memprof.cli.run"]),
        ("from opacus_memprofile import x", []),
    ],
)
def test_imports_are_found_however_they_are_written(source: str, names: list[str]) -> None:
    assert list(imported(source, "opacus_memprof.hooks")) == names
