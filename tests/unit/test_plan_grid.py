# SPDX-License-Identifier: Apache-2.0
"""The cells of a plan and their order, and the table's width."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram, Range, parse_search
from opacus_memprof.planning.report import print_cells
from opacus_memprof.planning.table import PlannedCell, make_cells, smallest_gpus
from opacus_memprof.planning.virtual_run import VirtualRun, run_environment

EXPANDABLE = ("expandable_segments:True", "expandable_segments:False")


def cells_of_everything() -> list[PlannedCell]:
    base = PlannedConfiguration(PlannedProgram("train.py", ("--mode", "hooks")), "a100-40", ranks=8)
    return make_cells(
        base, ["a100-40", "h100"], modes=("mode", ["hooks", "ghost"]), settings=EXPANDABLE, values={"seq": [128, 512]}
    )


def test_the_least_change_comes_first() -> None:
    cells = cells_of_everything()
    listed = [(cell.fixed["seq"], cell.configuration.gpu, cell.mode, cell.settings) for cell in cells]
    yes, no = EXPANDABLE
    of_a_length = [
        ("a100-40", "hooks", no),  # as it is
        ("a100-40", "hooks", yes),  # an environment variable
        ("a100-40", "ghost", no),  # an argument
        ("a100-40", "ghost", yes),
        ("h100", "hooks", no),  # another GPU
        ("h100", "hooks", yes),
        ("h100", "ghost", no),
        ("h100", "ghost", yes),
    ]
    assert listed == [(length, *values) for length in (128, 512) for values in of_a_length]


def test_each_cell_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cells_of_everything()[11]
    assert cell.label == "seq=512, ghost, expandable_segments:True on a100-40"
    assert cell.configuration.program.arguments == ("--mode", "ghost", "--seq", "512")
    assert cell.configuration.changes == ({"kind": "allocator_setting", "value": "expandable_segments:True"},)
    assert (cell.configuration.gpu, cell.configuration.ranks) == ("a100-40", 8)
    assert PlannedConfiguration.from_json(json.loads(json.dumps(cell.configuration.to_json()))) == cell.configuration
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    settings = run_environment(cell.configuration, threads=None)["PYTORCH_CUDA_ALLOC_CONF"]
    assert settings == "max_split_size_mb:64,expandable_segments:True"


def test_of_several_searches_the_first_range_is_searched() -> None:
    assert parse_search([]).searched is None
    asked = parse_search(["seq-length=512,128", "batch-size=1..4096", "layers=3..20"])
    assert asked.searched == Range("batch-size", 1, 4096)
    assert asked.others == {"seq-length": [512, 128], "layers": [3, 6, 12, 20]}
    assert parse_search(["n=1..4", "m=4..4", "k=2..8"]).others == {"m": [4], "k": [2, 4, 8]}


def test_words_are_passed_on_as_they_are_written() -> None:
    asked = parse_search(["dtype=bfloat16,float16", "size=007,7,1.5,7", "attention=flash"])
    assert asked.searched is None
    assert asked.others == {"dtype": ["bfloat16", "float16"], "size": ["007", 7, "1.5"], "attention": ["flash"]}
    base = PlannedConfiguration(PlannedProgram("train.py", ("--dtype=float32",)), "h100")
    cells = make_cells(base, ["h100"], values={"dtype": asked.others["dtype"]})
    assert [cell.configuration.program.arguments for cell in cells] == [("--dtype=bfloat16",), ("--dtype=float16",)]
    assert [cell.label for cell in cells] == ["dtype=bfloat16 on h100", "dtype=float16 on h100"]


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        (["n=1..4", "n=8..9"], "names n twice"),
        (["n=1,2", "n=1..4", "n=3"], "names n twice"),
        (["n=0..4"], "sizes begin at 1"),
        (["n=1,2", "m=9..1"], "is a range with nothing in it"),
        (["n="], "is not of the form ARGUMENT=LOW..HIGH"),
        (["n=a,"], "is not of the form ARGUMENT=LOW..HIGH"),
        (["n=a..b"], "is not of the form ARGUMENT=LOW..HIGH"),
    ],
)
def test_searches_that_say_nothing(texts: list[str], sentence: str) -> None:
    with pytest.raises(MemprofError, match=sentence):
        parse_search(texts)


def test_the_table_has_80_columns() -> None:
    cells = cells_of_everything()
    for number, cell in enumerate(cells):
        for value, fits in ((100 + number, True), (101 + number, False)):
            cell.runs[value] = _run(fits, 10**10 + value)
    out = io.StringIO()
    print_cells(cells, Range("batch-size", 1, 4096), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith(("128 ", "512 "))]
    assert [row.split()[-5] for row in rows] == [str(100 + number) for number in range(16)]
    assert all("…" not in line for line in lines)


def test_the_smallest_gpu_that_fits_is_named() -> None:
    """Of l4 with 21.99 GiB, t4 with 14.76 and a100-40 with 39.39: named in another order than by size."""
    base = PlannedConfiguration(PlannedProgram("train.py"), "l4")
    kinds = ["a100-40", "t4", "l4"]
    cells = make_cells(base, kinds, modes=("mode", ["hooks", "ghost", "none"]))
    fits = {("hooks", "l4"), ("hooks", "a100-40"), ("ghost", "a100-40"), ("ghost", "t4")}
    for cell in cells:
        cell.runs[0] = _run((cell.mode, cell.configuration.gpu) in fits, 10**10)
    found = {mode: cell and cell.configuration.gpu for mode, cell in smallest_gpus(cells)}
    assert found == {"hooks": "l4", "ghost": "t4", "none": None}
    out = io.StringIO()
    print_cells(cells, None, Console(file=out, width=80))
    assert "the smallest GPU that fits with hooks: l4 (21.99 GiB)" in out.getvalue()
    assert "none of these GPUs fits with none" in out.getvalue()
    rows = [line.split()[:5] for line in out.getvalue().splitlines() if line.startswith("ghost")]
    assert rows == [
        ["ghost", kind, *size, answer]
        for kind, size, answer in (
            ("a100-40", ["39.39", "GiB"], "yes"),
            ("t4", ["14.76", "GiB"], "yes"),
            ("l4", ["21.99", "GiB"], "no"),
        )
    ]


@pytest.mark.parametrize(("retries", "times"), [(0, None), (1, "once"), (4, "4 times")])
def test_a_batch_at_the_brink_is_said_to_be(retries: int, times: str | None) -> None:
    (cell,) = make_cells(PlannedConfiguration(PlannedProgram("train.py"), "h100"), ["h100"])
    cell.runs = {7: replace(_run(True, 10**10), retries=retries), 8: _run(False, 10**10)}
    out = io.StringIO()
    print_cells([cell], Range("batch-size", 1, 4096), Console(file=out, width=400))
    brink = f" (only just: torch had to give cached memory back {times} to go on)" if times else ""
    assert f"batch-size=7 was run and fits{brink}, 8 was run and does not fit" in out.getvalue()


def _run(fits: bool, reserved: int) -> VirtualRun:
    status = "finished" if fits else "out_of_memory"
    return VirtualRun(
        fits, status, "", 2, 1, reserved - 1, reserved, 2 * 10**10, 10**8, 0, "activations", "", "forward", 1.0, ""
    )
