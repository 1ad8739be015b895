# SPDX-License-Identifier: Apache-2.0
"""The command line: its commands, and exit code 2 with one sentence for whatever the user can mend."""

import sys

import typer

from opacus_memprof.cli.debug import debug
from opacus_memprof.cli.diff import diff
from opacus_memprof.cli.doctor import doctor
from opacus_memprof.cli.draw import draw
from opacus_memprof.cli.experiment import experiment
from opacus_memprof.cli.experiments import experiments
from opacus_memprof.cli.lists import ListsCommand
from opacus_memprof.cli.report import ReportCommand, report
from opacus_memprof.cli.run import run
from opacus_memprof.cli.single_gpu import single_gpu
from opacus_memprof.cli.sweep import sweep
from opacus_memprof.cli.tax import tax
from opacus_memprof.cli.top import top
from opacus_memprof.errors import MemprofError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Where the memory of DP-SGD training goes.",
    # Options and their choices are the same with _ and with -. What follows a script is not looked at.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)
# What follows the script belongs to the script.
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command(cls=ReportCommand)(report)
app.command()(doctor)
app.command()(debug)
app.command()(tax)
app.command()(diff)
app.command()(top)
app.command()(experiment)
app.command()(experiments)
app.command()(draw)
app.command()(single_gpu)
app.command(cls=ListsCommand)(sweep)


def main() -> None:
    """Runs the command that sys.argv names, and exits."""
    try:
        # Not app() itself, which would put an excepthook of its own in the profiled script's process.
        typer.main.get_command(app)()
    except MemprofError as error:
        print(f"opacus-memprof: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
