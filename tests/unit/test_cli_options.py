# SPDX-License-Identifier: Apache-2.0
"""Options are the same with - and with _, for every command; a script's own stay as they are."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import opacus_memprof
from opacus_memprof import cli
from opacus_memprof.cli.options import FineTuningOptions, hide_token, with_groups
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import BUILT_IN

COMMANDS: Any = typer.main.get_command(cli.app)


@dataclass(frozen=True)
class Size:
    width: int = 1
    height: int = 2


def parsed(command: str, *arguments: str) -> dict[str, Any]:
    with COMMANDS.make_context("opacus-memprof", [command]) as group:
        values: dict[str, Any] = COMMANDS.commands[command].make_context(command, list(arguments), parent=group).params
    return values


@pytest.mark.parametrize(
    ("spelling", "field"),
    [
        ("--seq{}length", "seq_length"),
        ("--seq{}len", "seq_length"),
        ("--num{}iter", "num_steps"),
        ("--warmup{}iter", "warmup_steps"),
        ("--num{}layers", "num_layers"),
    ],
)
@pytest.mark.parametrize("letter", "-_")
def test_both_spellings_are_one_option(spelling: str, field: str, letter: str) -> None:
    assert parsed("experiments", spelling.format(letter), "5")[field] == 5


def test_the_same_thing_has_the_same_name_in_all_commands() -> None:
    """Other spellings are accepted, but not listed."""
    for command, given in (("experiments", ("--experiment", "ghost", "ew")), ("sweep", ("--experiment", "ghost"))):
        values = parsed(command, *given, "--output-dir", "there", "--num-iter", "7")
        assert values.get("modes", [values.get("mode")])[0] == "ghost"
        assert (str(values["results_dir"]), values["num_steps"]) == ("there", 7)
    shared = {
        "mode",
        "num-steps",
        "warmup-steps",
        "learning-rate",
        "sigma",
        "max-grad-norm",
        "dtype",
        "device",
        "token",
    }
    for command in ("experiment", "experiments", "sweep", "single-gpu"):
        listed = {name.lstrip("-") for option in COMMANDS.commands[command].params for name in option.opts}
        assert shared <= listed
        assert not listed & {"num-iter", "warmup-iter", "seq-len", "output-dir"}
        assert ("experiment" in listed) == command.startswith("experiment")  # whose documented name it is


def test_a_token_is_no_part_of_the_stored_command() -> None:
    arguments = ["sweep", "--token", "secret", "--token=secret", "--dtype", "bf16", "--token"]
    hide_token(arguments)
    assert arguments == ["sweep", "--token", "***", "--token=***", "--dtype", "bf16", "--token"]


def test_a_built_in_model_is_not_a_pretrained_one() -> None:
    assert FineTuningOptions().classification("bert").pretrained
    assert not FineTuningOptions(config=BUILT_IN[0]).classification("bert").pretrained


def test_options_of_a_dataclass_reach_the_command_as_one() -> None:
    received: list[object] = []

    @with_groups
    def command(*, name: str, size: Size, last: bool = False) -> None:
        """Its help."""
        received.extend([name, size, last])

    app = typer.Typer(add_completion=False)
    app.command()(command)
    for arguments in (["n", "--height", "3"], ["n", "--last"]):
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert received == ["n", Size(width=1, height=3), False, "n", Size(width=1, height=2), True]
    listed = [parameter.name for parameter in typer.main.get_command(app).params]
    assert listed == ["name", "width", "height", "last"]  # in the places that they have in --help


@pytest.mark.parametrize("mode", ["flash_clip", "flash-clip"])
def test_both_spellings_are_one_choice(mode: str) -> None:
    assert parsed("experiment", "--experiment", mode, "--output", "a_b.json")["mode"] == "flash_clip"
    assert str(parsed("experiment", "--experiment", mode, "--output", "a_b.json")["output"]) == "a_b.json"


@pytest.mark.parametrize(
    ("command", "documented"), [("experiment --experiment", "flash_clip"), ("debug --debug_level", "model_only")]
)
def test_a_wrong_choice_lists_the_documented_spellings(command: str, documented: str) -> None:
    refused = CliRunner().invoke(cli.app, [*command.split(), "none"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert f"'{documented}'" in refused.output
    assert documented.replace("_", "-") not in refused.output
    assert "Value error" not in refused.output


@pytest.mark.parametrize(("more", "warns"), [([], True), (["--use_lora"], False)])
def test_a_lora_rank_without_adapters_is_warned_of(more: list[str], warns: bool) -> None:
    ran = CliRunner().invoke(cli.app, ["single-gpu", "--lora_rank", "32", "--config", "none", *more])
    assert isinstance(ran.exception, MemprofError)  # there is no such model: nothing is trained
    assert ("--lora-rank 32 has no effect: add --use-lora" in ran.output) == warns


@pytest.mark.parametrize(("named", "count"), [([], 6), (["--experiment", "ghost", "--experiment", "vanilla"], 2)])
def test_experiments_lists_its_methods_before_it_trains(
    named: list[str], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["opacus_memprof.cli.experiments"], "_run", lambda *arguments: print("training"))
    ran = CliRunner().invoke(cli.app, ["experiments", "--config", "tiny", *named])
    assert ran.exit_code == 0
    listed = ran.output.splitlines()
    assert listed[0].startswith(f"{count} methods, in this order: vanilla, ")
    assert listed[1:] == (["training"] if named else ["to compare fewer: --mode vanilla ghost flash_clip", "training"])


def test_a_script_s_arguments_are_its_own() -> None:
    theirs = ["--my_rate", "1_000", "--other-rate=2", "--max_events", "7"]
    values = parsed("run", "--max_events", "5", "my_script.py", *theirs)
    assert (values["script"], list(values["arguments"]), values["max_events"]) == ("my_script.py", theirs, 5)


NEEDY = [name for name, command in COMMANDS.commands.items() if any(option.required for option in command.params)]


@pytest.mark.parametrize("command", NEEDY)
def test_a_command_without_what_it_needs_says_so(command: str) -> None:
    assert "report" in NEEDY
    ended = CliRunner().invoke(cli.app, [command])
    assert ended.exit_code == 2, ended.exception
    assert "Missing" in ended.output


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"opacus-memprof {opacus_memprof.__version__}\n")


def test_every_command_stands_in_a_panel_of_the_help() -> None:
    panels = {name: command.rich_help_panel for name, command in COMMANDS.commands.items()}
    assert set(panels.values()) <= {"Profile", "Look", "Compare", "Experiments", "Debug"}, panels
    assert panels["run"] == "Profile"


@pytest.mark.parametrize("command", ["run", "plan", "experiment", "experiments", "sweep", "single-gpu"])
def test_options_of_large_commands_stand_in_panels(command: str) -> None:
    panels: dict[str, set[str]] = {}
    for option in COMMANDS.commands[command].params:
        if option.param_type_name == "option" and option.name != "module":
            panels.setdefault(option.rich_help_panel, set()).add(option.opts[-1])
    assert panels.keys() <= {"Model and data", "Training", "Comparison", "Machine", "Results"}
    assert panels["Machine"] >= ({"--gpu", "--memory"} if command == "plan" else {"--device", "--virtual-gpu"})
    shown = CliRunner().invoke(cli.app, [command, "--help"]).output
    assert all(f"─ {panel} ─" in shown for panel in panels)


@pytest.mark.parametrize(
    "arguments",
    [("A",), ("A", "B", "--vanilla", "C"), ("A", "--vanilla", "C", "--markdown"), ("A", "--fail-above", "1%")],
)
def test_a_difference_needs_two_profiles(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, ["diff", *arguments])
    assert isinstance(result.exception, MemprofError)
