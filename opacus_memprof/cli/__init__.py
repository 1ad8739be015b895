# SPDX-License-Identifier: Apache-2.0
"""The command line: its commands, and exit code 2 with one sentence for whatever the user can mend."""

import sys
from typing import Annotated

import typer

from opacus_memprof.cli.debug import debug
from opacus_memprof.cli.diff import diff
from opacus_memprof.cli.doctor import doctor
from opacus_memprof.cli.draw import draw
from opacus_memprof.cli.experiment import experiment
from opacus_memprof.cli.experiments import experiments
from opacus_memprof.cli.list_options import ListOptionsCommand
from opacus_memprof.cli.plan import plan
from opacus_memprof.cli.replay import replay_command
from opacus_memprof.cli.report import ReportCommand, report
from opacus_memprof.cli.run import run
from opacus_memprof.cli.single_gpu import single_gpu
from opacus_memprof.cli.sweep import sweep
from opacus_memprof.cli.tax import tax
from opacus_memprof.cli.top import top
from opacus_memprof.cli.training_options import current_name
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.versions import VERSION

PROFILE_PANEL, LOOK_PANEL, COMPARE_PANEL, EXPERIMENTS_PANEL, DEBUG_PANEL = (
    "Profile",
    "Look",
    "Compare",
    "Experiments",
    "Debug",
)  # panels of --help

app = typer.Typer(
    no_args_is_help=True,
    # Options and their choices are the same with _ and with -. What follows a script is not looked at.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
# What follows the script belongs to the script.
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=PROFILE_PANEL)(run)
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=PROFILE_PANEL)(plan)
app.command("replay", rich_help_panel=PROFILE_PANEL)(replay_command)
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=PROFILE_PANEL)(doctor)
app.command(cls=ReportCommand, rich_help_panel=LOOK_PANEL)(report)
app.command(rich_help_panel=LOOK_PANEL)(top)
app.command(rich_help_panel=COMPARE_PANEL)(diff)
app.command(rich_help_panel=COMPARE_PANEL)(tax)
for command in (experiment, experiments, sweep, single_gpu):
    names = {"token_normalize_func": current_name}
    app.command(cls=ListOptionsCommand, context_settings=names, rich_help_panel=EXPERIMENTS_PANEL)(command)
app.command(rich_help_panel=EXPERIMENTS_PANEL)(draw)
app.command(rich_help_panel=DEBUG_PANEL)(debug)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"opacus-memprof {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Where the memory of DP-SGD training goes."""


def main() -> None:
    """Runs the command that sys.argv names, and exits."""
    try:
        # Not app() itself, which would install typer's excepthook in the profiled script's process.
        typer.main.get_command(app)()
    except MemprofError as error:
        print(f"opacus-memprof: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
