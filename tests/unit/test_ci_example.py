# SPDX-License-Identifier: Apache-2.0
"""The workflow in examples/ci is valid, and every command and option of ours in it exists."""

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
SCRIPTS = [step["run"] for step in STEPS if "run" in step]


def test_it_has_what_a_workflow_needs() -> None:
    assert WORKFLOW[True] == "pull_request"  # YAML 1.1 reads `on` as true, and GitHub as itself
    assert WORKFLOW["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert all(("run" in step) != ("uses" in step) for step in STEPS)
    expressions = re.findall(r"\$\{\{ (.*?) \}\}", str(STEPS))
    assert all(re.fullmatch(r"github\.[a-z_.]+", expression) for expression in expressions)


@pytest.mark.parametrize("script", SCRIPTS)
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
    used = re.findall(r"--memprof[a-z-]*", "\n".join(SCRIPTS))
    assert used
    assert set(used) <= set(known)
