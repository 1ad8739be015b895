# SPDX-License-Identifier: Apache-2.0
"""The command line. Errors that the user can fix end it with exit code 2 and one sentence."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from opacus_memprof.cli.debug import bisect, debug
from opacus_memprof.cli.experiments import ListOptionsCommand, draw, experiment, experiments, single_gpu, sweep
from opacus_memprof.cli.look import ReportCommand, diff, mcp, merge, report, tax
from opacus_memprof.cli.options import current_name, normalized
from opacus_memprof.cli.plan import plan, replay_command
from opacus_memprof.cli.profile import attach, doctor, run, top
from opacus_memprof.errors import MemprofError
from opacus_memprof.language import ESCAPED, current_language, tr_help, tr_sentence, tr_usage
from opacus_memprof.versions import VERSION

PROFILE_PANEL, LOOK_PANEL, COMPARE_PANEL, EXPERIMENTS_PANEL, DEBUG_PANEL = (
    "Profile",
    "Look",
    "Compare",
    "Experiments",
    "Debug",
)  # panels of --help


@contextmanager
def _refusals_in_language() -> Iterator[None]:
    """Lets errors of typer say what is wrong with a call in the current language."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):
            # Pydantic, by which typer 0.29 reads values, calls each refusal of a choice a value error.
            message = tr_usage(error.format_message().replace(": Value error, ", ": "))
            error.format_message = lambda: message
        raise


class _Commands(TyperGroup):
    """The commands of `opacus-memprof`. A script that uses typer itself keeps its own language."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _refusals_in_language():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _refusals_in_language():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    # Options and their choices may be written with _ or -. Arguments of a script do not change.
    context_settings={"token_normalize_func": normalized},
)
# Options after the script belong to the script.
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=PROFILE_PANEL)(run)
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=PROFILE_PANEL)(plan)
app.command(rich_help_panel=PROFILE_PANEL)(attach)
app.command("replay", rich_help_panel=PROFILE_PANEL)(replay_command)
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=PROFILE_PANEL)(doctor)
app.command(cls=ReportCommand, rich_help_panel=LOOK_PANEL)(report)
app.command(rich_help_panel=LOOK_PANEL)(top)
app.command(rich_help_panel=LOOK_PANEL)(merge)
app.command(rich_help_panel=LOOK_PANEL)(mcp)
app.command(rich_help_panel=COMPARE_PANEL)(diff)
app.command(rich_help_panel=COMPARE_PANEL)(tax)
app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=COMPARE_PANEL)(bisect)
for command in (experiment, experiments, sweep, single_gpu):
    names = {"token_normalize_func": current_name}
    app.command(cls=ListOptionsCommand, context_settings=names, rich_help_panel=EXPERIMENTS_PANEL)(command)
app.command(rich_help_panel=EXPERIMENTS_PANEL)(draw)
app.command(rich_help_panel=DEBUG_PANEL)(debug)

# Constants of typer.rich_utils that are words in --help and above what is wrong with a call.
TYPER_CONSTANTS = (
    *("ARGUMENTS_PANEL_TITLE", "OPTIONS_PANEL_TITLE", "DEFAULT_STRING", "REQUIRED_LONG_STRING"),
    *("ERRORS_PANEL_TITLE", "RICH_HELP"),
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"opacus-memprof {VERSION}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Show where the memory of DP-SGD training goes."""
    # Text that the output's encoding does not have is escaped; but the output of a script stays its own.
    if context.invoked_subcommand != "run" and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=ESCAPED)


def translate_help(command: Any) -> None:
    """Puts the help of a command, its options and its subcommands into the current language.

    Usage stays English.
    """
    help_option = command.get_help_option(typer.Context(command))  # the command keeps it
    for described in (command, *command.params, help_option):
        for attribute in ("help", "rich_help_panel"):
            if isinstance(text := getattr(described, attribute, None), str):
                setattr(described, attribute, tr_help(text))
    for subcommand in getattr(command, "commands", {}).values():
        translate_help(subcommand)


def main() -> None:
    """Runs the command in sys.argv, and exits."""
    try:
        # Not app(), which would install typer's excepthook in the process of the profiled script.
        command = typer.main.get_command(app)
        if current_language() != "en":  # an unknown one is refused before anything runs
            from typer import rich_utils

            translate_help(command)
            for name in TYPER_CONSTANTS:
                setattr(rich_utils, name, tr_help(getattr(rich_utils, name)))
        command()
    except MemprofError as error:
        print(f"opacus-memprof: {tr_sentence(str(error), least_words=2)}", file=sys.stderr)
        sys.exit(error.exit_code)
