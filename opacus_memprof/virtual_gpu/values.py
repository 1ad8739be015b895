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

import sysconfig
import threading
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

import opacus_memprof.recording.native  # noqa: F401 (checks the version of torch before an extension is loaded)
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
    """A use of values that were not computed, by one line of the program.

    Attributes:
        operation: the operation, such as "item".
        line: "file:line"; empty if no line of the program called it, as on a thread of autograd.
        count: the number of uses.
        frames: where it was first used, and the lines that called, the innermost first.
    """

    operation: str
    line: str
    count: int
    frames: tuple[Frame, ...] = field(default=(), compare=False, repr=False)


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
        _patch_threads()
    _virtual.enable_thread()


def _pass_higher_order_operators() -> None:
    """Makes operators of Python (`torch.cond`, `flex_attention`, DTensor's random ones) skip the interception's key.

    They look for a Python function for each active dispatch key, and the operators that they call are intercepted.
    """
    from torch import _ops

    key: Any = torch._C._parse_dispatch_key("Fake")  # where csrc/virtual_values stands
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


def _uses(counted: dict[tuple[str, str], int]) -> list[Use]:
    uses = []
    for (operation, lines), count in sorted(counted.items()):
        line, *stack = lines.split("\n")
        frames = [Frame(file, int(number)) for file, _, number in (each.rpartition(":") for each in stack)]
        uses.append(Use(operation, line, count, tuple(frames)))
    return uses
