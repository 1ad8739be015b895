# SPDX-License-Identifier: Apache-2.0
"""What a virtual GPU refuses, each in one sentence, before anything is loaded into the process."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from opacus_memprof import cli, virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.virtual_gpu import process, requirements
from opacus_memprof.virtual_gpu.devices import GPUS

ROOT = Path(__file__).parents[2]


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `opacus-memprof run` says of these options. It exits with 2 and writes no profile."""
    monkeypatch.setattr(sys, "argv", ["opacus-memprof", "run", *arguments, __file__])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("opacus-memprof: ")
    assert printed.count("\n") == 1
    return printed


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (("--virtual-gpu", "h2000"), f'there is no virtual GPU "h2000": use one of {", ".join(GPUS)}'),
        (("--virtual-memory", "1GiB"), "--virtual-memory is for a virtual GPU: add --virtual-gpu KIND"),
        (("--virtual-gpus", "2"), "--virtual-gpus is for a virtual GPU: add --virtual-gpu KIND"),
        (("--virtual-gpu", "h200", "--virtual-memory", "24 gigs"), "'24 gigs' is not a size: write bytes"),
        (("--virtual-gpu", "h200", "--virtual-memory", "0"), "a virtual GPU cannot have 0 B: give at least"),
        (("--virtual-gpu", "h200", "--virtual-memory", "9000TiB"), "a virtual GPU cannot have 9000.00 TiB: give"),
        (
            ("--virtual-gpu", "h200", "--virtual-gpus", "0"),
            "a process cannot have 0 virtual GPUs: give a number from 1",
        ),
        (("--virtual-gpu", "h200", "--virtual-gpus", "999"), "a process cannot have 999 virtual GPUs"),
        (("--virtual-gpu", "h200"), "torch is imported already"),  # by this test's process
    ],
)
def test_options_that_make_no_sense(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    options: tuple[str, ...],
    printed: str,
) -> None:
    monkeypatch.setattr(process, "_active", None)
    assert printed in refusal(monkeypatch, capsys, "-o", str(tmp_path / "out"), *options)
    assert not (tmp_path / "out").exists()


def test_a_launcher_that_says_no_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert "LOCAL_WORLD_SIZE is 'many'" in refusal(monkeypatch, capsys, "--virtual-gpu", "h200")


def test_one_inside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_active", process.VirtualGpu("h200", GPUS["h200"], 2))
    with pytest.raises(
        MemprofError, match=r"has virtual GPUs already \(2 of h200\), and one cannot run inside another"
    ):
        virtual_gpu.start("h200")


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is found as the installed torch, with CUDA 13, and libraries that were built for it."""
    libraries = tmp_path / "libraries"
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libc10_cuda.so").write_bytes(b"\0ELF\0libcudart.so.13\0")
    libraries.mkdir()
    (libraries / "libcuda.so.1").touch()
    (libraries / "built_for.json").write_text(json.dumps({"torch": "2.15.0", "cuda": "13.2"}))
    monkeypatch.setattr(requirements, "LIBRARIES", libraries)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: {"torch": spec}[name])
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def why() -> str:
    with pytest.raises(MemprofError) as caught:
        requirements.check_machine()
    return str(caught.value)


def test_a_machine_that_has_all(torch_of: Path) -> None:
    requirements.check_machine()
    (torch_of / "torch" / "lib" / "libc10_cuda.so").write_bytes(b"\0libcudart-9335f6a2.so.13\0")  # a wheel's own copy
    requirements.check_machine()


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_other_systems(torch_of: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert f"and this is {platform}: use Linux" in why()


def test_no_torch(torch_of: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "torch, which is not installed: the wheel of `pip install torch` from PyPI" in why()


def test_a_torch_without_cuda(torch_of: Path) -> None:
    (torch_of / "torch" / "lib" / "libc10_cuda.so").unlink()
    assert "a build without CUDA" in why()
    assert "`pip install torch` from PyPI for Linux has CUDA" in why()


def test_a_torch_with_cuda_linked_into_it(torch_of: Path) -> None:
    (torch_of / "torch" / "lib" / "libc10_cuda.so").write_bytes(b"\0ELF\0cudaMalloc\0")
    assert "has CUDA's runtime linked into it" in why()


def test_libraries_that_were_not_built(torch_of: Path) -> None:
    (torch_of / "libraries" / "libcuda.so.1").unlink()
    assert "have not been built: install opacus-memprof again" in why()


def test_libraries_of_another_cuda(torch_of: Path) -> None:
    (torch_of / "torch" / "lib" / "libc10_cuda.so").write_bytes(b"\0libcudart.so.12\0")
    assert "was built for torch 2.15.0 with CUDA 13.2, and this torch uses CUDA 12: install" in why()
