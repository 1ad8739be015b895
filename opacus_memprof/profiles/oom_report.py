# SPDX-License-Identifier: Apache-2.0
"""The structure of oom_report.json, which docs/oom.md explains. Units are those of profiles.profile."""

from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.profile import Groups, Sizes, VirtualGpus


class Request(JsonObject):
    """An allocation that failed: how many bytes, and for what."""

    bytes: int
    category: str
    module: str
    op: str
    phase: str
    step: int
    logical_step: int
    unix_ns: int


class NeededPeak(JsonObject):
    """The peak of the whole step, of which the request was a part, as a sum of named parts."""

    bytes: int
    phase: str
    module: str
    parts: Sizes


class HeldSince(JsonObject):
    """What the step `step`, `age` steps ago, has made and was live."""

    step: int
    age: int
    bytes: int


class HeldBlocks(JsonObject):
    """Live blocks of one origin: their sum, number and largest, where they were made, and how many steps ago."""

    bytes: int
    blocks: int
    largest: int
    category: str
    module: str
    op: str
    phase: str
    step: int
    age: int


class Holders(JsonObject):
    """Who held what, the largest first: by category, by module and category, by step, and of one origin."""

    categories: Sizes
    modules: Groups
    steps: list[HeldSince]
    largest: list[HeldBlocks]


class LeftBehind(JsonObject):
    """What earlier steps should have freed; with `captures` what forwards without a backward did."""

    bytes: int
    categories: Sizes
    modules: Sizes
    steps: list[int]
    captures: bool


class RoomBytes(JsonObject):
    """The bytes that would have fitted; None where nobody counts.

    Attributes:
        capacity_bytes: requested bytes that fit at once, as this run's blocks round and fragment, less a margin.
        may_reserve_bytes: what the allocator could reserve in all, with other processes as they are.
        cached_bytes: reserved, and used by nobody. `largest_free_bytes`: of it in one block.
        unreserved_bytes: what it could still take from the device.
        free_segments_bytes: what empty_cache would give back. `free_expandable_bytes`: free in expandable segments.
        others_bytes: used on the device by others.
        device_bytes: the device's memory. `limit_bytes`: what this process was allowed of it, if less.
        rounding: bytes of blocks for each requested one.
    """

    capacity_bytes: int | None
    may_reserve_bytes: int | None
    reserved_bytes: int | None
    allocated_bytes: int | None
    cached_bytes: int | None
    largest_free_bytes: int | None
    unreserved_bytes: int | None
    free_segments_bytes: int | None
    free_expandable_bytes: int | None
    others_bytes: int | None
    device_bytes: int | None
    limit_bytes: int | None
    rounding: float


class FittingBatch(JsonObject):
    """Samples of the failing step, bytes of one at the peak, and how many at a time would fit, with the peak that is
    predicted then; None where that is not known, 0 where not even one would."""

    samples: int | None
    bytes_per_sample: int | None
    largest_that_fits: int | None
    predicted_peak_bytes: int | None


class LayerCost(JsonObject):
    """What a layer keeps for backward, and what privacy takes for it in each mode."""

    module: str
    kind: str
    samples: int
    tokens: int
    activations_bytes: int
    per_sample_gradients_bytes: int
    ghost_bytes: int
    flash_clip_bytes: int


class Action(JsonObject):
    """What to change, for programs; docs/oom.md lists the kinds and what each has."""

    kind: str
    value: str | int | UnsetType = UNSET
    categories: list[str] | UnsetType = UNSET
    modules: list[str] | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    lacking_bytes: int | UnsetType = UNSET


class SuggestedChange(JsonObject):
    """What to change.

    Attributes:
        title: for people. `code`: as they would write it. `computed`: how the prediction was made.
        saved_bytes: against `needed`.
        fits: whether it does then; None where nobody knows how much fits.
    """

    title: str
    actions: list[Action]
    code: str
    computed: str
    predicted_peak_bytes: int
    saved_bytes: int
    fits: bool | None


class OomReport(JsonObject, kw_only=True):
    """The content of oom_report.json.

    Attributes:
        live_bytes: when the request failed.
        mode: Opacus' grad_sample_mode; "" without Opacus.
        layers: those for which privacy takes the most.
        earlier_failures: the oldest first.
        virtual: of a run on virtual GPUs; absent for real ones.
    """

    format: Literal[1] = FORMAT
    device: str
    request: Request
    live_bytes: int
    needed: NeededPeak
    mode: str
    holders: Holders
    left_behind: LeftBehind
    room: RoomBytes
    batch: FittingBatch
    layers: list[LayerCost]
    suggestions: list[SuggestedChange]
    earlier_failures: list[Request]
    virtual: VirtualGpus | UnsetType = UNSET
