# SPDX-License-Identifier: Apache-2.0
"""The structure of an experiment run's result. docs/experiments.md explains it.

Fields that end in `_mb` are in MB of 2**20 bytes; the units of other fields are those of profiles.profile.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.difference import Tax
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.profile import (
    DeviceSnapshot,
    FailedAllocation,
    Finding,
    Peak,
    PhasePeak,
    StepPeak,
    Timeline,
    VirtualGpus,
)


class RunConfiguration(JsonObject):
    """The fields of experiments.configuration.Configuration; fields of later releases may be absent."""

    model: str
    mode: str
    dtype: str
    seq_length: int
    batch_size: int
    max_physical_batch_size: int | None
    lora_rank: int | None
    pretrained: bool | UnsetType = UNSET
    task: str | UnsetType = UNSET
    num_steps: int | UnsetType = UNSET
    warmup_steps: int | UnsetType = UNSET
    learning_rate: float | UnsetType = UNSET
    sigma: float | UnsetType = UNSET
    max_grad_norm: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    device: str | UnsetType = UNSET
    nproc: int | UnsetType = UNSET
    checkpointing: bool | UnsetType = UNSET
    virtual_gpu: str | UnsetType | None = UNSET
    virtual_memory: int | UnsetType | None = UNSET
    dataset: str | UnsetType | None = UNSET
    vocab_size: int | UnsetType | None = UNSET
    hidden_dim: int | UnsetType | None = UNSET
    num_layers: int | UnsetType | None = UNSET
    num_heads: int | UnsetType | None = UNSET


class RunProgress(JsonObject):
    """The last state of the run, the number of completed optimizer steps, and their planned number."""

    stage: str
    steps_completed: int
    steps: int


class RunEnvironment(JsonObject):
    """The device's name and memory, and versions; None if absent or not examined."""

    device_name: str | None
    torch: str
    opacus: str | None
    device_bytes: int | None = None
    cuda: str | None = None
    transformers: str | None = None
    peft: str | None = None
    opacus_memprof: str | UnsetType = UNSET
    python: str | UnsetType = UNSET
    float32_matmul_precision: str | UnsetType = UNSET


class DataSource(JsonObject):
    """The source of the batches, "snli", "own" or "synthetic", and a sentence with the reason."""

    source: str
    reason: str


class StageSnapshot(DeviceSnapshot, kw_only=True):
    """A snapshot between two stages of the run.

    Attributes:
        timestamp: seconds since 1970.
        peak_bytes: the highest since the previous snapshot; None where events are missing.
    """

    allocated_mb: float | None
    reserved_mb: float | None
    timestamp: float
    peak_bytes: int | UnsetType | None = UNSET


class RunTimeline(Timeline, omit_defaults=True):
    """A timeline of at most about 500 rows; no rows if nothing was measured."""

    event: list[int] = []
    time_ns: list[int] = []
    step: list[int] = []
    logical_step: list[int] = []
    bytes: list[int] = []
    phase: list[str] = []
    categories: dict[str, list[int]] = {}


class PhaseEdges(JsonObject, omit_defaults=True):
    """Columns of equal length: the events at which the program's phase changes, and the phase from there on.

    Idle time between two parts of one phase in one step counts as that phase. The phase "proof" is the part of a
    forward in which flash_clip proves its rules.
    """

    event: list[int] = []
    time_ns: list[int] = []
    step: list[int] = []
    phase: list[str] = []


class BestSuggestion(JsonObject):
    """The first suggestion of the latest failure's report."""

    title: str
    code: str
    predicted_peak_bytes: int
    fits: bool | None


class AllocatorPeak(JsonObject):
    """The highest count of torch's own allocator."""

    max_allocated_bytes: int
    max_reserved_bytes: int


class ExperimentResult(JsonObject, kw_only=True):
    """The content of a result.json or MODE_result.json.

    Attributes:
        experiment: the mode.
        status: "finished", "out_of_memory", "failed" or "killed".
        error: a sentence with the reason why it did not finish, or None. `refused`: whether the user can fix it.
        parameters: `total` and `trainable`.
        tax: the cost of privacy, from analysis.diff.dp_tax, if there was a run without privacy.
        avg_time_ms, step_times_ms: times of the measured steps.
        device: the device of the memory figures. `peak`, `phases`, `steps`, `out_of_memory`: as in its profile.json.
        peak_memory_mb: allocated at the peak. `breakdown`: memory at the peak, by category.
        oom_report: its path, relative to the file's directory. `profile`: the profile's directory, next to the file.
        virtual: of a run on virtual GPUs, which has no times; absent for real ones.
        ranks: for several processes, the summary of all, as in ranks.json.
    """

    format: Literal[1] = FORMAT
    experiment: str
    config: RunConfiguration
    status: str
    error: str | None
    refused: bool = False
    progress: RunProgress
    environment: RunEnvironment
    data: DataSource | None
    parameters: dict[str, int] | None = None
    tax: Tax | None = None
    avg_time_ms: float | None
    step_times_ms: list[float] = []
    device: str | None = None
    started_unix_ns: int | None = None
    peak_memory_mb: float | None
    breakdown: dict[str, float] | None
    snapshots: list[StageSnapshot]
    peak: Peak | None
    phases: dict[str, PhasePeak]
    steps: list[StepPeak] = []
    out_of_memory: list[FailedAllocation]
    timeline: RunTimeline
    phase_edges: PhaseEdges = msgspec.field(default_factory=PhaseEdges)
    findings: list[Finding]
    warnings: list[str] = []
    oom_suggestion: BestSuggestion | None = None
    allocator_peak: AllocatorPeak | None = None
    oom_report: str | None = None
    profile: str | UnsetType = UNSET
    virtual: VirtualGpus | UnsetType = UNSET
    ranks: JobSummary | UnsetType | None = UNSET
