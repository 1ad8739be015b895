# SPDX-License-Identifier: Apache-2.0
"""The page of a job's ranks in a real browser."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Opened
from event_files import EventFile

from opacus_memprof.analysis.job import load_ranks
from opacus_memprof.analysis.job_view import load_view
from opacus_memprof.analysis.profile import build_profile, write_profile
from opacus_memprof.reports.html.report_page import write_html

Open = Callable[..., Opened]
ACTIVATIONS = [1000, 2000, 1000, 9000]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of four ranks, of which the last needs most, and their summary."""
    path = tmp_path_factory.mktemp("job")
    for rank, size in enumerate(ACTIVATIONS):
        folder = path / f"rank_{rank}"
        folder.mkdir()
        file = EventFile()
        file.add("alloc", 1, 500, "model_parameters").add("alloc", 2, size, "activations", phase="forward")
        file.add("step", size=1, step=1)
        file.write(folder)
        launch = {"rank": rank, "world_size": 4, "local_rank": rank % 2, "host": f"<b>node{rank // 2}", "job": "x"}
        meta = json.loads((folder / "meta.json").read_text()) | {"launch": {**launch, "launcher": 1, "restart": "0"}}
        (folder / "meta.json").write_text(json.dumps(meta))
        failed = rank == 1
        write_profile(build_profile(folder, status="failed" if failed else "finished", exit_code=int(failed)), folder)
    summary = load_ranks(path)
    write_html(load_view(path), path / "ranks.html")
    return path / "ranks.html", summary


def test_the_heat_map_has_every_rank_and_category(open_page: Open, job: tuple[Path, dict[str, Any]]) -> None:
    report = open_page(job[0])
    rows = report.rows("Ranks and categories: bytes at the peak")
    assert [(row[0], row[1], int(row[2]), row[4]) for row in rows] == [
        (str(rank), f"<b>node{rank // 2}", size + 500, "failed" if rank == 1 else "")
        for rank, size in enumerate(ACTIVATIONS)
    ]
    assert [[int(cell) for cell in row[5:]] for row in rows] == [[size, 500] for size in ACTIVATIONS]
    report.page.get_by_role("button", name="Above the mean").click()
    above = report.rows("Ranks and categories: above the mean")
    mean = sum(ACTIVATIONS) // 4
    assert [[int(cell) if cell else 0 for cell in row[5:]] for row in above] == [
        [size - mean, 0] for size in ACTIVATIONS
    ]
    assert "2.533 times the mean" in report.texts("#ranks .lead")[0]
    assert any("rank 1 failed" in text for text in report.texts("#ranks li"))


def test_a_ranks_own_report_is_chosen(open_page: Open, job: tuple[Path, dict[str, Any]]) -> None:
    report = open_page(job[0])
    assert report.bytes('[data-figure="peak"]') == [1500]
    report.page.get_by_role("combobox", name="Rank").select_option(label="rank 3")
    assert report.bytes('[data-figure="peak"]') == [9500]
    report.page.locator("#ranks").get_by_role("button", name="1", exact=True).click()
    assert report.bytes('[data-figure="peak"]') == [2500]
