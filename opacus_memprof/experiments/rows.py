# SPDX-License-Identifier: Apache-2.0
"""The table of results for summaries and pictures: one row per run."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

from opacus_memprof.experiments.configuration import LABELS, MODES, Cell
from opacus_memprof.experiments.files import read_results
from opacus_memprof.profiles.categories import as_without_dp
from opacus_memprof.profiles.experiment_result import ExperimentResult
from opacus_memprof.profiles.profile import FailedAllocation, Finding, Groups, Peak, Sizes

MB = 2**20

SET_UP = ("model_loaded", "data_prepared", "fsdp_wrapped", "optimizer_set_up", "privacy_engine_set_up")
_STATES = ("model_parameters", "buffers", "optimizer_states")
# The phases of a training step, in order.
OPERATIONS = ("forward", "backward", "second_backward", "clip", "noise", "optimizer_step")


class SetUpStage(NamedTuple):
    """A stage before training: its highest bytes (None if events are missing), and the live bytes at its end."""

    name: str
    peak_bytes: int | None
    live_bytes: int


@dataclass(frozen=True)
class Row:
    """The result of one run. Sizes are in bytes.

    Attributes:
        name: a unique name in its table.
        label: a label for people that distinguishes it from other runs.
        result: the result, as in docs/experiments.md.
        folder: the folder of the result's file, relative to the directory of the results.
    """

    name: str
    label: str
    result: ExperimentResult
    folder: str = ""

    @property
    def short_label(self) -> str:
        """The label without what stands in parentheses."""
        return self.label.replace(" (No DP-SGD)", "").replace(" (DP-SGD)", "")

    @property
    def names_sizes(self) -> bool:
        """Whether the label is of sizes, which SIZES_NOTE explains."""
        return " · B " in self.label

    @property
    def mode(self) -> str:
        """The mode of its configuration."""
        return self.result.config.mode

    @property
    def finished(self) -> bool:
        """Whether the run has finished. Only then can its time and peak be compared with others."""
        return self.result.status == "finished"

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether it ended because memory ran out."""
        return self.result.status == "out_of_memory"

    @property
    def outcome(self) -> str:
        """The status in words: "out of memory"."""
        return self.result.status.replace("_", " ")

    @property
    def step_ms(self) -> float | None:
        """The mean time of a step in milliseconds; None without one."""
        return self.result.avg_time_ms

    @property
    def peak(self) -> Peak | None:
        """The peak, up to the failure of a run that failed; None if nothing was measured."""
        return self.result.peak

    @property
    def bytes(self) -> Sizes:
        """The bytes at the peak by category, with `rounding` of the allocator, without zeros."""
        if self.peak is None:
            return {}
        sizes = {**self.peak.categories, "rounding": self.peak.rounding or 0}
        return {category: size for category, size in sizes.items() if size}

    @property
    def total_bytes(self) -> int:
        """The allocated bytes at the peak: the sum of `bytes`."""
        return sum(self.bytes.values())

    @property
    def shared_captures(self) -> int:
        """The bytes of activation_hooks at the peak that autograd holds as well."""
        return 0 if self.peak is None else self.peak.activation_hooks.shared_with_autograd

    @property
    def components(self) -> Groups:
        """The bytes at the peak by component and category."""
        return {} if self.peak is None else self.peak.components

    @property
    def findings(self) -> list[Finding]:
        """The findings of its profile."""
        return self.result.findings

    @property
    def set_up(self) -> list[SetUpStage]:
        """The stages before training."""
        stages = []
        for snapshot in self.result.snapshots:
            name = snapshot.name.partition("_")[2]
            if name in SET_UP:
                peak = snapshot.peak_bytes if isinstance(snapshot.peak_bytes, int) else None
                stages.append(SetUpStage(name, peak, snapshot.requested_bytes))
        return stages

    @property
    def oom_report(self) -> str:
        """The path of the report of the failure, relative to the directory of the results; "" without one."""
        report = self.result.oom_report
        return (Path(self.folder) / report).as_posix() if report else ""

    def operation_peak(self, name: str) -> int:
        """Returns the peak bytes of one of OPERATIONS; 0 if the run has not reached it."""
        phase = self.result.phases.get(name)
        return 0 if phase is None else phase.peak_bytes

    def operation(self, name: str) -> Sizes:
        """Returns the bytes by category at the peak of one of OPERATIONS; {} if the run has not reached it."""
        phase = self.result.phases.get(name)
        return {} if phase is None else phase.categories

    @property
    def failed_allocation(self) -> FailedAllocation | None:
        """The last failed allocation of a run that ran out of memory; None for any other run."""
        failures = self.result.out_of_memory if self.ran_out_of_memory else []
        return failures[-1] if failures else None

    @property
    def refused_bytes(self) -> int:
        """The size of the failed allocation; 0 without one."""
        return 0 if self.failed_allocation is None else self.failed_allocation.requested_bytes


def sort_by_mode(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows by mode, vanilla first; rows of one mode keep their order."""
    return sorted(rows, key=lambda row: MODES.index(row.mode))


def rows_by_mode(results: Mapping[str, ExperimentResult]) -> list[Row]:
    """Returns the rows of named results by mode. The labels of several results of one mode contain their names."""
    count = Counter(result.config.mode for result in results.values())
    rows = []
    for name, result in sorted(results.items()):
        mode = result.config.mode
        rows.append(Row(name, LABELS[mode] if count[mode] == 1 else f"{LABELS[mode]} {name}", result))
    return sort_by_mode(rows)


def read_rows(directory: Path) -> list[Row]:
    """Returns the rows of the result files in a directory. Raises MemprofError if they cannot be read."""
    return rows_by_mode(read_results(directory))


def find_vanilla(rows: Sequence[Row]) -> Row | None:
    """Returns the row for comparisons: the only one without privacy, if it has finished; otherwise None."""
    vanilla = [row for row in rows if row.mode == "vanilla"]
    return vanilla[0] if len(vanilla) == 1 and vanilla[0].finished else None


def overhead(row: Row, vanilla: Row) -> Sizes:
    """Returns the bytes by category that a run needs more than vanilla, each at its own peak, without zeros.

    As in analysis.diff, captures that autograd also holds count as activations.
    """
    sizes, others = as_without_dp(row.bytes, row.shared_captures), vanilla.bytes
    changes = {category: sizes.get(category, 0) - others.get(category, 0) for category in {**sizes, **others}}
    return {category: change for category, change in changes.items() if change}


Line = list[tuple[int, Row]]


def varied_sizes(rows: Sequence[Row]) -> list[str]:
    """Returns the sizes in Cell.varied that have more than one value."""
    return [size for size in Cell.varied if len({size_of(row, size) for row in rows}) > 1]


def lines_over(size: str, rows: Sequence[Row]) -> list[Line]:
    """Returns the rows that differ only in `size`, as lines of (size, row) in ascending order. Rows need a peak."""
    lines: dict[tuple[int, ...], Line] = defaultdict(list)
    for row in rows:
        if row.peak:
            others = tuple(size_of(row, other) for other in Cell.varied if other != size)
            lines[others].append((size_of(row, size), row))
    return [sorted(line, key=lambda point: point[0]) for line in lines.values()]


def size_of(row: Row, size: str) -> int:
    """Returns one of the sizes in Cell.varied; no LoRA is rank 0."""
    return int(row.result.config[size] or 0)


@dataclass(frozen=True)
class Growth:
    """The growth of the peak with one size, between runs that differ in that size alone: peak ~ size ** exponent.

    Attributes:
        size: one of Cell.varied.
        smallest, largest: its values.
        exponents: one for each group of such runs, ascending.
        without_states: the same for the peak without parameters and optimizer states, where that is not nothing.
    """

    size: str
    smallest: int
    largest: int
    exponents: list[float]
    without_states: list[float]


def growth(size: str, rows: Sequence[Row]) -> Growth | None:
    """Returns the growth with a size, by least squares over logarithms; None if no two finished runs tell it."""
    lines = [[point for point in line if point[0] and point[1].finished] for line in lines_over(size, rows)]
    lines = [line for line in lines if len({value for value, _ in line}) > 1]
    if not lines:
        return None
    values = [value for line in lines for value, _ in line]
    totals = [[(value, row.total_bytes) for value, row in line] for line in lines]
    rest = [
        [(value, row.total_bytes - sum(row.bytes.get(name, 0) for name in _STATES)) for value, row in line]
        for line in lines
    ]
    without_states = sorted(_exponent(line) for line in rest if all(size > 0 for _, size in line))
    return Growth(size, min(values), max(values), sorted(map(_exponent, totals)), without_states)


def _exponent(points: Sequence[tuple[int, int]]) -> float:
    return linear_regression(*zip(*((math.log(value), math.log(size)) for value, size in points), strict=True)).slope


OTHER = "other"

# `privacy` has the categories that only Opacus needs.
MEMORY_TYPES = {
    "parameters": ("model_parameters", "buffers", "unsharded_parameters"),
    "optimizer": ("optimizer_states",),
    "gradients": ("gradients", "unsharded_gradients"),
    "activations": ("activations", "activation_hooks_shared", "forward_undecided", "inputs"),
    "privacy": (
        "activation_hooks_opacus_only",
        "backprop_copies",
        "per_sample_gradients",
        "temp_matrices",
        "norm_samples",
        "clipping_temporaries",
        "summed_gradients",
        "noise",
    ),
    "temporaries": ("forward_temporaries", "backward_temporaries", "optimizer_temporaries"),
    OTHER: (),
}
_TYPE_OF = {category: name for name, categories in MEMORY_TYPES.items() for category in categories}


def memory_types(peak: Peak) -> Sizes:
    """Returns the bytes of a peak by type of memory. Their sum is the requested bytes."""
    split = peak.activation_hooks
    categories = {
        **{name: size for name, size in peak.categories.items() if name != "activation_hooks"},
        "activation_hooks_shared": split.shared_with_autograd,
        "activation_hooks_opacus_only": split.opacus_only,
    }
    sums = dict.fromkeys(MEMORY_TYPES, 0)
    for category, size in categories.items():
        sums[_TYPE_OF.get(category, OTHER)] += size
    return sums
