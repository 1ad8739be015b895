# SPDX-License-Identifier: Apache-2.0
"""The structures of differences between two profiles, as analysis.diff computes them, and of pytest's baselines.

Sizes of differences are signed bytes; unchanged sizes are omitted. docs/pytest.md explains the file of baselines.
"""

from typing import Literal

from msgspec import UNSET, UnsetType

from opacus_memprof.profiles.json_object import FORMAT, JsonObject
from opacus_memprof.profiles.profile import Groups, ReservedPeak, Sizes


class PeakDifference(JsonObject, kw_only=True):
    """One peak minus another: Σ `categories` = Σ `modules` = `total`.

    `lines` are by the innermost line of the user's own code that made a block, as far as known.
    """

    total: int
    categories: Sizes
    modules: Groups
    lines: Groups = {}


class DiffPeak(JsonObject):
    """The step and phase of a peak, its bytes by category, and the most reserved bytes of the whole run, if known."""

    requested_bytes: int
    phase: str
    step: int
    categories: Sizes
    reserved_peak: ReservedPeak | None = None


class DiffPhase(JsonObject):
    """The peaks of a phase (None for a run without the phase) and their difference."""

    total: int
    before_bytes: int | None
    after_bytes: int | None
    categories: Sizes


class DeviceDiff(PeakDifference):
    """The difference between two peaks of one device, and between the peaks of its phases."""

    before: DiffPeak
    after: DiffPeak
    phases: dict[str, DiffPhase]


class Diff(JsonObject):
    """The differences between two profiles by device, and notes on other differences."""

    devices: dict[str, DeviceDiff]
    notes: list[str]


class DeviceTax(PeakDifference):
    """The private run's peak on a device minus the vanilla run's: `total` = private_bytes - vanilla_bytes.

    Captures that autograd also holds count as the activations that they are without Opacus. `opacus_only` is the
    private run's share of activation_hooks that only Opacus holds.
    """

    private_bytes: int
    vanilla_bytes: int
    opacus_only: int


class Tax(JsonObject):
    """The memory that privacy adds, by device, and notes on other differences."""

    devices: dict[str, DeviceTax]
    notes: list[str] = []


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
