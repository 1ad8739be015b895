# SPDX-License-Identifier: Apache-2.0
"""Data flows one way, and so do imports and includes."""

import ast
import re
import subprocess
import sys

import pytest

from tests.rooms import (
    CSRC,
    ROOT,
    find_circle,
    floors,
    imported_names,
    included_files,
    module_imports,
    python_files,
    room,
    room_imports,
    unit_imports,
)

MOST_ROOMS, MOST_FLOORS, MOST_FILES = 30, 9, 260
MOST_FLOORS_INSIDE = {"clipping": 9}
MOST_FLOORS_INSIDE_OTHERS = 8

# From the ground up: a room imports from floors below its own only.
FLOORS = [
    {"errors", "versions"},
    {"profiles", "clipping", "language"},
    {"analysis", "recording", "jobs"},
    {"reports", "hooks", "virtual_gpu"},
    {"session"},
    {"integrations", "running"},
    {"planning", "toolkit", "loop_check"},
    {"pytest_plugin", "experiments"},
    {"cli", "__init__"},  # __init__ loads what it names on demand
    {"__main__"},
]
# They read profiles, also where there is no torch or another one.
READERS = {"errors", "versions", "language", "profiles", "analysis", "reports"}
# The module that imports each extension, and explains why one cannot be loaded.
EXTENSIONS = {
    "_C": "recording.native",
    "_clipping": "clipping.kernels.native",
    "_core": "profiles.core",
    "_virtual": "virtual_gpu.values",
}

# The folders of csrc, except for those of the virtual GPU, each includes from the left only.
CPP_LAYERS = ["python", "core", "allocators", "hooks", "bindings"]
# A library of the virtual GPU includes from these and from its own folder.
VIRTUAL_GPU_BASE = ["machine", "defaults", "driver"]
VIRTUAL_GPU_LIBRARIES = ["cublas", "cudnn", "nccl", "nvml", "runtime"]

CORE_MAY_INCLUDE = re.compile(
    r"<[a-z_]+>|"  # C++
    r"<(?:fcntl|pthread|unistd|sys/mman|sys/stat|sys/statvfs|sys/types)\.h>|"  # POSIX
    r"<(?:cpuid|immintrin|x86intrin)\.h>|"  # the processor's clock
    r"<nlohmann/[a-z_]+\.hpp>|"
    r'"core/[a-z_]+\.h"'
)


def test_every_room_is_on_its_floor() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    arrows = {name: others for name, others in room_imports().items() if not name.startswith("csrc/")}
    assert set(arrows) == set(floor), "say in FLOORS which floor a new room stands on"
    wrong = [(name, other) for name, others in arrows.items() for other in others if floor[other] >= floor[name]]
    assert wrong == []


def test_there_are_no_circles() -> None:
    assert find_circle(module_imports()) == []
    assert find_circle(room_imports()) == []


def test_the_house_stays_small() -> None:
    arrows = room_imports()
    assert len(arrows) <= MOST_ROOMS
    assert max(floors(arrows).values()) <= MOST_FLOORS
    assert len(python_files().keys() - {"opacus_memprof._build_info"}) <= MOST_FILES, (
        "put it where a reader looks for it"
    )


@pytest.mark.parametrize("name", sorted(name for names in FLOORS for name in names))
def test_a_room_has_few_floors_inside(name: str) -> None:
    """The files and folders of a room have floors of their own, without circles."""
    arrows = unit_imports(name)
    assert find_circle(arrows) == []
    most = MOST_FLOORS_INSIDE.get(name, MOST_FLOORS_INSIDE_OTHERS)
    assert max(floors(arrows).values(), default=0) <= most


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_an_extension_has_one_importer(extension: str) -> None:
    importers = {
        module
        for module, file in python_files().items()
        for name in imported_names(file.read_text(), module.rpartition(".")[0])
        if room(name) == extension
    }
    assert importers == {f"opacus_memprof.{EXTENSIONS[extension]}"}


def test_readers_do_not_import_what_records() -> None:
    trees = {module: ast.parse(file.read_text()) for module, file in python_files().items() if room(module) in READERS}
    assert trees
    for module, tree in trees.items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"torch", "opacus"}, module


def test_the_command_line_leaves_torch_to_the_program() -> None:
    """`run` starts when the script has imported torch: loaded before, the session would begin before the script.

    What only some commands need would delay each of them, --help and the script of `run` too.
    """
    late = {"torch", "numpy", "asyncio", "importlib.metadata", "opacus_memprof.analysis", "opacus_memprof.planning"}
    script = f"import sys, opacus_memprof.cli; print(*{late} & {{*sys.modules}})"
    assert subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True) == "\n"


def test_the_core_includes_nothing_of_torch_or_python() -> None:
    assert not [
        (file.name, name) for file, name in included_files(CSRC / "core") if not CORE_MAY_INCLUDE.fullmatch(name)
    ]


@pytest.mark.parametrize("folder", CPP_LAYERS)
def test_a_folder_of_csrc_includes_from_the_left_only(folder: str) -> None:
    allowed = CPP_LAYERS[: CPP_LAYERS.index(folder) + 1]
    ours = [(file.name, name) for file, name in included_files(CSRC / folder) if name.startswith('"')]
    assert not [(file, name) for file, name in ours if name.strip('"').split("/")[0] not in allowed]


def test_what_torch_calls_does_not_know_pybind11() -> None:
    """It runs without the GIL."""
    files = included_files(CSRC / "allocators")
    assert not [(file.name, name) for file, name in files if name.startswith("<pybind11/")]


def test_what_flash_clip_does_knows_nothing_of_profiling() -> None:
    ours = [(file.name, name) for file, name in included_files(CSRC / "clipping") if name.startswith('"')]
    assert [each for each in ours if not each[1].startswith(('"clipping/', '"python/'))] == []


def test_the_virtual_gpu_includes_nothing_of_torch_or_python() -> None:
    """It is what torch runs on, and knows of nobody who runs on it."""
    others = re.compile(rf'<(?:torch|ATen|c10|caffe2|pybind11)/|<Python\.h>|"(?:{"|".join(CPP_LAYERS)})/')
    assert not [(file.name, name) for file, name in included_files(CSRC / "virtual_gpu") if others.match(name)]


@pytest.mark.parametrize("folder", [*VIRTUAL_GPU_BASE, *VIRTUAL_GPU_LIBRARIES])
def test_a_library_of_the_virtual_gpu_includes_no_other(folder: str) -> None:
    below = VIRTUAL_GPU_BASE.index(folder) if folder in VIRTUAL_GPU_BASE else len(VIRTUAL_GPU_BASE)
    allowed = {folder, *VIRTUAL_GPU_BASE[:below]}
    names = [name.strip('"').split("/") for _, name in included_files(CSRC / "virtual_gpu" / folder)]
    assert [name for name in names if name[0] == "virtual_gpu" and name[1] not in allowed] == []


def test_the_virtual_gpu_has_no_other_folders() -> None:
    folders = {path.name for path in (CSRC / "virtual_gpu").iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == {*VIRTUAL_GPU_BASE, *VIRTUAL_GPU_LIBRARIES}


def test_there_are_no_other_sources() -> None:
    """What is not in one of these folders would escape the checks above, and the build."""
    folders = {path.relative_to(ROOT / "csrc").parts[0] for path in (ROOT / "csrc").rglob("*.*") if path.is_file()}
    assert folders == {*CPP_LAYERS, "clipping", "virtual_gpu", "virtual_values"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch, os", []),
        ("import opacus_memprof", []),
        ("import opacus_memprof.cli.profile as r", ["opacus_memprof.cli.profile"]),
        ("from opacus_memprof import hooks, errors", ["opacus_memprof.hooks", "opacus_memprof.errors"]),
        ("def f():\n    from opacus_memprof.cli.profile import run", ["opacus_memprof.cli.profile.run"]),
        ("from . import capture", ["opacus_memprof.hooks.capture"]),
        ("from .. import _C", ["opacus_memprof._C"]),
        ("from ..cli.profile import run", ["opacus_memprof.cli.profile.run"]),
        ("from opacus_memprofile import x", []),
    ],
)
def test_imports_are_found_however_they_are_written(source: str, names: list[str]) -> None:
    assert list(imported_names(source, "opacus_memprof.hooks")) == names
