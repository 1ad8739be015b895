# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof experiment`, `experiments`, `sweep`, `single-gpu` and `draw`: train given models, compare memory."""

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperCommand

from opacus_memprof.cli.options import (
    FineTuningOptions,
    MethodOptions,
    MethodRunningOptions,
    Nproc,
    ResultsDir,
    RunningOptions,
    TrainingOptions,
    with_groups,
)
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import MODES, Configuration, Mode
from opacus_memprof.language import tr, tr_sentence
from opacus_memprof.profiles.units import format_count

if TYPE_CHECKING:
    from opacus_memprof.experiments.configuration import Cell
    from opacus_memprof.experiments.directory import Preset

SWEEP_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SINGLE_GPU_MODEL = "meta-llama/Llama-3.2-3B-Instruct"
_VALUE = re.compile(r"(?!-)|-\d")  # a negative number is a value, which is refused later


class ListOptionsCommand(TyperCommand):
    """A command whose list options (`list[…]`) accept several values after one flag: `--seq-lengths 128 256 512`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = {name for parameter in self.params if getattr(parameter, "multiple", False) for name in parameter.opts}
        return super().parse_args(ctx, repeat_flags(args, lists, ctx.token_normalize_func))


def repeat_flags(arguments: Iterable[str], lists: set[str], normalized: Callable[[str], str]) -> list[str]:
    """Repeats flags before each of their values: `--sizes 1 2` becomes `--sizes 1 --sizes 2`.

    Args:
        arguments: the command line.
        lists: the flags of list options.
        normalized: maps all spellings of an option to one.

    Returns:
        The command line with a flag before each value.

    Raises:
        MemprofError: a flag has no value.
    """
    known = {normalized(name.lstrip("-")) for name in lists}
    result: list[str] = []
    flag, values = "", 0  # the list that is being read, and the number of its values
    for argument in [*arguments, "--"]:
        if flag and _VALUE.match(argument):
            result += [flag, argument]
            values += 1
            continue
        if flag and not values:
            raise MemprofError(f"{flag} has no values: give it at least one")
        flag, values = (argument, 0) if normalized(argument.lstrip("-")) in known else ("", 0)
        if not flag:
            result.append(argument)
    return result[:-1]


@with_groups
def experiment(
    *,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            "--experiment",
            metavar="|".join(MODES),
            help="vanilla trains without privacy; the others are ways to clip.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", metavar="FILE.json", help="File of the result; the profile goes to FILE.run beside it."
        ),
    ],
    training: MethodOptions,
    nproc: Nproc = 1,
) -> None:
    """Train a model for a few steps with one method, and measure time and memory.

    Exits with 1 if the training failed. Running out of memory is a result, not a failure.
    """
    from opacus_memprof.experiments import process

    chosen = training.configuration(default="transformer", mode=mode, nproc=nproc)
    result = process.run_to_file(output, chosen, token=training.token, on_line=print)
    from opacus_memprof.experiments.configuration import MethodCell
    from opacus_memprof.experiments.rows import Row
    from opacus_memprof.experiments.summary import terminal_summary

    row = Row(output.stem, MethodCell(chosen).label, result)
    print(terminal_summary([row], output.parent))
    print(tr("result: {path}", path=output))
    if not row.finished and not row.ran_out_of_memory:
        raise typer.Exit(1)


@with_groups
def experiments(
    *,
    modes: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            "--experiment",
            metavar="|".join(MODES),
            help="Methods to compare, such as vanilla ghost flash_clip. Default: all.",
        ),
    ] = None,
    training: MethodOptions,
    results_dir: Annotated[
        Path | None,
        typer.Option(
            "--results-dir",
            metavar="DIR",
            help="Directory of the results. Default: memory_profiling_results/run_TIMESTAMP.",
        ),
    ] = None,
    running: MethodRunningOptions,
) -> None:
    """Train a model with every method, each in a new process, and plot memory and time.

    Each result is written when its run ends. Exits with 1 if a training failed; running out of memory is a result.
    """
    base = training.configuration(default="transformer")
    from opacus_memprof.experiments.configuration import methods
    from opacus_memprof.experiments.directory import EXPERIMENTS

    cells = methods(base, modes or ())
    names = ", ".join(cell.name for cell in cells)
    print(tr("{count}, in this order: {names}", count=tr_sentence(format_count(len(cells), "method")), names=names))
    if not modes:
        print(tr("to compare fewer: --mode vanilla ghost flash_clip"))
    directory = results_dir or Path("memory_profiling_results") / f"run_{datetime.now():%Y%m%d_%H%M%S}"
    _run(EXPERIMENTS, cells, directory, training, running)


@with_groups
def sweep(
    *,
    seq_lengths: Annotated[list[int], typer.Option(help="Tokens per sample.")] = [128, 256, 512],  # noqa: B006
    batch_sizes: Annotated[list[int], typer.Option(help="Samples per optimizer step.")] = [8, 16, 32],  # noqa: B006
    max_physical_batch_sizes: Annotated[
        list[int], typer.Option(help="Samples per forward pass; at most the batch size.")
    ] = [1, 2, 4],  # noqa: B006
    lora_ranks: Annotated[
        list[int] | None,
        typer.Option(
            help="LoRA ranks; 0 trains all parameters. Default: 8 and 16; with --detailed: 16.", show_default=False
        ),
    ] = None,
    training: FineTuningOptions,
    nproc: Nproc = 1,
    results_dir: ResultsDir = Path("memory_results"),
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Also plot memory by component, operation and kind.")
    ] = False,
    running: RunningOptions,
) -> None:
    """Train every combination of sizes under the profiler, each in a new process, and compare their memory.

    Lists follow their flag: --seq-lengths 128 256 512.

    All GPUs of the machine are used at once. Running out of memory is a result, not a failure.

    The task is sequence classification on SNLI, or on random tokens if SNLI cannot be downloaded.

    Default model: meta-llama/Llama-3.1-8B-Instruct.
    """
    base = training.classification(SWEEP_MODEL, nproc=nproc)
    from opacus_memprof.experiments.configuration import grid
    from opacus_memprof.experiments.directory import DETAILED_SWEEP, SWEEP

    ranks = lora_ranks or ([16] if detailed else [8, 16])
    cells, left_out = grid(base, seq_lengths, batch_sizes, max_physical_batch_sizes, ranks)
    if left_out:
        print(
            tr(
                "{count} of {all} combinations are left out: their physical batch is larger than their logical batch",
                count=left_out,
                all=left_out + len(cells),
            )
        )
    _run(DETAILED_SWEEP if detailed else SWEEP, cells, results_dir, training, running)


@with_groups
def single_gpu(
    *,
    training: FineTuningOptions,
    seq_length: Annotated[int, typer.Option(help="Tokens per sample.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Samples per optimizer step.")] = 32,
    max_physical_batch_size: Annotated[int, typer.Option(help="Samples per forward pass.")] = 1,
    use_lora: Annotated[
        bool, typer.Option("--use-lora", help="Train LoRA adapters instead of all parameters.")
    ] = False,
    lora_rank: Annotated[int | None, typer.Option(help="LoRA rank; needs --use-lora. Default: 16.")] = None,
    results_dir: ResultsDir = Path("single_gpu_memory_results"),
    run_all: Annotated[
        bool,
        typer.Option(
            "--run-all",
            help="Run nine configurations instead of these sizes: sequence lengths 64, 128, 256; batch sizes 8, 16, "
            "32; LoRA ranks 16, 32; physical batch sizes 1, 2, 4.",
        ),
    ] = False,
    running: RunningOptions,
) -> None:
    """Fine-tune a language model privately under the profiler, in a new process, and show where its memory goes.

    Further calls add results to the same directory, and compare them with the earlier ones.

    The task is sequence classification on SNLI, or on random tokens if SNLI cannot be downloaded.

    Default model: meta-llama/Llama-3.2-3B-Instruct.
    """
    if lora_rank is not None and not use_lora:
        said = tr("--lora-rank {rank} has no effect: add --use-lora to train adapters", rank=lora_rank)
        print(f"opacus-memprof: {said}", file=sys.stderr)
    base = training.classification(
        SINGLE_GPU_MODEL,
        seq_length=seq_length,
        batch_size=batch_size,
        max_physical_batch_size=max_physical_batch_size,
        lora_rank=(16 if lora_rank is None else lora_rank) if use_lora else None,
    )
    from opacus_memprof.experiments.configuration import Cell, one_at_a_time
    from opacus_memprof.experiments.directory import SINGLE_GPU

    cells = one_at_a_time(base) if run_all else [Cell(base)]
    print(_described(base, sizes=not run_all))
    _run(SINGLE_GPU, cells, results_dir, training, running)


def _described(chosen: Configuration, *, sizes: bool) -> str:
    """Returns the description of a configuration; without `sizes`, the common settings of several configurations."""
    lines = [
        tr(
            "model {model}{weights}, mode {mode}, {dtype}, device {device}",
            model=chosen.model,
            weights="" if chosen.pretrained else tr(" (random weights)"),
            mode=chosen.mode,
            dtype=chosen.dtype,
            device=chosen.device,
        )
    ]
    if sizes:
        adapters = tr("LoRA adapters of rank {rank}", rank=chosen.lora_rank)
        lines.append(
            tr(
                "sequence length {tokens}, batch {batch}, physical batch {physical}, training {trained}",
                tokens=chosen.seq_length,
                batch=chosen.batch_size,
                physical=chosen.physical_batch_size,
                trained=tr("all parameters") if chosen.lora_rank is None else adapters,
            )
        )
    private = "" if chosen.mode == "vanilla" else f", sigma {chosen.sigma:g}, max_grad_norm {chosen.max_grad_norm:g}"
    lines.append(
        tr(
            "learning rate {rate:g}{private}, {steps}",
            rate=chosen.learning_rate,
            private=private,
            steps=tr_sentence(format_count(chosen.num_steps, "step")),
        )
    )
    return "\n".join(lines)


def draw(
    input_dir: Annotated[Path, typer.Option("--input-dir", metavar="DIR", help="Directory of the results, *.json.")],
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            metavar="DIR",
            help="Directory of the pictures. Default: visualizations in the input directory.",
        ),
    ] = None,
    axis: Annotated[
        Literal["events", "seconds"],
        typer.Option(help="The time of memory_timeline.png: events, or the host's seconds."),
    ] = "events",
) -> None:
    """Draw the pictures and tables of experiments again, from the JSON files of their results."""
    from opacus_memprof.experiments.directory import EXPERIMENTS
    from opacus_memprof.experiments.rows import read_rows

    rows, directory = read_rows(input_dir), output_dir or input_dir / EXPERIMENTS.outputs
    for path in (*EXPERIMENTS.write_tables(rows, directory), *EXPERIMENTS.draw(rows, directory, axis)):
        print(path)


def _run(
    preset: "Preset", cells: "Sequence[Cell]", results_dir: Path, training: TrainingOptions, running: RunningOptions
) -> None:
    """Runs cells and draws all results in `results_dir`.

    Prints a line for each run, or the stages of a single run, and a summary at the end.

    Raises:
        MemprofError: see engine.run_grid.
        typer.Exit: with code 1 if a cell neither finished nor ran out of memory.
    """
    from opacus_memprof.experiments.engine import run_grid
    from opacus_memprof.experiments.summary import terminal_summary

    console = Console()
    executor = "submitit" if running.launcher == "slurm" else running.executor
    try:
        rows = run_grid(
            preset,
            cells,
            results_dir,
            console,
            resume=running.resume,
            executor=executor,
            cluster=_parsed(running.launcher_option or ()),
            pause=running.pause,
            token=training.token,
            on_line=print if len(cells) == 1 else lambda line: None,
        )
    except KeyboardInterrupt:
        directory = shlex.quote(str(results_dir))
        said = tr("stopped; the same command with --results-dir {directory} --resume continues", directory=directory)
        print(f"opacus-memprof: {said}", file=sys.stderr)
        raise
    print(terminal_summary(rows, results_dir))
    for reason in dict.fromkeys(row.result.data.reason for row in rows if row.result.data):
        console.print(tr("data: {reason}", reason=tr_sentence(reason)), highlight=False, markup=False, soft_wrap=True)
    counts = Counter(row.outcome for row in rows)
    listed = ", ".join(tr("{count} {outcome}", count=count, outcome=tr(outcome)) for outcome, count in counts.items())
    ended = tr("{listed}. The results are in {directory}", listed=listed, directory=results_dir.absolute())
    console.print(ended, highlight=False, markup=False, soft_wrap=True)
    if any(not row.finished and not row.ran_out_of_memory for row in rows):
        raise typer.Exit(1)


def _parsed(options: Sequence[str]) -> dict[str, str | int]:
    """Parses `KEY=VALUE` options. Whole numbers become numbers. Raises MemprofError for anything else."""
    parsed: dict[str, str | int] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not key or not equals:
            raise MemprofError(f"--launcher-option {option!r} is not of the form KEY=VALUE, as slurm_partition=gpu is")
        parsed[key] = int(value) if value.isdigit() else value
    return parsed
