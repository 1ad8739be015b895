# SPDX-License-Identifier: Apache-2.0
"""Options are the same with - and with _, for every command; a script's own stay as they are."""

from typing import Any

import pytest
import typer

from opacus_memprof import cli

COMMANDS: Any = typer.main.get_command(cli.app)


def parsed(command: str, *arguments: str) -> dict[str, Any]:
    with COMMANDS.make_context("opacus-memprof", [command]) as group:
        values: dict[str, Any] = COMMANDS.commands[command].make_context(command, list(arguments), parent=group).params
    return values


@pytest.mark.parametrize("spelling", ["--seq{}len", "--warmup{}iter", "--num{}layers"])
@pytest.mark.parametrize("letter", "-_")
def test_both_spellings_are_one_option(spelling: str, letter: str) -> None:
    values = parsed("experiments", spelling.format(letter), "5")
    assert values[spelling.format("_").removeprefix("--")] == 5


@pytest.mark.parametrize("mode", ["flash_clip", "flash-clip"])
def test_both_spellings_are_one_choice(mode: str) -> None:
    assert parsed("experiment", "--experiment", mode, "--output", "a_b.json")["mode"] == "flash_clip"
    assert str(parsed("experiment", "--experiment", mode, "--output", "a_b.json")["output"]) == "a_b.json"


def test_a_script_s_arguments_are_its_own() -> None:
    theirs = ["--my_rate", "1_000", "--other-rate=2", "--max_events", "7"]
    values = parsed("run", "--max_events", "5", "my_script.py", *theirs)
    assert (values["script"], values["arguments"], values["max_events"]) == ("my_script.py", theirs, 5)
