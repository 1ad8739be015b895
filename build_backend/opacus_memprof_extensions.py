# SPDX-License-Identifier: Apache-2.0
"""The extension modules that are built against the torch that is importable here.

_C records profiles, _clipping belongs to flash_clip and _virtual to the virtual GPU, whose libraries are built as well.
"""

import copy
import importlib.util
import os
import runpy
import sysconfig
from pathlib import Path
from typing import ClassVar

import torch
from opacus_memprof_core import CORE, FLAGS, core_extension, package_of, write_build_info
from opacus_memprof_finding import Cuda, choose_cuda, json_include, package_folders, torch_has
from setuptools import Command, Extension
from torch.utils import cpp_extension

CUDA = choose_cuda(torch.__version__, torch.version.cuda)
# Objects of another torch, or of a build without CUDA, must not be taken for this one's.
BUILD = f"build/torch-{torch.__version__}-{'cuda' if CUDA else 'cpu'}"


def sources(with_cuda: bool) -> list[str]:
    """Of _C. Files named cuda_* need CUDA's headers; cuda_stub.cpp stands in for them where there are none."""
    parts = ("python", "core", "allocators", "hooks", "bindings")
    found = sorted(path for part in parts for path in Path("csrc", part).glob("*.cpp"))
    return [
        str(path)
        for path in found
        if str(path) not in CORE and (not path.name.startswith("cuda_") or (path.name == "cuda_stub.cpp") != with_cuda)
    ]


def extension(cuda: Cuda | None) -> Extension:
    # pybind11 is torch's own copy (torch/include/pybind11), not PyPI's: allocator() hands out an object of a type
    # that torch._C registered, and pybind11 shares types only between modules with the same internals version.
    torch_includes = [Path(folder) for folder in cpp_extension.include_paths()]
    headers = [*torch_includes, json_include(), Path(sysconfig.get_path("include")), *(cuda.include if cuda else [])]
    return cpp_extension.CppExtension(
        "opacus_memprof._C",
        sources(with_cuda=cuda is not None),
        # System headers: their warnings are ignored.
        extra_compile_args=[*FLAGS, *(f"-isystem{folder}" for folder in headers)],
        define_macros=torch_has(torch_includes[0]) if cuda else [],
        include_dirs=[str(Path("csrc").resolve())],
        libraries=["c10_cuda", "torch_cuda"] if cuda else [],
        extra_link_args=[f"-L{cuda.libcudart.parent}", f"-l:{cuda.libcudart.name}"] if cuda else [],
    )


class TestFlags(Command):
    """Prints what tests/cpp compiles and links the CUDA allocator with, a flag a line; fails where there is no CUDA."""

    description = "print the flags of the CUDA allocator's C++ tests"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        if CUDA is None:
            raise SystemExit("this torch, or its surroundings, cannot build for CUDA")
        torch_includes = [Path(folder) for folder in cpp_extension.include_paths()]
        libraries = Path(torch.__file__).parent / "lib"
        # Without libtorch_cuda, whose loading would take longer than the tests: what reads its workspaces is left out.
        macros = [(name, value) for name, value in torch_has(torch_includes[0]) if "Workspace" not in name]
        flags = [*(f"-isystem{folder}" for folder in [*torch_includes, *CUDA.include])]
        flags += [f"-D{name}={value}" for name, value in macros]
        flags += [f"-L{libraries}", "-lc10", "-lc10_cuda", f"-Wl,-rpath,{libraries}"]
        flags += [f"-L{CUDA.libcudart.parent}", f"-Wl,-rpath,{CUDA.libcudart.parent}", f"-l:{CUDA.libcudart.name}"]
        print(*flags, sep="\n")


# Files that include torch's Python headers or pybind11 take 6 to 14 seconds each, nearly all of them for these.
HEAVY = (
    "csrc/allocators/tensor.cpp",
    "csrc/allocators/backward_position.cpp",
    "csrc/clipping/",
    "csrc/hooks/",
    "csrc/python/",
    "csrc/bindings/",
    "csrc/virtual_values/",
)


def joined(extension: Extension) -> Extension:
    """The same extension, whose heavy sources are one file that includes them."""
    heavy = [source for source in extension.sources if source.startswith(HEAVY)]
    file = Path(BUILD, f"{extension.name}.cpp")
    text = "".join(f'#include "{Path(source).relative_to("csrc")}"\n' for source in heavy)
    if not file.is_file() or file.read_text() != text:  # else nothing is compiled anew
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    same = copy.copy(extension)
    same.sources = [str(file), *(source for source in extension.sources if source not in heavy)]
    return same


def clipping_extension() -> Extension:
    """What flash_clip does for each layer. Needs torch alone. Loops over numbers gain by vector instructions (-O3)."""
    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    return cpp_extension.CppExtension(
        "opacus_memprof._clipping",
        sorted(str(path) for part in ("clipping", "python") for path in Path("csrc", part).glob("*.cpp")),
        extra_compile_args=[*FLAGS, "-O3", *(f"-isystem{folder}" for folder in headers)],
        include_dirs=[str(Path("csrc").resolve())],
    )


def values_extension(cuda: Cuda) -> Extension:
    """Executes operations on the virtual GPU's tensors."""
    headers = [Path(folder) for folder in cpp_extension.include_paths()]
    headers += [Path(sysconfig.get_path("include")), *cuda.include]
    return cpp_extension.CppExtension(
        "opacus_memprof._virtual",
        sorted(str(path) for path in Path("csrc/virtual_values").glob("*.cpp")),
        extra_compile_args=[*FLAGS, *(f"-isystem{folder}" for folder in headers)],
        include_dirs=[str(Path("csrc").resolve())],
        libraries=["c10_cuda", "torch_cuda"],
    )


def build_virtual_gpu(package: Path, cuda: Cuda) -> None:
    """Builds the virtual GPU's libraries into the package. Needs nm and the headers of cuDNN and NCCL."""
    spec = importlib.util.spec_from_file_location("virtual_gpu_build", "csrc/virtual_gpu/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wheels = [path for folder in package_folders("nvidia") for path in sorted(folder.glob("*"))]
    module.build(
        package / "virtual_gpu" / "lib",
        Path(BUILD, "virtual_gpu").resolve(),
        Path(torch.__file__).parent / "lib",
        [*cuda.include, *(path / "include" for path in wheels)],
        [path / "lib" for path in wheels],
        jobs=int(os.environ["MAX_JOBS"]),
    )


def all_extensions() -> list[Extension]:
    """Everything that can be built here."""
    found = [core_extension(), clipping_extension(), extension(CUDA)]
    return [*found, values_extension(CUDA)] if CUDA else found


class BuildExtension(cpp_extension.BuildExtension):
    """Compiles what is heavy together, and builds the virtual GPU's libraries as well."""

    def run(self) -> None:
        self.build_temp = f"{BUILD}/objects"  # an editable install would compile everything anew in a temporary folder
        self.extensions = [joined(extension) for extension in self.extensions]
        super().run()
        if CUDA is not None:
            build_virtual_gpu(package_of(self), CUDA)
        versions = runpy.run_path("opacus_memprof/versions.py")
        info = {
            "TORCH_VERSION": str(torch.__version__),
            "TORCH_CUDA": torch.version.cuda,
            "ALLOCATOR_HEADERS": versions["hash_allocator_headers"](Path(torch.__file__).parent),
            "HAS_CUDA": CUDA is not None,
        }
        write_build_info(package_of(self), self.distribution.get_version(), info)
