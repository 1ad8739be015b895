# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run`: profiles a training script that knows nothing of it."""

from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli.option_groups import with_groups
from opacus_memprof.cli.program import Program
from opacus_memprof.cli.recording import Recording
from opacus_memprof.cli.training_options import DeviceName
from opacus_memprof.cli.virtual_options import VirtualGpuOptions
from opacus_memprof.directory import DEFAULT_DIRECTORY, DEFAULT_MAX_EVENTS, MOST_EVENTS, claim


@with_groups
def run(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", show_default=False, help="The script, or the module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", show_default=False, help="All that follows is its own.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as `python -m` does.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where the profile goes.")] = Path(
        DEFAULT_DIRECTORY
    ),
    device: DeviceName = "auto",
    max_events: Annotated[
        int, typer.Option(min=1, max=MOST_EVENTS, metavar="N", help="The event file's bound; an event takes 32 bytes.")
    ] = DEFAULT_MAX_EVENTS,
    virtual: VirtualGpuOptions,
) -> None:
    """Run a training script as python would, and write down where its memory goes.

    The summary follows the script's output, and the script's own exit code comes back. Of the processes that torchrun,
    accelerate or srun have started each profiles itself, and the last one to end prints the summary of all.
    """
    program = Program(script, arguments or [], module=module)
    if virtual.start() and device == "auto":
        device = "cuda"
    Recording(claim(output), device, max_events).of(program)
