# SPDX-License-Identifier: Apache-2.0
"""A plain `pip install` into an environment that has torch, as a user does it: from a source distribution.

The environment is a new one that sees this one's packages through a path file, which is how it has torch. Needs a
package index for setuptools and the other build requirements.

Compilers only read here what they would compile, which fails where a header is not packed, and then take the object
that this environment's own build has made of the same sources, where it has.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
import torch

from opacus_memprof import _build_info

ROOT = Path(__file__).parents[1]
OBJECTS = ROOT / "build" / f"torch-{torch.__version__}-{'cuda' if _build_info.HAS_CUDA else 'cpu'}"
COMPILER = """#!/bin/sh
for word; do
    [ "$last" = -o ] && out=/$word
    last=$word
done
object=${{out#*/build/*/}}
case $object in temp.*) object=objects/${{object#*/}};; esac
if [ -f "{objects}/$object" ] && [ -z "$(find {sources} -newer "{objects}/$object" | head -n 1)" ]; then
    {real} "$@" -E && exec cp "{objects}/$object" "${{out#/}}"
else
    exec {real} "$@"
fi
"""

pytestmark = pytest.mark.slow


# The path file must be all that leads to this environment.
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPACUS_MEMPROF_CUDA", "CXX")}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command that must succeed prints."""
    ran = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=CLEAN | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources alone: nothing that an earlier build has left can help or harm."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("csrc", "opacus_memprof", "build_backend"):
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH with compilers that do not compile twice what this environment's build has compiled."""
    folder = tmp_path_factory.mktemp("compilers")
    for name in ("c++", "g++", "cc", "gcc"):
        sources = f"{ROOT / 'csrc'} {ROOT / 'build_backend'}"
        (folder / name).write_text(COMPILER.format(objects=OBJECTS, sources=sources, real=shutil.which(name)))
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that has torch."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, symlinks=True)
    purelib = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    (purelib / "shared.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin" / "python"


@pytest.fixture(scope="module")
def archive(tree: Path) -> Path:
    """A source distribution."""
    script = "import opacus_memprof_build as backend; print(backend.build_sdist('dist'))"
    run(sys.executable, "-c", script, cwd=tree, PYTHONPATH=str(tree / "build_backend"))
    (archive,) = (tree / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def installation(archive: Path, tree: Path, python: Path, compilers: str) -> str:
    """What pip says while it builds and installs from a source distribution, isolated as is its default."""
    return run(python, "-m", "pip", "install", "--no-cache-dir", "-v", archive, cwd=tree.parent, PATH=compilers)


def environment_without_torch(home: Path) -> tuple[Path, list[str | Path]]:
    """The Python of a new environment, and this environment's pip for it."""
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    return python, [sys.executable, "-m", "pip", "--python", python]


@pytest.mark.nightly
def test_the_part_that_reads_profiles_is_built_without_torch(tree: Path, compilers: str, tmp_path: Path) -> None:
    """OPACUS_MEMPROF_READER=1, in an environment of its own that has no torch and gets none."""
    python, pip = environment_without_torch(tmp_path / "environment")
    run(*pip, "install", "-q", tree, cwd=tmp_path, OPACUS_MEMPROF_READER="1", PATH=compilers)
    assert "torch" not in run(*pip, "list", cwd=tmp_path)
    reported = run(python, "-m", "opacus_memprof", "report", ROOT / "tests" / "data" / "format_1_hooks", cwd=tmp_path)
    assert "per_sample_gradients" in reported
    assert "read profiles here" in run(python, "-m", "opacus_memprof", "doctor", cwd=tmp_path)
    script = "import opacus_memprof\ntry:\n opacus_memprof.install('cpu')\nexcept ImportError as error:\n print(error)"
    assert "install torch, then opacus-memprof again" in run(python, "-c", script, cwd=tmp_path)


def test_a_source_distribution_has_all_sources(archive: Path, tree: Path) -> None:
    with tarfile.open(archive) as packed:
        names = {Path(*Path(name).parts[1:]) for name in packed.getnames()}
    sources = {file.relative_to(tree) for folder in ("csrc", "build_backend") for file in (tree / folder).rglob("*.*")}
    assert {file for file in sources if file.suffix != ".pyc"} <= names


@pytest.mark.nightly
def test_a_source_distribution_needs_no_torch(tree: Path, tmp_path: Path) -> None:
    """Made by an isolated build in an environment of its own; building from it there says what is missing."""
    python, pip = environment_without_torch(tmp_path / "environment")
    run(*pip, "install", "-q", "build", "pip", cwd=tmp_path)
    run(python, "-m", "build", "--sdist", "--outdir", tmp_path / "dist", tree, cwd=tmp_path)
    (archive,) = (tmp_path / "dist").iterdir()
    for command in (["-m", "pip", "install", archive], ["-m", "build", "--wheel", tree]):
        ran = subprocess.run(
            [python, *command], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert ran.returncode != 0
        assert "install torch first; uv and `python -m build` hide it" in ran.stdout


@pytest.mark.nightly
def test_no_second_torch_is_downloaded(installation: str) -> None:
    assert "Collecting torch" not in installation
    assert "Successfully installed opacus-memprof-" in installation


@pytest.mark.nightly
def test_an_installed_package_loads_and_says_its_build(installation: str, python: Path, tmp_path: Path) -> None:
    script = (
        "from opacus_memprof import _build_info as build\n"
        "from opacus_memprof.recording import native\n"
        "print(native.__file__, build.TORCH_VERSION, build.TORCH_CUDA, build.HAS_CUDA, native.HAS_CUDA, sep='\\n')"
    )
    file, version, cuda, built, has = run(python, "-c", script, cwd=tmp_path).splitlines()
    assert Path(file).is_relative_to(python.parents[1])
    assert version == torch.__version__
    assert cuda == str(torch.version.cuda)
    assert built == has


@pytest.mark.nightly
def test_an_installation_changes_neither_torch_nor_opacus(installation: str, python: Path, tmp_path: Path) -> None:
    script = "import importlib.metadata as m; print(*m.requires('opacus-memprof'), sep='\\n')"
    requirements = [line for line in run(python, "-c", script, cwd=tmp_path).splitlines() if "extra ==" not in line]
    assert {re.split("[>=]", line)[0] for line in requirements} == {"msgspec", "numpy", "rich", "typer"}


@pytest.mark.nightly
def test_types_come_along(installation: str, python: Path) -> None:
    (package,) = python.parents[1].glob("lib/python*/site-packages/opacus_memprof")
    assert {"py.typed", "_C.pyi", "_virtual.pyi", "_build_info.pyi"} <= {file.name for file in package.iterdir()}
    assert (package / "locale" / "zh.po").exists()


@pytest.mark.nightly
def test_the_command_works(installation: str, python: Path, tmp_path: Path) -> None:
    out = run(python.parent / "opacus-memprof", "doctor", cwd=tmp_path)
    assert f"built for torch {torch.__version__}" in out


def test_another_torch_is_refused_with_the_command_that_fixes_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "opacus_memprof", tmp_path / "opacus_memprof")
    info = tmp_path / "opacus_memprof" / "_build_info.py"
    info.write_text(info.read_text().replace(str(torch.__version__), "2.0.0+cu117"))
    command = [sys.executable, "-c", "import opacus_memprof.recording.native"]
    ran = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        f"ImportError: opacus-memprof was built for torch 2.0.0+cu117, but torch {torch.__version__} is installed: in "
        "opacus-memprof's source tree run `pip install --force-reinstall --no-deps --no-cache-dir .`"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"OPACUS_MEMPROF_CUDA": "0"}, "building the CPU part only: OPACUS_MEMPROF_CUDA is 0"),
        ({"OPACUS_MEMPROF_CUDA": "yes"}, "OPACUS_MEMPROF_CUDA is 'yes'; it can be auto, 0 or 1"),
    ],
)
def test_what_the_build_says(tree: Path, setting: dict[str, str], message: str) -> None:
    ran = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=tree, env=os.environ | setting, capture_output=True, text=True
    )
    assert message in ran.stdout + ran.stderr
    assert (ran.returncode == 0) == (setting["OPACUS_MEMPROF_CUDA"] == "0")
    assert "Traceback" not in ran.stderr


def test_cuda_that_is_demanded_and_missing_fails(tree: Path) -> None:
    """A torch for CUDA 99 finds no headers of that version anywhere."""
    script = (
        "import sys, runpy, torch\n"
        "torch.version.cuda = '99.0'\n"
        "sys.argv = ['setup.py', '--name']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tree,
        env=os.environ | {"OPACUS_MEMPROF_CUDA": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "OPACUS_MEMPROF_CUDA is 1, but CUDA cannot be built: no complete headers" in ran.stderr
    assert "of CUDA 99" in ran.stderr
