# SPDX-License-Identifier: Apache-2.0
"""Which configurations a grid has."""

import pytest

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import grid, methods, one_at_a_time
from tests.unit.sweep_results import BASE

Sizes = tuple[int, int, int | None, int | None]


def sizes(cells: list) -> list[Sizes]:
    chosen = [cell.configuration for cell in cells]
    return [(c.seq_length, c.batch_size, c.max_physical_batch_size, c.lora_rank) for c in chosen]


def test_every_combination_small_samples_first() -> None:
    cells, left_out = grid(BASE, [256, 128], [8, 8], [2, 1], [0, 16])
    assert sizes(cells) == [
        (128, 8, 1, None),
        (128, 8, 1, 16),
        (128, 8, 2, None),
        (128, 8, 2, 16),
        (256, 8, 1, None),
        (256, 8, 1, 16),
        (256, 8, 2, None),
        (256, 8, 2, 16),
    ]
    assert left_out == 0
    assert {cell.configuration.task for cell in cells} == {"classification"}


def test_a_physical_batch_above_the_logical_one_is_left_out() -> None:
    cells, left_out = grid(BASE, [16], [1, 2, 4], [1, 2, 4, 8], [8])
    assert {(logical, physical) for _, logical, physical, _ in sizes(cells)} == {
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 2),
        (4, 4),
    }
    assert left_out == 12 - 6


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [
        (([], [8], [1], [8]), "the grid is empty: give --seq_lengths"),
        (([16], [8], [1], []), "the grid is empty: give --lora_ranks"),
        (([16, 0], [8], [1], [8]), "--seq_lengths has 0"),
        (([16], [-8], [1], [8]), "--batch_sizes has -8"),
        (([16], [8], [0], [8]), "--max_physical_batch_sizes has 0"),
        (([16], [8], [1], [-1]), "--lora_ranks has -1"),
        (([16], [2, 4], [8, 16], [8]), r"no combination is possible: every physical batch \(8 and more\)"),
    ],
)
def test_what_is_no_grid(lists: tuple[list[int], ...], sentence: str) -> None:
    with pytest.raises(MemprofError, match=sentence):
        grid(BASE, *lists)


def test_names_tell_cells_apart() -> None:
    cells, _ = grid(BASE, [16, 32], [8, 16], [1, 2], [0, 4])
    assert len({cell.name for cell in cells}) == len({cell.label for cell in cells}) == len(cells) == 16
    assert cells[0].name == "seq16_batch8_physical1_full"
    assert cells[-1].name == "seq32_batch16_physical2_lora4"
    assert cells[-1].label == "S 32 · B 16/2 · r 4"


def test_the_comparison_varies_one_thing_at_a_time() -> None:
    cells = sizes(one_at_a_time(BASE))
    middle = (128, 8, 1, None)
    assert cells[0] == middle
    assert all(sum(size != other for size, other in zip(cell, middle, strict=True)) == 1 for cell in cells[1:])
    assert {cell[0] for cell in cells} == {64, 128, 256}
    assert {cell[1] for cell in cells} == {8, 16, 32}
    assert {cell[2] for cell in cells} == {1, 2, 4}
    assert {cell[3] for cell in cells} == {None, 16, 32}


def test_methods_come_with_vanilla_first() -> None:
    assert [cell.name for cell in methods(BASE, [])] == ["vanilla", "hooks", "functorch", "ew", "ghost", "flash_clip"]
    chosen = methods(BASE, ["flash-clip", "vanilla", "vanilla"])
    assert [cell.name for cell in chosen] == ["vanilla", "flash_clip"]
    assert [cell.label for cell in chosen] == ["Vanilla (No DP-SGD)", "Flash Clipping (DP-SGD)"]
    with pytest.raises(MemprofError, match='there is no mode "fast"'):
        methods(BASE, ["fast"])
