# SPDX-License-Identifier: Apache-2.0
"""Executes operations on small tensors of the virtual GPU on the CPU, so that they have real values.

The virtual GPU computes nothing. But its memory is host memory, so an operation whose tensors are all small (at most 1
MiB each) is computed there, after the CUDA operation has made its allocations. Labels, token ids, masks, counters,
`unique`, `nonzero` and `item()` on data from the CPU then behave as on a real GPU.

Values that were not computed read as zero, and their uses are reported:

* Reads of such values by the host are counted, with the line of the program (`unknown_reads`).
* A shape that depends on them is the one that zeros give or, if that is empty, the one that includes every element:
  `nonzero` of a mask that was not computed has a row for each element, `unique` has one (`assumed_shapes`).
* `topk`, `argmax` and `max` over a dimension choose indices round robin over the rows, as a load-balanced router of a
  mixture of experts would (`assumed_shapes`).
* Floating-point results that were not computed are finite, so `isfinite(x).all()` is True, and a GradScaler finds no
  overflow.

Random values come from a CPU generator that is seeded by the state of CUDA's generator. The same seed gives the same
values, but not the values of a real GPU.

Imports torch, so it must be imported after the program has imported torch.
"""

import _thread
import re
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import opacus_memprof.recording.native  # noqa: F401 (checks the version of torch before an extension is loaded)
from opacus_memprof.errors import MemprofError
from opacus_memprof.versions import how_to_build
from opacus_memprof.virtual_gpu.decisions import Frame

try:
    from opacus_memprof import _virtual
except ImportError as error:
    raise ImportError(
        f"the extension that computes values on the virtual GPU cannot be loaded ({error}): {how_to_build()}"
    ) from error

_installed = False


@dataclass(frozen=True)
class Use:
    """A use of values that were not computed, by one line of the program on one way there.

    Attributes:
        operation: the operation, such as "item".
        line: "file:line"; empty if no line of the program called it, as on a thread of autograd.
        count: the number of uses.
        frames: where it was used, and the lines that called, the innermost first.
    """

    operation: str
    line: str
    count: int
    frames: tuple[Frame, ...] = field(default=(), repr=False)


def install() -> None:
    """Enables computing for this thread and for every `threading.Thread` that is started from now on."""
    global _installed
    if not _installed:
        _installed = True
        paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        packages = {Path(__file__).parents[1], Path(torch.__file__).parent}
        _virtual.set_libraries([*sorted(paths), *(f"{folder}/" for folder in packages)])
        _virtual.install()
        _pass_higher_order_operators()
        torch.UntypedStorage._share_cuda_ = _refuse_to_share  # type: ignore[method-assign]
        _patch_threads()
    _virtual.enable_thread()


def _refuse_to_share(*_: Any, **__: Any) -> Any:
    raise MemprofError(
        "a CUDA tensor cannot be sent to another process from a virtual GPU, whose memory belongs to its process: send "
        "it on the CPU (tensor.cpu()), and move it to the GPU there"
    )


def _pass_higher_order_operators() -> None:
    """Makes operators of Python (`torch.cond`, `flex_attention`, DTensor's random ones) skip the interception's key.

    They look for a Python function for each active dispatch key, and the operators that they call are intercepted.
    """
    from torch import _ops

    key: Any = torch._C._parse_dispatch_key("Fake")  # csrc/virtual_values intercepts operators at this key
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for operator in _ops._higher_order_ops.values():
        operator.fallthrough(key)  # type: ignore[no-untyped-call]


def _patch_threads() -> None:
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    @wraps(bootstrap)
    def bootstrap_with_values(self: threading.Thread) -> None:
        _virtual.enable_thread()
        bootstrap(self)

    threading.Thread._bootstrap_inner = bootstrap_with_values  # type: ignore[attr-defined]
    start = _thread.start_new_thread

    @wraps(start)
    def start_with_values(function: Callable[..., Any], *arguments: Any) -> int:
        def run(*given: Any, **named: Any) -> None:
            _virtual.enable_thread()
            function(*given, **named)

        return start(run, *arguments)

    _thread.start_new_thread = start_with_values


# What TTIR stores through, and what it takes a pointer for that may store.
_STORES = re.compile(r"\btt\.(?:store|atomic_\w+|\w*descriptor_(?:store|reduce|scatter)\w*)\b")
_FOREIGN = re.compile(r"\btt\.(?:elementwise_inline_asm|extern_elementwise)\b.*!tt\.ptr")
_ELSEWHERE = re.compile(r"\btt\.call\b|\bcf\.\w*br\b[^:]*\(")  # functions and blocks with arguments are not followed
_NAME = re.compile(r"%[\w.$-]+")


def note_what_kernels_write(kernel: Any) -> None:
    """Makes a class of Triton's kernels note, at each launch, that what they write has unknown values from then on.

    Args:
        kernel: triton.compiler.compiler.CompiledKernel.
    """
    initialize = kernel._init_handles

    @wraps(initialize)
    def initialize_noting(self: Any) -> None:
        initialize(self)
        name = "_run" if isinstance(getattr(kernel, "run", None), property) else "run"
        launch = getattr(self, name)
        if hasattr(launch, "notes"):
            return
        kinds = list(self.src.signature.values())
        parameters = [position for position, of in enumerate(kinds) if of != "constexpr"]
        written = written_parameters(self.asm.get("ttir", ""))

        def launch_noting(*arguments: Any) -> None:
            _virtual.set_noted(True)
            try:
                launch(*arguments)
            finally:
                _virtual.set_noted(False)
            given = arguments[9:]  # after the grid, the stream, the function, metadata and hooks
            if len(given) == len(kinds):
                given = tuple(given[position] for position in parameters)
            for position, argument in enumerate(given):
                tensor = getattr(argument, "base", argument)  # of a descriptor
                if (written is None or position in written) and isinstance(tensor, torch.Tensor):
                    _virtual.note_written_by_kernel(tensor)

        launch_noting.notes = True  # type: ignore[attr-defined]
        setattr(self, name, launch_noting)

    kernel._init_handles = initialize_noting


def written_parameters(ttir: str) -> set[int] | None:
    """Returns the positions of a kernel's parameters through which it stores, or None if its TTIR does not tell.

    Each name stands for the parameters from which it may be derived, other than by loading.
    """
    header = re.search(r"tt\.func public @[^(]*\((.*)", ttir)
    if header is None or _ELSEWHERE.search(ttir):
        return None
    origins = {name: {position} for position, name in enumerate(re.findall(r"(%[\w.$-]+): ", header[1]))}
    written: set[int] = set()
    lines = [line.partition(" loc(")[0].strip() for line in ttir[header.end() :].splitlines()]
    before = -1
    while (known := sum(map(len, origins.values())) + len(written)) > before:  # loops hand on what they have computed
        before = known
        regions: list[set[str]] = []  # the names that a region's yield gives values to
        for line in lines:
            names = _NAME.findall(line)
            found = set[int]().union(*(origins.get(name, ()) for name in names))
            results = _NAME.findall(line.partition(" = ")[0]) if line.startswith("%") else []
            if "iter_args(" in line or "scf.while" in line:
                results = names
            if line.startswith("}") and regions:
                results = list(regions.pop())
            if line.endswith("{"):
                regions.append(set(results))
            if line.startswith(("scf.yield", "scf.condition")) and regions:
                results = list(regions[-1])
            if _STORES.search(line):
                written |= origins.get(next(name for name in names if name not in results), set())
            elif _FOREIGN.search(line):
                written |= found
            elif "tt.load" not in line:
                for name in results:
                    origins[name] = origins.get(name, set()) | found
    return written


def unknown_reads() -> list[Use]:
    """Returns the host's reads of values that the virtual GPU has not computed. They read as zeros."""
    return _uses(_virtual.unknown_reads())


def count_rank_read(operation: str) -> None:
    """Counts a read of data that another rank would have sent, by `operation`."""
    _virtual.count_rank_read(operation)


def assumed_shapes() -> list[Use]:
    """Returns the shapes and index choices that depend on values that the virtual GPU has not computed."""
    return _uses(_virtual.assumed_shapes())


def failures() -> dict[str, int]:
    """Returns how often the CPU could not execute an operation, by operation. The results count as not computed."""
    return _virtual.failures()


# File, line, what is evaluated there where that is known, and the function's name.
_FRAME = re.compile(r"(.*?):(\d+)(?::(\d+):(\d+):(\d+))?:([^:]*)")


def _uses(counted: dict[tuple[str, str], int]) -> list[Use]:
    uses = []
    for (operation, lines), count in sorted(counted.items()):
        line, *stack = lines.split("\n")
        frames = (_frame(*found.groups()) for found in map(_FRAME.fullmatch, stack) if found)
        uses.append(Use(operation, line, count, tuple(frames)))
    return uses


def _frame(file: str, line: str, column: str | None, last_line: str, last_column: str, function: str) -> Frame:
    columns = None if column is None else (int(column), int(last_line), int(last_column))
    return Frame(file, int(line), function, columns)
