# SPDX-License-Identifier: Apache-2.0
"""The dicts that the toolkit's functions return. Sizes ending in `_mb` are in MB of 2**20 bytes."""

from typing import TypedDict

from opacus_memprof.profiles.profile import Finding


class Reading(TypedDict):
    """One device at one moment; docs/toolkit.md explains `source`. `total_mb` and `utilization_percent` are None as
    long as CUDA is not initialised."""

    device: str
    source: str
    allocated_mb: float
    reserved_mb: float
    max_allocated_mb: float
    max_reserved_mb: float
    total_mb: float | None
    utilization_percent: float | None
    categories_mb: dict[str, float]


class MachineMemory(TypedDict):
    """The memory of the machine, and how much of it is in use."""

    total_mb: float
    available_mb: float
    used_percent: float


class MemorySnapshot(TypedDict):
    """The memory of all devices at one moment. `timestamp` is in ISO 8601."""

    name: str
    timestamp: str
    devices: list[Reading]
    system: MachineMemory


class DeviceChange(TypedDict):
    """The change of one device between two snapshots; `utilization_change` in percentage points, or None."""

    device: str
    memory_change_mb: float
    reserved_change_mb: float
    peak_change_mb: float
    utilization_change: float | None
    categories_change_mb: dict[str, float]


class _OptionalChanges(TypedDict, total=False):
    system_change_mb: float
    duration_s: float


class SnapshotDifference(_OptionalChanges):
    """The change between the snapshots named `before` and `after`; of a function's call, also its duration."""

    before: str
    after: str
    gpu_changes: list[DeviceChange]


class ParameterSize(TypedDict):
    """One parameter of a model."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    numel: int
    memory_mb: float
    trainable: bool


class LayerSize(TypedDict):
    """The numbers of all and of trainable parameters of a layer, and their memory."""

    total: int
    trainable: int
    memory_mb: float


class ModelMemory(TypedDict):
    """The memory of a model: `total_memory_mb` is the sum of parameters, buffers, gradients and grad_sample."""

    total_memory_mb: float
    parameters_mb: float
    buffers_mb: float
    gradients_mb: float
    per_sample_gradients_mb: float


class ModelAnalysis(TypedDict):
    """The numbers of all and of trainable parameters of a model, its memory, and its anomalies."""

    name: str
    total: int
    trainable: int
    memory_mb: float
    param_efficiency: float
    parameters: list[ParameterSize]
    layers: dict[str, LayerSize]
    summary: ModelMemory
    findings: list[Finding]


class Stage(TypedDict):
    """One stage of a training run, and what the memory in use changed by."""

    name: str
    duration_s: float
    failed: bool
    change: SnapshotDifference


class Sizes(TypedDict):
    """The four sizes of a device, in MB of 2**20 bytes."""

    allocated: float
    reserved: float
    max_allocated: float
    max_reserved: float


class _SizesOfDevices(TypedDict, total=False):
    devices: dict[str, Sizes]


class EventRecord(Sizes, _SizesOfDevices):
    """One record of an event: seconds since the first record, the sizes of the device in use, and those of all devices
    if there are several. `timestamp` is in ISO 8601."""

    time: float
    timestamp: str
