# SPDX-License-Identifier: Apache-2.0
"""The table of results as text: the files that commands write. Sizes in MB are of 2**20 bytes."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opacus_memprof.experiments import summary
from opacus_memprof.experiments.files import json_text
from opacus_memprof.experiments.memory_types import memory_types
from opacus_memprof.experiments.rows import MB, OPERATIONS, Row
from opacus_memprof.profiles.json_object import FORMAT

# Of a peak, what the run's own result.json keeps: it is long, and of interest for one run.
_LEFT_OUT = ("modules", "module_tree", "ops", "streams", "threads", "largest_blocks", "newest_blocks")


def without_detail(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result without what is long in its peak."""
    peak = result["peak"]
    return {
        **result,
        "peak": None if peak is None else {key: value for key, value in peak.items() if key not in _LEFT_OUT},
    }


def results_json(rows: Sequence[Row]) -> str:
    """Every result without what is long in its peak."""
    return _json([{"name": row.name, **without_detail(row.result)} for row in rows])


def details_json(rows: Sequence[Row]) -> str:
    return _json([detail(row) for row in rows])


def _json(entries: Sequence[Mapping[str, Any]]) -> str:
    return json_text({"format": FORMAT, "results": entries})


def summary_csv(rows: Sequence[Row]) -> str:
    """A line for each run. Of the allocation that ended one, what was asked for and where."""
    found = [columns(row) for row in rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(key for one in found for key in one)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def results_lines(rows: Sequence[Row]) -> str:
    """A line of JSON for each run, with what the CSV has of it."""
    return "".join(json.dumps(columns(row), ensure_ascii=False) + "\n" for row in rows)


def columns(row: Row) -> dict[str, Any]:
    """What the table has of a run. Sizes are in MB of 2**20 bytes."""
    config, peak, failed = row.result["config"], row.peak, row.failed_allocation or {}
    suggestion = row.result.get("oom_suggestion") or {}
    return {
        "name": row.name,
        **{key: config[key] for key in ("model", "mode", "dtype", "seq_length", "batch_size")},
        "max_physical_batch_size": config["max_physical_batch_size"] or config["batch_size"],
        "lora_rank": config["lora_rank"],
        "status": row.result["status"],
        "peak_memory_mb": row.result["peak_memory_mb"],
        "peak_phase": peak.get("phase"),
        "peak_step": peak.get("step"),
        "avg_time_ms": row.milliseconds,
        "reserved_memory_mb": _max_reserved(row),
        "parameters": (row.result["parameters"] or {}).get("total"),
        "trainable_parameters": (row.result["parameters"] or {}).get("trainable"),
        "steps_completed": row.result["progress"]["steps_completed"],
        "stage": row.result["progress"]["stage"],
        "failed_allocation_mb": failed["requested_bytes"] / MB if failed else None,
        "failed_allocation_phase": failed.get("phase"),
        "failed_allocation_category": failed.get("category"),
        "failed_allocation_module": failed.get("module"),
        **{f"{category}_mb": size / MB for category, size in peak.get("categories", {}).items()},
        **{f"component_{name}_mb": sum(sizes.values()) / MB for name, sizes in row.components.items()},
        **{f"stage_{name}_peak_mb": None if size is None else size / MB for name, size, _ in row.set_up},
        "findings": "; ".join(f"{one['kind']} {one['bytes'] / MB:.2f} MB" for one in row.findings),
        "top_finding_remedy": max(row.findings, key=lambda one: one["bytes"])["remedy"] if row.findings else None,
        "oom_suggestion": suggestion.get("title"),
        "oom_suggestion_peak_mb": suggestion["predicted_peak_bytes"] / MB if suggestion else None,
        "oom_report": row.oom_report,
        "data": (row.result["data"] or {}).get("source"),
        "device_name": row.result["environment"]["device_name"],
        "virtual_gpu": config.get("virtual_gpu"),
        "error": row.result["error"],
    }


def _max_reserved(row: Row) -> float | None:
    """What the allocator has taken from the device at most; None on the CPU."""
    counted = row.result["allocator_peak"]
    return None if counted is None else counted["max_reserved_bytes"] / MB


def detail(row: Row) -> dict[str, Any]:
    """What a result says by stage, component, operation and kind of memory, in bytes.

    `components`, `component_categories` and `memory_types` are of the peak, and each sums up to it. `operations` has
    the highest instant within each operation, `stages` what was live at the end of each stage and what it has added.
    """
    return {
        "name": row.name,
        "config": row.result["config"],
        "status": row.result["status"],
        "peak_bytes": row.peak.get("requested_bytes"),
        "stages": _stages(row.result["snapshots"]),
        "components": {component: sum(sizes.values()) for component, sizes in row.components.items()},
        "component_categories": row.components,
        "memory_types": memory_types(row.peak) if row.peak else {},
        "operations": {
            operation: {"peak_bytes": found["peak_bytes"], "categories": found["categories"]}
            for operation in OPERATIONS
            if (found := row.result["phases"].get(operation))
        },
        "born_in": row.peak.get("born_in", {}),
        "out_of_memory": row.result["out_of_memory"],
    }


def _stages(snapshots: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Live bytes at each snapshot, and the difference to the one before."""
    sizes = [snapshot["requested_bytes"] for snapshot in snapshots]
    return [
        {"name": snapshot["name"], "requested_bytes": size, "added_bytes": size - before}
        for snapshot, size, before in zip(snapshots, sizes, [0, *sizes], strict=False)
    ]


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "memory_profile_results.json": results_json,
    "memory_profile_summary.csv": summary_csv,
    "results.jsonl": results_lines,
    "detailed_memory_results.json": details_json,
    "summary.txt": summary.text,
    "memory_table.tex": summary.latex,
}
