# SPDX-License-Identifier: Apache-2.0
"""The structure of plan.json. docs/planning.md explains it. Sizes are bytes, and their keys end in `_bytes`."""

import contextlib
import shlex
from pathlib import Path
from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import PLAN, PLAN_DIRECTORY
from opacus_memprof.profiles.json_object import FORMAT, JsonObject, read_json_object
from opacus_memprof.profiles.oom_report import OomReport, Trial
from opacus_memprof.profiles.profile import Sizes


class PlannedRun(JsonObject, kw_only=True):
    """A run on a virtual GPU. A value is None if the run ended before it was known.

    Attributes:
        fits: whether it finished, and memory never ran out.
        error: the program's last words, in a line.
        steps: completed calls of an optimizer's step.
        samples: the samples of the largest physical batch that was seen.
        requested_bytes, reserved_bytes: the peaks. `categories`: requested bytes at the peak.
        may_reserve_bytes: the GPU's memory minus `context_bytes`, which CUDA's context and libraries use.
        retries: how often torch had to return cached memory to the GPU before an allocation succeeded.
        category, module, phase: of the most bytes at the peak; for a run that ran out of memory, of the failed request.
        poisson: samples, rate and steps of a loader that draws batch sizes; {} for other loaders.
        seconds: run time of the whole process.
        directory: the directory with its profile and its log.
    """

    fits: bool
    status: Literal["finished", "out_of_memory", "failed", "killed"]
    error: str
    steps: int
    samples: int | None
    requested_bytes: int | None
    reserved_bytes: int | None
    may_reserve_bytes: int | None
    context_bytes: int | None
    retries: int
    category: str
    module: str
    phase: str
    categories: Sizes
    poisson: dict[str, int | float]
    seconds: float
    directory: str


class RunOfValue(PlannedRun, kw_only=True):
    """A run with one value of the searched argument; the value is 0 without a search."""

    value: int


class TriedAdvice(JsonObject):
    """A suggestion of the OOM report.

    Attributes:
        code: the code of the change.
        tried: the run with it; None if it cannot be applied without editing the program.
        failure: the reason why it could not be tried although it can be applied; "" otherwise.
    """

    title: str
    code: str
    predicted_peak_bytes: int
    tried: PlannedRun | None
    failure: str


class PlanVerdict(JsonObject):
    """The verdict on one configuration: whether it fits.

    Attributes:
        memory_bytes: memory of the GPU, as given; None for that of its kind.
        needed_bytes: the memory that a GPU of this kind must have, found by runs: at most 2 % above the least that
            works.
        spare_bytes: the GPU's memory minus `needed_bytes`; negative if it does not fit.
        predicted_gpu: the kind with the least memory that is predicted to be enough; None if no kind has as much.
        with_more_memory: the same run on a GPU that is large enough; None if the run fits, or no GPU is.
    """

    gpu: str
    memory_bytes: int | None
    fits: bool
    needed_bytes: int
    spare_bytes: int
    predicted_gpu: str | None
    run: PlannedRun
    with_more_memory: PlannedRun | None
    advice: list[TriedAdvice]


class DrawnPeak(JsonObject):
    """With this probability no batch of all steps is above `batch`; the peak of such a batch is computed."""

    probability: float
    batch: int
    requested_bytes: int


class DrawnAbove(JsonObject):
    """The probability that at least one batch of all steps is above `batch`."""

    batch: int
    probability: float


class PlanDraws(JsonObject):
    """The batches of all steps under Poisson sampling, which takes each of `samples` with probability `rate`.

    Attributes:
        steps: logical steps of the whole training.
        ran: batch sizes that were run.
        above: points for the picture, from the mean on.
        max_physical_batch_size: the largest tested size that fits, if one is needed and was found.
    """

    samples: int
    rate: float
    steps: int
    largest_batch_that_fits: int
    ran: list[int]
    out_of_memory_probability: float
    peaks: list[DrawnPeak]
    above: list[DrawnAbove]
    max_physical_batch_size: int | None
    with_it: PlannedRun | None


class SearchedArgument(JsonObject):
    """The argument of the program whose largest value is searched from `low` to `high`."""

    argument: str
    low: int
    high: int


class ComputedBytes(JsonObject):
    """Requested bytes near the largest value that fits: base_bytes + bytes_per_value · value."""

    base_bytes: float
    bytes_per_value: float


class PlanCell(JsonObject):
    """One line of the table.

    Attributes:
        mode: the mode from --modes; None without the option.
        settings: settings of torch's allocator; None if --settings has none.
        gpu_memory_bytes: memory of the GPU; `memory_bytes` if that is given.
        fixed: the grid's other arguments and their values.
        largest: the largest value that fits; None if none does, or none is searched.
        error: the reason why there is no answer; "" otherwise.
        computed: interpolation between the runs; None if fewer than two have fitted.
    """

    mode: str | None
    settings: str | None
    fixed: dict[str, int | str]
    gpu: str
    memory_bytes: int | None
    gpu_memory_bytes: int
    largest: int | None
    error: str
    computed: ComputedBytes | None
    runs: list[RunOfValue]


class SmallestGpu(JsonObject):
    """The kind with the least memory on which a candidate fits, of the kinds that were compared; None if none does.

    Attributes:
        candidate: mode, settings and fixed arguments; "" if only GPUs are compared.
    """

    candidate: str
    gpu: str | None
    memory_bytes: int | None


class Plan(JsonObject, kw_only=True):
    """The content of plan.json: `verdict`, and `draws` with --steps; or `search`, `cells` and `smallest_gpus`.

    Attributes:
        ranks: number of processes of the job, each with a GPU. Only the first one was run.
    """

    format: Literal[1] = FORMAT
    program: str
    arguments: list[str]
    ranks: int
    verdict: PlanVerdict | UnsetType = UNSET
    draws: PlanDraws | UnsetType = UNSET
    search: SearchedArgument | UnsetType | None = UNSET
    cells: list[PlanCell] | UnsetType = UNSET
    smallest_gpus: list[SmallestGpu] | UnsetType = UNSET


_SAME_MEMORY = 0.01  # the memory of GPUs of one kind differs between drivers


def add_trials(report: OomReport, directory: Path = Path(PLAN_DIRECTORY)) -> None:
    """Adds to suggestions what a plan has found by trying them: changes that fit come first, and others last.

    A plan counts if it is of the same program with the same arguments, which has not changed since, and of a GPU with
    as much memory.

    Args:
        report: the report of a failed allocation.
        directory: of the plan.
    """
    trials: dict[str, Trial] = {}
    with contextlib.suppress(MemprofError, OSError):  # without a readable plan, nothing is known to have been tried
        plan = read_json_object(directory / PLAN, Plan)
        if plan.verdict is not UNSET and _is_plan_of(plan, report, directory / PLAN):
            trials = {
                advice.title: Trial(
                    fits=advice.tried is not None and advice.tried.fits,
                    peak_bytes=None if advice.tried is None else advice.tried.requested_bytes,
                    error=advice.failure,
                )
                for advice in plan.verdict.advice
                if advice.tried is not None or advice.failure
            }
    for suggestion in report.suggestions:
        if trial := trials.get(suggestion.title):
            suggestion.tried, suggestion.fits = trial, trial.fits
            suggestion.is_tight = suggestion.is_tight and not trial.fits
    order = {True: 0, None: 1, False: 2}
    report.suggestions.sort(key=lambda each: order[None if each.tried is UNSET else each.tried.fits])  # stable


def _is_plan_of(plan: Plan, report: OomReport, file: Path) -> bool:
    words = [plan.program, *plan.arguments]
    if report.plan is UNSET or shlex.split(report.plan)[-len(words) :] != words or plan.verdict is UNSET:
        return False
    program, memory = Path(plan.program), report.room.device_bytes
    planned = plan.verdict.needed_bytes + plan.verdict.spare_bytes
    if program.is_file() and program.stat().st_mtime > file.stat().st_mtime:
        return False
    return memory is not None and abs(planned - memory) <= _SAME_MEMORY * memory
