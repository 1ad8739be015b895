# SPDX-License-Identifier: Apache-2.0
"""The results of several configurations as one JSON file and one CSV file. Sizes in MB are of 2**20 bytes."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opacus_memprof.experiments.files import write_json
from opacus_memprof.experiments.sweep.memory_types import memory_types
from opacus_memprof.experiments.sweep.reading import failed_allocation
from opacus_memprof.experiments.sweep.results import FORMAT
from opacus_memprof.files import write_text

MB = 2**20

# Of a peak, what the run's own result.json keeps: it is long, and of interest for one run.
_LEFT_OUT = ("modules", "module_tree", "ops", "streams", "threads", "largest_blocks", "newest_blocks")
# What stages of the training loop hold, by the phases that the profiler tells apart.
OPERATIONS = ("forward", "backward", "second_backward", "clip", "noise", "optimizer_step")

Results = Mapping[str, Mapping[str, Any]]


def write_tables(results: Results, directory: Path, *, detailed: bool) -> None:
    """memory_profile_results.json and memory_profile_summary.csv, with `detailed` detailed_memory_results.json as well.

    Raises MemprofError where they cannot be written.
    """
    entries = [{"name": name, **without_detail(result)} for name, result in results.items()]
    write_json(directory / "memory_profile_results.json", {"format": FORMAT, "results": entries})
    write_text(directory / "memory_profile_summary.csv", summary_csv(results))
    if detailed:
        details = [detail(name, result) for name, result in results.items()]
        write_json(directory / "detailed_memory_results.json", {"format": FORMAT, "results": details})


def without_detail(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without what is long in its peak."""
    peak = result["peak"]
    return {
        **result,
        "peak": None if peak is None else {key: value for key, value in peak.items() if key not in _LEFT_OUT},
    }


def summary_csv(results: Results) -> str:
    """One line for each result. Of the allocation that ended one, what was asked for and where."""
    rows = [_summary(name, result) for name, result in results.items()]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _summary(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    config, peak, progress = result["config"], result["peak"] or {}, result["progress"]
    failed = failed_allocation(result) or {}
    return {
        "name": name,
        **{key: config[key] for key in ("model", "mode", "dtype", "seq_length", "batch_size")},
        "max_physical_batch_size": config["max_physical_batch_size"] or config["batch_size"],
        "lora_rank": config["lora_rank"],
        "status": result["status"],
        "peak_memory_mb": result["peak_memory_mb"],
        "peak_phase": peak.get("phase"),
        "peak_step": peak.get("step"),
        "avg_time_ms": result["avg_time_ms"],
        "steps_completed": progress["steps_completed"],
        "stage": progress["stage"],
        "failed_allocation_mb": failed["requested_bytes"] / MB if failed else None,
        "failed_allocation_phase": failed.get("phase"),
        "failed_allocation_category": failed.get("category"),
        "failed_allocation_module": failed.get("module"),
        **{f"{category}_mb": size / MB for category, size in peak.get("categories", {}).items()},
        "data": (result["data"] or {}).get("source"),
        "device_name": result["environment"]["device_name"],
        "error": result["error"],
    }


def detail(name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says by stage, component, operation and kind of memory, in bytes.

    `components`, `component_categories` and `memory_types` are of the peak, and each sums up to it. `operations` has
    the highest instant within each operation, `stages` what was live at the end of each stage and what it has added.
    """
    peak = result["peak"]
    components = {} if peak is None else peak["components"]
    return {
        "name": name,
        "config": result["config"],
        "status": result["status"],
        "peak_bytes": None if peak is None else peak["requested_bytes"],
        "stages": _stages(result["snapshots"]),
        "components": {component: sum(sizes.values()) for component, sizes in components.items()},
        "component_categories": components,
        "memory_types": {} if peak is None else memory_types(peak),
        "operations": {
            operation: {"peak_bytes": found["peak_bytes"], "categories": found["categories"]}
            for operation in OPERATIONS
            if (found := result["phases"].get(operation))
        },
        "born_in": {} if peak is None else peak["born_in"],
        "out_of_memory": result["out_of_memory"],
    }


def _stages(snapshots: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Live bytes at each snapshot, and the difference to the one before."""
    sizes = [snapshot["requested_bytes"] for snapshot in snapshots]
    return [
        {"name": snapshot["name"], "requested_bytes": size, "added_bytes": size - before}
        for snapshot, size, before in zip(snapshots, sizes, [0, *sizes], strict=False)
    ]
