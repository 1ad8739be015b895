# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof experiments`: the methods side by side, each in a fresh process, with pictures and tables."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli import training_options as options
from opacus_memprof.experiments.configuration import MODES, Configuration


def experiments(
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--experiment", metavar="|".join(MODES), help="This method only; give it again for more. All by default."
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", metavar="DIR", help="memory_profiling_results/run_TIMESTAMP by default."),
    ] = None,
    seq_len: options.SeqLen = options.SEQ_LEN,
    batch_size: options.BatchSize = options.BATCH_SIZE,
    vocab_size: options.VocabSize = None,
    hidden_dim: options.HiddenDim = None,
    num_layers: options.NumLayers = None,
    num_heads: options.NumHeads = None,
    num_iter: options.NumIter = options.NUM_ITER,
    warmup_iter: options.WarmupIter = options.WARMUP_ITER,
    dtype: options.DtypeName = "fp32",
    device: options.DeviceName = "auto",
    config: options.ConfigName = None,
    model_name: options.ModelName = None,
    token: options.Token = None,
) -> None:
    """Train a model with every method, each in a fresh process, and draw what they need in memory and time.

    Results are written as they come. Exits with 1 where a training failed; running out of memory is a result.
    """
    model, pretrained = options.model_of(config, model_name)
    base = options.checked(
        Configuration(
            model=model,
            pretrained=pretrained,
            seq_length=seq_len,
            batch_size=batch_size,
            dtype=dtype,
            num_steps=num_iter,
            warmup_steps=warmup_iter,
            device=device,
            vocab_size=vocab_size,
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            num_heads=num_heads,
        )
    )
    from opacus_memprof.experiments import suite

    chosen = [replace(base, mode=mode) for mode in dict.fromkeys(only or MODES)]  # type: ignore[arg-type]
    chosen.sort(key=lambda one: MODES.index(one.mode))  # vanilla first, which the others are held against
    directory = output_dir or Path("memory_profiling_results") / f"run_{datetime.now():%Y%m%d_%H%M%S}"
    results = suite.run_all(chosen, directory, token=token)
    visualizations = directory / "visualizations"
    suite.draw(directory, visualizations)
    print((visualizations / "summary.txt").read_text(encoding="utf-8"))
    print(f"results: {directory}")
    print(f"pictures: {visualizations}")
    if any(result["status"] not in ("finished", "out_of_memory") for result in results):
        raise typer.Exit(1)
