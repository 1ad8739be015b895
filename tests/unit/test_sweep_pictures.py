# SPDX-License-Identifier: Apache-2.0
"""What the pictures of several results show; that they look right is for the eye."""

from pathlib import Path

from opacus_memprof.experiments.sweep import pictures
from opacus_memprof.experiments.sweep.details import COMPONENT_COLORS, TYPE_COLORS, component_bytes, operation_bytes
from opacus_memprof.experiments.sweep.grid import grid
from opacus_memprof.experiments.sweep.heatmap import cells_by_sizes
from opacus_memprof.experiments.sweep.memory_types import MEMORY_TYPES
from opacus_memprof.experiments.sweep.overview import lines_over, varied_sizes
from opacus_memprof.experiments.sweep.reading import categories, failure, label, outcome, peak_bytes
from tests.unit.sweep_results import BASE, GIB, failed, finished, out_of_memory

CELLS, _ = grid(BASE, [16, 32], [8], [1, 2, 4], [0, 8])
ROWS = [finished(cell.configuration) for cell in CELLS]
ROWS[-1] = out_of_memory(CELLS[-1].configuration)
ROWS[-2] = failed(CELLS[-2].configuration)


def test_what_is_read_from_a_result() -> None:
    assert label(ROWS[0]) == "S 16 · B 8/1 · full"
    assert peak_bytes(ROWS[0]) == GIB + 16 * 2**20 + 300
    assert categories(ROWS[0]) == {"model_parameters": GIB, "activations": 16 * 2**20, "activation_hooks": 300}
    assert failure(ROWS[0]) is None
    assert [outcome(ROWS[place]) for place in (0, -1, -2)] == ["", " (OOM)", " (failed)"]
    assert failure(ROWS[-1]) == "out of memory, asked 3.00 GiB more"
    assert (failure(ROWS[-2]), peak_bytes(ROWS[-2]), categories(ROWS[-2])) == ("failed", None, {})


def test_a_line_differs_in_one_size_only() -> None:
    assert varied_sizes(ROWS) == ["seq_length", "max_physical_batch_size", "lora_rank"]
    lines = lines_over("max_physical_batch_size", ROWS)
    assert sorted(len(line) for line in lines) == [2, 3, 3, 3]  # the one that failed has no peak
    for line in lines:
        sizes = [value for value, _ in line]
        assert sizes == sorted(sizes)
        tokens = line[0][1]["config"]["seq_length"]
        assert [peak_bytes(result) for _, result in line] == [GIB + tokens * size * 2**20 + 300 for size in sizes]
    ranks = lines_over("lora_rank", ROWS)
    assert {tuple(value for value, _ in line) for line in ranks} == {(0, 8), (8,)}


def test_the_heat_map_finds_every_cell() -> None:
    cells = cells_by_sizes(ROWS)
    assert len(cells) == 12
    assert cells[8, 8, 32, 4]["status"] == "out_of_memory"
    assert cells[0, 8, 16, 2]["config"]["max_physical_batch_size"] == 2
    whole = finished(BASE)  # no physical batch size of its own: all of the batch at once
    assert list(cells_by_sizes([whole])) == [(0, 1, 128, 1)]


def test_components_kinds_and_operations() -> None:
    assert component_bytes(ROWS[0]) == {"mlp": GIB + 300, "other": 16 * 2**20}
    assert component_bytes(ROWS[-2]) == {}
    assert operation_bytes(ROWS[0], "backward") == ROWS[0]["peak"]["categories"]
    assert operation_bytes(ROWS[0], "noise") == {}
    assert TYPE_COLORS.keys() == MEMORY_TYPES.keys()


def test_every_component_has_a_colour() -> None:
    from opacus_memprof.analysis.components import OTHER, RULES

    assert COMPONENT_COLORS.keys() == {*RULES.values(), OTHER}


def test_all_pictures_are_there(tmp_path: Path) -> None:
    results = {CELLS[0].name: ROWS[0], CELLS[-1].name: ROWS[-1], CELLS[-2].name: ROWS[-2]}
    pictures.draw_sweep(results, tmp_path, detailed=True)
    timelines = {f"memory_timeline_config_{name}" for name in results}
    summaries = {"memory_analysis_overview", "memory_heatmap", "detailed_memory_analysis", "operation_level_breakdown"}
    expected = {f"{stem}{suffix}.png" for stem in timelines | summaries for suffix in ("", "_dark")}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_nothing_was_measured(tmp_path: Path) -> None:
    """Every run failed: there are pictures all the same, and they say so."""
    results = {CELLS[0].name: failed(CELLS[0].configuration)}
    pictures.draw_sweep(results, tmp_path, detailed=True)
    pictures.draw_single_gpu(results, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 * 7
