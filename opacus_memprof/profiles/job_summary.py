# SPDX-License-Identifier: Apache-2.0
"""The structure of ranks.json, the summary of a job's ranks. Units are those of profiles.profile."""

from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.profile import Finding, ReservedPeak, Sizes, VirtualGpus


class RankPeak(JsonObject):
    """A rank's peak on one device, as in its profile.json, without categories that have no bytes.

    Attributes:
        reserved_bytes: reserved at that instant. `reserved_peak`: the most in the whole run.
    """

    requested_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    step: int
    phase: str
    remainder_bytes: int
    categories: Sizes
    reserved_peak: ReservedPeak | None = None


class Rank(JsonObject):
    """A rank's row.

    Attributes:
        host, local_rank: None if its profile does not contain them.
        directory: name of its directory in the job's.
        events, dropped: recorded and lost events.
        device: the device with its highest peak, `peak`; None without one.
        steps: completed optimizer steps.
        outside_pytorch: the most bytes used on the device outside PyTorch, at a snapshot.
        other_devices: peaks on other devices.
    """

    rank: int
    host: str | None
    local_rank: int | None
    directory: str
    status: str
    exit_code: int | None
    error: str | None
    started_unix_ns: int
    ended_unix_ns: int
    events: int
    dropped: int
    device: str | None
    steps: int
    peak: RankPeak | None
    outside_pytorch: int | None
    other_devices: dict[str, RankPeak]


class Spread(JsonObject):
    """The ranks' maximum and mean, their ratio, and the rank with the maximum."""

    max_bytes: int
    mean_bytes: int
    ratio: float
    rank: int


class Imbalance(JsonObject):
    """The spread of the ranks' peaks, and of each category at the peaks.

    Attributes:
        cause: the category in which the highest peak exceeds the mean most, by `cause_bytes`.
    """

    max_bytes: int
    mean_bytes: int
    ratio: float
    rank: int
    cause: str | None
    cause_bytes: int
    categories: dict[str, Spread]


class Straggler(JsonObject):
    """A rank whose peak of `bytes` is far above the median."""

    rank: int
    bytes: int
    above_median: int


class TotalPeaks(JsonObject):
    """The sum of the ranks' peaks, which need not be at the same time."""

    peaks_bytes: int
    categories: Sizes


class JobSummary(JsonObject, kw_only=True):
    """The content of ranks.json.

    Attributes:
        launch: launch of one of the ranks.
        status: the worst status of the ranks; a missing rank counts as killed.
        versions, virtual: versions and virtual GPUs of the first rank.
        played: the ranks that ran, if only some ranks of a simulated job did.
        missing: ranks without a profile.
        imbalance: over the ranks that ended a step, or over all ranks if none did; None if no rank has a peak.
        findings: findings of the ranks; if several ranks have the same one, the one with the most bytes.
        warnings: contradictions between ranks, and the ranks' own warnings.
    """

    format: Literal[1] = FORMAT
    launch: Launch | None
    world_size: int
    status: str
    versions: dict[str, str | None]
    played: list[int] | UnsetType = UNSET
    virtual: VirtualGpus | UnsetType = UNSET
    ranks: list[Rank]
    missing: list[int]
    imbalance: Imbalance | None
    stragglers: list[Straggler]
    total: TotalPeaks
    findings: list[Finding]
    warnings: list[str]
