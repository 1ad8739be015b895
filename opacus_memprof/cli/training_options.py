# SPDX-License-Identifier: Apache-2.0
"""The options of what is trained, and the Configuration that they say."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from opacus_memprof.cli.virtual_options import VirtualGpuKind, VirtualMemory
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import Configuration, Device, Dtype, Mode
from opacus_memprof.experiments.shapes import BUILT_IN, shape_of
from opacus_memprof.profiles.units import parse_size

_OWN = "In place of the configuration's own."

ModeName = Annotated[Mode, typer.Option("--mode", help="vanilla: without privacy. The others: how to clip.")]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Of the weights.")]
DeviceName = Annotated[Device, typer.Option("--device", help="auto: CUDA if there is a GPU, else the CPU.")]
Token = Annotated[
    str | None, typer.Option("--token", help="Of the Hugging Face hub (HF_TOKEN without it). Written nowhere.")
]
Nproc = Annotated[
    int, typer.Option("--nproc", help="Processes, a GPU each, over which FSDP2 shards the model: vanilla, ghost.")
]

# Other spellings: those of earlier releases.
_OLD_NAMES = {
    "experiment": "mode",
    "num-iter": "num-steps",
    "output-dir": "results-dir",
    "seq-len": "seq-length",
    "warmup-iter": "warmup-steps",
}


def current_name(name: str) -> str:
    """The name of an option, without its dashes, that was written with _ or as earlier releases called it."""
    name = name.replace("_", "-")
    return _OLD_NAMES.get(name, name)


@dataclass(frozen=True)
class TrainingOptions:
    """The options of every command that trains a Configuration. What subclasses add are fields of a Configuration."""

    config: Annotated[
        str | None, typer.Option("--config", metavar="NAME", help=f"Random weights: {', '.join(BUILT_IN)}.")
    ] = None
    model_name: Annotated[
        str | None, typer.Option("--model-name", metavar="MODEL", help="Instead: a hub id or a local path.")
    ] = None
    token: Token = None
    num_steps: Annotated[int, typer.Option(help="Steps that are measured.")] = 5
    warmup_steps: Annotated[int, typer.Option(help="Steps before them.")] = 1
    learning_rate: Annotated[float, typer.Option(help="Adam's.")] = 1e-5
    sigma: Annotated[float, typer.Option(help="The noise multiplier.")] = 1.0
    max_grad_norm: Annotated[float, typer.Option(help="The clipping bound.")] = 1.0
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Make activations again in backward, block by block.")
    ] = False
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="FILE|MODULE:FUNCTION", help="In place of SNLI: .jsonl or .csv, or yours."),
    ] = None
    dtype: DtypeName = "bf16"
    device: DeviceName = "auto"
    virtual_gpu: VirtualGpuKind = None
    virtual_memory: VirtualMemory = None

    def configuration(self, *, default: str, pretrained: bool = False, **further: Any) -> Configuration:
        """Returns the Configuration with these options and `further` fields.

        Args:
            default: the model, for where neither option names one.
            pretrained: what `default` is; see Configuration.

        Raises:
            MemprofError: two models are named, a built-in one is unknown, or values cannot be trained.
        """
        given = asdict(self)
        config, model_name, _ = (given.pop(name) for name in ("config", "model_name", "token"))
        if self.virtual_memory is not None:
            given["virtual_memory"] = parse_size(self.virtual_memory)
        if config is not None and model_name is not None:
            raise MemprofError(f"--config {config} and --model-name {model_name} are two models: give one of them")
        if config is not None:
            default, pretrained = config, False
        elif model_name is not None:
            default, pretrained = model_name, True
        chosen = Configuration(model=default, pretrained=pretrained, **given, **further)
        if not chosen.pretrained:
            shape_of(chosen)
        return chosen


@dataclass(frozen=True)
class MethodOptions(TrainingOptions):
    """The options of `experiment` and `experiments`: by default the published comparison of clipping methods, on a
    transformer of 1.2 B parameters."""

    seq_length: Annotated[int, typer.Option("--seq-length", envvar="SEQ_LEN", help="Tokens of a sample.")] = 16384
    batch_size: Annotated[int, typer.Option("--batch-size", envvar="BATCH_SIZE", help="Samples of a step.")] = 1
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", envvar="VOCAB_SIZE", help=_OWN)] = None
    hidden_dim: Annotated[int | None, typer.Option("--hidden-dim", envvar="HIDDEN_DIM", help=_OWN)] = None
    num_layers: Annotated[int | None, typer.Option("--num-layers", envvar="NUM_LAYERS", help=_OWN)] = None
    num_heads: Annotated[int | None, typer.Option("--num-heads", envvar="NUM_HEADS", help=_OWN)] = None
    num_steps: Annotated[int, typer.Option("--num-steps", envvar="NUM_ITER", help="Steps that are measured.")] = 3
    warmup_steps: Annotated[int, typer.Option("--warmup-steps", envvar="WARMUP_ITER", help="Steps before them.")] = 2
    dtype: DtypeName = "fp32"


@dataclass(frozen=True)
class FineTuningOptions(TrainingOptions):
    """The options of `sweep` and `single-gpu`: sequence classification, as SNLI is."""

    mode: ModeName = "hooks"

    def classification(self, default_model: str, **sizes: Any) -> Configuration:
        """`default_model` is an id on the hub, for where no other model is given. Raises MemprofError as
        `configuration` does."""
        return self.configuration(default=default_model, pretrained=True, task="classification", **sizes)


def hide_token(arguments: list[str]) -> None:
    """Takes the token out of the command line, which a profile quotes."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--token="):
            arguments[index] = "--token=***"
        elif argument == "--token" and index + 1 < len(arguments):
            arguments[index + 1] = "***"
