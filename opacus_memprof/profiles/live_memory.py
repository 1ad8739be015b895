# SPDX-License-Identifier: Apache-2.0
"""The structures of what is live in a running process: a reading of the live counters, as a stream writes it; a
snapshot, as session.snapshot returns it and snapshots.jsonl has it; and the counters' peaks.

Units are those of profiles.profile, categories those of reports. What a forward pass has made is forward_undecided
until it dies.
"""

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import JsonObject
from opacus_memprof.profiles.profile import HookedActivations, Sizes


class LiveDevice(JsonObject):
    """The live bytes of one device.

    Attributes:
        requested_bytes: the sum of `categories`.
        peak_bytes: the highest requested bytes since recording began.
        phase: of the newest allocation.
        activation_hooks: the two parts of that category.
    """

    requested_bytes: int
    peak_bytes: int
    phase: str
    categories: Sizes
    activation_hooks: HookedActivations


class LiveMemory(JsonObject):
    """The live bytes of all devices that have had a block, at one instant. `rank` is None without a job."""

    unix_ns: int
    pid: int
    rank: int | None
    step: int
    logical_step: int
    devices: dict[str, LiveDevice]


class LivePeak(JsonObject):
    """The peak of one device, as the live counters have it.

    Attributes:
        counted_bytes, allocated_bytes, reserved_bytes: as of profiles.profile.Peak; None where nobody counts.
    """

    requested_bytes: int
    counted_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    unix_ns: int
    step: int
    phase: str
    categories: Sizes
    activation_hooks: HookedActivations


class DeviceCount(JsonObject):
    """One device's live bytes, compared with what the allocator itself counts.

    The sums go on: requested_bytes is the sum of `categories`; with `rounding` it is what the allocator has handed out,
    with `cached` what it has reserved, with `outside_pytorch` what is used on the device. What nobody counts is None.

    Attributes:
        activation_hooks: the two parts of that category.
        allocated_bytes: of live tensors, as the allocator counts them.
        remainder: what the allocator counts as requested, less the categories' sum: 0, unless the session's warnings
            say why.
    """

    requested_bytes: int
    categories: Sizes
    activation_hooks: HookedActivations | UnsetType = UNSET
    allocated_bytes: int | UnsetType | None = UNSET
    reserved_bytes: int | UnsetType | None = UNSET
    rounding: int | UnsetType | None = UNSET
    cached: int | UnsetType | None = UNSET
    outside_pytorch: int | UnsetType | None = UNSET
    remainder: int | UnsetType | None = UNSET


class Snapshot(JsonObject):
    """The live bytes of all devices at one call of session.snapshot; `index` counts the calls in a process."""

    index: int
    name: str
    unix_ns: int
    step: int
    logical_step: int
    devices: dict[str, DeviceCount]
