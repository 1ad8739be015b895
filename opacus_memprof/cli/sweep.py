# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof sweep`: what memory takes over a grid of sequence lengths, batch sizes and LoRA ranks."""

from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli import side_by_side
from opacus_memprof.cli import training_options as options

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def sweep(
    seq_lengths: Annotated[list[int], typer.Option(help="Tokens of a sample.")] = [128, 256, 512],  # noqa: B006
    batch_sizes: Annotated[list[int], typer.Option(help="Samples of an optimizer's step.")] = [8, 16, 32],  # noqa: B006
    max_physical_batch_sizes: Annotated[
        list[int], typer.Option(help="Samples that go through the model at once; at most the batch.")
    ] = [1, 2, 4],  # noqa: B006
    lora_ranks: Annotated[list[int], typer.Option(help="0 trains all parameters.")] = [8, 16],  # noqa: B006
    config: options.ConfigName = None,
    model_name: options.ModelName = None,
    token: options.Token = None,
    num_steps: side_by_side.NumSteps = 5,
    mode: side_by_side.ModeName = "hooks",
    dtype: options.DtypeName = "bf16",
    device: options.DeviceName = "auto",
    nproc: options.Nproc = 1,
    results_dir: side_by_side.ResultsDir = Path("memory_results"),
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Also what components, operations and kinds of memory take.")
    ] = False,
    resume: side_by_side.Resume = False,
    launcher: side_by_side.LauncherName = side_by_side.Launcher.local,
    launcher_option: side_by_side.LauncherOptions = None,
) -> None:
    """Train every combination of sizes under the profiler, each in a process of its own, and compare their memory.

    Lists follow their flag: --seq-lengths 128 256 512.

    The GPUs of the machine work through the grid side by side. Running out of memory is a result.

    Trains sequence classification on SNLI, or on random tokens where it cannot be reached.

    Without --config and --model-name: meta-llama/Llama-3.1-8B-Instruct.
    """
    base = side_by_side.configuration(
        config, model_name, DEFAULT_MODEL, num_steps=num_steps, mode=mode, dtype=dtype, device=device, nproc=nproc
    )
    from opacus_memprof.experiments.sweep.grid import grid
    from opacus_memprof.experiments.sweep.pictures import draw_sweep

    cells, left_out = grid(base, seq_lengths, batch_sizes, max_physical_batch_sizes, lora_ranks)
    if left_out:
        print(
            f"{left_out} of {left_out + len(cells)} combinations are left out: their physical batch is larger than the "
            "logical one, of which it is a part"
        )
    side_by_side.run_side_by_side(
        "sweep",
        cells,
        results_dir,
        lambda results, directory: draw_sweep(results, directory, detailed=detailed),
        token=token,
        grows=False,
        resume=resume,
        launcher=launcher,
        launcher_options=launcher_option,
        detailed=detailed,
    )
