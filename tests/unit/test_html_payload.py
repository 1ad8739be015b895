# SPDX-License-Identifier: Apache-2.0
"""The report's page as text: what it embeds, and that it stays small and closed. test_html_report.py opens it."""

import base64
import copy
import hashlib
import json
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from event_files import EventFile
from large_event_files import one_step, write_repeated
from msgspec.structs import replace

from opacus_memprof.analysis.profile import build_profile
from opacus_memprof.analysis.profile_view import view_profile
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.profile import DeviceSnapshot, Profile
from opacus_memprof.reports.html.report_page import build_html, write_html

BOUND = 5_000_000  # bytes of a page
LORA = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.default" for layer in range(40)]


def embedded(page: str) -> dict[str, Any]:
    (data,) = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    content: dict[str, Any] = json.loads(data)
    return content


def device_of(page: str) -> dict[str, Any]:
    (device,) = embedded(page)["runs"][0]["profile"]["devices"].values()
    return dict(device)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile, np.ndarray]:
    """20 000 events, their profile, and the live bytes after each of them."""
    directory = tmp_path_factory.mktemp("trained")
    _, live = write_repeated(one_step(500, [*LORA, "head", ""]), 20, directory)
    return directory, build_profile(directory, status="finished", exit_code=0), live


def test_a_timeline_is_as_fine_as_the_events(trained: tuple[Path, Profile, np.ndarray]) -> None:
    directory, profile, live = trained
    timeline = device_of(build_html([view_profile(profile, directory)]))["timeline"]
    a_row = timeline["events_a_row"]
    assert 1 <= a_row <= 2
    expected = [int(live[start : start + a_row].max()) for start in range(0, len(live), a_row)]
    columns = [list(accumulate(differences)) for _, differences in timeline["categories"]]
    sizes = [sum(row) for row in zip(*columns, strict=True)]
    # Of the events in a row the first of the highest is shown, unless a retag or step follows: bytes tell.
    assert [size for size in sizes if size] == [size for size in expected if size]
    assert max(sizes) == profile["devices"]["cuda:0"]["peak"]["requested_bytes"] == live.max()
    events = list(accumulate(timeline["event"]))
    assert [int(live[event]) for event in events] == sizes


def test_without_events_the_profiles_own_timeline_is_drawn(trained: tuple[Path, Profile, np.ndarray]) -> None:
    _, profile, live = trained
    given = profile["devices"]["cuda:0"]["timeline"]
    for directory in (None, Path("nowhere")):
        timeline = device_of(build_html([view_profile(profile, directory)]))["timeline"]
        assert list(accumulate(timeline["event"])) == given["event"]
        assert [timeline["phases"][phase] for phase in accumulate(timeline["phase"])] == given["phase"]
        for name, differences in timeline["categories"]:
            assert list(accumulate(differences)) == given["categories"][name]
        assert timeline["events_a_row"] == -(-len(live) // 2000)
        begins = [
            row for row, phase in enumerate(given["phase"]) if given["phase"][max(row - 1, 0)] != phase or not row
        ]
        runs = timeline["phase_runs"]
        assert list(accumulate(runs["event"])) == [given["event"][row] for row in begins]
        assert list(accumulate(runs["time_ns"])) == [given["time_ns"][row] for row in begins]
        assert [timeline["phases"][phase] for phase in runs["phase"]] == [given["phase"][row] for row in begins]


def test_the_largest_profiles_stay_within_the_bound(trained: tuple[Path, Profile, np.ndarray]) -> None:
    directory, profile, live = trained
    large = copy.deepcopy(profile)
    (device,) = large.devices.values()
    modules = {f"{LORA[0]}.{number}": {"noise": number, "buffers": 1, "gradients": number} for number in range(30_000)}
    device.peak.modules = modules
    device.peak.requested_bytes = sum(sum(sizes.values()) for sizes in modules.values())
    place: dict[str, Any] = {
        "name": "s" * 40,
        "requested_bytes": 1,
        "step": 1,
        "logical_step": 1,
        "phase": "idle",
        "event": 1,
    }
    device.snapshots = [DeviceSnapshot(index=number, **place, unix_ns=10, categories={}) for number in range(30_000)]
    device.steps = [replace(device.steps[0], step=number, peak_bytes=number) for number in range(600)]
    large.devices = {f"cuda:{index}": device for index in range(8)}
    page = build_html([view_profile(large, directory, name=f"rank {rank}") for rank in range(8)])
    assert len(page.encode()) <= BOUND
    for shown in embedded(page)["runs"][7]["profile"]["devices"].values():
        columns = [list(accumulate(differences)) for _, differences in shown["timeline"]["categories"]]
        assert max(map(sum, zip(*columns, strict=True))) == live.max()
        a_row = shown["timeline"]["events_a_row"]
        assert a_row > -(-len(live) // 2000)  # coarser than the profile's own
        events = accumulate(shown["timeline"]["event"])
        assert all(row * a_row <= event < (row + 1) * a_row for row, event in enumerate(events))
        assert len(shown["steps"]) + shown["steps_left_out"] == 600
        assert 599 in [step["step"] for step in shown["steps"]]
        kept = shown["peak"]["modules"]
        assert len(kept) <= 1000
        assert sum(sum(sizes.values()) for sizes in kept.values()) == shown["peak"]["requested_bytes"]
        assert f"{LORA[0]}.29999" in kept
        assert len(shown["snapshots"]) + shown["snapshots_left_out"] == 30_000


def test_names_cannot_leave_their_element(tmp_path: Path) -> None:
    name = "</script><!--<script>alert(1)</script>"
    file = EventFile().add("alloc", 0x1000, 100, name, module=name, op=name)
    profile = build_profile(file.write(tmp_path), status="finished", exit_code=0)
    profile.command = [name]
    page = build_html([view_profile(profile, tmp_path)])
    assert page.count("<script") == page.count("</script") == 2
    assert page.count("<!--") == 1  # the template's own
    assert name in device_of(page)["peak"]["modules"]


def test_only_the_pages_own_scripts_and_styles_may_run(trained: tuple[Path, Profile, np.ndarray]) -> None:
    page = build_html([view_profile(trained[1])])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src 'none';")
    for tag, rule in (('<script type="module">', "script-src"), ("<style>", "style-src")):
        text = page.partition(tag)[2].partition(f"</{tag[1:].split()[0].rstrip('>')}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy[1]


def test_the_page_explains_every_category_of_the_document(trained: tuple[Path, Profile, np.ndarray]) -> None:
    document = (Path(__file__).parents[2] / "docs" / "categories.md").read_text(encoding="utf-8")
    names = set(re.findall(r"^\| `(\w+)` \|", document, re.MULTILINE))
    directory, profile, _ = trained
    meanings = embedded(build_html([view_profile(profile, directory, name="a run")]))["meanings"]
    assert {"dataset", "noise"} <= names <= set(meanings)


def test_several_runs_share_a_page(trained: tuple[Path, Profile, np.ndarray]) -> None:
    directory, profile, _ = trained
    runs = embedded(
        build_html([view_profile(profile, directory, name="rank 0"), view_profile(profile, name="rank 1")])
    )["runs"]
    assert [run["name"] for run in runs] == ["rank 0", "rank 1"]
    rows = [len(run["profile"]["devices"]["cuda:0"]["timeline"]["event"]) for run in runs]
    assert rows[0] > rows[1]


def test_two_runs_that_cannot_be_compared_are_refused(
    trained: tuple[Path, Profile, np.ndarray], tmp_path: Path
) -> None:
    _, profile, _ = trained
    page = tmp_path / "report.html"
    page.write_text("an earlier one")
    with pytest.raises(MemprofError, match="profile both on the same devices"):
        view_profile(profile, None, replace(profile, devices={"cpu": profile.devices["cuda:0"]}))
    assert page.read_text() == "an earlier one"
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_the_page_is_written_where_it_is_asked_for(trained: tuple[Path, Profile, np.ndarray], tmp_path: Path) -> None:
    directory, profile, _ = trained
    write_html(view_profile(profile, directory), tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == build_html(
        [view_profile(profile, directory)]
    )
    with pytest.raises(MemprofError, match="cannot write"):
        write_html(view_profile(profile, directory), directory / "meta.json" / "report.html")
