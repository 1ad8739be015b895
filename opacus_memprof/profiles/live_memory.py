# SPDX-License-Identifier: Apache-2.0
"""The structures of live memory.

These are readings of the live counters, as a stream writes them; snapshots, as session.snapshot returns them and
snapshots.jsonl stores them; and the counters' peaks.

Units are those of profiles.profile, categories those of reports. Blocks that a forward pass allocated are
forward_undecided until they are freed.
"""

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import JsonObject
from opacus_memprof.profiles.profile import HookedActivations, ReservedPeak, Sizes


class LiveDevice(JsonObject):
    """The live bytes of one device.

    Attributes:
        requested_bytes: the sum of `categories`.
        peak_bytes: the highest requested bytes since recording began.
        phase: the phase of the newest allocation.
        activation_hooks: the two parts of that category.
        reserved_peak: the most reserved bytes since recording began; None if they are not counted.
    """

    requested_bytes: int
    peak_bytes: int
    phase: str
    categories: Sizes
    activation_hooks: HookedActivations
    reserved_peak: ReservedPeak | None = None


class LiveMemory(JsonObject):
    """The live bytes of all devices that have had a block, at one instant. `rank` is None without a job."""

    unix_ns: int
    pid: int
    rank: int | None
    step: int
    logical_step: int
    devices: dict[str, LiveDevice]


class LivePeak(JsonObject):
    """The peak of one device in the live counters.

    Attributes:
        counted_bytes, allocated_bytes, reserved_bytes: as in profiles.profile.Peak; None if they are not counted.
        reserved_peak: as in profiles.profile.Device.
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
    reserved_peak: ReservedPeak | None = None


class DeviceCount(JsonObject):
    """One device's live bytes, compared with the allocator's own count.

    requested_bytes is the sum of `categories`. Adding `rounding` gives the bytes that the allocator handed out, adding
    `cached` the bytes that it reserved, adding `outside_pytorch` the bytes used on the device. Unknown counts are None.

    Attributes:
        activation_hooks: the two parts of that category.
        allocated_bytes: of live tensors, as the allocator counts them.
        remainder: the allocator's count of requested bytes minus the categories' sum: 0, unless the session's warnings
            explain it.
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
