# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries of the virtual GPU for the torch that is installed: libcuda.so.1 and libnvidia-ml.so.1.

The first holds the driver, the runtime, cuBLAS, cuDNN and NCCL, and for every other symbol of CUDA's libraries that
torch imports or that they export a function that succeeds: it writes 0 where the caller expects a figure, gives out a
handle where it creates something, and counts its calls, unless it has no effect on memory. setup.py calls `build`; by
hand:

    python csrc/virtual_gpu/build.py OUT
"""

import ctypes
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
_LIBRARIES = (
    "cudart",
    "cublas",
    "cublasLt",
    "cudnn",
    "cusparse",
    "cusparseLt",
    "cusolver",
    "curand",
    "cufft",
    "nccl",
    "cupti",
)
# Old names of functions of the driver, by which cuDNN looks for them before it compiles a kernel.
_OLD_NAMES = {"cuCtxPopCurrent", "cuCtxPushCurrent", "cuLinkAddData", "cuLinkCreate"}
_LISTING = "libtorch_python.so"  # has the list of architectures as a text
_IMPORTERS = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_cpu.so", "libtorch_python.so")

# What neither takes nor gives memory and tells the caller nothing that memory depends on: it is not counted. What is
# left are sizes of workspaces, libraries' own handles (which take memory on a real GPU), and what nobody has met yet.
_NO_EFFECT = re.compile(
    r"__cuda(?:Register|Unregister|Init)\w*|cu\w*(?:Destroy|Synchronize|Unload|Prefetch|Advise)\w*"
    r"|cu(?!\w*Limit)[a-z]*\w*Set[A-Z]\w*|cu[a-z]+[A-Z]?\w*Create[A-Z]\w*|cufftCreate|cusparseLt\w*Init"
    r"|cuda(?:GraphLaunch|DeviceEnablePeerAccess|DeviceDisablePeerAccess|Profiler\w+|CtxResetPersistingL2Cache)"
    r"|cuProfiler\w+|cuLogs\w+|cuTensorMap\w+|cuCtx(?:Enable|Disable)PeerAccess"
    r"|cublas(?:[SDCZH][a-z]\w*|I?\w*Gemm\w*|\w+Ex(?:_64)?|LtMatmul|LtMatrixTransform)"
    r"|cusolver(?!\w*(?:bufferSize|Create|Get))(?:Dn|Sp)[SDCZX]\w+|cusolverDnIRS\w+"
    r"|cusparse(?!\w*(?:[bB]ufferSize|Create|Get|Compress|Init))\w+|cufft(?:Xt)?Exec\w*|curandGenerate\w*"
    r"|cudnn(?!\w*(?:Size|Get|Create))\w+|cupti(?!\w*(?:Profiler|PmSampling)).*"
)
# Of these the caller expects figures, or handles, through pointers.
_TELLS = re.compile(
    r"Get|Query|Nnz|[Ss]ize|Count|Create|Init|Plan|Estimate|Is[A-Z]|Can[A-Z]|Import|Export|Retain|alloc|Alloc"
    r"|(?:geqrf|gels|getrs)Batched"
)
_MAKES = re.compile(r"Create|Init|Import|Retain|Begin|Clone|Instantiate|Add\w*Node")
_SIZES = {
    **dict.fromkeys(("char", "bool"), 1),
    **dict.fromkeys(("int", "unsigned", "unsigned int", "int32_t", "uint32_t", "cuuint32_t", "CUdevice", "float"), 4),
    **dict.fromkeys(("size_t", "int64_t", "uint64_t", "cuuint64_t", "CUdeviceptr", "double"), 8),
    **dict.fromkeys(("unsigned long", "unsigned long long", "long long", "long long int"), 8),
}
_HEADERS = [
    *["cuda.h", "cudaProfiler.h", "cuda_runtime_api.h", "driver_types.h", "library_types.h"],
    *["cublas*.h", "cudnn*.h", "cusolver*.h", "cusparse*.h", "curand.h", "cufft*.h", "cupti*.h"],
]


class Headers:
    """What CUDA's headers declare: functions with their parameters, enums, handles, and the errors."""

    def __init__(self, include: list[Path]) -> None:
        files = [file for pattern in _HEADERS for folder in include for file in sorted(folder.glob(pattern))]
        text = "\n".join(file.read_text(errors="replace") for file in files)
        text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
        macro = (
            r"^\s*#\s*define\s+(cu[A-Z]\w*)\s+(?:__CUDA_API_PT(?:DS|SZ)\()?(\1_v\d+|cuGraphInstantiateWithFlags)\)?\s*$"
        )
        self.renamed = dict(re.findall(macro, text, re.MULTILINE))
        self.driver = {self.renamed.get(name, name) for name in re.findall(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(", text)}
        enums = set(re.findall(r"\benum\s+\w*\s*\{[^{}]*\}\s*(?:CUDNN_DEPRECATED\w*\s+)?(\w+)[^;{}]*;", text))
        enums |= set(re.findall(r"\benum\s+(?:__device_builtin__\s+)?(\w+)\s*\{", text))
        enums |= set(re.findall(r"\btypedef\s+(?:__device_builtin__\s+)?enum\s+\w+\s+(\w+)\s*;", text))
        self.handles = set(
            re.findall(
                r"\btypedef\s+(?:const\s+|__device_builtin__\s+)?(?:struct\s+\w+(?:\s+const)?|void)\s*\*\s*"
                r"(?:CUDNN_DEPRECATED\w*\s+)?(\w+)[^;{}()]*;",
                text,
            )
        )
        self.sizes = _SIZES | dict.fromkeys(enums, 4) | dict.fromkeys(self.handles, 8)
        for known, alias in re.findall(r"\btypedef\s+([\w ]+?)\s+(\w+)\s*;", text):
            self.sizes.setdefault(alias, self.sizes.get(known, 0))
        self.functions: dict[str, list[str]] = {}
        for name, parameters in re.findall(r"\b(cu\w+)\s*\(([^()]*)\)\s*;", text):
            name = self.renamed.get(name, name)
            self.functions.setdefault(name, [" ".join(part.split()) for part in parameters.split(",")])
        self.driver_errors = re.findall(r"\b(CUDA_(?:SUCCESS|ERROR_\w+))\s*=\s*(\d+)", text)
        status = re.search(r"\{([^{}]*)\}\s*cublasStatus_t\s*;", text)
        self.cublas_errors = re.findall(r"\b(CUBLAS_STATUS_\w+)\s*=", status[1]) if status else []

    def answer(self, name: str) -> str:
        """The default answer to a function, as a line of defaults.inc."""
        kind = "NO_EFFECT" if _NO_EFFECT.fullmatch(name) else "DEFAULT"
        declared, answers = [], []
        for index, parameter in enumerate(self.functions.get(name, []) if _TELLS.search(name) else []):
            found = re.fullmatch(r"(const )?(?:struct |enum )?([\w ]+?) ?(\**) ?(?:const )?(\w+)?(\[\w*\])?", parameter)
            if found is None or parameter == "void":
                return f"{kind}({name}, (), )\n"
            constant, of_type, stars, _, brackets = found.groups()
            size = self.sizes.get(of_type, 0)
            if not stars and not brackets and size == 0:
                return f"{kind}({name}, (), )\n"  # a struct, which may take several registers
            declared.append(of_type if of_type in ("float", "double") and not stars else "std::intptr_t")
            written = not constant and not brackets and ("Plan" not in name or of_type in self.handles | {"size_t"})
            if stars == "*" and written and size:
                declared[-1] += f" a{index}"
                made = of_type in self.handles and _MAKES.search(name)
                answers.append(f"give_handle(a{index});" if made else f"give_zero(a{index}, {size});")
        if not answers:
            return f"{kind}({name}, (), )\n"
        return f"{kind}({name}, ({', '.join(declared)}), {' '.join(answers)})\n"

    def versions(self) -> str:
        """versions.inc: which version of a driver's function a program gets that is compiled with these headers."""
        return "".join(f'VERSION("{name}", "{renamed}")\n' for name, renamed in sorted(self.renamed.items()))

    def errors(self, runtime: Path) -> str:
        """errors.inc: every error of the runtime, the driver and cuBLAS, in the words of the runtime library."""
        library = ctypes.CDLL(str(runtime))
        library.cudaGetErrorName.restype = library.cudaGetErrorString.restype = ctypes.c_char_p
        words = {code: (library.cudaGetErrorName(code), library.cudaGetErrorString(code)) for code in range(10000)}
        unknown = words[9999]
        text = "#ifdef RUNTIME_ERROR\n"
        for code, (name, description) in words.items():
            if (name, description) != unknown:
                text += f'RUNTIME_ERROR({code}, "{name.decode()}", "{description.decode()}")\n'
        text += "#endif\n#ifdef DRIVER_ERROR\n"
        for name, code in self.driver_errors:  # of one number in both
            text += f'DRIVER_ERROR({name}, "{words[int(code)][1].decode()}")\n'
        text += "#endif\n#ifdef CUBLAS_ERROR\n"
        text += "".join(f"CUBLAS_ERROR({name})\n" for name in self.cublas_errors)
        return text + "#endif\n"


def symbols(library: Path, *, defined: bool) -> set[str]:
    """The dynamic symbols that a library defines or, if not `defined`, imports, without their versions."""
    listed = subprocess.run(
        ["nm", "-D", "--defined-only" if defined else "--undefined-only", library],
        check=True,
        capture_output=True,
        text=True,
    )
    names = (line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines() if line.strip())
    return {name for name in names if _OURS.fullmatch(name)}


def _write(file: Path, text: str) -> None:
    """Leaves a file alone that holds this text already."""
    if not file.is_file() or file.read_text() != text:
        file.write_text(text)


def _compile(source: Path, target: Path, include: Iterable[Path], generated: Path) -> None:
    headers = [f"-isystem{folder}" for folder in include]
    subprocess.run(
        ["g++", *FLAGS, f"-I{HERE.parent}", f"-I{generated}", *headers, "-c", source, "-o", target], check=True
    )


def build(
    out: Path, temporary: Path, torch_lib: Path, include: list[Path], libraries: list[Path], jobs: int = 2
) -> None:
    """Builds the two libraries, and writes the versions that they were built for, which are compared when they start.

    Args:
        out: the folder for the libraries and the versions.
        temporary: where objects and the generated list go.
        torch_lib: the folder with libtorch_cuda.so.
        include: folders with the headers of the CUDA that this torch was built for, cuDNN's and NCCL's among them.
        libraries: folders with CUDA's own libraries, of which only the names of their symbols are read.
        jobs: compilers at once.
    """
    out.mkdir(parents=True, exist_ok=True)
    temporary.mkdir(parents=True, exist_ok=True)
    header = next(folder / "cuda.h" for folder in include if (folder / "cuda.h").is_file())
    headers = Headers(include)
    runtime = next(file for folder in libraries for file in sorted(folder.glob("libcudart.so.*")))
    _write(temporary / "errors.inc", headers.errors(runtime))
    _write(temporary / "versions.inc", headers.versions())
    nvml_source, defaults_source = HERE / "nvml" / "nvml.cpp", HERE / "defaults" / "defaults.cpp"
    main = sorted({*HERE.rglob("*.cpp")} - {nvml_source, defaults_source})

    def compile_one(source: Path) -> Path:
        target = temporary / f"{'_'.join(source.relative_to(HERE).with_suffix('').parts)}.o"
        _compile(source, target, include, temporary)
        return target

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile_one, main))
        nvml = pool.submit(compile_one, nvml_source)
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
        wanted |= headers.driver | _OLD_NAMES
        _write(temporary / "defaults.inc", "".join(headers.answer(name) for name in sorted(wanted - ours)))
        objects.append(compile_one(defaults_source))
        nvml_object = nvml.result()
    _link(objects, out / "libcuda.so.1", "libcuda.so.1")
    _link([nvml_object], out / "libnvidia-ml.so.1", "libnvidia-ml.so.1")
    (out / "built_for.json").write_text(json.dumps(_built_for(torch_lib.parent, header)) + "\n")


def _built_for(torch: Path, cuda_header: Path) -> dict[str, str | list[int]]:
    """Returns the versions of torch and of CUDA's headers, and the architectures that torch has machine code for.

    Architectures are numbers such as 90. They are those of torch.cuda.get_arch_list(), which the build cannot call.
    """
    version = re.search(r"^__version__ = '([^']+)'", (torch / "version.py").read_text(), re.MULTILINE)
    cuda = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", cuda_header.read_text(errors="replace"))
    assert version is not None
    assert cuda is not None
    listed = re.search(
        rb"\0((?:sm|compute)_\d+\w*(?: (?:sm|compute)_\d+\w*)*)\0", (torch / "lib" / _LISTING).read_bytes()
    )
    kernels = sorted({int(digits) for digits in re.findall(rb"sm_(\d+)", listed[1])}) if listed else []
    return {"torch": version[1], "cuda": f"{int(cuda[1]) // 1000}.{int(cuda[1]) % 1000 // 10}", "kernels": kernels}


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
