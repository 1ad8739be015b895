# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share.

A group is a dataclass whose fields are options. `with_groups` gives a command the options of its groups, and each
option its panel in --help.
"""

import copy
import inspect
import os
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from opacus_memprof import virtual_gpu
from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import BUILT_IN, Configuration, Device, Dtype, Mode, shape_of
from opacus_memprof.profiles.units import parse_size
from opacus_memprof.running.program import fork_for_each

EXECUTORS = "local|submitit|dask|ray|MODULE:CALLABLE"
# Panel of --help → parameters of any command. Other options are in the panel "Options".
PANELS = {
    "Model and data": (
        *("config", "model_name", "token", "dataset"),
        *("vocab_size", "hidden_dim", "num_layers", "num_heads", "use_lora", "lora_rank", "lora_ranks"),
    ),
    "Training": (
        *("mode", "seq_length", "seq_lengths", "batch_size", "batch_sizes"),
        *("max_physical_batch_size", "max_physical_batch_sizes", "num_steps", "warmup_steps"),
        *("learning_rate", "sigma", "max_grad_norm", "checkpointing", "dtype"),
    ),
    "Comparison": ("search", "modes", "settings", "steps"),
    "Machine": (
        *("device", "gpu", "memory", "gpus", "nproc", "executor", "launcher", "launcher_option", "pause"),
        *("virtual_gpu", "virtual_memory", "virtual_gpus", "virtual_ranks", "rank", "no_weights"),
    ),
    "Results": ("output", "gather", "results_dir", "resume", "detailed", "run_all", "max_events"),
}
_PANEL = {parameter: panel for panel, parameters in PANELS.items() for parameter in parameters}


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with a signature that typer understands.

    Each parameter whose type is a dataclass is replaced by the fields of that class, and each option gets its panel.
    """
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    flat: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            options = inspect.signature(group).parameters
            groups[parameter.name] = group, list(options)
            flat += options.values()
        else:
            flat.append(parameter)

    @wraps(command)
    def grouped(**values: Any) -> None:
        for name, (group, options) in groups.items():
            values[name] = group(**{option: values.pop(option) for option in options})
        command(**values)

    by_keyword = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_annotation_in_panel(option)) for option in flat
    ]
    vars(grouped)["__signature__"] = inspect.Signature(by_keyword)
    grouped.__annotations__ = {option.name: option.annotation for option in by_keyword}
    return grouped


def _annotation_in_panel(option: inspect.Parameter) -> Any:
    """Returns the annotation of an option, with its panel if it has one."""
    if option.name not in _PANEL:
        return option.annotation
    kind, info = get_args(option.annotation)
    shown = copy.copy(info)  # several commands share it
    shown.rich_help_panel = _PANEL[option.name]
    return Annotated[kind, shown]


VirtualGpuKind = Annotated[
    str | None,
    typer.Option(
        "--virtual-gpu",
        metavar="KIND",
        help="Run on a virtual GPU, which counts memory but computes nothing: h200, a100-40 … (see `doctor`).",
        show_default=False,
    ),
]
VirtualMemory = Annotated[
    str | None,
    typer.Option(
        "--virtual-memory",
        metavar="SIZE",
        help="Memory of the virtual GPU, such as 24GiB. Default: that of the kind.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class VirtualGpuOptions:
    """The options of virtual GPUs: their kind, memory and number, and the ranks of a job to run."""

    virtual_gpu: VirtualGpuKind = None
    virtual_memory: VirtualMemory = None
    virtual_gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of virtual GPUs. Default: one per process of a launcher.",
            show_default=False,
        ),
    ] = None

    virtual_ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Run ranks of a job of N processes, one after the other.",
            show_default=False,
        ),
    ] = None
    rank: Annotated[
        list[int] | None,
        typer.Option(
            metavar="RANK",
            help="Rank to run. Default: 0. Can be given several times.",
            show_default=False,
        ),
    ] = None
    no_weights: Annotated[
        bool,
        typer.Option(
            "--no-weights",
            help="Create models from their configuration in transformers' from_pretrained, without loading weights.",
        ),
    ] = False

    def start(self) -> bool:
        """Starts the virtual GPUs in this process. Returns False if the options ask for none.

        With several ranks it forks: see `fork_for_each`.

        Raises:
            MemprofError: the options contradict each other, have an invalid value, or a virtual GPU cannot work here.
        """
        if self.virtual_gpu is None:
            for option in ("virtual_memory", "virtual_gpus", "virtual_ranks", "rank", "no_weights"):
                if getattr(self, option) not in (None, False):
                    raise MemprofError(f"--{option.replace('_', '-')} is for a virtual GPU: add --virtual-gpu KIND")
            return False
        if self.no_weights:
            virtual_gpu.load_no_weights()
        memory = None if self.virtual_memory is None else parse_size(self.virtual_memory)
        if self.virtual_ranks is not None:
            ranks = virtual_gpu.check_ranks(self.rank or [], self.virtual_ranks)
            count = virtual_gpu.local_world_size(self.virtual_ranks, self.virtual_gpus)
            job = uuid.uuid4().hex
            rank = fork_for_each(ranks)
            virtual_gpu.start(self.virtual_gpu, memory=memory, count=count)
            virtual_gpu.simulate_rank(rank, self.virtual_ranks, gpus=count, job=job, ranks=ranks)
            return True
        if self.rank is not None:
            raise MemprofError("--rank is one of the ranks of a job: add --virtual-ranks N")
        count = _local_world_size() if self.virtual_gpus is None else self.virtual_gpus
        virtual_gpu.start(self.virtual_gpu, memory=memory, count=count)
        return True


def _local_world_size() -> int:
    """Returns the number of processes that a launcher (torchrun, accelerate) has started on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not text.isdecimal():
        raise MemprofError(f"LOCAL_WORLD_SIZE is {text!r} and should be a number: correct it, or give --virtual-gpus")
    return max(int(text), 1)


_OVERRIDE = "Overrides the value of --config."

ModeName = Annotated[Mode, typer.Option("--mode", help="vanilla trains without privacy; the others are ways to clip.")]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Data type of the weights.")]
DeviceName = Annotated[Device, typer.Option("--device", help="auto is CUDA if there is a GPU, else the CPU.")]
Token = Annotated[
    str | None,
    typer.Option("--token", help="Token of the Hugging Face hub. Default: HF_TOKEN. Never written to a file."),
]
Nproc = Annotated[
    int,
    typer.Option(
        "--nproc",
        help="Number of processes, one GPU each, over which FSDP2 shards the model. Needs mode vanilla or ghost.",
    ),
]

# Values that messages show as the documentation writes them.
_VALUES = {"flash-clip": "flash_clip", "model-only": "model_only"}
# Other spellings of options.
_SYNONYMS = {
    "experiment": "mode",
    "num-iter": "num-steps",
    "output-dir": "results-dir",
    "seq-len": "seq-length",
    "warmup-iter": "warmup-steps",
}


def normalized(name: str) -> str:
    """Returns an option's name (without leading dashes), or a choice, with - instead of _."""
    name = name.replace("_", "-")
    return _VALUES.get(name, name)


def current_name(name: str) -> str:
    """Returns the name of an option as `normalized` does, also for its older spellings."""
    name = normalized(name)
    return _SYNONYMS.get(name, name)


@dataclass(frozen=True)
class TrainingOptions:
    """The options of every command that trains a Configuration. Options that subclasses add are its fields, too."""

    config: Annotated[
        str | None, typer.Option("--config", metavar="NAME", help=f"Model with random weights: {', '.join(BUILT_IN)}.")
    ] = None
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            metavar="MODEL",
            help="Pretrained model instead: an id on the Hugging Face hub or a local path.",
        ),
    ] = None
    token: Token = None
    num_steps: Annotated[int, typer.Option(help="Number of measured steps.")] = 5
    warmup_steps: Annotated[int, typer.Option(help="Number of steps before them.")] = 1
    learning_rate: Annotated[float, typer.Option(help="Learning rate of Adam.")] = 1e-5
    sigma: Annotated[float, typer.Option(help="Noise multiplier.")] = 1.0
    max_grad_norm: Annotated[float, typer.Option(help="Clipping bound.")] = 1.0
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in backward, block by block.")
    ] = False
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            metavar="FILE|MODULE:FUNCTION",
            help="Dataset instead of SNLI: a .jsonl or .csv file, or a function.",
        ),
    ] = None
    dtype: DtypeName = "bf16"
    device: DeviceName = "auto"
    virtual_gpu: VirtualGpuKind = None
    virtual_memory: VirtualMemory = None

    def configuration(self, *, default: str, pretrained: bool = False, **further: Any) -> Configuration:
        """Returns the Configuration with these options and `further` fields.

        Args:
            default: the model if no option names one.
            pretrained: whether `default` is a pretrained model; see Configuration.
            further: fields without an option in this group.

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
    """The options of `experiment` and `experiments`.

    The defaults are those of a published comparison of clipping methods, on a transformer with 1.2 B parameters.
    """

    seq_length: Annotated[int, typer.Option("--seq-length", envvar="SEQ_LEN", help="Tokens per sample.")] = 16384
    batch_size: Annotated[
        int, typer.Option("--batch-size", envvar="BATCH_SIZE", help="Samples per optimizer step.")
    ] = 1
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", envvar="VOCAB_SIZE", help=_OVERRIDE)] = None
    hidden_dim: Annotated[int | None, typer.Option("--hidden-dim", envvar="HIDDEN_DIM", help=_OVERRIDE)] = None
    num_layers: Annotated[int | None, typer.Option("--num-layers", envvar="NUM_LAYERS", help=_OVERRIDE)] = None
    num_heads: Annotated[int | None, typer.Option("--num-heads", envvar="NUM_HEADS", help=_OVERRIDE)] = None
    num_steps: Annotated[int, typer.Option("--num-steps", envvar="NUM_ITER", help="Number of measured steps.")] = 3
    warmup_steps: Annotated[
        int, typer.Option("--warmup-steps", envvar="WARMUP_ITER", help="Number of steps before them.")
    ] = 2
    dtype: DtypeName = "fp32"


@dataclass(frozen=True)
class FineTuningOptions(TrainingOptions):
    """The options of `sweep` and `single-gpu`: sequence classification, as SNLI is."""

    mode: ModeName = "hooks"

    def classification(self, default_model: str, **sizes: Any) -> Configuration:
        """Returns the Configuration with these options and `sizes`. Raises MemprofError as `configuration` does.

        Args:
            default_model: an id on the hub, if no option names a model.
            sizes: further fields of the Configuration.
        """
        return self.configuration(default=default_model, pretrained=True, task="classification", **sizes)


def hide_token(arguments: list[str]) -> None:
    """Removes the token from the command line, which is part of a profile."""
    for index, argument in enumerate(arguments):
        if argument.startswith("--token="):
            arguments[index] = "--token=***"
        elif argument == "--token" and index + 1 < len(arguments):
            arguments[index + 1] = "***"


ResultsDir = Annotated[Path, typer.Option("--results-dir", metavar="DIR", help="Directory of the results.")]


@dataclass(frozen=True)
class RunningOptions:
    """The options of running many configurations."""

    resume: Annotated[
        bool,
        typer.Option("--resume", help="Keep existing results, and run the missing ones."),
    ] = False
    executor: Annotated[
        str, typer.Option("--executor", metavar=EXECUTORS, help="Where configurations run. submitit: jobs on SLURM.")
    ] = "local"
    launcher: Annotated[
        Literal["local", "slurm"], typer.Option("--launcher", help="slurm: as --executor submitit.")
    ] = "local"
    launcher_option: Annotated[
        list[str] | None,
        typer.Option(
            "--launcher-option", metavar="KEY=VALUE", help="Parameter of submitit, such as slurm_partition=gpu."
        ),
    ] = None
    pause: Annotated[float, typer.Option(help="Seconds between two runs on a GPU.", min=0)] = 0


@dataclass(frozen=True)
class MethodRunningOptions(RunningOptions):
    """RunningOptions for commands that compare times, which let a GPU rest between two runs."""

    pause: Annotated[float, typer.Option(envvar="PAUSE", help="Seconds between two runs on a GPU.", min=0)] = 3
