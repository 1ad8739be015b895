# SPDX-License-Identifier: Apache-2.0
"""The JSON and CSV files of several results."""

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from opacus_memprof.experiments import summary
from opacus_memprof.experiments.configuration import grid
from opacus_memprof.experiments.directory import DETAILED_SWEEP, SWEEP
from opacus_memprof.experiments.rows import MEMORY_TYPES, growth, memory_types
from opacus_memprof.experiments.tables import results_lines, row_details, summary_csv
from tests.unit.made_profiles import a_peak
from tests.unit.sweep_results import BASE, GIB, a_row, assert_contains, failed, finished, out_of_memory, with_fields

CELLS, _ = grid(BASE, [16, 32, 64], [8], [2], [4])
MADE = (finished, out_of_memory, failed)
ROWS = [a_row(cell.name, cell.label, made(cell.configuration)) for cell, made in zip(CELLS, MADE, strict=True)]


def test_the_summary_has_a_line_for_each() -> None:
    one, two, three = csv.DictReader(io.StringIO(summary_csv(ROWS)))
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
    assert (one["parameters"], one["trainable_parameters"], one["reserved_memory_mb"]) == ("1000", "10", "")
    assert (two["reserved_memory_mb"], two["oom_suggestion_peak_mb"]) == ("2048.0", "512.0")
    assert two["oom_suggestion"] == "physical batches of 1"
    assert (float(one["component_mlp_mb"]), float(one["stage_model_loaded_peak_mb"])) == (1024 + 300 / 2**20, 1025)


def test_the_summary_says_what_was_found_and_what_would_fit() -> None:
    def finding(kind: str, size: int) -> dict[str, object]:
        return {"kind": kind, "module": "mlp", "bytes": size, "evidence": "it is there", "remedy": f"fix {kind}"}

    small, large = finding("discarded_gradients", GIB), finding("discarded_gradients", 2 * GIB)
    three = [finding(f"kind_{number}", number * 2**20) for number in (3, 2, 1)]
    found = [replace(ROWS[0], result=with_fields(ROWS[0].result, findings=[small, *three]))]
    found.append(replace(ROWS[1], result=with_fields(ROWS[1].result, findings=[large]), folder="runs/two"))
    lines = [" ".join(line.split()) for line in summary.summary_text(found).splitlines()]
    assert lines[lines.index("TOP FINDINGS:") + 2] == (
        "discarded gradients in mlp, 2048.00 MB (S 32 · B 8/2 · r 4, and 1 more)"
    )
    assert {"remedy: fix kind_3", "remedy: fix kind_2"} <= set(lines)
    assert "remedy: fix kind_1" not in lines  # the top three
    assert "suggestion: physical batches of 1 (predicted peak 512.00 MB, which fits)" in lines
    assert "report: runs/two/profile/oom_report.txt" in lines
    assert f"report: {Path('there/runs/two/profile/oom_report.txt')}" in summary.terminal_summary(found, Path("there"))
    assert "mlp 1024.00 MB" in lines
    assert lines[lines.index("By stage: peak live after it") + 1] == "model loaded 1025.00 MB 1024.00 MB"
    (first, second) = csv.DictReader(io.StringIO(summary_csv(found)))
    assert first["findings"].startswith("discarded_gradients 1024.00 MB; kind_3 3.00 MB")
    assert (first["top_finding_remedy"], second["oom_report"]) == (
        "fix discarded_gradients",
        "runs/two/profile/oom_report.txt",
    )
    rows = [json.loads(line) for line in results_lines(found).splitlines()]
    assert [row["status"] for row in rows] == ["finished", "out_of_memory"]


def test_of_many_runs_a_terminal_shows_the_largest_s_parts() -> None:
    many = [replace(ROWS[0], name=str(number), label=f"run {number}") for number in range(6)] + [ROWS[1]]
    printed = summary.terminal_summary(many, Path())
    assert printed.count("By component:") == 1
    assert summary.summary_text(many).count("By component:") == 7


def test_memory_over_time_of_a_slow_run_is_not_nothing() -> None:
    slow = replace(ROWS[0], result=with_fields(ROWS[0].result, avg_time_ms=5e6))
    row = next(line for line in summary.summary_text([slow]).splitlines() if line.startswith(slow.label))
    assert float(row.split()[-1]) == pytest.approx(slow.total_bytes / 2**20 / 5e6, rel=0.05)


def test_the_files(tmp_path: Path) -> None:
    SWEEP.write_tables(ROWS, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "memory_profile_results.json",
        "memory_profile_summary.csv",
        "results.jsonl",
        "summary.txt",
    }
    content = json.loads((tmp_path / "memory_profile_results.json").read_text())
    assert content["format"] == 1
    assert [entry["name"] for entry in content["results"]] == [row.name for row in ROWS]
    assert "modules" not in content["results"][0]["peak"]
    for entry, cell, made in zip(content["results"], CELLS, MADE, strict=True):
        result = made(cell.configuration)
        del result["peak"]
        assert_contains(entry, result)
    DETAILED_SWEEP.write_tables(ROWS, tmp_path)
    details = json.loads((tmp_path / "detailed_memory_results.json").read_text())["results"]
    assert [entry["status"] for entry in details] == ["finished", "out_of_memory", "failed"]


def test_details_sum_up_to_the_peak() -> None:
    found = row_details(ROWS[0])
    assert found["components"] == {"mlp": GIB + 300, "other": 32 * 2**20}
    for parts in (found["components"], found["memory_types"]):
        assert sum(parts.values()) == found["peak_bytes"] == ROWS[0].peak["requested_bytes"]
    assert list(found["operations"]) == ["forward", "backward"]
    assert [stage["added_bytes"] for stage in found["stages"]] == [GIB, 32 * 2**20, -32 * 2**20]
    assert row_details(ROWS[2])["components"] == {}


def test_kinds_of_memory() -> None:
    found = memory_types(ROWS[0].peak)
    assert found == {
        "parameters": GIB,
        "optimizer": 0,
        "gradients": 0,
        "activations": 32 * 2**20 + 200,  # autograd would hold them anyway
        "privacy": 100,
        "temporaries": 0,
        "other": 0,
    }
    own = memory_types(a_peak(categories={"teacher": 5, "library_workspace": 7}))
    assert own["other"] == 12
    gathered = {"model_parameters": 1, "unsharded_parameters": 20, "gradients": 3, "unsharded_gradients": 40}
    of_fsdp = memory_types(a_peak(categories=gathered))
    assert (of_fsdp["parameters"], of_fsdp["gradients"], of_fsdp["other"]) == (21, 43, 0)


def test_every_category_has_a_kind() -> None:
    """Except categories that belong to nobody."""
    from opacus_memprof.recording import native

    listed = {category for categories in MEMORY_TYPES.values() for category in categories}
    assert set(native.names()["categories"][:23]) - listed == {
        "unattributed",
        "communication",
        "library_workspace",
        "pending_free",
    }


def test_growth_is_a_sentence_for_each_size_with_its_exponent() -> None:
    """The parameters take 1024 MiB, and activations 2 MiB for each token: 1056 and 1152 MiB at 16 and 64 tokens."""
    cells, _ = grid(BASE, [16, 64], [8], [2], [4])
    rows = [a_row(cell.name, cell.label, finished(cell.configuration)) for cell in cells]
    text = " ".join(summary.summary_text(rows).split())
    exponent = math.log(1152 / 1056) / math.log(64 / 16)
    assert (
        f"From sequence length 16 to 64 the peak grows as its power {exponent:.2f}; without parameters and optimizer "
        "states, as its power 1.00." in text
    )
    assert "From batch size" not in text  # it does not vary


def test_of_several_comparisons_the_growth_is_the_median() -> None:
    cells, _ = grid(BASE, [16, 64], [8], [2, 4, 8], [4])
    rows = [a_row(cell.name, cell.label, finished(cell.configuration)) for cell in cells]
    found = growth("seq_length", rows)
    assert found is not None
    expected = [math.log((1024 + 64 * n) / (1024 + 16 * n)) / math.log(4) for n in (2, 4, 8)]
    assert found.exponents == pytest.approx(expected, abs=1e-6)
    text = " ".join(summary.summary_text(rows).split())
    assert f"{expected[1]:.2f} (median of 3 comparisons, {expected[0]:.2f} to {expected[2]:.2f})" in text
    assert growth("lora_rank", rows) is None


def test_components_of_every_configuration_are_in_one_table() -> None:
    lines = summary.terminal_summary(ROWS, Path("there")).splitlines()
    at = lines.index("COMPONENTS AT THE PEAK, in MB:")
    heading, first, _, third = (line.split() for line in lines[at + 2 : at + 6])
    assert heading == ["mlp", "other"]
    assert first[-2:] == ["1024.00", "32.00"]
    assert third[-2:] == ["-", "-"]  # nothing was recorded


def test_the_peak_s_step_counts_what_steps_completed_counts() -> None:
    """Of physical steps there are more."""
    made = finished(CELLS[0].configuration)
    made["peak"] |= {"step": 7, "logical_step": 1}
    (line,) = csv.DictReader(io.StringIO(summary_csv([a_row("a", "A", made)])))
    assert (line["peak_step"], line["steps_completed"]) == ("2", "2")


def test_the_summary_says_the_model_s_shape_and_its_layers() -> None:
    made = finished(CELLS[0].configuration)
    made["parameters"] = {"total": 100, "trainable": 100}
    made["peak"]["modules"] = {
        "tokens": {"model_parameters": 3 * 2**20},
        **{f"blocks.{number}.mlp.up": {"model_parameters": 2**20, "activations": 9} for number in range(3)},
        **{f"blocks.{number}.norm": {"model_parameters": 2**19} for number in range(3)},
    }
    text = summary.summary_text([a_row("a", "A", made)])
    assert "Parameters: 100 in 7.50 MB: blocks.[0-2] 3 x 1.50 MB, tokens 3.00 MB" in text
    assert "Model: tiny (transformer: vocab_size 256, hidden_dim 64, num_layers 2, num_heads 4)" in text
