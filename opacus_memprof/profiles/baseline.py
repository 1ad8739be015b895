# SPDX-License-Identifier: Apache-2.0
"""The structure of a file of pytest baselines. docs/pytest.md explains it."""

from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.profile import Groups


class BaselineKey(JsonObject):
    """The conditions of a peak: the device's name, the versions of torch and Opacus, and the grad-sample modes."""

    device: str
    torch: str
    opacus: str
    mode: str


class Baseline(JsonObject):
    """A test's peak.

    Attributes:
        peak_bytes: requested bytes at the peak; `step` and `phase` say when it was.
        modules: peak bytes by module and category.
        virtual_gpu: the kind of the virtual GPU; absent for real devices. A real device of the same name allocates the
            same, so the two are comparable.
    """

    key: BaselineKey
    peak_bytes: int
    modules: Groups
    step: int
    phase: str
    virtual_gpu: str | UnsetType = UNSET


class BaselineFile(JsonObject, kw_only=True):
    """The entries with one name, one for each key."""

    format: Literal[1] = FORMAT
    baselines: list[Baseline]
