# SPDX-License-Identifier: Apache-2.0
"""Results side by side: what they are called, what they held at the peak, and what each took more than vanilla."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opacus_memprof.analysis.names import as_without_dp
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import MODES
from opacus_memprof.experiments.files import read_json, refuse_damaged

LABELS = {
    "vanilla": "Vanilla (No DP-SGD)",
    "hooks": "Hooks (DP-SGD)",
    "functorch": "Functorch (DP-SGD)",
    "ew": "Expanded Weights (DP-SGD)",
    "ghost": "Ghost Clipping (DP-SGD)",
    "flash_clip": "Flash Clipping (DP-SGD)",
}


@dataclass(frozen=True)
class Method:
    """A result, for tables and pictures.

    Attributes:
        label: what it is called there.
        result: as docs/experiments.md describes it.
    """

    label: str
    result: Mapping[str, Any]

    @property
    def short(self) -> str:
        """The label without what stands in parentheses."""
        return self.label.replace(" (No DP-SGD)", "").replace(" (DP-SGD)", "")

    @property
    def ran_out(self) -> bool:
        """Of memory."""
        return bool(self.result["status"] == "out_of_memory")

    @property
    def finished(self) -> bool:
        """Only then time and peak can be compared."""
        return bool(self.result["status"] == "finished")

    @property
    def outcome(self) -> str:
        """In words: "out of memory"."""
        return str(self.result["status"]).replace("_", " ")

    @property
    def milliseconds(self) -> float | None:
        """Of a step; None without one."""
        value = self.result["avg_time_ms"]
        return None if value is None else float(value)

    @property
    def bytes(self) -> dict[str, int]:
        """By category what was allocated at the peak, or, where memory ran out, when it did. `rounding` is the
        allocator's. Categories without bytes are left out."""
        if self.ran_out and self.result["out_of_memory"]:
            return dict(self.result["out_of_memory"][-1]["categories"])
        peak = self.result["peak"]
        if peak is None:
            return {}
        sizes = {**peak["categories"], "rounding": peak["rounding"] or 0}
        return {category: size for category, size in sizes.items() if size}

    @property
    def shared_captures(self) -> int:
        """Of its activation_hooks at the peak, what autograd holds as well."""
        return int(((self.result["peak"] or {}).get("activation_hooks") or {}).get("shared_with_autograd", 0))

    @property
    def refused_bytes(self) -> int:
        """What was not to be had when memory ran out."""
        failed = self.result["out_of_memory"]
        return int(failed[-1]["requested_bytes"]) if self.ran_out and failed else 0

    @property
    def total(self) -> int:
        """The sum of `bytes`."""
        return sum(self.bytes.values())


def methods(results: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Method]:
    """In the order of the modes. Results of one mode are told apart by their names.

    Args:
        results: (name, result).
    """
    ordered = sorted(results, key=lambda item: (MODES.index(item[1]["experiment"]), item[0]))
    count = Counter(result["experiment"] for _, result in ordered)
    return [
        Method(LABELS[mode] if count[mode := result["experiment"]] == 1 else f"{LABELS[mode]} {name}", result)
        for name, result in ordered
    ]


def vanilla_of(compared: Sequence[Method]) -> Method | None:
    """The one that all others are held against: finished and the only one without privacy; None where there is none."""
    found = [method for method in compared if method.result["experiment"] == "vanilla"]
    return found[0] if len(found) == 1 and found[0].finished else None


def difference(method: Method, vanilla: Method) -> dict[str, int]:
    """What it holds more, by category, each at its own peak, as analysis.tax has it: captures that autograd holds as
    well are vanilla's activations. Categories without a difference are left out."""
    ours, theirs = as_without_dp(method.bytes, method.shared_captures), vanilla.bytes
    changes = {category: ours.get(category, 0) - theirs.get(category, 0) for category in {**ours, **theirs}}
    return {category: change for category, change in changes.items() if change}


def read_results(directory: Path) -> list[tuple[str, dict[str, Any]]]:
    """The results in a directory: (file's name without .json, result).

    Raises:
        MemprofError: there is none, or one of another version, or a file that is no result.
    """
    if not directory.is_dir():
        raise MemprofError(f"{directory} is no directory: give one with the results of experiments, *.json")
    found = []
    for path in sorted(directory.glob("*.json")):
        content = read_json(path)
        if content.get("experiment") not in MODES or "breakdown" not in content:
            raise MemprofError(f"{path} is not an experiment's result: give a directory that has only these")
        if content.get("format") != 1:
            raise MemprofError(
                f"{path} has format {content.get('format')!r}, and this release reads 1: run the experiment again"
            )
        refuse_damaged(path, content)
        found.append((path.stem, content))
    if not found:
        raise MemprofError(f"there is no result in {directory}: run `opacus-memprof experiments` first")
    return found
