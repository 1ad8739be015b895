# SPDX-License-Identifier: Apache-2.0
"""The options of `experiment` and `experiments`."""

from typing import Annotated

import typer

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration, Device, Dtype
from opacus_memprof.experiments.shapes import BUILT_IN, shape_of

_OWN = "In place of the configuration's own."

SeqLen = Annotated[int, typer.Option("--seq-len", envvar="SEQ_LEN", help="Tokens of a sample.")]
BatchSize = Annotated[int, typer.Option("--batch-size", envvar="BATCH_SIZE", help="Samples of a step.")]
VocabSize = Annotated[int | None, typer.Option("--vocab-size", envvar="VOCAB_SIZE", help=_OWN)]
HiddenDim = Annotated[int | None, typer.Option("--hidden-dim", envvar="HIDDEN_DIM", help=_OWN)]
NumLayers = Annotated[int | None, typer.Option("--num-layers", envvar="NUM_LAYERS", help=_OWN)]
NumHeads = Annotated[int | None, typer.Option("--num-heads", envvar="NUM_HEADS", help=_OWN)]
NumIter = Annotated[int, typer.Option("--num-iter", envvar="NUM_ITER", help="Steps that are measured.")]
WarmupIter = Annotated[int, typer.Option("--warmup-iter", envvar="WARMUP_ITER", help="Steps before them.")]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Of the weights.")]
DeviceName = Annotated[Device, typer.Option("--device", help="auto: CUDA if there is a GPU, else the CPU.")]
Nproc = Annotated[
    int, typer.Option("--nproc", help="Processes, a GPU each, over which FSDP2 shards the model: vanilla, ghost.")
]
ConfigName = Annotated[
    str | None, typer.Option("--config", metavar="NAME", help=f"Random weights: {', '.join(BUILT_IN)}.")
]
ModelName = Annotated[
    str | None, typer.Option("--model-name", metavar="MODEL", help="Instead: a hub id or a local path.")
]
Token = Annotated[
    str | None, typer.Option("--token", help="Of the Hugging Face hub (HF_TOKEN without it). Written nowhere.")
]

# Of the published comparison of clipping methods on a 1.2 B parameter transformer.
DEFAULT_CONFIG = "transformer"
SEQ_LEN = 16384
BATCH_SIZE = 1
NUM_ITER = 3
WARMUP_ITER = 2


def model_of(config: str | None, model_name: str | None) -> tuple[str, bool]:
    """Configuration's `model` and `pretrained`. Raises MemprofError where both are given."""
    if config is not None and model_name is not None:
        raise MemprofError(f"--config {config} and --model-name {model_name} are two models: give one of them")
    return (model_name, True) if model_name is not None else (config or DEFAULT_CONFIG, False)


def checked(configuration: Configuration) -> Configuration:
    """Raises MemprofError for a built-in configuration that is unknown or whose sizes do not fit."""
    if not configuration.pretrained:
        shape_of(configuration)
    return configuration
