# SPDX-License-Identifier: Apache-2.0
"""Builds the extension modules of opacus_memprof.

_core reads profiles and does not use torch; _C records them and _clipping belongs to flash_clip, both built against the
torch that is importable here. The metadata is in pyproject.toml.

Environment: OPACUS_MEMPROF_READER=1 (_core alone, which needs no torch), OPACUS_MEMPROF_CUDA=auto|0|1 (1 fails where
CUDA cannot be built), CUDA_HOME, NLOHMANN_JSON_INCLUDE (a folder that holds nlohmann/json.hpp), MAX_JOBS (compilers at
once, 2 by default).
"""

import copy
import importlib.util
import os
import platform
import re
import runpy
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pybind11
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

READER = os.environ.get("OPACUS_MEMPROF_READER", "0")
if READER not in ("0", "1"):
    raise SystemExit(f"OPACUS_MEMPROF_READER is {READER!r}; it can be 0 or 1")
if READER == "0":
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(
            f"opacus-memprof is built against the torch it will run with, and there is none ({error}): install torch "
            "first, or set OPACUS_MEMPROF_READER=1 for the part that reads profiles, which needs none"
        ) from None

# Virtuals of c10::cuda::CUDACachingAllocator::CUDAAllocator that come and go with torch's minors. The ones that the
# installed header declares are compiled in, as OPACUS_MEMPROF_HAS_<name>.
OPTIONAL_VIRTUALS = [
    "allocateWithAddress",
    "annotateMemory",
    "attachOomRejectionObserver",
    "getContextForPointer",
    "markCaptureBegin",
    "markCaptureEnd",
    "supportsUserMetadata",
]

# Each call through a procedure linkage table touches a page of its own, which the hot path finds evicted.
FLAGS = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-fno-plt", "-Wall", "-Wextra", "-Werror"]


class Cuda(NamedTuple):
    """CUDA's headers and runtime library, from one place. No nvcc is needed: there is no device code."""

    include: list[Path]
    libcudart: Path


def package_folders(name: str) -> list[Path]:
    """The folders of an installed package, without importing it; empty where it is not installed."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]


def cuda_at(include: list[Path], libraries: list[Path], major: str) -> Cuda | None:
    """CUDA from these folders, if they hold the headers and the runtime library of this major version."""
    header = next((folder / "cuda.h" for folder in include if (folder / "cuda.h").is_file()), None)
    complete = any((folder / "crt" / "host_defines.h").is_file() for folder in include)
    library = next((found for folder in libraries for found in folder.glob(f"libcudart.so.{major}")), None)
    if header is None or library is None or not complete:
        return None
    version = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return Cuda(include, library) if version and int(version[1]) // 1000 == int(major) else None


def find_cuda() -> Cuda | str:
    """CUDA as torch was built with, or why there is none. Torch's own wheels bring it; a toolkit serves as well."""
    if not torch.version.cuda:
        return f"torch {torch.__version__} is a build without CUDA"
    major = torch.version.cuda.split(".")[0]
    wheels = package_folders("nvidia")  # of the environment and, under isolation, of the build
    places = [
        (
            [path for folder in wheels for path in sorted(folder.glob("*/include"))],
            [path for folder in wheels for path in sorted(folder.glob("*/lib"))],
        )
    ]
    for home in filter(None, [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]):
        places.append(([Path(home, "include")], [Path(home, "lib64"), Path(home, "lib")]))
    for include, libraries in places:
        if cuda := cuda_at(include, libraries, major):
            return cuda
    minor = ".".join(torch.version.cuda.split(".")[:2])
    return (
        f"no complete headers with libcudart.so of CUDA {major} beside torch, in $CUDA_HOME or in /usr/local/cuda "
        f"(`pip install nvidia-cuda-crt=={minor}.*` completes those of torch's wheels)"
    )


def choose_cuda() -> Cuda | None:
    """What OPACUS_MEMPROF_CUDA asks for."""
    wanted = os.environ.get("OPACUS_MEMPROF_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"OPACUS_MEMPROF_CUDA is {wanted!r}; it can be auto, 0 or 1")
    cuda = "OPACUS_MEMPROF_CUDA is 0" if wanted == "0" else find_cuda()
    if isinstance(cuda, Cuda):
        return cuda
    if wanted == "1":
        raise SystemExit(f"OPACUS_MEMPROF_CUDA is 1, but CUDA cannot be built: {cuda}")
    print(f"opacus-memprof: building the CPU part only: {cuda}")
    return None


def json_include() -> Path:
    """Where nlohmann/json.hpp is."""
    places = [Path(os.environ["NLOHMANN_JSON_INCLUDE"])] if "NLOHMANN_JSON_INCLUDE" in os.environ else []
    places += [folder / "include" for folder in package_folders("nlohmann_json")]
    places += [Path("/usr/local/include"), Path("/usr/include")]
    for place in places:
        if (place / "nlohmann" / "json.hpp").is_file():
            return place
    raise SystemExit(
        "nlohmann/json.hpp is not found: `pip install nlohmann-json`, install the system's nlohmann-json3-dev, "
        "or name its folder in NLOHMANN_JSON_INCLUDE"
    )


def torch_has(torch_include: Path) -> list[tuple[str, str]]:
    """A macro for each of OPTIONAL_VIRTUALS, and for what else comes and goes, that the installed headers declare."""
    header = (torch_include / "c10" / "cuda" / "CUDACachingAllocator.h").read_text()
    declared = [name for name in OPTIONAL_VIRTUALS if re.search(rf"virtual\b[^;{{}}]*?\b{name}\(", header)]
    # Whether ATen keeps cuBLAS' workspaces in maps that can be read.
    context = (torch_include / "ATen" / "cuda" / "CUDAContextLight.h").read_text()
    if "struct WorkspaceMapWithMutex" in context:
        declared.append("WorkspaceMapWithMutex")
    return [(f"OPACUS_MEMPROF_HAS_{name}", "1") for name in declared]


# What reads event files. Nothing of it is in _C, which has the rest of csrc/core.
CORE_SOURCES = ["event_reader", "event_rows", "follower", "replay", "replay_survey", "torch_snapshot"]
CORE = ["csrc/bindings/core_module.cpp", *(f"csrc/core/{name}.cpp" for name in CORE_SOURCES)]


def core_extension() -> Extension:
    return Extension(
        "opacus_memprof._core",
        CORE,
        extra_compile_args=[*FLAGS, f"-isystem{pybind11.get_include()}"],
        include_dirs=[str(Path("csrc").resolve())],
        language="c++",
    )


def sources(with_cuda: bool) -> list[str]:
    """Of _C. Files named cuda_* need CUDA's headers; cuda_stub.cpp stands in for them where there are none."""
    parts = ("core", "allocators", "hooks", "bindings")
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
        sorted(str(path) for path in Path("csrc/clipping").glob("*.cpp")),
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


def write_build_info(package: Path, version: str, info: dict[str, Any]) -> None:
    """_build_info.py beside the extensions: what they were built for, which _native.py checks before it loads _C."""
    compiler = subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True)
    info = {
        "VERSION": version,
        **info,
        "PYTHON": platform.python_version(),
        "COMPILER": compiler.stdout.partition("\n")[0],
    }
    lines = ["# Written by setup.py: what the extensions beside this file were built for.\n"]
    lines += [f"{name} = {value!r}\n" for name, value in info.items()]
    (package / "_build_info.py").write_text("".join(lines))


def package_of(command: Any) -> Path:
    """The folder that a build_ext command puts the extensions into."""
    return Path(command.get_ext_fullpath("opacus_memprof._core")).parent


class BuildReader(build_ext):
    """Builds _core alone."""

    def run(self) -> None:
        super().run()
        nothing = {"TORCH_VERSION": None, "TORCH_CUDA": None, "HAS_CUDA": False}
        write_build_info(package_of(self), self.distribution.get_version(), nothing)


REQUIRES = ["msgspec>=0.18", "numpy", "rich", "typer>=0.19"]  # typer: choices from Literal
VERSIONS = runpy.run_path(str(Path(__file__).parent / "opacus_memprof" / "profiles" / "versions.py"))
REQUIRES_TO_RECORD = [f"opacus>={VERSIONS['LOWEST_OPACUS']}"]

os.environ.setdefault("MAX_JOBS", "2")
if READER == "1":
    setup(
        ext_modules=[core_extension()],
        cmdclass={"build_ext": BuildReader},
        install_requires=REQUIRES,
        options={"build": {"build_base": "build/reader"}},
    )
    raise SystemExit


class BuildExtension(cpp_extension.BuildExtension):
    """Compiles what is heavy together, and builds the virtual GPU's libraries as well."""

    def run(self) -> None:
        self.build_temp = f"{BUILD}/objects"  # an editable install would compile everything anew in a temporary folder
        self.extensions = [joined(extension) for extension in self.extensions]
        super().run()
        if CUDA is not None:
            build_virtual_gpu(package_of(self), CUDA)
        info = {"TORCH_VERSION": str(torch.__version__), "TORCH_CUDA": torch.version.cuda, "HAS_CUDA": CUDA is not None}
        write_build_info(package_of(self), self.distribution.get_version(), info)


CUDA = choose_cuda()
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])
# Objects of another torch, or of a build without CUDA, must not be taken for this one's.
BUILD = f"build/torch-{torch.__version__}-{'cuda' if CUDA else 'cpu'}"

setup(
    ext_modules=[
        core_extension(),
        clipping_extension(),
        extension(CUDA),
        *([values_extension(CUDA)] if CUDA else []),
    ],
    cmdclass={"build_ext": BuildExtension, "test_flags": TestFlags},
    install_requires=[f"torch=={TORCH_MINOR}.*", *REQUIRES, *REQUIRES_TO_RECORD],
    options={"build": {"build_base": BUILD}},
)
