# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof replay`, against runs of the same script with the same settings."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.planning.configuration import PlannedConfiguration, PlannedProgram, parse_settings
from opacus_memprof.planning.replay import read_recording, replay
from opacus_memprof.planning.virtual_run import ForkedRuns, VirtualRun, run_environment, run_virtually

SCRIPTS = Path(__file__).parent / "scripts"
DATA = Path(__file__).resolve().parents[1] / "data"
MIB = 2**20
TRIED = ("", "expandable_segments:True", "roundup_power2_divisions:[64:1,>:4]")
ALSO_TRIED = ("max_split_size_mb:21",)  # each is a process of its own: nightly

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.version.cuda is None, reason="needs a torch with CUDA for Linux"
)


Ran = Callable[..., VirtualRun]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """A function that runs a script with settings of the allocator. Tests that ask for the same run share it."""
    forked = ForkedRuns(run_environment(PlannedConfiguration(PlannedProgram(""), "a100-40"), 1))

    @cache
    def ran(settings: str, script: str, *arguments: str, memory: int | None = None) -> VirtualRun:
        changes = ({"kind": "allocator_setting", "value": settings},) if settings else ()
        program = PlannedProgram(str(SCRIPTS / script), arguments)
        configuration = PlannedConfiguration(program, "a100-40", memory, changes)
        directory = tmp_path_factory.mktemp("run")
        return run_virtually(configuration, directory, threads=1, forked=None if settings else forked)

    yield ran
    forked.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "tried"),
    [
        ("train_fragments.py", (), TRIED),
        pytest.param("train_fragments.py", (), TRIED + ALSO_TRIED, marks=pytest.mark.nightly),
        pytest.param(
            "train_cuda.py", ("--width", "512", "--batch", "96"), TRIED + ALSO_TRIED, marks=pytest.mark.nightly
        ),
    ],
)
def test_settings_reserve_what_a_run_with_them_does(
    ran: Ran, script: str, arguments: tuple[str, ...], tried: tuple[str, ...]
) -> None:
    runs = {settings: ran(settings, script, *arguments) for settings in tried}
    recorded = runs[""].profile
    replays = replay(read_recording(recorded, None, None), tried)
    for result in replays:
        run = runs[result.settings]
        assert result.fits
        assert result.requested == run.requested
        assert result.needed == result.reserved
        # Of the libraries' workspaces a run asks cuBLAS, whose answer no setting changes.
        assert result.reserved == pytest.approx(run.reserved, rel=0.01), result.settings
        assert result.may_reserve == run.may_reserve
    assert replays[0].reserved == runs[""].reserved
    if script == "train_fragments.py":
        assert replays[1].reserved < 0.9 * replays[0].reserved


@pytest.mark.slow
def test_where_a_run_runs_out_of_memory_its_replay_does(ran: Ran) -> None:
    recorded = ran("", "train_fragments.py")
    assert recorded.reserved is not None
    assert recorded.context is not None
    assert recorded.requested is not None
    some = (recorded.requested + recorded.reserved) // 2  # after torch has given cached memory back, perhaps
    for room, fits in ((recorded.reserved, True), (some, None), (recorded.requested - 8 * MIB, False)):
        memory = recorded.context + room
        (result,) = replay(read_recording(recorded.profile, "a100-40", memory), [""])
        run = ran("", "train_fragments.py", memory=memory)
        assert result.fits == run.fits
        assert fits in (None, result.fits)
        assert result.may_reserve == run.may_reserve == room
        assert result.retries == run.retries
        if fits is False:
            assert result.needed == recorded.reserved
            assert result.failed is not None
            request = (run.oom_report() or {})["request"]
            assert {key: request[key] for key in result.failed} == result.failed


@pytest.mark.slow
def test_the_command(ran: Ran) -> None:
    from typer.testing import CliRunner

    recorded = ran("", "train_fragments.py").profile
    played = CliRunner().invoke(app, ["replay", str(recorded), "--settings", "expandable_segments:True,False"])
    assert played.exit_code == 0, played.output
    assert "on a virtual NVIDIA A100-SXM4-40GB (39.39 GiB)" in played.output
    assert [line.split()[:2] for line in played.output.splitlines()[4:]] == [
        ["(defaults)", "yes"],
        ["expandable_segments:True", "yes"],
        ["expandable_segments:False", "yes"],
    ]
    assert max(map(len, played.output.splitlines()[1:])) <= 80
    small = CliRunner().invoke(app, ["replay", str(recorded), "--gpu", "t4", "--memory", "700MiB"])
    assert small.exit_code == 3
    assert "(defaults): memory runs out in step " in small.output
    wrong = CliRunner().invoke(app, ["replay", str(recorded), "--settings", "expandible:True"])
    assert isinstance(wrong.exception, MemprofError)
    assert "torch's allocator refuses these settings: " in str(wrong.exception)


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(MemprofError, match="does not say on which kind of GPU it was recorded: add --gpu KIND"):
        read_recording(DATA / "format_1_hooks", None, None)
    with pytest.raises(MemprofError, match='there is no virtual GPU "h300"'):
        read_recording(DATA / "format_1_hooks", "h300", None)
    with pytest.raises(MemprofError, match="is not there: give the directory of a profile"):
        read_recording(tmp_path / "nothing", "h100", None)
    job = tmp_path / "job"
    shutil.copytree(DATA / "format_1_hooks", job / "rank_0")
    with pytest.raises(MemprofError, match="holds several ranks: name one of them"):
        read_recording(job, "h100", None)
    full = tmp_path / "full"
    shutil.copytree(DATA / "format_1_hooks", full)
    profile = json.loads((full / "profile.json").read_text())
    if not any(name.startswith("cuda") for name in profile["devices"]):
        with pytest.raises(MemprofError, match="has no memory of a GPU"):
            read_recording(full, "h100", None)
        profile["devices"]["cuda:0"] = profile["devices"].pop("cpu")
    profile["events"]["dropped"] = 7
    (full / "profile.json").write_text(json.dumps(profile))
    with pytest.raises(MemprofError, match="lacks 7 events"):
        read_recording(full, "h100", None)


@pytest.mark.parametrize(
    ("text", "combinations"),
    [
        ("expandable_segments:True", ["expandable_segments:True"]),
        ("expandable_segments:True,False", ["expandable_segments:True", "expandable_segments:False"]),
        ("a:1,b:2", ["a:1,b:2"]),
        ("a:1,2,b:3", ["a:1,b:3", "a:2,b:3"]),
        ("a:[256:1,512:2],b:3", ["a:[256:1,512:2],b:3"]),
    ],
)
def test_settings_as_torch_has_them(text: str, combinations: list[str]) -> None:
    assert parse_settings(text) == combinations


@pytest.mark.parametrize("text", ["", "True", "a:", "a:1,,2:"])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(MemprofError, match="--settings"):
        parse_settings(text)
