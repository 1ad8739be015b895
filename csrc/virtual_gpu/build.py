# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries of the virtual GPU for the torch that is installed: libcuda.so.1 and libnvidia-ml.so.1.

The first holds the driver, the runtime, cuBLAS, cuDNN and NCCL, and for every other symbol of CUDA's libraries that torch
imports or that they export a function that answers 0 and counts its calls. setup.py calls `build`; by hand:

    python csrc/virtual_gpu/build.py OUT
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=default", "-Wall", "-Wextra", "-Werror"]
# The libraries whose symbols are answered here, by how the names of their functions begin. NVRTC is not among them: it
# compiles without a GPU.
_OURS = re.compile(r"(?:__cuda|cuda|cublas|cudnn|cusparse|cusolver|curand|cufft|nccl|cupti|nvshmemx?_init)\w*")
_LIBRARIES = ("cudart", "cublas", "cublasLt", "cudnn", "cusparse", "cusparseLt", "cusolver", "curand", "cufft", "nccl", "cupti")
_IMPORTERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_cpu.so", "libtorch_python.so")


def symbols(library: Path, *, defined: bool) -> set[str]:
    """The dynamic symbols that a library defines or, if not `defined`, imports, without their versions."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only" if defined else "--undefined-only", library],
        check=True, capture_output=True, text=True,
    )
    names = (line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if line.strip())
    return {name for name in names if _OURS.fullmatch(name)}


def driver_functions(cuda_header: Path) -> set[str]:
    """The functions that cuda.h declares, in the version that a program gets which is compiled with it."""
    text = cuda_header.read_text(errors="replace")
    declared = set(re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    renamed = dict(re.findall(r"#define\s+(cu[A-Z]\w*)\s+(\1_v\d+)\s*$", text, re.MULTILINE))
    return {renamed.get(name, name) for name in declared}


def _compile(source: Path, target: Path, include: Iterable[Path], generated: Path) -> None:
    headers = [f"-isystem{folder}" for folder in include]
    subprocess.run(
        ["g++", *FLAGS, f"-I{HERE.parent}", f"-I{generated}", *headers, "-c", source, "-o", target], check=True
    )


def build(out: Path, temporary: Path, torch_lib: Path, include: list[Path], libraries: list[Path], jobs: int = 2) -> None:
    """Writes the two libraries into `out`, and beside them what they were built for, which is compared at their start.

    Args:
        temporary: where objects and the generated list go.
        torch_lib: the folder with libtorch_cuda.so.
        include: folders with the headers of the CUDA that this torch was built for, cuDNN's and NCCL's among them.
        libraries: folders with CUDA's own libraries, of which only the names of their symbols are read.
        jobs: compilers at once.
    """
    out.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(parents=True, exist_ok=True)
    sources = sorted(HERE.glob("*.cpp"))
    main = [source for source in sources if source.name not in ("nvml.cpp", "defaults.cpp")]

    def compile_one(source: Path) -> Path:
        target = temporary / f"{source.stem}.o"
        _compile(source, target, include, temporary)
        return target

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, main))
        nvml = pool.submit(compile_one, HERE / "nvml.cpp")
        ours: set[str] = set()
        for compiled in objects:
            listed = subprocess.run(["nm", "--defined-only", compiled], check=True, capture_output=True, text=True)
            ours |= {line.split()[-1] for line in listed.stdout.splitlines()}
        wanted: set[str] = set()
        for name in _IMPORTERS:
            if (torch_lib / name).is_file():
                wanted |= symbols(torch_lib / name, defined=False)
        for folder in libraries:
            for stem in _LIBRARIES:
                for library in folder.glob(f"lib{stem}.so.*"):
                    wanted |= symbols(library, defined=True)
        header = next(folder / "cuda.h" for folder in include if (folder / "cuda.h").is_file())
        wanted |= driver_functions(header)
        missing = sorted(wanted - ours)
        text = "".join(f"DEFAULT({name})\n" for name in missing)
        listing = temporary / "defaults.inc"
        if not listing.is_file() or listing.read_text() != text:
            listing.write_text(text)
        objects.append(compile_one(HERE / "defaults.cpp"))
        nvml_object = nvml.result()
    _link(objects, out / "libcuda.so.1", "libcuda.so.1")
    _link([nvml_object], out / "libnvidia-ml.so.1", "libnvidia-ml.so.1")
    (out / "built_for.json").write_text(json.dumps(_built_for(torch_lib.parent, header)) + "\n")


def _built_for(torch: Path, cuda_header: Path) -> dict[str, str]:
    """The versions of torch and of CUDA's headers."""
    version = re.search(r"^__version__ = '([^']+)'", (torch / "version.py").read_text(), re.MULTILINE)
    cuda = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", cuda_header.read_text(errors="replace"))
    assert version is not None
    assert cuda is not None
    return {"torch": version[1], "cuda": f"{int(cuda[1]) // 1000}.{int(cuda[1]) % 1000 // 10}"}


def _link(objects: list[Path], target: Path, soname: str) -> None:
    made = target.with_suffix(".new")  # a process that has the old one loaded keeps it
    subprocess.run(
        ["g++", "-shared", f"-Wl,-soname,{soname}", f"-Wl,--version-script={HERE / 'exports.map'}",
         *map(str, objects), "-o", str(made), "-ldl", "-lpthread"],
        check=True,
    )  # fmt: skip
    made.replace(target)


if __name__ == "__main__":
    import importlib.util

    def folders(package: str) -> list[Path]:
        spec = importlib.util.find_spec(package)
        return [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]

    wheels = [path for folder in folders("nvidia") for path in sorted(folder.glob("*"))]
    build(
        Path(sys.argv[1]),
        Path(sys.argv[1]) / "build",
        folders("torch")[0] / "lib",
        [path / "include" for path in wheels if (path / "include").is_dir()],
        [path / "lib" for path in wheels if (path / "lib").is_dir()],
    )
