# SPDX-License-Identifier: Apache-2.0
"""`doctor` on machines that are made up: each thing that can be wrong is said, with what to do about it."""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from opacus_memprof.cli.profile import doctor
from opacus_memprof.language import in_language, tr_sentence
from opacus_memprof.running.environment import Check, examine
from opacus_memprof.versions import LOWEST_OPACUS, TORCH_MINORS
from opacus_memprof.virtual_gpu import requirements
from opacus_memprof.virtual_gpu.devices import GPUS

GIB = 2**30


def module(name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


def fake_torch(version: str = "2.15.0+cu132", cuda: str | None = "13.2", gpus: int = 0) -> ModuleType:
    device = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB)
    return module(
        "torch",
        __version__=version,
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(device_count=lambda: gpus, get_device_properties=lambda index: device),
    )


class Machine:
    """What `doctor` finds when it looks: modules to import, installed distributions, the driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        self.modules: dict[str, ModuleType | Exception] = {
            "torch": fake_torch(gpus=1),
            "opacus_memprof._build_info": module(
                "_build_info",
                TORCH_VERSION="2.15.0+cu132",
                TORCH_CUDA="13.2",
                HAS_CUDA=True,
                PYTHON="3.11.7",
                COMPILER="g++ 12",
            ),
            "opacus_memprof.recording.native": module("native", HAS_CUDA=True, cuda_current_name=lambda: "native"),
        }
        self.versions = {"opacus": "1.6.0", "opacus-memprof": "0.1.0"}
        self.driver: int | None = 13020
        self.virtual_gpu_fails: tuple[str, bool] | None = None
        monkeypatch.setattr(importlib, "import_module", self._import)
        monkeypatch.setattr(importlib.metadata, "version", self._version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: "a spec" if name in self.versions else None)
        monkeypatch.setattr(ctypes, "CDLL", self._load)
        monkeypatch.setattr(requirements, "find_failure", lambda: self.virtual_gpu_fails)
        for variable in ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.chdir(directory)

    def _import(self, name: str) -> ModuleType:
        found = self.modules[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _version(self, name: str) -> str:
        if name not in self.versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.versions[name]

    def _load(self, name: str) -> Any:
        assert name == "libcuda.so.1"
        if self.driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        driver = self.driver

        def get_version(reference: Any) -> int:
            reference._obj.value = driver
            return 0

        return SimpleNamespace(cuDriverGetVersion=get_version)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def check_of(name: str) -> Check:
    (check,) = [check for check in examine() if check.name == name]
    return check


def problems() -> list[str]:
    return [check.name for check in examine() if check.level == "problem"]


def test_a_machine_in_order(machine: Machine, tmp_path: Path) -> None:
    assert {check.name: check.found for check in examine()} == {
        "Python": platform.python_version(),
        "torch": "2.15.0+cu132, built for CUDA 13.2",
        "CUDA driver": "for CUDA 13.2",
        "cuda:0": "NVIDIA H200, 140.00 GiB",
        "Opacus": "1.6.0",
        "opacus-memprof": "0.1.0; built for torch 2.15.0+cu132, CUDA 13.2, Python 3.11.7 (g++ 12)",
        "extension": "loads, with CUDA",
        "CUDA allocator": "native",
        "virtual GPU": f"works here (`opacus-memprof run --virtual-gpu KIND`): {', '.join(GPUS)}",
        "directory": f"{tmp_path} can be written",
    }
    assert {check.level for check in examine()} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_no_torch(machine: Machine) -> None:
    machine.modules["torch"] = ImportError("No module named 'torch'")
    assert problems() == ["torch"]
    assert check_of("torch").found == "No module named 'torch'"
    assert "pip install torch" in check_of("torch").remedy


def test_a_broken_torch_does_not_break_the_doctor(machine: Machine) -> None:
    machine.modules["torch"] = OSError("libcudart.so.13: cannot open shared object file\nand more")
    assert check_of("torch").found == "libcudart.so.13: cannot open shared object file"
    assert problems() == ["torch"]


def test_an_extension_that_cannot_be_used_is_explained(machine: Machine) -> None:
    machine.modules["opacus_memprof.recording.native"] = ImportError("built for torch 2.11.0: run `pip install`")
    assert problems() == ["extension"]
    assert check_of("extension").remedy == "built for torch 2.11.0: run `pip install`"


def test_an_extension_that_was_never_built(machine: Machine) -> None:
    machine.modules["opacus_memprof._build_info"] = ImportError("none")
    machine.modules["opacus_memprof.recording.native"] = ImportError("not built: run `pip install`")
    del machine.versions["opacus-memprof"]
    assert (
        check_of("opacus-memprof").found
        == "not installed, run from its source tree; opacus-memprof's extension has not been built"
    )
    assert problems() == ["extension"]


@pytest.mark.parametrize(("version", "level"), [("1.5.4", "problem"), ("1.6", "ok"), ("1.10.0", "ok"), ("2.0", "ok")])
def test_versions_of_opacus(machine: Machine, version: str, level: str) -> None:
    machine.versions["opacus"] = version
    assert check_of("Opacus").level == level


@pytest.mark.parametrize(
    ("version", "level"), [("2.10.0", "note"), ("2.11.0+cpu", "ok"), ("2.15.1", "ok"), ("2.16.0", "note")]
)
def test_versions_of_torch(machine: Machine, version: str, level: str) -> None:
    machine.modules["torch"] = fake_torch(version)
    assert (check_of("torch").level, check_of("torch").remedy) == (
        level,
        "tried are 2.11 to 2.15" if level == "note" else "",
    )
    assert problems() == []


def test_docs_claim_what_is_tried() -> None:
    """The figures that `make matrix` runs, in the words of docs/install.md."""
    claimed = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    assert f"torch {TORCH_MINORS[0]} to {TORCH_MINORS[-1]}" in claimed
    assert f"Opacus {LOWEST_OPACUS}" in claimed


def test_no_opacus(machine: Machine) -> None:
    del machine.versions["opacus"]
    assert check_of("Opacus") == Check(
        "Opacus", "not installed", "note", 'only private training needs it: `pip install "opacus>=1.6"`'
    )


def test_no_driver_leaves_the_cpu(machine: Machine) -> None:
    machine.driver = None
    machine.modules["torch"] = fake_torch(gpus=0)
    assert check_of("CUDA driver").found == "none"
    assert check_of("GPUs").found == "torch finds none"
    assert problems() == []


@pytest.mark.parametrize(("driver", "level"), [(12080, "note"), (13000, "ok"), (14010, "ok")])
def test_a_driver_of_an_older_major_version_is_too_old(machine: Machine, driver: int, level: str) -> None:
    machine.driver = driver
    check = check_of("CUDA driver")
    assert check.level == level
    assert ("update the driver" in check.remedy) == (level == "note")


def test_hidden_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.modules["torch"] = fake_torch(gpus=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_of("GPUs").found == 'CUDA_VISIBLE_DEVICES="" leaves none'


def test_gpus_that_fail(machine: Machine) -> None:
    torch_ = fake_torch(gpus=1)

    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: device busy\nCUDA kernel errors might be …")

    torch_.cuda.get_device_properties = fail
    machine.modules["torch"] = torch_
    assert check_of("GPUs").found == "CUDA error: device busy"
    assert problems() == []


def test_torch_for_the_cpu_only(machine: Machine) -> None:
    machine.modules["torch"] = fake_torch("2.15.0+cpu", cuda=None)
    machine.modules["opacus_memprof.recording.native"] = module("native", HAS_CUDA=False)
    assert check_of("torch").found == "2.15.0+cpu, built for the CPU only"
    assert check_of("extension") == Check("extension", "loads; CPU only, as torch is")
    assert not [check for check in examine() if check.name in ("CUDA driver", "CUDA allocator", "GPUs")]


def test_built_without_cuda_for_a_torch_with_it(machine: Machine) -> None:
    machine.modules["opacus_memprof.recording.native"] = module("native", HAS_CUDA=False)
    check = check_of("extension")
    assert check.level == "note"
    assert "run `OPACUS_MEMPROF_CUDA=1 pip install --no-deps -e " in check.remedy


@pytest.mark.parametrize("name", ["cudaMallocAsync", "pluggable"])
def test_another_allocator(machine: Machine, name: str) -> None:
    machine.modules["opacus_memprof.recording.native"] = module("native", HAS_CUDA=True, cuda_current_name=lambda: name)
    check = check_of("CUDA allocator")
    assert name in check.found
    assert check.level == "note"
    assert check.remedy


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_of_the_allocator_are_shown(machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "backend:cudaMallocAsync")
    assert check_of(variable).found == "backend:cudaMallocAsync"


def test_no_caching(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert check_of("PYTORCH_NO_CUDA_MEMORY_CACHING").level == "note"


def test_a_virtual_gpu_that_cannot_be_is_explained(machine: Machine) -> None:
    machine.virtual_gpu_fails = "the libraries have not been built: install it again", True
    why = "does not work here: the libraries have not been built: install it again"
    assert check_of("virtual GPU") == Check("virtual GPU", why, "note")
    machine.virtual_gpu_fails = "a trial ended with exit code 1 (ImportError: no)", False
    assert check_of("virtual GPU").found.endswith("(ImportError: no)")
    assert "install opacus-memprof again" in check_of("virtual GPU").remedy
    assert problems() == []


@pytest.mark.parametrize(
    ("program", "failed"),
    [
        ("", None),
        ("print('it is not Linux: use one'); raise SystemExit(2)", ("it is not Linux: use one", True)),
        ("raise SystemExit(2)", ("a trial ended with exit code 2", False)),
        ("1 / 0", ("a trial ended with exit code 1 (ZeroDivisionError: division by zero)", False)),
        ("import os; os.abort()", ("a trial ended with exit code -6", False)),
    ],
)
def test_how_a_trial_ends(monkeypatch: pytest.MonkeyPatch, program: str, failed: tuple[str, bool] | None) -> None:
    monkeypatch.setattr(requirements, "_TRIAL", program)
    assert requirements.find_failure() == failed


def test_rmm(machine: Machine) -> None:
    machine.versions["rmm"] = "26.2.0"
    assert check_of("RMM").found == "26.2.0"
    assert "before the profile starts" in check_of("RMM").remedy


def test_a_directory_that_cannot_be_written(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    check = check_of("directory")
    assert check.found.endswith(": Read-only file system")
    assert "-o DIR" in check.remedy
    assert problems() == []


def test_what_is_printed_and_the_exit_code(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    doctor()
    assert capsys.readouterr().out.endswith("\nopacus-memprof can profile here.\n")

    command = "pip install --no-deps -e /" + "a/long/path/" * 20 + "[brackets]"
    machine.modules["opacus_memprof.recording.native"] = ImportError(f"run `{command}`")
    with pytest.raises(typer.Exit) as exit_:
        doctor()
    assert exit_.value.exit_code == 1
    out = capsys.readouterr().out
    assert f"→ run `{command}`\n" in out  # whole, to be copied
    assert out.endswith("opacus-memprof cannot profile here: 1 problem, see above.\n")


def test_this_machine(tmp_path: Path) -> None:
    """The printed versions are the ones that run the tests."""
    ran = subprocess.run(
        [sys.executable, "-m", "opacus_memprof", "doctor"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert platform.python_version() in ran.stdout
    assert str(torch.__version__) in ran.stdout
    assert f"{tmp_path} can be written" in ran.stdout
    if torch.version.cuda is not None and sys.platform == "linux":
        assert "virtual GPU     works here" in ran.stdout
    assert ran.stdout.endswith("opacus-memprof can profile here.\n")


def test_the_doctor_speaks_of_gpus_in_chinese() -> None:
    with in_language("zh"):
        said = [tr_sentence("GPUs"), tr_sentence('CUDA_VISIBLE_DEVICES="" leaves none')]
    assert said == ["GPU", 'CUDA_VISIBLE_DEVICES="" 没有留下任何 GPU']
