# SPDX-License-Identifier: Apache-2.0
"""Replaces CUDA by the virtual GPU in this process, and in the processes that multiprocessing starts from it."""

import atexit
import ctypes
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.recording.startup import AfterImport, run_in_children
from opacus_memprof.virtual_gpu import collectives
from opacus_memprof.virtual_gpu.devices import Gpu, find_gpu
from opacus_memprof.virtual_gpu.requirements import LIBRARIES, check_machine

_DRIVER_VERSION = 13020
_MAX_DEVICES = 64  # torch and the event file cannot number more
_MAX_MEMORY = 2**40  # bytes of a device: all devices must fit into the address space of a process
_MIN_MEMORY = 2**28  # bytes of a device, in addition to its context

_EXIT_TIMEOUT_S = 1.0
_EXIT_PAUSE_S = 0.005
_THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class VirtualGpu:
    """The virtual GPUs of this process: `count` of one kind."""

    kind: str
    gpu: Gpu
    count: int


_active: VirtualGpu | None = None
_library: ctypes.CDLL | None = None
_proofs_left_out = False


def active() -> VirtualGpu | None:
    """Returns the virtual GPUs of this process, or None."""
    return _active


def start(kind: str, *, memory: int | None = None, count: int = 1, of_parent: bool = False) -> VirtualGpu:
    """Gives this process virtual GPUs. Call it once, before torch is imported.

    Operations on small tensors compute real values (see `virtual_gpu.values`). Children that multiprocessing starts, by
    fork or spawn, have the same virtual GPUs; other programs that this process starts have none.

    Args:
        kind: a key of `GPUS`.
        memory: bytes of each GPU. Default: those of its kind.
        count: the number of GPUs.
        of_parent: whether a parent process has these virtual GPUs. Then CUDA_VISIBLE_DEVICES is the program's.
            Otherwise it says which of this machine's own GPUs are free, and is removed.

    Raises:
        MemprofError: the kind is unknown, the memory or the count is out of range, this process has virtual GPUs or has
            imported torch already, or a virtual GPU cannot work on this machine or with its torch.
    """
    global _active, _library
    gpu = choose_gpu(kind, memory, count)
    if _active is not None:
        raise MemprofError(
            f"this process has virtual GPUs already ({_active.count} of {_active.kind}), and one cannot run inside "
            "another: start the program without the second one"
        )
    if "torch" in sys.modules:
        raise MemprofError(
            "torch is imported already, but a virtual GPU must be started before it: start it first, or use "
            "`opacus-memprof run --virtual-gpu`"
        )
    kernels = check_machine()
    if not of_parent:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    _library = ctypes.CDLL(str(LIBRARIES / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(LIBRARIES / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    properties = gpu.as_structure(kernels)
    _library.memprof_virtual_gpu_start(ctypes.byref(properties), count, _DRIVER_VERSION)
    _active = VirtualGpu(kind, gpu, count)
    AfterImport("torch", _install_values)
    collectives.install(_library)
    _configure_compilers(LIBRARIES)
    _wait_for_threads_at_exit()
    _pass_to_children(kind, gpu.total_memory, count)
    return _active


def _install_values() -> None:
    try:
        from opacus_memprof.virtual_gpu import values  # loads torch

        values.install()
    except ImportError as error:
        raise MemprofError(str(error)) from None


def load_no_weights() -> None:
    """Makes `from_pretrained` of transformers' models load no weights in this process from now on."""

    def patch() -> None:
        from opacus_memprof.virtual_gpu import no_weights  # loads torch

        no_weights.patch_from_pretrained()

    AfterImport("transformers.modeling_utils", patch)


def choose_gpu(kind: str, memory: int | None, count: int) -> Gpu:
    """Returns the properties of a kind, with `memory` if it is not None. Raises MemprofError if a value is invalid."""
    gpu = find_gpu(kind)
    if not 1 <= count <= _MAX_DEVICES:
        raise MemprofError(f"a process cannot have {count} virtual GPUs: give a number from 1 to {_MAX_DEVICES}")
    if memory is None:
        return gpu
    smallest = smallest_memory(kind)
    if not smallest <= memory <= _MAX_MEMORY:
        raise MemprofError(
            f"a virtual GPU cannot have {format_bytes(memory)}: give at least {format_bytes(smallest)}, of which a "
            f"CUDA context takes {format_bytes(gpu.context_memory)}, and at most {format_bytes(_MAX_MEMORY)}"
        )
    return replace(gpu, total_memory=memory)


def smallest_memory(kind: str) -> int:
    """Returns the least bytes that a virtual GPU of a kind can have. Raises MemprofError if there is no such kind."""
    return find_gpu(kind).context_memory + _MIN_MEMORY


def default_answers() -> dict[str, int]:
    """Returns the number of calls, by name, of CUDA functions for which the virtual GPU has only a default result."""
    if _library is None:
        return {}
    answer = _library.memprof_virtual_gpu_default
    answer.restype = ctypes.c_char_p
    answer.argtypes = [ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint64)]
    calls = ctypes.c_uint64()
    result: dict[str, int] = {}
    index = 0
    while (name := answer(index, ctypes.byref(calls))) is not None:
        if calls.value:
            result[name.decode()] = calls.value
        index += 1
    return result


def estimated_workspaces() -> tuple[int, int]:
    """Returns the number of convolutions so far whose workspace in cuDNN is estimated, and the bytes of the largest."""
    if _library is None:
        return 0, 0
    largest = ctypes.c_int64()
    answer = _library.memprof_virtual_gpu_estimated_workspaces
    answer.restype = ctypes.c_size_t
    return answer(ctypes.byref(largest)), largest.value


def proofs_left_out() -> bool:
    """Returns whether flash_clip has left out a proof, for which a real GPU would need memory that is not counted."""
    return _proofs_left_out


def _configure_compilers(libraries: Path) -> None:
    """Configures what knows values or compiles, when the program imports it. Child processes do not inherit this."""
    _on_import("triton.knobs", lambda knobs: _set_libcuda_path(knobs, libraries))
    _on_import("triton.runtime.cache", _know_triton_by_its_times)
    _on_import("torch._inductor.runtime.cache_dir_utils", _use_separate_cache)
    _on_import("triton.compiler.compiler", _note_what_kernels_write)
    _on_import("torch._inductor.config", _compile_here)
    _on_import("torch.cuda.graphs", lambda graphs: _print_graphs(graphs, libraries))
    _on_import("torch.distributions.distribution", _accept_uncomputed_parameters)
    _on_import("opacus_memprof.clipping.kernels.noise", _believe_noise_kernel)
    _on_import("opacus_memprof.clipping.proof.situations", _leave_proofs_out)
    _on_import("opacus_memprof.clipping.proof.certificate", _certify_nothing)


def _on_import(name: str, set_up: Callable[[Any], None]) -> None:
    AfterImport(name, lambda: set_up(importlib.import_module(name)))


def _set_libcuda_path(knobs: Any, libraries: Path) -> None:
    """Makes Triton link its kernels to the virtual libcuda.so.1. By default it asks ldconfig for the library."""
    propagate, knobs.propagate_env = knobs.propagate_env, False  # do not set an environment variable
    knobs.nvidia.libcuda_path = str(libraries)
    knobs.propagate_env = propagate


def _know_triton_by_its_times(cache: Any) -> None:
    """Makes the keys of Triton's cache depend on when Triton's files were written, not on 500 MB of content.

    To read these takes half a second, more than a short run needs for its training.
    """
    folder = Path(cache.__file__).parents[1]

    @functools.cache
    def triton_key() -> str:
        files = sorted([*folder.rglob("*.py"), *folder.rglob("*.so")])
        return "-".join(str(file.stat().st_mtime_ns) for file in files)

    cache.triton_key = triton_key


def _use_separate_cache(cache: Any) -> None:
    """Gives Inductor a separate cache.

    The cache stores which kernels were fastest. Measured on a virtual GPU, this is meaningless, and must not be used on
    a real one. torch itself sets TORCHINDUCTOR_CACHE_DIR to its default folder if the program does not.
    """
    default = cache.default_cache_dir
    cache.default_cache_dir = lambda: default() + "_virtual_gpu"
    if chosen := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = chosen.removesuffix("_virtual_gpu") + "_virtual_gpu"


def _print_graphs(graphs: Any, libraries: Path) -> None:
    """Makes `CUDAGraph.debug_dump` ask the virtual GPU: recent torch asks cuda-bindings, which has its own runtime."""

    def dump(graph: Any, path: str, *, verbose: bool = True) -> None:
        runtime = ctypes.CDLL(str(libraries / "libcuda.so.1"))
        if runtime.cudaGraphDebugDotPrint(ctypes.c_void_p(graph.raw_cuda_graph()), os.fsencode(path), 0):
            raise OSError(f"{path} cannot be written")

    if hasattr(graphs, "_dump_graph_dot"):
        graphs._dump_graph_dot = dump


def _believe_noise_kernel(noise: Any) -> None:
    """Makes flash_clip use its noise kernel, although its values cannot be compared with torch's here."""
    compare = noise.draws_as_torch
    noise.draws_as_torch = lambda device: compare(device) or True


def _leave_proofs_out(situations: Any) -> None:
    """Makes flash_clip skip its proofs, which compare values that a virtual GPU does not compute."""
    make = situations.Situations.__init__

    @functools.wraps(make)
    def make_without_proofs(self: Any, *args: Any, **named: Any) -> None:
        global _proofs_left_out
        make(self, *args, **named)
        _proofs_left_out = _proofs_left_out or self.check != "off"
        self.check = "off"

    situations.Situations.__init__ = make_without_proofs


def _certify_nothing(certificate: Any) -> None:
    """Makes privacy_check.json say that nothing was proved: every check succeeds on zeros that were not computed."""
    describe = certificate.Certificate.to_data

    @functools.wraps(describe)
    def describe_without_checks(self: Any) -> Any:
        data = describe(self)
        data |= {"device": f"virtual {self.device}", "check": "off", "in_every_step": [], "checked_steps": {}}
        data["situations"] = [each | {"checks": {}} for each in data["situations"]]
        data["not_private"]["largest_sum"] = None
        return data

    certificate.Certificate.to_data = describe_without_checks


def _accept_uncomputed_parameters(module: Any) -> None:
    """Makes distributions accept parameters and samples that were not computed, since not every support has zeros."""

    def accepting(check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def check_computed(*args: Any, **named: Any) -> None:
            from opacus_memprof.virtual_gpu import values  # loads torch

            before = values.unknown_reads()
            try:
                check(*args, **named)
            except ValueError:
                if values.unknown_reads() == before:
                    raise

        return check_computed

    for name in ("__init__", "_validate_sample"):
        setattr(module.Distribution, name, accepting(getattr(module.Distribution, name)))


def _note_what_kernels_write(compiler: Any) -> None:
    from opacus_memprof.virtual_gpu import values  # loads torch

    values.note_what_kernels_write(compiler.CompiledKernel)


def _compile_here(config: Any) -> None:
    """Makes Inductor compile in this process, because its worker processes have no virtual GPU.

    Kernels are launched by Triton, where the virtual GPU notes what they write.
    """
    config.compile_threads = 1
    config.use_static_cuda_launcher = False


def _wait_for_threads_at_exit() -> None:
    """Makes the process wait at exit, for at most a second, until none of its other threads runs.

    A thread of autograd drops Python objects shortly after its backward pass has returned. If Python finalizes at that
    moment, the thread aborts the process. With a real GPU the program is then still waiting for its last kernels. With
    a virtual GPU there is nothing else to wait for.

    Call it before torch is imported: exit handlers run in reverse order, and torch's must run first.
    """
    atexit.register(_wait, os.getpid())


def _wait(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child has none of these threads
    end = time.monotonic() + _EXIT_TIMEOUT_S
    idle_checks = 0
    while idle_checks < 2 and time.monotonic() < end:
        time.sleep(_EXIT_PAUSE_S)  # releases the GIL, for which such a thread waits
        idle_checks = 0 if _other_threads_run() else idle_checks + 1


def _other_threads_run() -> bool:
    current = str(threading.get_native_id())
    return any(_state(thread) == "R" for thread in _THREADS.iterdir() if thread.name != current)


def _state(thread: Path) -> str:
    """Returns the state of a thread as in proc(5): R if it runs or is runnable. Empty if the thread has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _pass_to_children(kind: str, memory: int, count: int) -> None:
    """Gives these virtual GPUs to the processes that multiprocessing spawns from now on.

    With the start methods `spawn` and `forkserver` these are new Python processes, which import torch when they
    unpickle their arguments. The virtual GPU must start before that.

    Args:
        kind: a key of `GPUS`.
        memory: bytes of each GPU.
        count: the number of GPUs.
    """
    run_in_children(
        "from opacus_memprof import virtual_gpu; "
        f"virtual_gpu.start({kind!r}, memory={memory}, count={count}, of_parent=True)"
    )
