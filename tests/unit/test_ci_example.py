# SPDX-License-Identifier: Apache-2.0
"""The workflow in examples/ci and the action are valid, and every command and option of ours in them exists."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from opacus_memprof.cli import app
from opacus_memprof.pytest_plugin import plugin

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / "examples" / "ci" / "memory.yml").read_text())
STEPS = WORKFLOW["jobs"]["memory"]["steps"]
ACTION: dict[Any, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
(ACTION_STEP,) = ACTION["runs"]["steps"]
SCRIPTS = [step["run"] for step in STEPS if "run" in step]


def test_it_has_what_a_workflow_needs() -> None:
    assert WORKFLOW[True] == "pull_request"  # YAML 1.1 reads `on` as true, and GitHub as itself
    assert WORKFLOW["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert all(("run" in step) != ("uses" in step) for step in STEPS)
    expressions = re.findall(r"\$\{\{ (.*?) \}\}", str(STEPS))
    assert all(re.fullmatch(r"github\.[a-z_.]+", expression) for expression in expressions)


@pytest.mark.parametrize("script", [*SCRIPTS, ACTION_STEP["run"]])
def test_the_shell_can_read_it(script: str) -> None:
    plain = re.sub(r"\$\{\{.*?\}\}", "1", script)
    subprocess.run(["bash", "-n", "-c", plain], check=True, timeout=10)


def test_our_commands_take_these_arguments() -> None:
    """Parsed by the command line itself, which refuses what it does not know."""
    commands: Any = typer.main.get_command(app)
    lines = re.findall(r"opacus-memprof (run|diff) (.*?)(?:\)|>|$)", "\n".join(SCRIPTS), re.MULTILINE)
    assert [name for name, _ in lines] == ["run", "run", "diff"]
    for name, arguments in lines:
        context = commands.commands[name].make_context(
            name, shlex.split(arguments.replace("$TRAINING", "train.py --x 1").replace("$GPU", WORKFLOW["env"]["GPU"]))
        )
        assert context.params
    assert lines[2][1].split()[:2] == ["profile_before", "profile_after"]


def test_the_training_script_and_its_options_exist() -> None:
    script, *options = shlex.split(WORKFLOW["env"]["TRAINING"])
    source = (ROOT / script).read_text()
    assert all(f'"{option}"' in source for option in options if option.startswith("-"))


def test_pytest_knows_the_options() -> None:
    known: list[str] = []

    class Parser:
        def getgroup(self, *_: Any) -> Any:
            return self

        def addoption(self, name: str, **_: Any) -> None:
            known.append(name)

        def addini(self, name: str, *_: Any, **__: Any) -> None:
            pass

    plugin.pytest_addoption(Parser())  # type: ignore[arg-type]
    assert "--memprof-virtual-gpu" in known
    used = re.findall(r"--memprof[a-z-]*", "\n".join([*SCRIPTS, ACTION_STEP["run"]]))
    assert used
    assert set(used) <= set(known)


def test_the_action_declares_what_it_uses() -> None:
    used = set(re.findall(r"\$\{\{ inputs\.([a-z]+) \}\}", str(ACTION_STEP["env"])))
    assert used == set(ACTION["inputs"])
    assert "${{" not in ACTION_STEP["run"]  # values of a pull request reach the shell as variables, never as code


@pytest.mark.parametrize(("fits", "code"), [(True, 0), (False, 3)])
def test_the_action_comments_the_plan_and_the_tests(fits: bool, code: int, tmp_path: Path) -> None:
    """Its script, with stand-ins for the programs that it calls, which write down their arguments."""
    for name, does in {
        "pip": "",
        "opacus-memprof": f"echo fits: {fits}; exit {code}",
        "pytest": "mkdir -p memory_report; echo '| test |' > memory_report/summary.md",
        "gh": "while [ $# -gt 1 ]; do shift; done; cp $1 commented.md",
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/bash\necho "{name} $*" >> calls.txt\n{does}\n')
        program.chmod(0o755)
    given = {"PLAN": "--gpu h100 train.py", "TESTS": "tests/memory", "GPU": "h200", "INSTALL": "a.whl", "BASE": "abc"}
    given |= {"COMMENT": "true", "NUMBER": "7", "RUNNER_TEMP": str(tmp_path), "GITHUB_REPOSITORY": "a/b"}
    given |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "step.md"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    report = tmp_path / "memory_report"
    ran = subprocess.run(["bash", "-e", "-c", ACTION_STEP["run"]], cwd=tmp_path, env=given, timeout=30)
    assert ran.returncode == code
    assert (tmp_path / "commented.md").read_text() == f"```\nfits: {fits}\n```\n| test |\n"
    assert (tmp_path / "step.md").read_text() == (tmp_path / "commented.md").read_text()
    assert (tmp_path / "calls.txt").read_text().splitlines() == [
        "pip install a.whl",
        f"opacus-memprof plan -o {tmp_path}/memprof_plan --gpu h100 train.py",
        f"pytest tests/memory --memprof-virtual-gpu h200 --memprof-report={report} --memprof-compare abc",
        f"gh pr comment 7 --repo a/b --edit-last --create-if-none --body-file {tmp_path}/memory.md",
    ]
