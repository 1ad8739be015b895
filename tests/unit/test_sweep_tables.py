# SPDX-License-Identifier: Apache-2.0
"""The JSON and CSV files of several results."""

import csv
import io
import json
from pathlib import Path

from opacus_memprof.experiments.sweep.grid import grid
from opacus_memprof.experiments.sweep.memory_types import MEMORY_TYPES, memory_types
from opacus_memprof.experiments.sweep.tables import detail, summary_csv, write_tables
from tests.unit.sweep_results import BASE, GIB, failed, finished, out_of_memory

CELLS, _ = grid(BASE, [16, 32, 64], [8], [2], [4])
RESULTS = {
    CELLS[0].name: finished(CELLS[0].configuration),
    CELLS[1].name: out_of_memory(CELLS[1].configuration),
    CELLS[2].name: failed(CELLS[2].configuration),
}


def test_the_summary_has_a_line_for_each() -> None:
    one, two, three = csv.DictReader(io.StringIO(summary_csv(RESULTS)))
    assert one["name"] == "seq16_batch8_physical2_lora4"
    assert (one["seq_length"], one["batch_size"], one["max_physical_batch_size"], one["lora_rank"]) == (
        "16",
        "8",
        "2",
        "4",
    )
    assert (one["status"], one["peak_phase"], one["avg_time_ms"]) == ("finished", "backward", "12.5")
    assert float(one["peak_memory_mb"]) == 1024 + 16 * 2 + 300 / 2**20
    assert float(one["model_parameters_mb"]) == 1024
    assert float(one["activations_mb"]) == 32
    assert one["failed_allocation_mb"] == ""
    assert two["status"] == "out_of_memory"
    assert float(two["failed_allocation_mb"]) == 3072
    assert (two["failed_allocation_phase"], two["failed_allocation_module"]) == ("backward", "mlp")
    assert three["status"] == "failed"
    assert (three["peak_memory_mb"], three["activations_mb"], three["failed_allocation_mb"]) == ("", "", "")
    assert three["error"] == "ValueError while loading the model: no"


def test_the_files(tmp_path: Path) -> None:
    write_tables(RESULTS, tmp_path, detailed=False)
    assert {path.name for path in tmp_path.iterdir()} == {"memory_profile_results.json", "memory_profile_summary.csv"}
    content = json.loads((tmp_path / "memory_profile_results.json").read_text())
    assert content["format"] == 1
    assert [entry["name"] for entry in content["results"]] == list(RESULTS)
    assert "modules" not in content["results"][0]["peak"]
    for entry, result in zip(content["results"], RESULTS.values(), strict=True):
        assert {key: entry[key] for key in result if key != "peak"} == {
            key: value for key, value in result.items() if key != "peak"
        }
    write_tables(RESULTS, tmp_path, detailed=True)
    details = json.loads((tmp_path / "detailed_memory_results.json").read_text())["results"]
    assert [entry["status"] for entry in details] == ["finished", "out_of_memory", "failed"]


def test_details_sum_up_to_the_peak() -> None:
    result = RESULTS[CELLS[0].name]
    found = detail(CELLS[0].name, result)
    assert found["components"] == {"mlp": GIB + 300, "other": 32 * 2**20}
    for parts in (found["components"], found["memory_types"]):
        assert sum(parts.values()) == found["peak_bytes"] == result["peak"]["requested_bytes"]
    assert list(found["operations"]) == ["forward", "backward"]
    assert [stage["added_bytes"] for stage in found["stages"]] == [GIB, 32 * 2**20, -32 * 2**20]
    assert detail(CELLS[2].name, RESULTS[CELLS[2].name])["components"] == {}


def test_kinds_of_memory() -> None:
    found = memory_types(RESULTS[CELLS[0].name]["peak"])
    assert found == {
        "parameters": GIB,
        "optimizer": 0,
        "gradients": 0,
        "activations": 32 * 2**20 + 200,  # autograd would hold them anyway
        "privacy": 100,
        "temporaries": 0,
        "other": 0,
    }
    split = {"shared_with_autograd": 0, "opacus_only": 0}
    own = memory_types({"categories": {"teacher": 5, "library_workspace": 7}, "activation_hooks": split})
    assert own["other"] == 12
    gathered = {"model_parameters": 1, "unsharded_parameters": 20, "gradients": 3, "unsharded_gradients": 40}
    of_fsdp = memory_types({"categories": gathered, "activation_hooks": split})
    assert (of_fsdp["parameters"], of_fsdp["gradients"], of_fsdp["other"]) == (21, 43, 0)


def test_every_category_has_a_kind() -> None:
    """But those that are nobody's."""
    from opacus_memprof import _native

    listed = {category for categories in MEMORY_TYPES.values() for category in categories}
    assert set(_native.names()["categories"][:23]) - listed == {
        "unattributed",
        "communication",
        "library_workspace",
        "pending_free",
    }
