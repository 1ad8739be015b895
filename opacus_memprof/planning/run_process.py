# SPDX-License-Identifier: Apache-2.0
"""The process of one planned run: `python -m opacus_memprof.planning.run_process CONFIGURATION DIRECTORY`.

Runs a program on a virtual GPU under the profiler, as `opacus-memprof run --virtual-gpu` does. Applies the changes of a
suggestion, and writes data that the profile does not have into process.json.
"""

import _io
import atexit
import builtins
import fcntl
import functools
import hashlib
import importlib.machinery
import io
import json
import mmap
import os
import random
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import PlannedConfiguration, with_number
from opacus_memprof.planning.virtual_run import PROCESS_FILE, PROFILE_OF_RUN
from opacus_memprof.profiles.directory import DEFAULT_MAX_EVENTS, ProfileDirectory
from opacus_memprof.profiles.files import write_text
from opacus_memprof.recording.startup import AfterImport
from opacus_memprof.running.program import Program
from opacus_memprof.running.recording import ProgramRecording

if TYPE_CHECKING:
    from opacus_memprof.planning.changes import OpacusSetup

_SEED = (
    0  # runs of a plan draw the same random numbers, unless the program chooses a seed; else they could not be compared
)
SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""A variable that torch sets when the first optimizer is made, and that no package reads when imported."""
# A launcher's, which are read when a process group is made.
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE")
_OF_GROUPS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCH_NCCL_ENABLE_MONITORING")
_OF_PYTEST = ("PYTEST_VERSION", "PYTEST_CURRENT_TEST")  # set while it runs, also before a test imports a package
_NOT_READ = {SET_BY_TORCH, *_OF_RANKS, *_OF_GROUPS, *_OF_PYTEST}
_READ = ("TORCH", "PYTORCH", "CUDA", "TRITON", "NCCL", "OMP", "MKL", "PYTHON", "MEMPROF")
"""Beginnings of variables that packages may read when imported."""


class ProcessData:
    """Writes process.json when the process ends.

    Attributes:
        refused: the reason why the program was not run; "" if it was.
    """

    def __init__(self, configuration: PlannedConfiguration, directory: Path) -> None:
        self.refused = ""
        self._configuration = configuration
        self._directory = directory
        self._setup: OpacusSetup | None = None
        self._reserved = 0  # the highest peak before the program reset torch's
        self._steps = 0  # of any optimizer, including a training that the profiler does not follow
        self._torch_imported = False
        atexit.register(self._write)
        AfterImport("torch", self._on_torch_import)
        AfterImport("opacus", self._on_opacus_import)

    def _on_torch_import(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._torch_imported = True
        torch.default_generator.manual_seed(_SEED)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed(_SEED)
        register_optimizer_step_post_hook(self._on_step)
        reset = torch.cuda.memory.reset_peak_memory_stats

        def reset_peak_memory_stats(device: Any = None) -> None:
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())
            reset(device)

        torch.cuda.reset_peak_memory_stats = reset_peak_memory_stats
        torch.cuda.memory.reset_peak_memory_stats = reset_peak_memory_stats

    def _on_step(self, *about: Any) -> None:
        self._steps += 1

    def _on_opacus_import(self) -> None:
        from opacus_memprof.planning.changes import OpacusSetup

        self._setup = OpacusSetup(self._configuration.changes)

    def _write(self) -> None:
        data: dict[str, Any] = {"refused": self.refused}
        if self._torch_imported and "torch" in sys.modules:  # it is not where its import was refused
            data |= self._of_gpu()
        if self._setup is not None:
            data["poisson"] = self._setup.poisson
        write_text(self._directory / PROCESS_FILE, json.dumps(data) + "\n")

    def _of_gpu(self) -> dict[str, Any]:
        import torch

        from opacus_memprof.recording import observations

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        limit = int(torch.cuda.memory.get_per_process_memory_fraction() * total)  # the program's own limit
        return {
            "reserved": max(self._reserved, torch.cuda.max_memory_reserved()),
            "may_reserve": min(reserved + free, limit),
            "context": total - free - reserved,
            "retries": stats.get("num_alloc_retries", 0),
            "steps": self._steps,
            "samples": max((samples for _, samples in observations.layer_shapes().batches), default=None),
        }


_ENTRY = struct.Struct("=32sQQ5056s")  # of a draw: its key, place and bytes, the generator's state after it
_MOST_DRAWS = 1024
_SMALLEST = 2**20  # bytes; fewer are drawn as fast as they are found
_KEPT = 2**31  # bytes


class KeptDraws:
    """Random numbers that tensors on the CPU were filled with, for other runs that fill tensors from the same state.

    A program that makes a model on the CPU draws its weights in each run, the same ones: for each 100 million numbers,
    that takes a second. Copying them takes a tenth of it. Processes that are forked from the one that made this object
    share the numbers.
    """

    def __init__(self) -> None:
        most = min(_KEPT, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10)
        self._begin = -(-(8 + _MOST_DRAWS * _ENTRY.size) // mmap.PAGESIZE) * mmap.PAGESIZE  # of the numbers
        self._shared = mmap.mmap(-1, self._begin + most)  # takes pages only where it is written
        self._locked_file = tempfile.TemporaryFile()  # noqa: SIM115 (for the lock between processes)
        self._lock = threading.Lock()
        self._known: dict[bytes, tuple[int, int, bytes]] = {}
        self._end = self._begin

    def install(self, torch: Any) -> None:
        """Makes `normal_` and `uniform_` of tensors use the numbers, in this process.

        Args:
            torch: the module.
        """
        for name in ("normal_", "uniform_"):
            setattr(torch.Tensor, name, self._keeping(torch, getattr(torch.Tensor, name)))

    def _keeping(self, torch: Any, fill: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fill)
        def fill_keeping(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if not _fills_plainly(torch, tensor, arguments, named):
                return fill(tensor, *arguments, **named)
            state = bytes(torch.default_generator.get_state().tolist())
            key = hashlib.sha256(repr((fill.__name__, tensor.dtype, tensor.numel(), arguments, named)).encode() + state)
            with self._alone():
                self._read_new()
                found = self._known.get(key.digest())
            if found is None:
                fill(tensor, *arguments, **named)
                self._keep(torch, key.digest(), tensor)
                return tensor
            place, _, after = found
            with torch.no_grad():
                tensor.copy_(self._numbers(torch, tensor, place))
            torch.default_generator.set_state(torch.tensor(list(after), dtype=torch.uint8))
            return tensor

        return fill_keeping

    def _keep(self, torch: Any, key: bytes, tensor: Any) -> None:
        after = bytes(torch.default_generator.get_state().tolist())
        with self._alone():
            self._read_new()
            place, size = self._end, tensor.nbytes
            full = place + size > len(self._shared) or len(self._known) == _MOST_DRAWS
            if key in self._known or full or len(after) != 5056:
                return
            self._numbers(torch, tensor, place).copy_(tensor.detach())
            _ENTRY.pack_into(self._shared, 8 + len(self._known) * _ENTRY.size, key, place, size, after)
            self._shared[:8] = struct.pack("=Q", len(self._known) + 1)

    def _numbers(self, torch: Any, tensor: Any, place: int) -> Any:
        """Returns the shared numbers from a place on, as a tensor of the same shape and dtype."""
        return torch.frombuffer(self._shared, dtype=tensor.dtype, count=tensor.numel(), offset=place).view(tensor.shape)

    def _read_new(self) -> None:
        for index in range(len(self._known), struct.unpack("=Q", self._shared[:8])[0]):
            key, place, size, after = _ENTRY.unpack_from(self._shared, 8 + index * _ENTRY.size)
            self._known[key] = (place, size, after)
            self._end = -(-(place + size) // mmap.PAGESIZE) * mmap.PAGESIZE

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A context that one thread of one process can be in."""
        with self._lock:
            fcntl.lockf(self._locked_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._locked_file, fcntl.LOCK_UN)


def _fills_plainly(torch: Any, tensor: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Returns whether a fill only writes numbers that follow from the state of the CPU's default generator."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.nbytes >= _SMALLEST
        and tensor.is_contiguous()
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and all(isinstance(value, int | float | None) for value in (*arguments, *named.values()))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def has_changed(environment: Mapping[str, str]) -> bool:
    """Returns whether the environment variables of this process differ from these, except those of _NOT_READ."""
    names = {*environment, *os.environ} - _NOT_READ
    return any(environment.get(name) != os.environ.get(name) for name in names)


def _apply(configuration: PlannedConfiguration, directory: Path) -> None:
    """Sets the variables and the lines of files that are searched."""
    for change in configuration.changes:
        if change["kind"] == "environment":
            name = change["name"]
            os.environ[name] = change["value"]
            if not name.startswith(_READ):
                _NOT_READ.add(name)
        elif change["kind"] == "line":
            copy = directory / f"line{change['line']}{Path(change['file']).suffix}"
            write_text(copy, with_number(change["file"], change["line"], change["value"]))
            os.utime(copy, (0, 0))  # no bytecode of the file is as old
            _read_instead(os.path.realpath(change["file"]), copy)


def _read_instead(file: str, copy: Path) -> None:
    """Lets the program read a copy of a file: as its script, by an import, or by opening it."""

    def redirected(function: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
        @functools.wraps(function)
        def read(*arguments: Any, **named: Any) -> Any:
            path = arguments[place] if len(arguments) > place else None
            if isinstance(path, (str, os.PathLike)) and os.path.realpath(path) == file:
                arguments = (*arguments[:place], str(copy), *arguments[place + 1 :])
            return function(*arguments, **named)

        return read

    sys.dont_write_bytecode = True
    builtins.open = io.open = redirected(builtins.open)
    _io.open_code = io.open_code = redirected(io.open_code)
    loader: Any = importlib.machinery.SourceFileLoader
    loader.path_stats = redirected(loader.path_stats, 1)


def main() -> None:
    """Runs the program that sys.argv names, and exits as the program does."""
    configuration, directory = PlannedConfiguration.from_json(json.loads(sys.argv[1])), Path(sys.argv[2])
    program = configuration.program
    random.seed(_SEED)
    # Made first, because the exit handler that writes the data must run after the recording's own.
    data = ProcessData(configuration, directory)
    try:
        _apply(configuration, directory)
        running = Program(program.target, program.arguments, module=program.module)
        ranks = configuration.ranks
        gpus = virtual_gpu.local_world_size(ranks)
        virtual_gpu.start(configuration.gpu, memory=configuration.memory, count=gpus)
        if ranks > 1:
            virtual_gpu.simulate_rank(0, ranks, gpus=gpus)
        of_run = ProfileDirectory(directory / PROFILE_OF_RUN)
        ProgramRecording(of_run, "cuda", DEFAULT_MAX_EVENTS, improves=False).record(running)
    except MemprofError as error:
        data.refused = str(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
