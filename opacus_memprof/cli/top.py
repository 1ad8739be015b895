# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof top`: a running profile, followed from another terminal."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live as Screen

from opacus_memprof.errors import MemprofError


def top(
    target: Annotated[str, typer.Argument(metavar="DIR|PID", help="a profile's directory, or the profiled process")],
    interval: Annotated[float, typer.Option(help="seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="look once and exit")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON object a line, for scripts")] = False,
) -> None:
    """Follows a running profile: live bytes by category and module, step, phase and trend. The run notices nothing."""
    if interval <= 0:
        raise MemprofError(f"an interval of {interval:g} seconds is none: give one above 0")
    from opacus_memprof.analysis.live import Live, directory_of_process
    from opacus_memprof.profiles.json_object import to_json
    from opacus_memprof.reports.top import live_view

    is_process = target.isdecimal() and not Path(target).exists()
    live = Live(directory_of_process(int(target)) if is_process else target)
    console = Console()
    seen = live.look()
    if as_json:
        print(to_json(seen), end="", flush=True)
        while not once and seen.status == "running":
            time.sleep(interval)
            seen = live.look()
            print(to_json(seen), end="", flush=True)
    elif once:
        console.print(live_view(seen))
    else:
        with Screen(live_view(seen), console=console, auto_refresh=False) as screen:
            while seen.status == "running":
                time.sleep(interval)
                seen = live.look()
                screen.update(live_view(seen), refresh=True)
