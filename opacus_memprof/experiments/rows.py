# SPDX-License-Identifier: Apache-2.0
"""The table of results that every summary and picture is made from: a row a run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opacus_memprof.analysis.names import as_without_dp
from opacus_memprof.experiments.configuration import MODES, Mode
from opacus_memprof.experiments.files import read_results
from opacus_memprof.experiments.grid import LABELS

MB = 2**20

SET_UP = ("model_loaded", "data_prepared", "fsdp_wrapped", "optimizer_set_up", "privacy_engine_set_up")
# What stages of the training loop hold, by the phases that the profiler tells apart.
OPERATIONS = ("forward", "backward", "second_backward", "clip", "noise", "optimizer_step")


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        name: unique in its table.
        label: how it differs from the others, for people.
        result: as docs/experiments.md describes it; files.read_result has checked its keys.
        folder: of the result's file, from the directory of the results.
    """

    name: str
    label: str
    result: Mapping[str, Any]
    folder: str = ""

    @property
    def short(self) -> str:
        """The label without what stands in parentheses."""
        return self.label.replace(" (No DP-SGD)", "").replace(" (DP-SGD)", "")

    @property
    def mode(self) -> Mode:
        """As its configuration has it."""
        mode: Mode = self.result["config"]["mode"]
        return mode

    @property
    def finished(self) -> bool:
        """Only then time and peak can be compared."""
        return bool(self.result["status"] == "finished")

    @property
    def ran_out(self) -> bool:
        """Of memory."""
        return bool(self.result["status"] == "out_of_memory")

    @property
    def outcome(self) -> str:
        """The status in words: "out of memory"."""
        return str(self.result["status"]).replace("_", " ")

    @property
    def milliseconds(self) -> float | None:
        """Of a step; None without one."""
        return None if self.result["avg_time_ms"] is None else float(self.result["avg_time_ms"])

    @property
    def peak(self) -> Mapping[str, Any]:
        """As profile.json has it; {} where nothing was measured. Out of memory, what had been reached until then."""
        return self.result["peak"] or {}

    @property
    def bytes(self) -> dict[str, int]:
        """At the peak by category, those without bytes left out; `rounding` is the allocator's."""
        sizes = {**self.peak.get("categories", {}), "rounding": self.peak.get("rounding") or 0}
        return {category: size for category, size in sizes.items() if size}

    @property
    def total(self) -> int:
        """Allocated at the peak: the sum of `bytes`."""
        return sum(self.bytes.values())

    @property
    def shared_captures(self) -> int:
        """Of activation_hooks at the peak, what autograd holds as well."""
        return int((self.peak.get("activation_hooks") or {}).get("shared_with_autograd", 0))

    @property
    def components(self) -> dict[str, dict[str, int]]:
        """At the peak by component and category."""
        return dict(self.peak.get("components", {}))

    @property
    def findings(self) -> list[Mapping[str, Any]]:
        """As profile.json has them."""
        return list(self.result["findings"])

    @property
    def set_up(self) -> list[tuple[str, int | None, int]]:
        """Of each stage of set-up: its name, its highest bytes (None in results of earlier releases), and those that
        are live after it."""
        found = []
        for entry in self.result["snapshots"]:
            name = entry["name"].partition("_")[2]
            if name in SET_UP:
                found.append((name, entry.get("peak_bytes"), int(entry["requested_bytes"])))
        return found

    @property
    def oom_report(self) -> str:
        """Where what explains the failure is, from the directory of the results; "" where nothing does."""
        report = self.result.get("oom_report")
        return (Path(self.folder) / report).as_posix() if report else ""

    def operation_peak(self, name: str) -> int:
        """The highest bytes within one of OPERATIONS that was reached."""
        return int(self.result["phases"][name]["peak_bytes"])

    def operation(self, name: str) -> dict[str, int]:
        """By category, at the highest instant within one of OPERATIONS; {} where it was not reached."""
        found = self.result["phases"].get(name)
        return {} if found is None else dict(found["categories"])

    @property
    def failed_allocation(self) -> Mapping[str, Any] | None:
        """What a run that is out of memory ended with, as profile.json has it: libraries handle those before. None of a
        run that ended otherwise."""
        failures = self.result["out_of_memory"] if self.ran_out else ()
        return failures[-1] if failures else None

    @property
    def refused_bytes(self) -> int:
        """What was not to be had when memory ran out."""
        return 0 if self.failed_allocation is None else int(self.failed_allocation["requested_bytes"])


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By mode, vanilla first; else as they are."""
    return sorted(rows, key=lambda one: MODES.index(one.result["config"]["mode"]))


def rows_by_mode(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Of results by their names, in the order of the modes. Those of one mode are told apart by their names."""
    count = Counter(result["config"]["mode"] for result in results.values())
    rows = []
    for name, result in sorted(results.items()):
        mode = result["config"]["mode"]
        rows.append(Row(name, LABELS[mode] if count[mode] == 1 else f"{LABELS[mode]} {name}", result))
    return in_order(rows)


def read_rows(directory: Path) -> list[Row]:
    """Of the result files in a directory. Raises MemprofError, see files.read_results."""
    return rows_by_mode(read_results(directory))


def vanilla_of(rows: Sequence[Row]) -> Row | None:
    """The one that all others are held against: finished and the only one without privacy; None where there is none."""
    found = [one for one in rows if one.mode == "vanilla"]
    return found[0] if len(found) == 1 and found[0].finished else None


def difference(one: Row, vanilla: Row) -> dict[str, int]:
    """What it holds more, by category, each at its own peak, as analysis.tax has it: captures that autograd holds as
    well are vanilla's activations. Categories without a difference are left out."""
    ours, theirs = as_without_dp(one.bytes, one.shared_captures), vanilla.bytes
    changes = {category: ours.get(category, 0) - theirs.get(category, 0) for category in {**ours, **theirs}}
    return {category: change for category, change in changes.items() if change}
