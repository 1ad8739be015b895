# SPDX-License-Identifier: Apache-2.0
"""`opacus-memprof experiment`: one training run of a known configuration, in a process of its own."""

from pathlib import Path
from typing import Annotated

import typer

from opacus_memprof.cli import training_options as options
from opacus_memprof.directory import OOM_REPORTS
from opacus_memprof.experiments import process
from opacus_memprof.experiments.configuration import MODES, Configuration, Mode


def experiment(
    mode: Annotated[
        Mode,
        typer.Option(
            "--experiment", metavar="|".join(MODES), help="vanilla: without privacy. The others: how to clip."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE.json", help="The result; the profile goes to FILE.run beside it.")
    ],
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
    nproc: options.Nproc = 1,
    config: options.ConfigName = None,
    model_name: options.ModelName = None,
    token: options.Token = None,
) -> None:
    """Train a model for a few steps with one method, and write down time and memory.

    Exits with 1 where the training failed. Running out of memory is a result.
    """
    model, pretrained = options.model_of(config, model_name)
    chosen = options.checked(
        Configuration(
            model=model,
            pretrained=pretrained,
            mode=mode,
            seq_length=seq_len,
            batch_size=batch_size,
            dtype=dtype,
            num_steps=num_iter,
            warmup_steps=warmup_iter,
            device=device,
            nproc=nproc,
            vocab_size=vocab_size,
            hidden_dim=hidden_dim,
            num_layers=num_layers,
            num_heads=num_heads,
        )
    )
    result = process.run_to(output, chosen, token=token, on_line=print)
    from opacus_memprof.experiments.summary import told

    print(told(result))
    print(f"result: {output}")
    explained = output.parent / result["profile"] / OOM_REPORTS[0]
    if explained.exists():
        print(f"why memory ran out, and what would fit: {explained}")
    if result["status"] not in ("finished", "out_of_memory"):
        raise typer.Exit(1)
