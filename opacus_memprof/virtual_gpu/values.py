# SPDX-License-Identifier: Apache-2.0
"""True values where they decide: operations on small tensors of the virtual GPU are carried out on the CPU.

The virtual GPU computes nothing. But its memory is memory of the host, so an operation all of whose tensors are small
(at most 1 MiB each) is carried out over the bytes that are there, after the CUDA kernel has allocated what it
allocates. Labels, token ids, masks, counters, `unique`, `nonzero` and `item()` on what came from the CPU are then as on
a real GPU.

What was not computed reads as zero, and nothing depends on it silently:

* A value that the host reads is counted, with the line of the program (`unknown_reads`).
* A shape that depends on such values is the one that zeros give or, where that is none, the one of every element:
  `nonzero` of a mask that was not computed has a row for each element, `unique` gives one (`assumed_shapes`).
* `topk`, `argmax` and `max` over a dimension choose indices round robin over the rows, as a router of a mixture of
  experts that balances its load (`assumed_shapes`).
* Floating-point results that were not computed are finite, so `isfinite(x).all()` is True, and a GradScaler finds no
  overflow.

Random values come from a generator of the CPU's own kind, seeded by the state of CUDA's: the same seed gives the same
values again, but not those of a real GPU.

Imports torch: only to be imported after the program has.
"""

import sysconfig
import threading
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import torch

from opacus_memprof import _native  # it compares the versions of torch before an extension is loaded

try:
    from opacus_memprof import _virtual
except ImportError as error:
    raise ImportError(
        f"what computes on the virtual GPU cannot be loaded ({error}): in opacus-memprof's source tree run "
        f"`{_native.mending_command()}`"
    ) from error

_installed = False


@dataclass(frozen=True)
class Use:
    """Something that was done `count` times with values that were not computed, by one line of the program.

    `line` is "file:line", empty where no line of the program called it, as on a thread of autograd.
    """

    operation: str
    line: str
    count: int


def install() -> None:
    """Turns it on, for this thread and for every `threading.Thread` that is started from now on; once for all."""
    global _installed
    if not _installed:
        _installed = True
        paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        packages = {Path(__file__).parents[1], Path(torch.__file__).parent}
        _virtual.set_libraries([*sorted(paths), *(f"{folder}/" for folder in packages)])
        _virtual.install()
        _follow_threads()
    _virtual.enable_thread()


def _follow_threads() -> None:
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    @wraps(bootstrap)
    def bootstrap_with_values(self: threading.Thread) -> None:
        _virtual.enable_thread()
        bootstrap(self)

    threading.Thread._bootstrap_inner = bootstrap_with_values  # type: ignore[attr-defined]


def unknown_reads() -> list[Use]:
    """What the host has read of results that the virtual GPU does not compute; it read zeros."""
    return _uses(_virtual.unknown_reads())


def assumed_shapes() -> list[Use]:
    """Shapes and choices of indices that depend on results that the virtual GPU does not compute."""
    return _uses(_virtual.assumed_shapes())


def failures() -> dict[str, int]:
    """How often the CPU could not carry an operation out, by operation; its results count as not computed."""
    return _virtual.failures()


def _uses(counted: dict[tuple[str, str], int]) -> list[Use]:
    return [Use(operation, line, count) for (operation, line), count in sorted(counted.items())]
