# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof replay`: whether a recorded run would have fitted with other settings of torch's allocator, or
elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from opacus_memprof.planning.arguments import parse_settings
from opacus_memprof.planning.replay import Recording, Replay, read_recording, replay
from opacus_memprof.planning.report import gpu_name
from opacus_memprof.profiles.units import format_bytes, parse_size

_DOES_NOT_FIT = 3  # exit code


def replay_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False, help="Of the profile.")],
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="KEY:VALUE,...",
            help="Settings as PYTORCH_CUDA_ALLOC_CONF has them; several values of one are tried one by one: "
            "expandable_segments:True,False.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Kind of GPU, see `doctor`. Default: the virtual one of the run."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Its memory, such as 24GiB, instead of the kind's.", show_default=False),
    ] = None,
) -> None:
    """Play a recorded run's allocations through torch's allocator on a virtual GPU, without the program.

    Exits with 0 if it fits, with one of the settings at least, and with 3 if it does not.
    """
    tried = ["", *(parse_settings(settings) if settings is not None else ())]
    recording = read_recording(directory, gpu, None if memory is None else parse_size(memory))
    replays = replay(recording, tried)
    _print(recording, replays, Console())
    if not any(result.fits for result in replays):
        raise typer.Exit(_DOES_NOT_FIT)


def _print(recording: Recording, replays: Sequence[Replay], console: Console) -> None:
    first = replays[0]
    console.print(
        f"{recording.directory} on {gpu_name(recording.gpu, recording.memory)}, of which it may reserve "
        f"{format_bytes(first.may_reserve)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    console.print(f"it requests {format_bytes(max(result.requested for result in replays))} at most\n", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("settings", "fits", "reserves", "to spare"):
        table.add_column(column, overflow="fold")
    for result in replays:
        spare = None if result.needed is None else result.may_reserve - result.needed
        needed = "unknown" if result.needed is None else format_bytes(result.needed)
        lacking = "" if spare is None else format_bytes(spare) if result.fits else f"-{format_bytes(max(-spare, 0))}"
        color = "green" if result.fits else "red"
        table.add_row(result.settings or "(defaults)", f"[{color}]{'yes' if result.fits else 'no'}[/]", needed, lacking)
    console.print(table)
    for result in replays:
        if result.failed is not None:
            module = f" of {result.failed['module']}" if result.failed["module"] else ""
            console.print(
                f"{result.settings or '(defaults)'}: memory runs out in step {result.failed['step']}, at "
                f"{format_bytes(result.failed['bytes'])} for {result.failed['category'].replace('_', ' ')}{module} in "
                f"{result.failed['phase'].replace('_', ' ')}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    if recording.status != "finished":
        console.print(
            f"The run is {recording.status.replace('_', ' ')}: what would have come after is not known.",
            highlight=False,
        )
