# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof run`, `attach`, `top` and `doctor`: profile a program, follow a running profile, check this place."""

import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from opacus_memprof.cli.options import DeviceName, VirtualGpuOptions, with_groups
from opacus_memprof.errors import MemprofError
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.directory import (
    DEFAULT_DIRECTORY,
    DEFAULT_MAX_EVENTS,
    EVENTS,
    MOST_EVENTS,
    check_address,
    claim,
)
from opacus_memprof.profiles.units import format_count
from opacus_memprof.running.environment import Level, examine, reads_only
from opacus_memprof.running.program import Program
from opacus_memprof.running.recording import ProgramRecording

_COLORS: dict[Level, str] = {"ok": "green", "note": "yellow", "problem": "bold red"}


@with_groups
def run(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", show_default=False, help="The script or module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="Arguments of the script.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, like `python -m`.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Directory of the profile.")] = Path(
        DEFAULT_DIRECTORY
    ),
    device: DeviceName = "auto",
    max_events: Annotated[
        int, typer.Option(min=1, max=MOST_EVENTS, metavar="N", help="Maximum number of recorded events, 32 bytes each.")
    ] = DEFAULT_MAX_EVENTS,
    gather: Annotated[
        str | None,
        typer.Option(metavar="URL", show_default=False, help="Copy each rank's profile here at the end; see merge."),
    ] = None,
    virtual: VirtualGpuOptions,
) -> None:
    """Run a training script like python, and record where its memory goes.

    Prints a summary after the script's output, and exits with the script's exit code. Under torchrun, accelerate or
    srun, each process records a profile, and the last one to end prints the summary of all.
    """
    program = Program(script, arguments or [], module=module)
    if virtual.start() and device == "auto":
        device = "cuda"
    if gather is not None:
        check_address(gather)
    ProgramRecording(claim(output), device, max_events, gather).record(program)


def attach(
    pid: Annotated[int, typer.Argument(metavar="PID", help="Id of the process.", min=1)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Directory of the profile.")] = Path(
        DEFAULT_DIRECTORY
    ),
    seconds: Annotated[
        float | None, typer.Option(help="How long to record. Default: until Ctrl-C.", show_default=False, min=0.1)
    ] = None,
) -> None:
    """Record a program that runs already, from now on, and print a summary. The program goes on without the profiler.

    Needs Python 3.14 here and in the program, of which both must have this package.
    """
    from opacus_memprof.analysis.job_view import load_view
    from opacus_memprof.analysis.profile import is_being_written
    from opacus_memprof.reports.summary import print_summary

    _refuse_to_attach(pid)
    output = output.absolute()
    _execute(pid, f"begin_recording({str(output)!r})")
    until = tr("for {seconds:g} s, or until Ctrl-C", seconds=seconds) if seconds else tr("until Ctrl-C")
    print(tr("recording process {pid} into {path}: {until}", pid=pid, path=output, until=until), flush=True)
    end = time.monotonic() + (seconds or float("inf"))
    with suppress(KeyboardInterrupt):
        while is_being_written(output) and time.monotonic() < end:
            time.sleep(0.2)
    if is_being_written(output):  # otherwise the process has ended
        _execute(pid, "end_recording()")
    print_summary(load_view(output), Console())


def _refuse_to_attach(pid: int) -> None:
    process = Path(f"/proc/{pid}")
    try:
        mapped = (process / "maps").read_text(encoding="utf-8", errors="replace")
        files = list((process / "fd").iterdir())
    except PermissionError:
        raise MemprofError(
            f"process {pid} cannot be read from here: attach as its user, with a debugger's rights"
        ) from None
    except OSError:
        raise MemprofError(f"there is no process {pid}, or it has just ended: give the id of a running one") from None
    for file in files:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(file).endswith(f"/{EVENTS}"):
                raise MemprofError(f"process {pid} is being profiled already: follow it by `opacus-memprof top {pid}`")
    if "libtorch" not in mapped:
        raise MemprofError(f"process {pid} has not loaded torch: attach to it when it trains")
    if not hasattr(sys, "remote_exec"):
        here = ".".join(map(str, sys.version_info[:2]))
        raise MemprofError(f"attach needs Python 3.14, and this is {here}: start the program by `opacus-memprof run`")


def _refuse_if_ended(pid: int) -> None:
    with suppress(OSError):
        if Path(f"/proc/{pid}/maps").read_bytes():  # none of a process whose parent has not noticed its end
            return
    raise MemprofError(f"process {pid} has ended: give the id of a running one")


_ANSWER_SECONDS = 60.0  # a step of a large model, in which the main thread may be in one call


def _execute(pid: int, call: str) -> None:
    """Calls a function of `opacus_memprof.integrations` in the main thread of another process.

    Raises:
        MemprofError: the process cannot be reached, does not answer, or the call has raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, answer = Path(folder, "call.py"), Path(folder, "answer")
        code = (
            "import os\n"
            "try:\n"
            "    from opacus_memprof import integrations\n"
            f"    integrations.{call}\n"
            "    answer = ''\n"
            "except Exception as error:\n"
            "    answer = str(error) or type(error).__name__\n"
            f"with open({str(answer) + '.part'!r}, 'w', encoding='utf-8') as file:\n"
            "    file.write(answer)\n"
            f"os.replace({str(answer) + '.part'!r}, {str(answer)!r})\n"
        )
        script.write_text(f"exec({code!r}, {{}})\n", encoding="utf-8")  # names of the program stay as they are
        try:
            sys.remote_exec(pid, str(script))  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as error:
            raise MemprofError(f"process {pid} cannot be reached ({error}): see Python's remote debugging") from error
        end = time.monotonic() + _ANSWER_SECONDS
        while not answer.exists():
            _refuse_if_ended(pid)
            if time.monotonic() > end:
                raise MemprofError(f"process {pid} has not answered for {_ANSWER_SECONDS:.0f} s: try again later")
            time.sleep(0.05)
        if said := answer.read_text(encoding="utf-8"):
            raise MemprofError(f"process {pid} cannot be recorded ({said}): start it by `opacus-memprof run`")


def top(
    target: Annotated[
        str, typer.Argument(metavar="DIR|PID", help="Directory of a profile, or id of the profiled process.")
    ],
    interval: Annotated[float, typer.Option(help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")] = False,
) -> None:
    """Follow a running profile: live bytes by category and module, step, phase and trend. Does not affect the run."""
    if interval <= 0:
        raise MemprofError(f"--interval is {interval:g}: give a number above 0")
    from opacus_memprof.analysis.live import ProfileFollower, directory_of_process
    from opacus_memprof.profiles.json_object import to_json
    from opacus_memprof.reports.text import live_view

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


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="SCRIPT.py", show_default=False, help="Script to check; needs --script.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="Arguments of the script.")
    ] = None,
    script: Annotated[
        bool, typer.Option("--script", help="Check the private training of a script instead of this environment.")
    ] = False,
) -> None:
    """Check whether profiling works here, and print how to fix problems.

    Exits with 0 if it works, otherwise with 1.

    With --script SCRIPT.py: runs the script until its private optimizer has made two steps. Compares clipping, noise
    and updates with a computation by hand, one sample at a time, and lists what was not checked. Exits with 0 if
    everything that was checked is correct, with 1 if there is a defect, with 2 if there is nothing to check.
    """
    if script or target is not None:
        _check_script(script, target, arguments or [])
        return
    checks = examine()
    console = Console(highlight=False)
    names = [tr_sentence(check.name) for check in checks]
    width = max(map(cell_len, names))
    for check, name in zip(checks, names, strict=True):
        level = set_cell_size(tr(check.level), 8)
        line = Text.assemble((level, _COLORS[check.level]), f"{set_cell_size(name, width)}  {tr_sentence(check.found)}")
        if check.remedy:
            line.append(f"\n{'':{8 + width}}  → {tr_sentence(check.remedy)}", "bold")
        console.print(line, soft_wrap=True)  # lines are not wrapped, so that commands can be copied
    problems = sum(check.level == "problem" for check in checks)
    if problems:
        counted = tr_sentence(format_count(problems, "problem"))
        console.print("\n" + tr("opacus-memprof cannot profile here: {problems}, see above.", problems=counted))
        raise typer.Exit(1)
    can_read, can_profile = (
        "opacus-memprof can read profiles here, but not record them.",
        "opacus-memprof can profile here.",
    )
    console.print("\n" + tr_sentence(can_read if reads_only() else can_profile))


def _check_script(script: bool, target: str | None, arguments: list[str]) -> None:
    if not script or target is None:
        raise MemprofError("to check a script: opacus-memprof doctor --script SCRIPT.py [ARGS]")
    from opacus_memprof.loop_check.script import ScriptCheck, print_verdict

    verdict = ScriptCheck(target, arguments).run()
    print_verdict(verdict, Console(highlight=False))
    if not verdict.is_good:
        raise typer.Exit(1)
