# SPDX-License-Identifier: Apache-2.0
"""The structure of a file of pytest baselines, which docs/pytest.md explains."""

from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.profile import Groups


class BaselineKey(JsonObject):
    """What a peak depends on: the device's name, the versions of torch and Opacus, and the grad-sample modes."""

    device: str
    torch: str
    opacus: str
    mode: str


class Baseline(JsonObject):
    """A test's peak.

    Attributes:
        peak_bytes: requested bytes; `step` and `phase` say when.
        modules: the same by module and category.
        virtual_gpu: the kind, where it was measured on a virtual GPU; absent for real devices. A real one of the same
            name allocates the same, so either is compared with the other.
    """

    key: BaselineKey
    peak_bytes: int
    modules: Groups
    step: int
    phase: str
    virtual_gpu: str | UnsetType = UNSET


class BaselineFile(JsonObject, kw_only=True):
    """The entries of one name, one for each key."""

    format: Literal[1] = FORMAT
    baselines: list[Baseline]
