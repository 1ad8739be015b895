# SPDX-License-Identifier: Apache-2.0
"""The ranks of a job as one summary, from profiles that are written by hand."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import Result
from msgspec.structs import replace
from rich.console import Console
from typer.testing import CliRunner

from opacus_memprof.analysis.job import load_ranks, write_job_summary
from opacus_memprof.analysis.job_view import view_job
from opacus_memprof.cli import app
from opacus_memprof.errors import MemprofError
from opacus_memprof.language import in_language
from opacus_memprof.profiles.directory import ProfileDirectory, claim, copy_rank, gather, rank_directories
from opacus_memprof.profiles.job_summary import JobSummary
from opacus_memprof.profiles.json_object import schema_of, to_json
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.profiles.units import format_ranks
from opacus_memprof.reports.text import print_job
from tests.unit.event_files import EventFile
from tests.unit.made_profiles import a_device, a_peak, a_profile

JOB = Launch(0, 4, 0, "a", "job", 100, "0")
VERSIONS = {"torch": "2.15.0", "opacus": "1.6.0"}


def write(
    path: Path, rank: int, *, launch: Launch = JOB, modules: tuple[str, ...] = ("", "head"), **categories: int
) -> None:
    """A rank's directory with a finished profile, whose peak has these categories."""
    folder = path / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    sentence = replace(launch, rank=rank, local_rank=rank)
    size = sum(categories.values())
    peak = a_peak(
        requested_bytes=size,
        allocated_bytes=size,
        reserved_bytes=2 * size,
        step=1,
        phase="backward",
        categories={**categories, "noise": 0},
    )
    device = a_device(
        peak=peak,
        steps=[{"step": 0}, {"step": 1}],
        snapshots=[{"outside_pytorch": 7}, {"outside_pytorch": 9}, {"outside_pytorch": None}],
    )
    profile = a_profile(versions=VERSIONS, launch=sentence, devices={f"cuda:{rank}": device})
    (folder / "meta.json").write_text(to_json({"format": 1, "launch": sentence, "names": {"modules": modules}}))
    (folder / "profile.json").write_text(to_json(profile))


def change(path: Path, rank: int, **keys: Any) -> None:
    file = path / f"rank_{rank}" / "profile.json"
    file.write_text(to_json(json.loads(file.read_text()) | keys))


def printed(summary: JobSummary) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_job(view_job(summary, ""), console)
    return console.export_text()


def four(path: Path) -> JobSummary:
    for rank in range(4):
        write(path, rank, activations=1000, gradients=400 if rank == 2 else 100)
    return load_ranks(path)


def test_imbalance_and_its_cause(tmp_path: Path) -> None:
    found = four(tmp_path)
    assert (found["status"], found["world_size"], found["missing"], found["warnings"]) == ("finished", 4, [], [])
    assert [row["peak"]["requested_bytes"] for row in found["ranks"]] == [1100, 1100, 1400, 1100]
    assert [row["device"] for row in found["ranks"]] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    imbalance = found["imbalance"]
    assert (imbalance["rank"], imbalance["max_bytes"], imbalance["mean_bytes"]) == (2, 1400, 1175)
    assert imbalance["ratio"] == pytest.approx(1400 / 1175)
    assert (imbalance["cause"], imbalance["cause_bytes"]) == ("gradients", 400 - 175)
    assert imbalance["categories"] == {
        "activations": {"max_bytes": 1000, "mean_bytes": 1000, "ratio": 1.0, "rank": 0},
        "gradients": {"max_bytes": 400, "mean_bytes": 175, "ratio": 400 / 175, "rank": 2},
    }
    assert found["stragglers"] == [{"rank": 2, "bytes": 1400, "above_median": 300}]
    assert found["total"] == {"peaks_bytes": 4700, "categories": {"activations": 4000, "gradients": 700}}
    assert [(row["outside_pytorch"], row["steps"]) for row in found["ranks"]] == [(9, 2)] * 4


def test_ranks_that_count_little_are_no_imbalance(tmp_path: Path) -> None:
    """One that has 5 % more than the others, and one that took no step."""
    for rank in range(4):
        write(tmp_path, rank, activations=1050 if rank == 3 else 1000)
    assert load_ranks(tmp_path)["stragglers"] == []
    devices = json.loads((tmp_path / "rank_3/profile.json").read_text())["devices"]
    change(tmp_path, 3, devices={"cuda:3": {**devices["cuda:3"], "steps": []}})
    imbalance = load_ranks(tmp_path)["imbalance"]
    assert imbalance is not None
    assert imbalance["ratio"] == 1


def test_what_is_printed(tmp_path: Path) -> None:
    text = printed(four(tmp_path))
    assert "imbalance (max / mean): 1.191, rank 2 has 225 B more than the mean; of gradients it has 225 B more" in text
    assert "All peaks together: 4.59 KiB" in text
    assert "rank 2 set" in text


def test_what_is_printed_in_chinese(tmp_path: Path) -> None:
    with in_language("zh"):
        text = printed(four(tmp_path))
    assert "不均衡（最大 / 平均）: 1.191，rank 2 比平均值多 225 B；其中 gradients 多 225 B" in text
    assert re.findall("[A-Za-z]+ [a-z]+ [a-z]+", text) == []


def test_of_many_ranks_the_highest_and_lowest_are_printed(tmp_path: Path) -> None:
    for rank in range(40):
        write(tmp_path, rank, launch=replace(JOB, world_size=40), activations=1000 + rank)
    lines = printed(load_ranks(tmp_path)).splitlines()
    shown = [int(line.split()[0]) for line in lines if line.strip() and line.split()[0].isdigit()]
    assert shown == [*range(39, 27, -1), 3, 2, 1, 0]
    assert "24 more lie between" in "\n".join(lines)


def test_a_killed_rank_counts_as_far_as_it_got(tmp_path: Path) -> None:
    write(tmp_path, 0, launch=replace(JOB, world_size=2), activations=100)
    file = EventFile(closed=False)
    file.add("alloc", 1, 300, "activations", phase="forward").add("step", 0, 1, step=1)
    (tmp_path / "rank_1").mkdir()
    file.write(tmp_path / "rank_1")
    meta = json.loads((tmp_path / "rank_1/meta.json").read_text())
    meta |= {"launch": replace(JOB, rank=1, world_size=2), "versions": VERSIONS}
    (tmp_path / "rank_1/meta.json").write_text(to_json(meta))
    found = load_ranks(tmp_path)
    assert found["status"] == "killed"
    assert [row["peak"]["requested_bytes"] for row in found["ranks"]] == [100, 300]
    assert found["warnings"] == ["rank 1 was killed after 1 step: its figures are those until then"]


@pytest.mark.parametrize("foreign", ["[]", '{"format": 1}'])
def test_ranks_that_are_missing_or_cannot_be_read(tmp_path: Path, foreign: str) -> None:
    four(tmp_path)
    shutil.rmtree(tmp_path / "rank_3")
    (tmp_path / "rank_1/profile.json").write_text(foreign)
    found = load_ranks(tmp_path)
    assert [row["rank"] for row in found["ranks"]] == [0, 2]
    assert found["missing"] == [3]
    assert "rank 3 of 4 has no profile here" in found["warnings"]
    assert any(warning.startswith("rank 1 is left out: ") for warning in found["warnings"])
    assert found["status"] == "killed"
    change(tmp_path, 2, status="out_of_memory")
    assert load_ranks(tmp_path)["status"] == "out_of_memory"  # why the others are gone


def test_ranks_of_an_earlier_job_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, 2, launch=replace(JOB, launcher=99), activations=9999)
    os.utime(tmp_path / "rank_2/meta.json", (1, 1))
    for rank in range(2):
        write(tmp_path, rank, launch=replace(JOB, world_size=2), activations=100)
    found = load_ranks(tmp_path)
    assert found["imbalance"]["max_bytes"] == 100
    assert found["warnings"] == ["the profiles of rank 2 are of an earlier job, and are left out"]


def test_what_does_not_fit_together_is_said(tmp_path: Path) -> None:
    four(tmp_path)
    change(tmp_path, 1, versions={**VERSIONS, "torch": "2.11.0"}, status="failed", error="ValueError: no data")
    write(tmp_path, 3, modules=("", "tail"), activations=1000, gradients=100)
    hosts = [replace(JOB, rank=rank, host=host) for rank, host in ((0, "a"), (2, "b"))]
    change(tmp_path, 0, launch=hosts[0])
    change(tmp_path, 2, launch=hosts[1], started_unix_ns=2_000_000_020, ended_unix_ns=3_000_000_000)
    found = load_ranks(tmp_path)
    assert found["status"] == "failed"
    assert found["warnings"] == [
        "rank 1 failed after 2 steps (ValueError: no data): its figures are those until then",
        "the ranks ran different versions: ranks 0, 2-3 have torch 2.15.0; rank 1 has torch 2.11.0",
        "rank 3 trained another model than rank 0: 2 modules are not in both, such as 'head'",
        "rank 2 on b began 2.0 s after rank 0 on a had ended: unless that is so, their clocks disagree, and times of "
        "different machines cannot be compared",
    ]


def test_what_several_ranks_say_alike_is_said_once(tmp_path: Path) -> None:
    four(tmp_path)
    finding = {"kind": "growing_memory", "module": "head", "evidence": "it grows", "remedy": "stop it"}
    for rank in (0, 1, 3):
        change(tmp_path, rank, warnings=["events were dropped"], findings=[{**finding, "bytes": 10 + rank}])
    found = load_ranks(tmp_path)
    assert found["warnings"] == ["ranks 0-1, 3: events were dropped"]
    assert found["findings"] == [{**finding, "bytes": 13, "ranks": [0, 1, 3]}]
    assert "ranks 0-1, 3: it grows" in printed(found)


def test_memory_on_another_ranks_gpu(tmp_path: Path) -> None:
    four(tmp_path)
    profile = json.loads((tmp_path / "rank_1/profile.json").read_text())
    stray = json.loads(json.dumps(profile["devices"]["cuda:1"]))
    stray["peak"] |= {"requested_bytes": 64, "categories": {"unattributed": 64}}
    change(tmp_path, 1, devices={"cuda:0": stray, **profile["devices"]})
    (found,) = load_ranks(tmp_path)["findings"]
    assert (found["kind"], found["bytes"], found["ranks"]) == ("stray_gpu_memory", 64, [1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--csv"], "only a page can be written: use --html, or give one, as "),
        (["--html", "--vanilla", "elsewhere"], "only a page can be written"),
        (["--html=summary.txt"], "summary.txt is not a name for html: end it with .html"),
    ],
)
def test_what_a_job_s_report_cannot_do_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], sentence: str
) -> None:
    four(tmp_path / "job")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", "job", *options])
    assert isinstance(result.exception, MemprofError)
    assert sentence in str(result.exception)
    assert [entry.name for entry in tmp_path.iterdir()] == ["job"]
    assert sorted(os.listdir("job")) == ["rank_0", "rank_1", "rank_2", "rank_3"]


def test_no_ranks_at_all(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    with pytest.raises(MemprofError, match="no readable profile of a rank"):
        load_ranks(tmp_path)


def test_only_the_last_one_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [ProfileDirectory(tmp_path / f"rank_{rank}", replace(JOB, rank=rank, world_size=2)) for rank in (0, 1)]
    write(tmp_path, 0, launch=replace(JOB, world_size=2), activations=100)
    assert write_job_summary(both[0]) is None  # rank 1 has not begun
    write(tmp_path, 1, launch=replace(JOB, world_size=2, launcher=99), activations=100)
    assert write_job_summary(both[0]) is None  # what lies there is an earlier job's
    write(tmp_path, 1, launch=replace(JOB, world_size=2), activations=100)
    (tmp_path / "rank_1/profile.json").rename(tmp_path / "kept")
    assert write_job_summary(both[0]) is None  # rank 1 is running: it holds its lock
    (tmp_path / "kept").rename(tmp_path / "rank_1/profile.json")
    summary = write_job_summary(both[1])
    assert summary is not None
    written = json.loads((tmp_path / "ranks.json").read_text())
    assert written == summary
    jsonschema.validate(written, schema_of(JobSummary))
    assert write_job_summary(both[0]) is None  # it is done
    for claimed in both:
        claimed.release()


# --- where ranks write ---


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_each_rank_has_its_directory(tmp_path: Path, rank_1: None) -> None:
    claimed = claim(tmp_path / "out")
    assert claimed.path == tmp_path / "out/rank_1"
    assert claimed.launch is not None
    with pytest.raises(MemprofError, match="being written by another profiler"):  # another job
        claim(tmp_path / "out")
    claimed.release()


@pytest.mark.parametrize(("name", "content"), [("events.bin", b"OMEMPROF"), ("notes.txt", b"")])
def test_other_files_are_left_alone(tmp_path: Path, rank_1: None, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MemprofError, match="choose another directory"):
        claim(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_ranks_that_a_smaller_job_does_not_have_go(tmp_path: Path) -> None:
    for rank in range(3):
        write(tmp_path, rank, activations=100)
        (tmp_path / f"rank_{rank}/events.bin").write_bytes(b"OMEMPROF")
    (tmp_path / "ranks.json").write_text("{}")
    first_of_a_machine = ProfileDirectory(tmp_path / "rank_1", replace(JOB, rank=1, world_size=2))
    first_of_a_machine.clear()
    first_of_a_machine.release()
    assert (tmp_path / "ranks.json").exists()
    write(tmp_path, 1, activations=100)
    claimed = ProfileDirectory(tmp_path / "rank_0", replace(JOB, world_size=2))
    claimed.clear()
    claimed.release()
    assert list(rank_directories(tmp_path)) == [0, 1]
    assert not (tmp_path / "ranks.json").exists()
    assert (tmp_path / "rank_1/profile.json").exists()  # its own rank clears it


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([4, 0], "ranks 0, 4"), ([7, 6], "ranks 6-7")],
)
def test_ranks_in_words(numbers: list[int], words: str) -> None:
    assert format_ranks(numbers) == words


def test_ranks_are_gathered_from_machines_without_a_common_disk(tmp_path: Path) -> None:
    """Two machines of two ranks each copy theirs to an address; merged, they are the job on one disk."""
    whole = four(tmp_path / "whole")
    for machine in ("a", "b"):
        (tmp_path / machine).mkdir()
    for rank in range(4):
        shutil.copytree(tmp_path / "whole" / f"rank_{rank}", tmp_path / "ab"[rank // 2] / f"rank_{rank}")
    (tmp_path / "b" / "rank_3" / ".lock").touch()
    (tmp_path / "a" / "rank_1" / "events.1.bin").touch()
    address = f"memory://{tmp_path.name}"

    def merge(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["merge", *arguments])

    for machine in ("a", "b", "a"):  # also again, a shorter run
        assert merge(str(tmp_path / machine), "-o", address).exit_code == 0
        (tmp_path / "a" / "rank_1" / "events.1.bin").unlink(missing_ok=True)
    result = merge(address, "-o", str(tmp_path / "merged"))
    assert result.exit_code == 0, result.output
    assert "rank 2" in result.output
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == [
        *(f"rank_{n}" for n in range(4)),
        "ranks.json",
    ]
    assert json.loads((tmp_path / "merged" / "ranks.json").read_text()) == json.loads(to_json(whole))
    assert not (tmp_path / "merged" / "rank_3" / ".lock").exists()
    assert not (tmp_path / "merged" / "rank_1" / "events.1.bin").exists()

    for rank in range(4):  # as each rank does at its end
        copy_rank(tmp_path / "ab"[rank // 2] / f"rank_{rank}", f"{address}/again")
    assert merge(f"{address}/again", "-o", str(tmp_path / "again")).output == result.output.replace("merged", "again")

    merged = merge(str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "at_once"))
    assert merged.output == result.output.replace("merged", "at_once")
    (tmp_path / "link").symlink_to(tmp_path / "merged")
    assert merge(str(tmp_path / "link"), "-o", str(tmp_path / "merged")).output == result.output  # nothing is removed


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("memory://nothing", "out", "memory://nothing holds no rank of a job"),
        ("nowhere", "out", "nowhere holds no rank of a job"),
        ("quaint://a", "out", "quaint://a cannot be opened (Protocol not known: quaint): install what it needs"),
        ("job", "file/below", "cannot copy the ranks of job to file/below ("),
    ],
)
def test_what_cannot_be_gathered(
    source: str, target: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    four(tmp_path / "job")
    Path("file").touch()
    with pytest.raises(MemprofError, match=re.escape(sentence)):
        gather([source], target)
