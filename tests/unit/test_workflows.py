# SPDX-License-Identifier: Apache-2.0
"""The workflows of this repository run targets that the Makefile has, on every torch that is supported."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from opacus_memprof.versions import TORCH_MINORS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS: dict[str, Any] = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(workflow: str) -> list[dict[str, Any]]:
    return list(WORKFLOWS[workflow]["jobs"].values())


def targets(job: dict[str, Any]) -> set[str]:
    """The targets that a job hands to .ci/run, those of a matrix included."""
    matrix = job.get("strategy", {}).get("matrix", {})
    commands = [step["run"].removeprefix(".ci/run ") for step in job["steps"] if step.get("run", "").startswith(".ci/")]
    choices = chain(matrix.get("target", []), matrix.get("targets", []))
    found = " ".join([*commands, *choices])
    return set(re.sub(r"\S*\$\{\{.*?\}\}", "", found).split())


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_the_targets_exist(workflow: str) -> None:
    assert set().union(*map(targets, jobs(workflow))) <= TARGETS


def test_pull_requests_run_all_of_make_test() -> None:
    (needed,) = re.findall(r"^test:\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets(WORKFLOWS["ci"]["jobs"]["test"]) == {"lint", "docs", "cpp-test", "python-test"}
    assert all(target in needed for target in targets(WORKFLOWS["ci"]["jobs"]["test"]))


def test_only_a_tag_is_published() -> None:
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["pypi"]["if"] == "github.ref_type == 'tag'"
    for name, job in jobs.items():  # the others wait for it, and write nothing without it
        assert name == "pypi" or job.get("needs") == "pypi" or "permissions" not in job


def test_wheels_have_every_supported_torch_with_cuda_and_without() -> None:
    (step,) = (step for step in WORKFLOWS["release"]["jobs"]["wheels"]["steps"] if "make wheels" in step.get("run", ""))
    minors = [f"{minor}.0{build}" for minor in TORCH_MINORS for build in ("", "+cpu")]
    assert step["env"]["WHEEL_TORCHES"].split() == minors


def test_every_supported_torch_is_tried_each_night() -> None:
    assert WORKFLOWS["nightly"]["jobs"]["torch"]["strategy"]["matrix"]["minor"] == list(TORCH_MINORS)


# The first majors of these actions for Node 24: GitHub's runners have no older one since September 2026.
NODE_24 = {"cache": 5, "checkout": 5, "deploy-pages": 5, "download-artifact": 7, "setup-python": 6}
NODE_24 |= {"upload-artifact": 6, "upload-pages-artifact": 5}


@pytest.mark.parametrize("file", [*WORKFLOWS, "action.yml", "examples/ci/memory.yml"])
def test_actions_run_on_a_node_that_runners_have(file: str) -> None:
    text = (ROOT / (f".github/workflows/{file}.yml" if file in WORKFLOWS else file)).read_text()
    for action, major in re.findall(r"uses: actions/([\w-]+)@v(\d+)", text):
        assert int(major) >= NODE_24[action], action
