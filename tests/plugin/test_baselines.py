# SPDX-License-Identifier: Apache-2.0
"""Baselines are written, compared and keyed, and unusable ones get a message."""

import json
import subprocess
from importlib.metadata import version

import pytest
import torch

from tests.plugin.conftest import Run

CHECK = """
def test_step(memprof):
    train(width={width}, mode="{mode}")
    memprof.check_baseline("step", rel={rel})
"""


def baseline_test(width: int = 32, mode: str = "hooks", rel: float = 0.02) -> str:
    return CHECK.format(width=width, mode=mode, rel=rel)


def test_written_then_kept_then_grown(run: Run, pytester: pytest.Pytester) -> None:
    """A model with 6 % more neurons: every per-sample gradient grows by as much."""
    run(baseline_test(), "--memprof-update-baselines").assert_outcomes(passed=1)
    file = pytester.path / "memprof_baselines" / "step.json"
    content = json.loads(file.read_text())
    (entry,) = content["baselines"]
    assert entry["key"] == {
        "device": "cpu",
        "torch": torch.__version__.partition("+")[0],
        "opacus": version("opacus"),
        "mode": "hooks",
    }
    assert entry["peak_bytes"] == sum(sum(sizes.values()) for sizes in entry["modules"].values())

    run(baseline_test(rel=0)).assert_outcomes(passed=1)
    result = run(baseline_test(width=34))
    result.assert_outcomes(failed=1)
    before, after = (8 * (2 * 16 * n + n + 4 * n + 4) * 4 for n in (32, 34))
    percent = 100 * (after / before - 1)
    result.stdout.fnmatch_lines(
        [
            "*memory grew by 2 % or more against the baseline *step.json for cpu, torch *, mode hooks; the peak is in "
            "backward of step 0, it was in backward of step 0",
            "*peak * -> *(+?.? %)",
            f"*per_sample_gradients *{before / 1024:.2f} KiB -> *{after / 1024:.2f} KiB  +* (+{percent:.1f} %)",
            "*in 0 *33.00 KiB -> *35.06 KiB  +2.06 KiB (+6.2 %)",
        ]
    )
    run(baseline_test(width=34, rel=0.07)).assert_outcomes(passed=1)
    run(baseline_test(width=30)).assert_outcomes(passed=1)

    for mode in ("ghost", "functorch"):
        refused = run(baseline_test(mode=mode))
        refused.assert_outcomes(failed=1)
        known = "only for cpu, *mode hooks: *"
        refused.stdout.fnmatch_lines([f"*step.json has no baseline for cpu, *mode {mode}, {known}"])
    run(baseline_test(mode="ghost"), "--memprof-update-baselines").assert_outcomes(passed=1)
    modes = [entry["key"]["mode"] for entry in json.loads(file.read_text())["baselines"]]
    assert modes == ["ghost", "hooks"]
    assert [path.name for path in file.parent.iterdir()] == ["step.json"]


def test_growth_of_2_percent_in_one_category_is_caught(run: Run) -> None:
    source = """
import opacus_memprof

def test_it(memprof):
    kept = block(10)
    with opacus_memprof.tag("inputs"):
        inputs = block({inputs})
    memprof.check_baseline("one")
"""
    run(source.format(inputs=1), "--memprof-update-baselines", "--memprof-baseline-dir=kept").assert_outcomes(passed=1)
    below, at = (source.format(inputs=1 + part) for part in (0.0199, 0.0201))
    run(below, "--memprof-baseline-dir=kept").assert_outcomes(passed=1)
    result = run(at, "--memprof-baseline-dir=kept")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*inputs *1.00 MiB -> *1.02 MiB  +20.58 KiB (+2.0 %)"])
    result.stdout.no_fnmatch_line("*unattributed*->*")


def test_baselines_that_cannot_be_used(run: Run, pytester: pytest.Pytester) -> None:
    """One run: each test checks a file that is wrong in its own way."""
    folder = pytester.mkdir("memprof_baselines")
    good = {"device": "cpu", "torch": torch.__version__.partition("+")[0], "opacus": version("opacus"), "mode": "none"}
    entry = {"key": good, "peak_bytes": 1, "modules": {}, "step": 0, "phase": "idle"}
    files = {
        "broken": "{",
        "list": "[]",
        "foreign": "{}",
        "future": json.dumps({"format": 2, "baselines": []}),
        "partial": json.dumps({"format": 1, "baselines": [{**entry, "peak_bytes": "1"}]}),
        "gpu": json.dumps({"format": 1, "baselines": [{**entry, "key": {**good, "device": "NVIDIA H200"}}]}),
        "older": json.dumps({"format": 1, "baselines": [{**entry, "key": {**good, "torch": "2.0.0"}}]}),
    }
    for name, text in files.items():
        (folder / f"{name}.json").write_text(text)
    source = """
@pytest.mark.parametrize("name", ["broken", "list", "foreign", "future", "partial", "gpu", "older", "absent", "../x"])
def test_it(memprof, name):
    block(1)
    memprof.check_baseline(name)

@pytest.mark.parametrize("rel", [-1, float("nan"), "2 %"])
def test_rel(memprof, rel):
    memprof.check_baseline("gpu", rel=rel)
"""
    result = run(source, "--tb=line")
    result.assert_outcomes(failed=12)
    result.stdout.fnmatch_lines_random(
        [
            "*broken.json cannot be read (*): restore it from version control*",
            "*list.json cannot be read (it is not a JSON object): restore it from version control*",
            "*foreign.json is not the profiler's, because its format is None: restore it*",
            "*future.json has format 2, and this release reads up to 1: *",
            "*partial.json is not the profiler's, because baselines[[]0].peak_bytes should be a whole number and is *",
            "*gpu.json has no baseline for cpu, *, only for NVIDIA H200, *: run with --memprof-update-baselines*",
            "*older.json has no baseline for cpu, *, only for cpu, torch 2.0.0, *",
            "*there is no baseline *absent.json: run with --memprof-update-baselines and commit the file",
            "*'../x' cannot name a baseline*",
            "*rel=-1 is not a tolerance*",
            "*rel=nan is not a tolerance*",
            "*rel='2 %' is not a tolerance*",
        ]
    )
    updated = run(source, "--memprof-update-baselines", "-k", "broken or future")
    updated.assert_outcomes(failed=2, deselected=10)
    assert {name: (folder / f"{name}.json").read_text() for name in files} == files


def test_compared_with_the_baselines_of_a_commit(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=pytester.path, check=True, capture_output=True)

    run(baseline_test(), "--memprof-update-baselines").assert_outcomes(passed=1)
    git("init", "-b", "main")
    git("add", "memprof_baselines")
    git("commit", "-m", "narrow")
    run(baseline_test(width=34), "--memprof-update-baselines").assert_outcomes(passed=1)
    run(baseline_test(width=34)).assert_outcomes(passed=1)  # with the file on disk
    grown = run(baseline_test(width=34), "--memprof-compare", "main")
    grown.assert_outcomes(failed=1)
    grown.stdout.fnmatch_lines(["*in 0 *33.00 KiB -> *35.06 KiB  +2.06 KiB (+6.2 %)"])
    git("rm", "-q", "--cached", "memprof_baselines/step.json")
    git("commit", "-m", "none")
    run(baseline_test(width=34), "--memprof-compare", "main").assert_outcomes(passed=1)  # new: from the disk
    unknown = run(baseline_test(width=34), "--memprof-compare", "nowhere")
    unknown.stdout.fnmatch_lines(
        ["*--memprof-compare nowhere: git knows no such commit in *(fatal: *); fetch it first"]
    )
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container that has mounted the checkout
        distrusted = run(baseline_test(width=34), "--memprof-compare", "main")
        distrusted.stdout.fnmatch_lines(
            ["*--memprof-compare main: git knows no such commit*(fatal: detected dubious owner*"]
        )
        patch.setenv("PATH", str(pytester.path))
        absent = run(baseline_test(width=34), "--memprof-compare", "main")
        absent.stdout.fnmatch_lines(
            ["*--memprof-compare main: git knows no such commit*No such file or directory: 'git'*"]
        )
    both = run(baseline_test(), "--memprof-compare", "main", "--memprof-update-baselines")
    assert both.ret == pytest.ExitCode.USAGE_ERROR
