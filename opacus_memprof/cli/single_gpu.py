# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof single-gpu`: where the memory of fine-tuning a language model on one GPU goes."""

from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli.option_groups import with_groups
from opacus_memprof.cli.running_options import ResultsDir, RunningOptions
from opacus_memprof.cli.training_options import FineTuningOptions
from opacus_memprof.experiments.configuration import Configuration

DEFAULT_MODEL = "meta-llama/Llama-3.2-3B-Instruct"


@with_groups
def single_gpu(
    *,
    training: FineTuningOptions,
    seq_length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 128,
    batch_size: Annotated[int, typer.Option(help="Samples of an optimizer's step.")] = 32,
    max_physical_batch_size: Annotated[int, typer.Option(help="Samples that go through the model at once.")] = 1,
    use_lora: Annotated[bool, typer.Option("--use-lora", help="Train LoRA adapters instead of all weights.")] = False,
    lora_rank: Annotated[int, typer.Option(help="Theirs, with --use-lora.")] = 16,
    results_dir: ResultsDir = Path("single_gpu_memory_results"),
    run_all: Annotated[
        bool,
        typer.Option(
            "--run-all",
            help="Nine configurations in the place of these sizes: lengths 64, 128, 256; batches 8, 16, 32; LoRA of "
            "rank 16 and 32; physical batches 1, 2, 4.",
        ),
    ] = False,
    running: RunningOptions,
) -> None:
    """Fine-tune a language model privately under the profiler, in a process of its own, and show where its memory goes.

    Further calls add to the same directory, and are compared with what is there.

    Trains sequence classification on SNLI, or on random tokens where it cannot be reached.

    Without --config and --model-name: meta-llama/Llama-3.2-3B-Instruct.
    """
    base = training.classification(
        DEFAULT_MODEL,
        seq_length=seq_length,
        batch_size=batch_size,
        max_physical_batch_size=max_physical_batch_size,
        lora_rank=lora_rank if use_lora else None,
    )
    from opacus_memprof.experiments.grid import Cell, one_at_a_time
    from opacus_memprof.experiments.presets import SINGLE_GPU

    cells = one_at_a_time(base) if run_all else [Cell(base)]
    print(_described(base, sizes=not run_all))
    running.run(SINGLE_GPU, cells, results_dir, training.token)


def _described(chosen: Configuration, *, sizes: bool) -> str:
    """A text on what is trained; without `sizes`, on what several configurations share."""
    weights = "" if chosen.pretrained else " (random weights)"
    lines = [f"model {chosen.model}{weights}, mode {chosen.mode}, {chosen.dtype}, device {chosen.device}"]
    if sizes:
        trained = "all parameters" if chosen.lora_rank is None else f"LoRA adapters of rank {chosen.lora_rank}"
        lines.append(
            f"sequence length {chosen.seq_length}, batch {chosen.batch_size}, physical batch "
            f"{chosen.physical_batch_size}, training {trained}"
        )
    private = "" if chosen.mode == "vanilla" else f", sigma {chosen.sigma:g}, max_grad_norm {chosen.max_grad_norm:g}"
    lines.append(f"learning rate {chosen.learning_rate:g}{private}, {chosen.num_steps} steps")
    return "\n".join(lines)
