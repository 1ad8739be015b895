# SPDX-License-Identifier: Apache-2.0
"""Of programs after reports of users, the first finding names the cause, and following its advice cures it."""

from pathlib import Path

import pytest

from tests.gallery.failures import GALLERY, Report
from tests.integration.planted_findings import kinds, profiled

pytestmark = [pytest.mark.usefixtures("clean_process"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("report", GALLERY, ids=str)
def test_the_first_finding_names_the_cause(report: Report, tmp_path: Path) -> None:
    first, *_ = profiled(tmp_path, lambda session: report.program(False), report.error)["findings"]
    assert first["kind"] == report.kind
    assert all(part in first["evidence"] for part in report.evidence), first["evidence"]
    assert report.remedy in first["remedy"], first["remedy"]
    assert ("flash_clip" in first["remedy"]) == report.flash_clip


@pytest.mark.parametrize("program", ["own_optimizer_steps", "broadcast_positions", "accumulated_in_ghost"])
def test_the_readme_quotes_what_is_said(program: str, tmp_path: Path) -> None:
    (report,) = (each for each in GALLERY if str(each) == program)
    first, *_ = profiled(tmp_path, lambda session: report.program(False), report.error)["findings"]
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert report.link in readme
    assert first["evidence"].partition(". ")[0] in " ".join(readme.split())


@pytest.mark.parametrize("report", GALLERY, ids=str)
def test_following_the_advice_cures(report: Report, tmp_path: Path) -> None:
    profile = profiled(tmp_path, lambda session: report.program(True))
    causes = {each.kind for each in GALLERY}
    assert not kinds(profile) & causes


@pytest.mark.parametrize("report", [report for report in GALLERY if report.flash_clip], ids=str)
def test_flash_clip_trains_where_it_is_offered(report: Report, tmp_path: Path) -> None:
    profile = profiled(tmp_path, lambda session: report.program(False, "flash_clip"))
    assert not kinds(profile) & {each.kind for each in GALLERY}
