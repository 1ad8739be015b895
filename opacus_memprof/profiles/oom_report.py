# SPDX-License-Identifier: Apache-2.0
"""The structure of oom_report.json. docs/oom.md explains it. Units are those of profiles.profile."""

from collections.abc import Iterable
from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.profile import Groups, Sizes, VirtualGpus


class Request(JsonObject):
    """A failed allocation: its size and purpose."""

    bytes: int
    category: str
    module: str
    op: str
    phase: str
    step: int
    logical_step: int
    unix_ns: int


class NeededPeak(JsonObject):
    """The peak of the step to which the request belongs, as a sum of named parts."""

    bytes: int
    phase: str
    module: str
    parts: Sizes


class LossBytes(JsonObject):
    """Bytes that the loss takes when its backward pass begins, which is the peak or close to it.

    Attributes:
        module: the layer that makes the model's output, or from whose output it is made.
        bytes: of the output, of what the loss has saved, and of its gradients.
        output_bytes: of the output alone, as of the logits of all tokens.
    """

    module: str
    bytes: int
    output_bytes: int


class HeldSince(JsonObject):
    """Live bytes that step `step` allocated, `age` steps ago."""

    step: int
    age: int
    bytes: int


class HeldBlocks(JsonObject):
    """Live blocks of one origin: their bytes, number and largest block, allocated `age` steps ago."""

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
    """Live bytes, the largest first: by category, by module and category, by step, and by origin.

    `unattributed` are those of that category by the line of the user's own code that made them, as far as known.
    """

    categories: Sizes
    modules: Groups
    steps: list[HeldSince]
    largest: list[HeldBlocks]
    unattributed: Sizes = {}


class LeftBehind(JsonObject):
    """Bytes that earlier steps should have freed; with `captures`, those of forward passes without a backward pass."""

    bytes: int
    categories: Sizes
    modules: Sizes
    steps: list[int]
    captures: bool


class RoomBytes(JsonObject):
    """The memory of the device at the failure, in bytes; None if it is unknown.

    Attributes:
        capacity_bytes: requested bytes that fit, with this run's rounding and fragments, minus a margin.
        may_reserve_bytes: bytes that the allocator could reserve in total, if other processes do not change.
        cached_bytes: reserved bytes that are free. `largest_free_bytes`: their largest block.
        unreserved_bytes: bytes that it could still reserve.
        free_segments_bytes: bytes that empty_cache would free. `free_expandable_bytes`: free in expandable segments.
        others_bytes: bytes used by other processes and CUDA itself.
        device_bytes: the device's memory. `limit_bytes`: the limit of this process, if lower.
        rounding: allocated bytes divided by requested bytes.
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
    """The samples of the failed step, bytes per sample at the peak, and the largest batch that fits.

    Includes its predicted peak. None is unknown; 0 means that not even one sample fits. `unit` is what is counted:
    "sample", or "node" where the rows of the model's input are the nodes of a graph.
    """

    samples: int | None
    bytes_per_sample: int | None
    largest_that_fits: int | None
    predicted_peak_bytes: int | None
    unit: str = "sample"


class LayerCost(JsonObject):
    """The activations of a layer, and its memory for privacy in each mode."""

    module: str
    kind: str
    samples: int
    tokens: int
    activations_bytes: int
    per_sample_gradients_bytes: int
    ghost_bytes: int
    flash_clip_bytes: int


# Kinds of actions that a run on a virtual GPU can apply without an edit of the program.
APPLICABLE = {
    "adopt_grad_samples",
    "allocator_setting",
    "drop_gradients",
    "grad_sample_mode",
    "max_physical_batch_size",
    "register_norm_samplers",
    "set_to_none",
}


class Action(JsonObject):
    """A change, for programs; docs/oom.md lists the kinds and their fields."""

    kind: str
    value: str | int | UnsetType = UNSET
    categories: list[str] | UnsetType = UNSET
    modules: list[str] | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    lacking_bytes: int | UnsetType = UNSET


def needs_edit(actions: Iterable[Action]) -> bool:
    """Returns whether these changes need an edit of the program. In the mode ghost, it must use another criterion."""
    return any(action.kind not in APPLICABLE or action.value == "ghost" for action in actions)


class Trial(JsonObject):
    """The result of `plan` for the same program with a change, on a virtual GPU with as much memory.

    Attributes:
        fits: whether it finished, and memory never ran out.
        peak_bytes: the peak of requested bytes; None if the run failed.
        error: the error with which it failed; "" if it did not.
    """

    fits: bool
    peak_bytes: int | None
    error: str


class SuggestedChange(JsonObject):
    """A change that saves memory.

    Attributes:
        title: the change, for people. `code`: the same as code. `computed`: how the prediction was computed.
        saved_bytes: compared with `needed`.
        fits: whether the run fits with the change; None if the capacity is unknown.
        is_tight: whether it fits only if no hole as large as the largest block stays unused.
        tried: the outcome of a run with it; absent if there was none.
    """

    title: str
    actions: list[Action]
    code: str
    computed: str
    predicted_peak_bytes: int
    saved_bytes: int
    fits: bool | None
    is_tight: bool = False
    tried: Trial | UnsetType = UNSET


class OomReport(JsonObject, kw_only=True):
    """The content of oom_report.json.

    Attributes:
        live_bytes: live bytes when the request failed.
        mode: Opacus' grad_sample_mode; "" without Opacus.
        layers: the layers for which privacy takes the most memory.
        earlier_failures: earlier failed allocations, the oldest first.
        loss: absent where the loss takes little, or nothing is known of it.
        virtual: of a run on virtual GPUs; absent for real ones.
        plan: the command that tries the suggestions on a virtual GPU; absent for a program without a file.
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
    loss: LossBytes | UnsetType = UNSET
    virtual: VirtualGpus | UnsetType = UNSET
    plan: str | UnsetType = UNSET
