# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run`: profiles a training script without changes to it."""

from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli.option_groups import with_groups
from opacus_memprof.cli.training_options import DeviceName
from opacus_memprof.cli.virtual_options import VirtualGpuOptions
from opacus_memprof.profiles.directory import DEFAULT_DIRECTORY, DEFAULT_MAX_EVENTS, MOST_EVENTS, claim
from opacus_memprof.running.program import Program
from opacus_memprof.running.recording import ProgramRecording


@with_groups
def run(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", show_default=False, help="The script, or the module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", show_default=False, help="Arguments of the script.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as `python -m` does.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Directory of the profile.")] = Path(
        DEFAULT_DIRECTORY
    ),
    device: DeviceName = "auto",
    max_events: Annotated[
        int, typer.Option(min=1, max=MOST_EVENTS, metavar="N", help="The most events to record; each takes 32 bytes.")
    ] = DEFAULT_MAX_EVENTS,
    virtual: VirtualGpuOptions,
) -> None:
    """Run a training script as python would, and record where its memory goes.

    Prints a summary after the script's output, and exits with the script's exit code. Each process that torchrun,
    accelerate or srun has started records a profile, and the last one to end prints the summary of all.
    """
    program = Program(script, arguments or [], module=module)
    if virtual.start() and device == "auto":
        device = "cuda"
    ProgramRecording(claim(output), device, max_events).record(program)
