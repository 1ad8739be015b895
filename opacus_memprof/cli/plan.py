# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof plan` and `replay`: whether a training fits on a GPU, before it runs there or from its profile."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from opacus_memprof.cli.options import EXECUTORS, with_groups
from opacus_memprof.errors import MemprofError
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.directory import PLAN_DIRECTORY
from opacus_memprof.profiles.plan import SearchedArgument
from opacus_memprof.profiles.units import format_bytes, parse_size
from opacus_memprof.virtual_gpu.devices import GPUS, find_gpu

if TYPE_CHECKING:  # no other command needs them
    from opacus_memprof.jobs.progress import ProgressBoard
    from opacus_memprof.planning.configuration import PlannedConfiguration, Range
    from opacus_memprof.planning.replay import Recording, Replay
    from opacus_memprof.planning.runs import PlannedRuns
    from opacus_memprof.planning.table import PlannedCell

_DOES_NOT_FIT = 3  # exit code


@with_groups
def plan(
    *,
    script: Annotated[str, typer.Argument(metavar="SCRIPT.py", show_default=False, help="The script or module.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="Arguments of the script.")
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, like `python -m`.")] = False,
    gpu: Annotated[
        str, typer.Option(metavar="KIND,...", help="Kinds of GPU; `doctor` lists them. `all`: which is the smallest?")
    ] = "h100",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of each GPU, such as 24GiB. Default: that of the kind.", show_default=False
        ),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="GPUs of the whole job, one process each. Only the first process is run."
        ),
    ] = 1,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARG=LOW..HIGH",
            help="Find the largest value of a script argument that fits: batch-size=1..4096. Further arguments, "
            "such as seq-length=128,256 or dtype=bfloat16,float16, make a grid.",
            show_default=False,
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="[ARG=]MODE,...",
            help="Compare grad-sample modes: hooks,ghost,flash_clip. ARG is the script's argument. Default: mode.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="KEY:VALUE,...",
            help="Compare settings of torch's allocator (PYTORCH_CUDA_ALLOC_CONF): expandable_segments:True,False.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Steps of a training with Poisson sampling: compute the probability that a batch is too large for the "
            "memory.",
            show_default=False,
        ),
    ] = None,
    executor: Annotated[
        str, typer.Option("--executor", metavar=EXECUTORS, help="Where the runs of a comparison happen.")
    ] = "local",
    resume: Annotated[bool, typer.Option("--resume", help="Keep existing runs, and run the missing ones.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Directory of the plan.")] = Path(
        PLAN_DIRECTORY
    ),
) -> None:
    """Find out whether a training fits on a GPU, by running it on a virtual GPU.

    Exits with 0 if it fits and with 3 if it does not. With --steps, also exits with 3 if it runs out of memory with a
    probability above 1e-6.
    """
    from opacus_memprof.jobs.executors import executor_of
    from opacus_memprof.jobs.progress import ProgressBoard
    from opacus_memprof.planning.configuration import (
        PlannedConfiguration,
        PlannedProgram,
        parse_modes,
        parse_search,
        parse_settings,
    )
    from opacus_memprof.planning.report import show_run
    from opacus_memprof.planning.runs import open_runs
    from opacus_memprof.planning.table import make_cells

    if not module and not Path(script).is_file():
        raise MemprofError(f"the script {script} {'is a directory' if Path(script).is_dir() else 'does not exist'}")
    asked = parse_search(search or ())
    named = None if modes is None else parse_modes(modes)
    base = PlannedConfiguration(
        PlannedProgram(script, tuple(arguments or ()), module),
        gpu,
        None if memory is None else parse_size(memory),
        ranks=gpus,
    )
    cells = make_cells(
        base,
        _kinds(gpu),
        modes=named,
        settings=() if settings is None else parse_settings(settings),
        values=asked.others,
    )
    is_single = asked.searched is None and len(cells) == 1
    if steps is not None and not is_single:
        raise MemprofError("--steps is for one configuration: leave --search and --modes out, and name one GPU")
    elsewhere = None if executor == "local" else executor_of(executor)
    console = Console()
    board = ProgressBoard(console, tr("runs"), transient=True, open_ended=True)
    try:
        with (
            board,
            open_runs(output, resume=resume, on_end=partial(show_run, board), executor=elsewhere) as runs,
        ):
            if runs.kept:
                console.print(tr("{count} runs are there already", count=runs.kept), highlight=False)
            if is_single:
                fits = _judge(runs, cells[0].configuration, named and named[0], steps, board, console)
            else:
                fits = _compare(runs, base, cells, asked.searched, board, console)
    except KeyboardInterrupt:
        said = tr("stopped; the same command with --resume before the script continues")
        print(f"opacus-memprof: {said}", file=sys.stderr)
        raise
    console.print(tr("the plan is in {path}", path=output.absolute()), highlight=False, markup=False, soft_wrap=True)
    if not fits:
        raise typer.Exit(_DOES_NOT_FIT)


def _judge(
    runs: "PlannedRuns",
    configuration: "PlannedConfiguration",
    mode_argument: str | None,
    steps: int | None,
    board: "ProgressBoard",
    console: Console,
) -> bool:
    from opacus_memprof.planning import report
    from opacus_memprof.planning.draws import TOLERATED, assess_draws
    from opacus_memprof.planning.verdict import judge

    board.add(1)
    verdict = judge(runs, configuration, mode_argument)
    board.stop()
    profile = report.copy_profile(runs, verdict.run)
    content: dict[str, Any] = {"verdict": report.verdict_content(verdict)}
    report.print_plan(verdict, console)
    report.print_doubts(profile["warnings"], console)
    fits = verdict.run.fits
    if steps is not None:
        draws = assess_draws(runs, configuration, verdict.run, steps, board.add)
        content["draws"] = report.draws_content(draws)
        report.print_draws(draws, console)
        fits = draws.probability <= TOLERATED
    report.write_plan(runs, configuration, **content)
    return fits


def _compare(
    runs: "PlannedRuns",
    base: "PlannedConfiguration",
    cells: "list[PlannedCell]",
    searched: "Range | None",
    board: "ProgressBoard",
    console: Console,
) -> bool:
    from opacus_memprof.planning import report
    from opacus_memprof.planning.table import fill, smallest_gpus

    fill(runs, cells, searched, board.add)
    board.stop()
    fitting = [cell for cell in cells if cell.answer is not None and cell.answer.fits]
    chosen = (fitting or [cell for cell in cells if cell.answer is not None])[0].answer
    assert chosen is not None
    profile = report.copy_profile(runs, chosen)
    search = (
        None if searched is None else SearchedArgument(argument=searched.name, low=searched.low, high=searched.high)
    )
    smallest = [] if len(_kinds_of(cells)) == 1 else [report.smallest_content(*each) for each in smallest_gpus(cells)]
    content = [report.plan_cell(cell) for cell in cells]
    report.write_plan(runs, base, search=search, cells=content, smallest_gpus=smallest)
    report.print_cells(cells, searched, console)
    report.print_doubts(profile["warnings"], console)
    return bool(fitting)


def _kinds_of(cells: "Sequence[PlannedCell]") -> set[str]:
    return {cell.configuration.gpu for cell in cells}


def _kinds(listed: str) -> list[str]:
    if listed == "all":
        return sorted(GPUS, key=lambda kind: GPUS[kind].total_memory)
    kinds = list(dict.fromkeys(kind.strip() for kind in listed.split(",")))
    for kind in kinds:
        find_gpu(kind)
    return kinds


def replay_command(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR|FILE", show_default=False, help="Directory of the profile, or snapshot of torch."),
    ],
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="KEY:VALUE,...",
            help="Allocator settings to try, as in PYTORCH_CUDA_ALLOC_CONF. A setting can have several values: "
            "expandable_segments:True,False.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="Kind of GPU; `doctor` lists them. Default: the virtual GPU of the run."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of the GPU, such as 24GiB. Default: that of the kind.", show_default=False
        ),
    ] = None,
) -> None:
    """Repeat the allocations of a recorded run with torch's allocator on a virtual GPU, without the program.

    Exits with 0 if it fits with at least one of the settings, otherwise with 3.
    """
    from opacus_memprof.analysis.torch_snapshot import profile_of
    from opacus_memprof.planning.configuration import parse_settings
    from opacus_memprof.planning.replay import read_recording, replay

    tried = ["", *(parse_settings(settings) if settings is not None else ())]
    recording = read_recording(profile_of(directory), gpu, None if memory is None else parse_size(memory))
    replays = replay(recording, tried)
    _print_replays(recording, replays, Console())
    if not any(result.fits for result in replays):
        raise typer.Exit(_DOES_NOT_FIT)


def _print_replays(recording: "Recording", replays: "Sequence[Replay]", console: Console) -> None:
    from opacus_memprof.planning.report import describe_allocation, gpu_name

    first = replays[0]
    room = tr(
        "{directory} on {gpu}, where torch may reserve {size}",
        directory=recording.directory,
        gpu=tr_sentence(gpu_name(recording.gpu, recording.memory)),
        size=format_bytes(first.may_reserve),
    )
    console.print(room, highlight=False, markup=False, soft_wrap=True)
    most = format_bytes(max(result.requested for result in replays))
    console.print(tr("it requests {size} at most", size=most) + "\n", highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in (tr("settings"), tr("fits"), tr("reserves"), tr("to spare")):
        table.add_column(column, overflow="fold")
    for result in replays:
        spare = None if result.needed is None else result.may_reserve - result.needed
        needed = tr("unknown") if result.needed is None else format_bytes(result.needed)
        lacking = "" if spare is None else format_bytes(spare) if result.fits else f"-{format_bytes(max(-spare, 0))}"
        color = "green" if result.fits else "red"
        fits = tr("yes") if result.fits else tr("no")
        table.add_row(result.settings or tr("(defaults)"), f"[{color}]{fits}[/]", needed, lacking)
    console.print(table)
    for result in replays:
        if result.failed is not None:
            where = describe_allocation(result.failed["category"], result.failed["module"], result.failed["phase"])
            failed = tr(
                "{settings}: memory runs out in step {step}, at {size} for {place}",
                settings=result.settings or tr("(defaults)"),
                step=result.failed["step"],
                size=format_bytes(result.failed["bytes"]),
                place=tr_sentence(where),
            )
            console.print(failed, highlight=False, markup=False, soft_wrap=True)
    if recording.status != "finished":
        status = tr(recording.status.replace("_", " "))
        console.print(tr("The run is {status}: what would have followed is not known.", status=status), highlight=False)
