# SPDX-License-Identifier: Apache-2.0
"""The structure of ranks.json, the summary of a job's ranks. Units are those of profiles.profile."""

from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.profile import Finding, Sizes, VirtualGpus


class RankPeak(JsonObject):
    """A rank's peak on one device, as in its profile.json, without categories that have no bytes."""

    requested_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    step: int
    phase: str
    remainder_bytes: int
    categories: Sizes


class Rank(JsonObject):
    """A rank's row.

    Attributes:
        host, local_rank: None where its profile does not say.
        directory: its name within the job's.
        events, dropped: records of its event file, and those that found no room.
        device: with its highest peak, which is `peak`; None where it has none.
        steps: that have ended.
        outside_pytorch: the most bytes that were used on the device at a snapshot and torch knows nothing of.
        other_devices: its peaks there.
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
    """The highest of the ranks' figures, their mean, the ratio of the two, and the rank with the highest."""

    max_bytes: int
    mean_bytes: int
    ratio: float
    rank: int


class Imbalance(JsonObject):
    """The spread of the ranks' peaks, the category of which the highest has most above the mean, by how many bytes,
    and the spread of each category at the peaks."""

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
        launch: of one of the ranks.
        status: the worst of the ranks', of which a missing one was killed.
        versions, virtual: of the first rank.
        played: of a job of which only some ranks ran, which.
        missing: ranks that have left no profile.
        imbalance: of the ranks that have ended a step where some have; None where no rank has a peak.
        findings: of the ranks; of what several have found in one module the one with most bytes.
        warnings: what does not fit together, and the ranks' own.
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
