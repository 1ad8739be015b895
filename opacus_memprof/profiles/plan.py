# SPDX-License-Identifier: Apache-2.0
"""The structure of plan.json, which docs/planning.md explains. Sizes are bytes, and their keys end in `_bytes`."""

from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.profile import Sizes


class PlannedRun(JsonObject, kw_only=True):
    """A run on a virtual GPU. None where it did not get so far.

    Attributes:
        fits: it came to its end, and memory did not run out on the way.
        error: the program's last words, in a line.
        steps: calls of an optimizer's step that have ended.
        samples: of the largest physical batch that was seen.
        requested_bytes, reserved_bytes: the peaks. `categories`: requested bytes at the peak.
        may_reserve_bytes: the GPU's memory less `context_bytes`, what CUDA's context and libraries take.
        retries: how often torch had to give cached memory back to the GPU before an allocation went well.
        category, module, phase: of the most bytes at the peak; of a run that ran out of memory, of what was asked for.
        poisson: of a loader that draws batch sizes its samples, rate and steps; {} of another.
        seconds: of the whole process.
        directory: of its profile and its log.
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
    """A run with one value of the argument that is searched; 0 where none is."""

    value: int


class TriedAdvice(JsonObject):
    """A suggestion of the OOM report.

    Attributes:
        code: as people would write it.
        tried: the run with it; None if it cannot be applied without editing the program.
        failure: why it could not be tried although it can be applied; "" otherwise.
    """

    title: str
    code: str
    predicted_peak_bytes: int
    tried: PlannedRun | None
    failure: str


class PlanVerdict(JsonObject):
    """Whether one configuration fits.

    Attributes:
        memory_bytes: of the GPU; None for its kind's.
        needed_bytes: to reserve. `spare_bytes`: what is left of what may be reserved; below 0 where it does not fit.
        with_more_memory: the same run on a GPU that is large enough; None where the run fits, or none is.
    """

    gpu: str
    memory_bytes: int | None
    fits: bool
    needed_bytes: int
    spare_bytes: int
    run: PlannedRun
    with_more_memory: PlannedRun | None
    advice: list[TriedAdvice]


class DrawnPeak(JsonObject):
    """No batch of all steps is above `batch` with this probability; the peak of such a batch is computed."""

    probability: float
    batch: int
    requested_bytes: int


class DrawnAbove(JsonObject):
    """The probability that a batch of one of all steps is above `batch`."""

    batch: int
    probability: float


class PlanDraws(JsonObject):
    """The batches of all steps, of which Poisson sampling takes each of `samples` with probability `rate`.

    Attributes:
        steps: logical ones, of the whole training.
        ran: batch sizes that were run.
        above: for the picture, from the mean on.
        max_physical_batch_size: the largest that was tried and fits, where one is needed and was found.
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
        mode: what --modes names; None where it names none.
        settings: of torch's allocator; None where --settings names none.
        fixed: the grid's other arguments and their values.
        largest: the largest value that fits; None where none does, or none is searched.
        error: why there is no answer; "" otherwise.
        computed: between the runs; None where fewer than two have fitted.
    """

    mode: str | None
    settings: str | None
    fixed: dict[str, int]
    gpu: str
    memory_bytes: int | None
    largest: int | None
    error: str
    computed: ComputedBytes | None
    runs: list[RunOfValue]


class Plan(JsonObject, kw_only=True):
    """The content of plan.json: `verdict`, and `draws` with --steps; or `search` and `cells`.

    Attributes:
        ranks: processes of the job, a GPU each, of which the first was run.
    """

    format: Literal[1] = FORMAT
    program: str
    arguments: list[str]
    ranks: int
    verdict: PlanVerdict | UnsetType = UNSET
    draws: PlanDraws | UnsetType = UNSET
    search: SearchedArgument | UnsetType | None = UNSET
    cells: list[PlanCell] | UnsetType = UNSET
