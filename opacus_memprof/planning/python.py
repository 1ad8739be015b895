# SPDX-License-Identifier: Apache-2.0
"""Plans from Python, for a function that is called in separate processes."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning import call
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram, Range
from opacus_memprof.planning.report import copy_profile, plan_cell, verdict_content, write_plan
from opacus_memprof.planning.runs import PlannedRuns, open_runs
from opacus_memprof.planning.table import PlannedCell, fill
from opacus_memprof.planning.verdict import judge
from opacus_memprof.profiles.directory import PLAN_DIRECTORY
from opacus_memprof.profiles.files import writing
from opacus_memprof.profiles.plan import PlanVerdict, SearchedArgument
from opacus_memprof.profiles.units import parse_size
from opacus_memprof.virtual_gpu.devices import find_gpu

_PACKED = "function.pickle"


def plan(
    train: Callable[[], object],
    gpu: str = "h100",
    *,
    memory: str | int | None = None,
    directory: str | os.PathLike[str] = PLAN_DIRECTORY,
) -> PlanVerdict:
    """Returns whether a function's training fits on a GPU, by calling it in a new process with a virtual GPU.

    If it does not fit, further processes try changes that could make it fit.

    Args:
        train: makes a model and trains a few steps on "cuda". The new process imports the module that defines it. It
            imports a script as multiprocessing's spawn does: code below `if __name__ == "__main__":` does not run.
        gpu: a kind of virtual GPU, as listed by `opacus-memprof doctor`.
        memory: memory of the GPU, such as "24 GiB" or in bytes. Default: that of its kind.
        directory: the directory for the profile, plan.json and the runs. Files of an earlier plan are replaced.

    Returns:
        Whether it `fits`, `needed_bytes`, `spare_bytes` and `advice`; docs/planning.md has all fields.

    Raises:
        MemprofError: another process cannot find the function; it fails there, uses no GPU, or ends before its first
            training step; the kind is unknown; or a virtual GPU cannot work here.
    """
    size = _checked(gpu, memory)
    packed = call.pack(train)
    with open_runs(Path(directory), resume=False, on_end=_ignore) as runs:
        program = _program(runs, train, packed)
        configuration = PlannedConfiguration(program, gpu, size)
        verdict = judge(runs, configuration)
        copy_profile(runs, verdict.run)
        content = verdict_content(verdict)
        write_plan(runs, configuration, verdict=content)
    return content


def largest_physical_batch(
    train: Callable[[int], object],
    gpu: str = "h100",
    *,
    memory: str | int | None = None,
    low: int = 1,
    high: int = 4096,
    directory: str | os.PathLike[str] = PLAN_DIRECTORY,
) -> int:
    """Finds the largest number from `low` to `high` with which `train(number)` fits on a GPU.

    Takes a few runs on virtual GPUs.

    Args:
        train: takes the number of samples in a physical batch, makes a model and trains a few steps on "cuda"; see
            `plan`.
        gpu: a kind of virtual GPU, as listed by `opacus-memprof doctor`.
        memory: memory of the GPU, such as "24 GiB" or in bytes. Default: that of its kind.
        low: the smallest number that is tried.
        high: the largest number that is tried.
        directory: the directory for the profile, plan.json and the runs, see `plan`.

    Returns:
        The number. It was run and fits; the next one does not, or is beyond `high`. From a hundred on, where torch has
        to give cached memory back, one that is at most 1 % larger does not fit.

    Raises:
        MemprofError: not even `low` fits; memory does not depend on the number; the range is empty; or see `plan`.
    """
    size = _checked(gpu, memory)
    if not 1 <= low <= high:
        raise MemprofError(f"there are no batches from {low} to {high}: give a range from 1 on")
    packed = call.pack(train)
    with open_runs(Path(directory), resume=False, on_end=_ignore) as runs:
        program = _program(runs, train, packed)
        cell = PlannedCell(None, PlannedConfiguration(program, gpu, size))
        fill(runs, [cell], _CalledWith("the physical batch", low, high), _ignore)
        assert cell.answer is not None
        assert cell.largest is not None
        copy_profile(runs, cell.answer)
        search = SearchedArgument(argument="physical batch", low=low, high=high)
        write_plan(runs, cell.configuration, search=search, cells=[plan_cell(cell)])
    return cell.largest


class _CalledWith(Range):
    """The number with which a function is called, instead of an argument of a program."""

    def apply(self, configuration: PlannedConfiguration, value: int) -> PlannedConfiguration:
        program = configuration.program
        return replace(configuration, program=replace(program, arguments=(*program.arguments, str(value))))


def _program(runs: PlannedRuns, train: Callable[..., object], packed: bytes) -> PlannedProgram:
    file = runs.directory / _PACKED
    with writing(file):
        file.write_bytes(packed)
    return PlannedProgram(
        call.__name__, (str(file),), module=True, title=getattr(train, "__qualname__", "the function")
    )


def _checked(gpu: str, memory: str | int | None) -> int | None:
    find_gpu(gpu)
    return None if memory is None else parse_size(memory)


def _ignore(*about: object) -> None:
    """Does nothing, because nobody watches."""
