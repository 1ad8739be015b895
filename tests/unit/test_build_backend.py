# SPDX-License-Identifier: Apache-2.0
"""What a build finds around it, in folders that are made here, and the package's static metadata."""

import base64
import hashlib
import importlib.util
import re
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from opacus_memprof.versions import LOWEST_OPACUS, TORCH_MINORS, VERSION

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "build_backend"), str(ROOT / "tools")]
import opacus_memprof_build as backend  # noqa: E402
import opacus_memprof_finding as finding  # noqa: E402
import wheels  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def toolkit(home: Path, version: int) -> Path:
    """Makes a CUDA toolkit: version 99020 is 99.2."""
    (home / "include" / "crt").mkdir(parents=True)
    (home / "lib64").mkdir()
    (home / "include" / "cuda.h").write_text(f"#define CUDA_VERSION {version}\n")
    (home / "include" / "crt" / "host_defines.h").touch()
    (home / "lib64" / f"libcudart.so.{version // 1000}").touch()
    return home


@pytest.fixture
def no_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "package_folders", lambda name: [])


@pytest.mark.usefixtures("no_wheels")
def test_a_toolkit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path, 99020)))
    found = finding.find_cuda("2.15.0", "99.0")
    assert found == finding.Cuda([tmp_path / "include"], tmp_path / "lib64" / "libcudart.so.99")


@pytest.mark.usefixtures("no_wheels")
@pytest.mark.parametrize("lacking", ["include/cuda.h", "include/crt/host_defines.h", "lib64/libcudart.so.99"])
def test_an_incomplete_toolkit_is_not_taken(lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (toolkit(tmp_path, 99020) / lacking).unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = finding.find_cuda("2.15.0", "99.2")
    assert isinstance(found, str)
    assert "pip install nvidia-cuda-crt==99.2.*" in found


@pytest.mark.usefixtures("no_wheels")
def test_a_toolkit_of_another_major_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path, 98080)))
    assert isinstance(finding.find_cuda("2.15.0", "99.2"), str)


def test_headers_of_wheels_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = toolkit(tmp_path / "nvidia" / "cu99", 99020)
    (wheel / "lib64").rename(wheel / "lib")
    monkeypatch.setattr(finding, "package_folders", lambda name: [tmp_path / name])
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "toolkit", 99000)))
    found = finding.find_cuda("2.15.0", "99.2")
    assert isinstance(found, finding.Cuda)
    assert found.libcudart == wheel / "lib" / "libcudart.so.99"


def test_a_torch_without_cuda_is_said() -> None:
    assert finding.find_cuda("2.15.0+cpu", None) == "torch 2.15.0+cpu is a build without CUDA"


def test_the_environment_decides_about_cuda(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPACUS_MEMPROF_CUDA", "0")
    assert finding.choose_cuda("2.15.0", "13.2") is None
    assert "the CPU part only: OPACUS_MEMPROF_CUDA is 0" in capsys.readouterr().out
    monkeypatch.setenv("OPACUS_MEMPROF_CUDA", "1")
    with pytest.raises(SystemExit, match=r"CUDA cannot be built: torch 2\.15\.0 is a build without CUDA"):
        finding.choose_cuda("2.15.0", None)
    monkeypatch.setenv("OPACUS_MEMPROF_CUDA", "yes")
    with pytest.raises(SystemExit, match="it can be auto, 0 or 1"):
        finding.choose_cuda("2.15.0", None)


@pytest.mark.usefixtures("no_wheels")
def test_the_json_library_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nlohmann").mkdir()
    (tmp_path / "nlohmann" / "json.hpp").touch()
    monkeypatch.setenv("NLOHMANN_JSON_INCLUDE", str(tmp_path))
    assert finding.json_include() == tmp_path


def test_what_comes_and_goes_is_read_from_torch_s_headers(tmp_path: Path) -> None:
    allocator = tmp_path / "c10" / "cuda" / "CUDACachingAllocator.h"
    context = tmp_path / "ATen" / "cuda" / "CUDAContextLight.h"
    for header in (allocator, context):
        header.parent.mkdir(parents=True)
    allocator.write_text(
        "virtual std::pair<int, int>\n    markCaptureEnd(int device) = 0;\nvoid annotateMemory(int);\n"
    )
    context.write_text("struct WorkspaceMapWithMutex {};\n")
    names = [name for name, _ in finding.torch_has(tmp_path)]
    assert names == ["OPACUS_MEMPROF_HAS_markCaptureEnd", "OPACUS_MEMPROF_HAS_WorkspaceMapWithMutex"]


def test_without_torch_a_build_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("OPACUS_MEMPROF_READER", raising=False)
    with pytest.raises(SystemExit, match="install torch first; uv and `python -m build` hide it"):
        backend.get_requires_for_build_wheel()
    assert backend.get_requires_for_build_sdist() == []
    monkeypatch.setenv("OPACUS_MEMPROF_READER", "1")
    assert backend.get_requires_for_build_wheel() == []


def test_a_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version = {{{VERSION}}}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_metadata_is_static() -> None:
    assert "dynamic" not in PROJECT
    assert PROJECT["license"] == "Apache-2.0"
    assert not any(name.startswith("License ::") for name in PROJECT["classifiers"])
    assert not any(name.startswith(("torch", "opacus")) for name in PROJECT["dependencies"])


def test_the_claimed_versions_are_those_of_the_extra() -> None:
    after = TORCH_MINORS[-1].partition(".")[2]
    torch = f"torch>={TORCH_MINORS[0]},<2.{int(after) + 1}"
    assert PROJECT["optional-dependencies"]["train"] == [f"opacus>={LOWEST_OPACUS}", torch]


def test_what_users_install_has_floors() -> None:
    extras = {name: wanted for name, wanted in PROJECT["optional-dependencies"].items() if name not in ("test", "docs")}
    for wanted in [PROJECT["dependencies"], *extras.values()]:
        assert all(">=" in one for one in wanted if not one.startswith("opacus-memprof["))


def test_the_conda_recipe_has_the_package_s_version_and_requirements() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == VERSION

    def as_conda_has_them(requirements: list[str]) -> set[str]:
        spaced = (re.sub(r"(?<=[\w-])(?=[<>=])", " ", requirement, count=1) for requirement in requirements)
        return {requirement.replace("nlohmann-json", "nlohmann_json") for requirement in spaced}

    needed = recipe["requirements"]
    assert set(needed["run"]) == as_conda_has_them(PROJECT["dependencies"]) | {"python", "pytorch"}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    host = {line for line in [*needed["build"], *needed["host"]] if isinstance(line, str) and "$" not in line}
    assert host == as_conda_has_them(build) | {"python", "pip", "pytorch"}
    assert needed["run_constraints"] == [f"opacus >={LOWEST_OPACUS}"]
    assert recipe["about"]["license"] == PROJECT["license"]
    assert recipe["about"]["summary"] == PROJECT["description"]


def wheel(folder: Path, torch: str, cuda: str | None, **other: str) -> Path:
    """Makes a wheel as the build makes it beside a torch; `other` files have this content."""
    said = f"TORCH_VERSION = {torch!r}\nTORCH_CUDA = {cuda!r}\nALLOCATOR_HEADERS = '0123456789'\n"
    files = {
        "opacus_memprof/__init__.py": "import this",
        "opacus_memprof/_C.cpython-311-x86_64-linux-gnu.so": f"_C of {torch}",
        "opacus_memprof/_C.pyi": "types",
        "opacus_memprof/_build_info.py": said,
        "opacus_memprof/_clipping.cpython-311-x86_64-linux-gnu.so": f"_clipping of {torch}",
        "opacus_memprof/_core.cpython-311-x86_64-linux-gnu.so": f"_core beside {torch}",
        "opacus_memprof/virtual_gpu/lib/libcuda.so.1": f"CUDA of {torch}",
        "opacus_memprof-0.1.0.dist-info/WHEEL": f"Generator: that beside {torch}\nTag: cp311-cp311-linux_x86_64\n",
        "opacus_memprof-0.1.0.dist-info/RECORD": "",
        **other,
    }
    made = folder / torch / "opacus_memprof-0.1.0-cp311-cp311-linux_x86_64.whl"
    made.parent.mkdir()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return made


def test_wheels_of_several_torches_become_one(tmp_path: Path) -> None:
    built = [wheel(tmp_path, "2.14.0+cu130", "13.0"), wheel(tmp_path, "2.15.0", None)]
    with zipfile.ZipFile(wheels.merge(built, tmp_path / "out")) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    record = files.pop("opacus_memprof-0.1.0.dist-info/RECORD").splitlines()
    assert files.pop("opacus_memprof/__init__.py") == "import this"
    assert files.pop("opacus_memprof/_C.pyi") == "types"
    assert files.pop("opacus_memprof/_core.cpython-311-x86_64-linux-gnu.so") == "_core beside 2.14.0+cu130"
    assert files.pop("opacus_memprof-0.1.0.dist-info/WHEEL")
    for build, torch in (("torch2.14-cu13-01234567", "2.14.0+cu130"), ("torch2.15-cpu-01234567", "2.15.0")):
        folder = f"opacus_memprof/builds/{build}"
        assert f"TORCH_VERSION = '{torch}'" in files.pop(f"{folder}/_build_info.py")
        assert files.pop(f"{folder}/_C.cpython-311-x86_64-linux-gnu.so") == f"_C of {torch}"
        assert files.pop(f"{folder}/_clipping.cpython-311-x86_64-linux-gnu.so") == f"_clipping of {torch}"
        assert files.pop(f"{folder}/virtual_gpu/lib/libcuda.so.1") == f"CUDA of {torch}"
    assert not files
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"import this").digest()).decode().rstrip("=")
    assert f"opacus_memprof/__init__.py,sha256={digest},11" in record
    assert record[-1] == "opacus_memprof-0.1.0.dist-info/RECORD,,"
    assert len(record) == 13


@pytest.mark.parametrize(
    ("torch", "cuda", "other", "message"),
    [
        ("2.14.1+cu132", "13.2", {}, "is of a torch that another one is of, too: torch2.14-cu13-01234567"),
        ("2.15.0+cu132", "13.2", {"opacus_memprof/__init__.py": "import that"}, r"__init__\.py of .* is not that of"),
        (
            "2.15.0+cu132",
            "13.2",
            {"opacus_memprof-0.1.0.dist-info/WHEEL": "Tag: other\n"},
            "WHEEL of .* is not that of",
        ),
    ],
)
def test_wheels_that_cannot_be_one(torch: str, cuda: str, other: dict[str, str], message: str, tmp_path: Path) -> None:
    built = [wheel(tmp_path, "2.14.0+cu130", "13.0"), wheel(tmp_path, torch, cuda, **other)]
    with pytest.raises(SystemExit, match=message):
        wheels.merge(built, tmp_path / "out")
