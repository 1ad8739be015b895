# SPDX-License-Identifier: Apache-2.0
"""A plan in plain words."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from opacus_memprof.jobs.progress import ProgressBoard
from opacus_memprof.planning.arguments import Range
from opacus_memprof.planning.configuration import PlannedConfiguration
from opacus_memprof.planning.draws import TOLERATED, Draws
from opacus_memprof.planning.table import PlannedCell
from opacus_memprof.planning.verdict import Advice, Verdict
from opacus_memprof.planning.virtual_run import VirtualRun
from opacus_memprof.profiles.units import format_bytes
from opacus_memprof.virtual_gpu.devices import GPUS

_MOST_WARNINGS = 3
_UNKNOWN = "values that the virtual GPU does not compute"  # in warnings about values and shapes


def gpu_name(kind: str, memory: int | None) -> str:
    """Returns the name of a virtual GPU: `a virtual NVIDIA H200 (139.80 GiB)`."""
    return f"a virtual {GPUS[kind].name} ({format_bytes(GPUS[kind].total_memory if memory is None else memory)})"


def show_run(board: ProgressBoard, configuration: PlannedConfiguration, run: VirtualRun) -> None:
    """Shows on a board that a run has ended."""
    board.advance()
    peak = f", peak {format_bytes(run.requested)}" if run.fits and run.requested is not None else ""
    words = " ".join([configuration.gpu, *configuration.program.arguments])
    changes = ", ".join(f"{change['kind']} {change.get('value', '')}".strip() for change in configuration.changes)
    status = "fits" if run.fits else run.status.replace("_", " ")
    line = Text(f"{words}{f' with {changes}' if changes else ''}  ")
    line.append(f"{status}{peak}", "green" if run.fits else "magenta")
    line.append(f"  {run.seconds:.0f} s", "dim")
    board.print(line)


def print_draws(draws: Draws, console: Console) -> None:
    """Prints the peak of the planned steps, and how to prevent a batch that is too large."""
    drawn = draws.largest
    _print(
        console,
        f"\nbatches are drawn: each of {drawn.samples} samples with probability {drawn.rate:g}, {drawn.steps} times; "
        "computed:",
    )
    for probability, (size, requested) in draws.peaks.items():
        _print(
            console,
            f"  no batch is above {size} with probability {probability:g}; its peak is {format_bytes(requested)}",
        )
    ran = ", ".join(map(str, draws.ran))
    color = "red" if draws.probability > TOLERATED else "green"
    _print(console, f"  batches of up to {draws.fits} fit (ran: {ran})")
    _print(console, f"  [{color}]probability of running out of memory: {draws.probability:.2g}[/]")
    if draws.physical is not None and draws.physical_run is not None:
        _print(
            console,
            f"  max_physical_batch_size={draws.physical} brings it below {TOLERATED:g}: tried, with "
            f"{format_bytes(draws.physical_run.reserved or 0)} reserved",
        )


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Prints whether it fits and by how much, the reason, and a remedy."""
    run, gpu = verdict.run, gpu_name(verdict.configuration.gpu, verdict.configuration.memory)
    room = f"{format_bytes(run.may_reserve or 0)} that it may reserve"
    taken = f"CUDA's context and libraries take {format_bytes(run.context or 0)}"
    if run.fits:
        _print(console, f"[bold green]fits[/] on {gpu}, with {format_bytes(verdict.spare)} to spare")
        _print(console, f"  it reserves {format_bytes(verdict.needed)} at most of the {room} ({taken})")
        if run.retries:
            _print(console, f"  {_only_just(run)}")
    else:
        about = "" if verdict.whole is not None else "about "
        lacking = format_bytes(max(-verdict.spare, 0))
        if verdict.spare < 0:
            _print(console, f"[bold red]does not fit[/] on {gpu}: {about}{lacking} too much")
        else:  # fragments: with more memory it would have reserved less than it had here
            _print(console, f"[bold red]does not fit[/] on {gpu}, for its memory is in fragments")
        _print(console, f"  it needs {about}{format_bytes(verdict.needed)} of the {room} ({taken})")
        _print(console, f"  memory ran out at {_place(run)}")
    peak = run if run.fits else verdict.whole
    if peak is not None and peak.requested is not None:
        _print(console, f"  its peak of {format_bytes(peak.requested)} is mostly {_place(peak)}")
    for number, suggestion in enumerate(verdict.advice, 1):
        _print(console, f"\n[bold]{number}. {escape(suggestion.title)}[/]: {_outcome(suggestion)}")
        _print(console, f"   [cyan]{escape(suggestion.code)}[/]")
    if not run.fits and not verdict.advice:
        _print(console, "\nNo known change would make it fit except a GPU with more memory.")


def print_doubts(warnings: Sequence[str], console: Console) -> None:
    """Prints the decisions of the run that depend on values which a virtual GPU does not compute.

    They come from its profile's warnings. Also prints how to set these values for the plan.
    """
    doubts = [warning for warning in warnings if "virtual GPU" in warning or "real GPU" in warning]
    for warning in doubts[:_MOST_WARNINGS]:
        _print(console, f"[yellow]note: {escape(warning)}[/]")
    if any(_UNKNOWN in warning for warning in doubts):
        _print(
            console,
            "[yellow]note: what the training would decide there can be set for the plan, where "
            "opacus_memprof.virtual_gpu.active() is not None[/]",
        )


def _outcome(advice: Advice) -> str:
    run = advice.tried
    if run is None:
        return f"not tried, predicted peak {format_bytes(advice.predicted)}; it takes an edit of the program"
    if advice.failure:
        return f"not tried, predicted peak {format_bytes(advice.predicted)}; with it, {escape(advice.failure)}"
    if not run.fits:
        return "[yellow]tried: does not fit[/]"
    return (
        f"[green]tried: fits[/], with a peak of {format_bytes(run.requested or 0)} and "
        f"{format_bytes(run.reserved or 0)} reserved"
    )


def _only_just(run: VirtualRun) -> str:
    times = "once" if run.retries == 1 else f"{run.retries} times"
    return f"only just: torch had to give cached memory back {times} to go on"


def _place(run: VirtualRun) -> str:
    module = f" of {run.module}" if run.module else ""
    return escape(f"{run.category.replace('_', ' ')}{module} in {run.phase.replace('_', ' ')}")


def print_cells(cells: Sequence[PlannedCell], searched: Range | None, console: Console) -> None:
    """Prints a line for each cell: the largest value that fits, and the memory that it needs."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns_of(cells):
        table.add_column(escape(name), overflow="fold")
    for name in ("fits" if searched is None else searched.name, "peak", "reserved"):
        table.add_column(escape(name), justify="right", no_wrap=True)
    for cell in cells:
        run = cell.answer
        if run is None or (searched is not None and cell.largest is None):
            table.add_row(*columns_of([cell]).values(), "none" if cell.runs else "failed")
            continue
        sizes = [format_bytes(size or 0) for size in (run.requested, run.reserved)]
        what = ("yes" if run.fits else "no") if searched is None else str(cell.largest)
        table.add_row(*columns_of([cell]).values(), what, *sizes)
    console.print(table)
    rooms = {cell.configuration.gpu: run.may_reserve for cell in cells if (run := cell.answer) is not None}
    listed = ", ".join(f"{format_bytes(room or 0)} on {gpu}" for gpu, room in rooms.items())
    console.print(f"may be reserved: {listed}\n" if rooms else "", highlight=False)
    for cell in cells:
        if cell.error:
            _print(console, f"[yellow]{escape(cell.label)}: {escape(cell.error)}[/]")
        elif searched is not None and cell.largest is not None:
            console.print(_explained(cell, searched), highlight=False)


def columns_of(cells: Sequence[PlannedCell]) -> dict[str, str]:
    """Returns the columns in which cells differ: their names, and their values in the first cell."""
    cell = cells[0]
    columns = {name: str(value) for name, value in cell.fixed.items()}
    columns |= {} if cell.mode is None else {"mode": cell.mode}
    columns |= {} if cell.settings is None else {"settings": cell.settings}
    return columns | {"gpu": cell.configuration.gpu}


def _explained(cell: PlannedCell, searched: Range) -> str:
    best, line, run = cell.largest, cell.line, cell.answer
    assert best is not None
    assert run is not None
    fits = f"fits ({_only_just(run)})" if run.retries else "fits"
    end = "it is the range's end" if best == searched.high else f"{best + 1} was run and does not fit"
    ran = ", ".join(str(value) for value in sorted(cell.runs))
    grows = "" if line is None else f"; computed between the runs: {format_bytes(round(line.slope))} for each"
    return f"{escape(cell.label)}: {searched.name}={best} was run and {fits}, {end} (ran: {ran}){grows}"


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
