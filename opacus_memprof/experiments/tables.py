# SPDX-License-Identifier: Apache-2.0
"""The tables of results that commands write, as JSON, CSV, text and LaTeX. Sizes in MB are of 2**20 bytes."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from opacus_memprof.experiments import summary
from opacus_memprof.experiments.files import json_text
from opacus_memprof.experiments.rows import MB, OPERATIONS, Row, memory_types
from opacus_memprof.profiles.experiment_result import StageSnapshot
from opacus_memprof.profiles.json_object import FORMAT

# Long parts of a peak, which only the run's own result.json has.
_LEFT_OUT = ("modules", "module_tree", "ops", "streams", "threads", "largest_blocks", "newest_blocks")


def results_json(rows: Sequence[Row]) -> str:
    """Returns all results, without the long parts of their peaks."""
    entries = [{"name": row.name, **to_builtins(row.result)} for row in rows]
    for entry in entries:
        if entry["peak"] is not None:
            entry["peak"] = {key: value for key, value in entry["peak"].items() if key not in _LEFT_OUT}
    return _json(entries)


def details_json(rows: Sequence[Row]) -> str:
    """Returns the details of all results; see `row_details`."""
    return _json([row_details(row) for row in rows])


def _json(entries: Sequence[Mapping[str, Any]]) -> str:
    return json_text({"format": FORMAT, "results": entries})


def summary_csv(rows: Sequence[Row]) -> str:
    """Returns a line for each run, with the columns of `row_columns`."""
    lines = [row_columns(row) for row in rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def results_lines(rows: Sequence[Row]) -> str:
    """Returns a line of JSON for each run, with the columns of `row_columns`."""
    return "".join(json.dumps(row_columns(row), ensure_ascii=False) + "\n" for row in rows)


def row_columns(row: Row) -> dict[str, Any]:
    """Returns the columns of a run in the CSV table. Sizes are in MB of 2**20 bytes."""
    result, peak, failed, suggestion = row.result, row.peak, row.failed_allocation, row.result.oom_suggestion
    config, allocator_peak = result.config, result.allocator_peak
    return {
        "name": row.name,
        **{key: config[key] for key in ("model", "mode", "dtype", "seq_length", "batch_size")},
        "max_physical_batch_size": config.max_physical_batch_size or config.batch_size,
        "lora_rank": config.lora_rank,
        "status": result.status,
        "peak_memory_mb": result.peak_memory_mb,
        "peak_phase": peak.phase if peak else None,
        # The optimizer step with the peak, from 1 on: `steps_completed` counts the same steps.
        "peak_step": None if peak is None or peak.logical_step is None else peak.logical_step + 1,
        "avg_time_ms": row.step_ms,
        "reserved_memory_mb": allocator_peak.max_reserved_bytes / MB if allocator_peak else None,
        "parameters": (result.parameters or {}).get("total"),
        "trainable_parameters": (result.parameters or {}).get("trainable"),
        "steps_completed": result.progress.steps_completed,
        "stage": result.progress.stage,
        "failed_allocation_mb": failed.requested_bytes / MB if failed else None,
        "failed_allocation_phase": failed.phase if failed else None,
        "failed_allocation_category": failed.category if failed else None,
        "failed_allocation_module": failed.module if failed else None,
        **{f"{category}_mb": size / MB for category, size in (peak.categories if peak else {}).items()},
        **{f"component_{name}_mb": sum(sizes.values()) / MB for name, sizes in row.components.items()},
        **{f"stage_{name}_peak_mb": None if size is None else size / MB for name, size, _ in row.set_up},
        "findings": "; ".join(f"{finding.kind} {finding.bytes / MB:.2f} MB" for finding in row.findings),
        "top_finding_remedy": max(row.findings, key=lambda finding: finding.bytes).remedy if row.findings else None,
        "oom_suggestion": suggestion.title if suggestion else None,
        "oom_suggestion_peak_mb": suggestion.predicted_peak_bytes / MB if suggestion else None,
        "oom_report": row.oom_report,
        "data": result.data.source if result.data else None,
        "device_name": result.environment.device_name,
        "virtual_gpu": config.get("virtual_gpu"),
        "error": result.error,
    }


def row_details(row: Row) -> dict[str, Any]:
    """Returns the memory of a run by stage, component, operation and type of memory, in bytes.

    `components`, `component_categories` and `memory_types` describe the peak, and each adds up to it. `operations` has
    the highest instant within each operation. `stages` has the live memory at the end of each stage and its increase.
    """
    peak, phases = row.peak, row.result.phases
    return {
        "name": row.name,
        "config": row.result.config,
        "status": row.result.status,
        "peak_bytes": peak.requested_bytes if peak else None,
        "stages": _stages(row.result.snapshots),
        "components": {component: sum(sizes.values()) for component, sizes in row.components.items()},
        "component_categories": row.components,
        "memory_types": memory_types(peak) if peak else {},
        "operations": {
            name: {"peak_bytes": phases[name].peak_bytes, "categories": phases[name].categories}
            for name in OPERATIONS
            if name in phases
        },
        "born_in": peak.born_in if peak else {},
        "out_of_memory": row.result.out_of_memory,
    }


def _stages(snapshots: Sequence[StageSnapshot]) -> list[dict[str, Any]]:
    """Returns the live bytes at each snapshot, and the difference to the previous one."""
    sizes = [snapshot.requested_bytes for snapshot in snapshots]
    return [
        {"name": snapshot.name, "requested_bytes": size, "added_bytes": size - before}
        for snapshot, size, before in zip(snapshots, sizes, [0, *sizes], strict=False)
    ]


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "memory_profile_results.json": results_json,
    "memory_profile_summary.csv": summary_csv,
    "results.jsonl": results_lines,
    "detailed_memory_results.json": details_json,
    "summary.txt": summary.summary_text,
    "memory_table.tex": summary.latex_table,
}
