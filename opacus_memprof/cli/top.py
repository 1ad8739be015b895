# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof top`: a running profile, followed from another terminal."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

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
    from opacus_memprof.analysis.live import ProfileFollower, directory_of_process
    from opacus_memprof.profiles.json_object import to_json
    from opacus_memprof.reports.top import live_view

    is_process = target.isdecimal() and not Path(target).exists()
    follower = ProfileFollower(directory_of_process(int(target)) if is_process else target)
    console = Console()
    profile = follower.read()
    if as_json:
        print(to_json(profile), end="", flush=True)
        while not once and profile.status == "running":
            time.sleep(interval)
            profile = follower.read()
            print(to_json(profile), end="", flush=True)
    elif once:
        console.print(live_view(profile))
    else:
        with Live(live_view(profile), console=console, auto_refresh=False) as screen:
            while profile.status == "running":
                time.sleep(interval)
                profile = follower.read()
                screen.update(live_view(profile), refresh=True)
