# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof sweep`: what memory takes over a grid of sequence lengths, batch sizes and LoRA ranks."""

from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli.option_groups import with_groups
from opacus_memprof.cli.running_options import ResultsDir, RunningOptions
from opacus_memprof.cli.training_options import FineTuningOptions, Nproc

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B-Instruct"


@with_groups
def sweep(
    *,
    seq_lengths: Annotated[list[int], typer.Option(help="Tokens of a sample.")] = [128, 256, 512],  # noqa: B006
    batch_sizes: Annotated[list[int], typer.Option(help="Samples of an optimizer's step.")] = [8, 16, 32],  # noqa: B006
    max_physical_batch_sizes: Annotated[
        list[int], typer.Option(help="Samples that go through the model at once; at most the batch.")
    ] = [1, 2, 4],  # noqa: B006
    lora_ranks: Annotated[
        list[int] | None,
        typer.Option(help="0 trains all parameters. 8 and 16 by default; with --detailed 16.", show_default=False),
    ] = None,
    training: FineTuningOptions,
    nproc: Nproc = 1,
    results_dir: ResultsDir = Path("memory_results"),
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Also what components, operations and kinds of memory take.")
    ] = False,
    running: RunningOptions,
) -> None:
    """Train every combination of sizes under the profiler, each in a process of its own, and compare their memory.

    Lists follow their flag: --seq-lengths 128 256 512.

    The GPUs of the machine work through the grid side by side. Running out of memory is a result.

    Trains sequence classification on SNLI, or on random tokens where it cannot be reached.

    Without --config and --model-name: meta-llama/Llama-3.1-8B-Instruct.
    """
    base = training.classification(DEFAULT_MODEL, nproc=nproc)
    from opacus_memprof.experiments.grid import grid
    from opacus_memprof.experiments.presets import DETAILED_SWEEP, SWEEP

    ranks = lora_ranks or ([16] if detailed else [8, 16])
    cells, left_out = grid(base, seq_lengths, batch_sizes, max_physical_batch_sizes, ranks)
    if left_out:
        print(
            f"{left_out} of {left_out + len(cells)} combinations are left out: their physical batch is larger than the "
            "logical one, of which it is a part"
        )
    running.run(DETAILED_SWEEP if detailed else SWEEP, cells, results_dir, training.token)
