# SPDX-License-Identifier: Apache-2.0
"""The configuration of one training run, and of all runs of an experiment, each with a unique name. Needs no torch.

Built-in configurations have random weights in the shapes of known models.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any, ClassVar, Literal, get_args

from opacus_memprof.errors import MemprofError
from opacus_memprof.virtual_gpu import choose_gpu

Mode = Literal["vanilla", "hooks", "functorch", "ew", "ghost", "flash_clip"]
Dtype = Literal["fp32", "fp16", "bf16"]
Task = Literal["language_model", "classification"]
Device = Literal["auto", "cuda", "cpu"]

MODES: tuple[Mode, ...] = get_args(Mode)
SIZES = ("vocab_size", "hidden_dim", "num_layers", "num_heads")

_COUNTS = ("seq_length", "batch_size", "num_steps", "nproc")
_SHARDED: tuple[Mode, ...] = ("vanilla", "ghost")
_OPTIONAL_COUNTS = ("max_physical_batch_size", "lora_rank", *SIZES)
LABELS: dict[str, str] = {
    "vanilla": "Vanilla (No DP-SGD)",
    "hooks": "Hooks (DP-SGD)",
    "functorch": "Functorch (DP-SGD)",
    "ew": "Expanded Weights (DP-SGD)",
    "ghost": "Ghost Clipping (DP-SGD)",
    "flash_clip": "Flash Clipping (DP-SGD)",
}
CLASSES = 3  # entailment, neutral, contradiction

_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}

_TRANSFORMER = {"vocab_size": 32000, "hidden_dim": 2048, "num_layers": 20, "num_heads": 16}

# Family, and sizes by the family's names. Sources: the models' own config.json.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("transformer", {"vocab_size": 256, "hidden_dim": 64, "num_layers": 2, "num_heads": 4}),
    "transformer": ("transformer", _TRANSFORMER),
    "transformer-relu": (
        "transformer",
        {**_TRANSFORMER, "activation": "relu", "attention_bias": False, "last_norm": False},
    ),
    "gpt2": ("gpt2", {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}),
    "llama-3.2-1b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-3b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.1-8b": (
        "llama",
        {
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
}

BUILT_IN = tuple(_SHAPES)

_SIZE_NAMES: dict[str, tuple[str, str, str, str]] = {  # the families' names of SIZES
    "transformer": SIZES,
    "gpt2": ("vocab_size", "n_embd", "n_layer", "n_head"),
    "llama": ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
}


@dataclass(frozen=True)
class Configuration:
    """The configuration of one training run.

    Attributes:
        model: the name of a built-in configuration with random weights (`opacus_memprof.experiments.models.BUILT_IN`)
            or, if `pretrained`, an id on the Hugging Face hub or a local path.
        pretrained: whether `model` is such an id or path.
        task: "language_model" (next token) or "classification" (of sequences, with three classes as in SNLI).
        mode: "vanilla" trains without privacy; the others are grad-sample modes.
        seq_length: tokens per sample.
        batch_size: samples per optimizer step (logical batch).
        max_physical_batch_size: samples per forward pass; None for the whole batch.
        lora_rank: rank of LoRA's adapters; None trains all parameters.
        dtype: dtype of the weights. Adapters have the dtype that peft gives them, fp32.
        num_steps: the number of measured optimizer steps, after `warmup_steps` more.
        learning_rate: learning rate of Adam.
        sigma: the noise multiplier.
        max_grad_norm: the clipping bound.
        seed: seed of weights and data.
        device: "auto" is CUDA if there is a GPU, otherwise the CPU.
        nproc: processes, each with a GPU and separate batches, over which FSDP2 shards the model. More than one only
            for "vanilla" and "ghost".
        checkpointing: whether blocks keep only their inputs, and recompute their activations in backward. Not for "ew".
        virtual_gpu: the kind of virtual GPU to run on, which computes nothing; times are then not measured.
        virtual_memory: its bytes; None for the default of its kind.
        dataset: used instead of SNLI: a file of texts, or a function that makes a dataset; see data.py.
        vocab_size, hidden_dim, num_layers, num_heads: override the sizes of a built-in configuration.

    Raises:
        MemprofError: a value cannot be trained.
    """

    model: str = "tiny"
    pretrained: bool = False
    task: Task = "language_model"
    mode: Mode = "hooks"
    seq_length: int = 128
    batch_size: int = 1
    max_physical_batch_size: int | None = None
    lora_rank: int | None = None
    dtype: Dtype = "fp32"
    num_steps: int = 3
    warmup_steps: int = 2
    learning_rate: float = 1e-5
    sigma: float = 1.0
    max_grad_norm: float = 1.0
    seed: int = 0
    device: Device = "auto"
    nproc: int = 1
    checkpointing: bool = False
    virtual_gpu: str | None = None
    virtual_memory: int | None = None
    dataset: str | None = None
    vocab_size: int | None = None
    hidden_dim: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        for name, choices in (("mode", Mode), ("task", Task), ("dtype", Dtype), ("device", Device)):
            if getattr(self, name) not in get_args(choices):
                raise MemprofError(f'there is no {name} "{getattr(self, name)}": use {", ".join(get_args(choices))}')
        for name in _COUNTS:
            _check_count(name, getattr(self, name), 1)
        for name in ("warmup_steps", "seed"):
            _check_count(name, getattr(self, name), 0)
        for name in _OPTIONAL_COUNTS:
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        for name in ("learning_rate", "max_grad_norm"):
            _check_number(name, getattr(self, name), positive=True)
        _check_number("sigma", self.sigma, positive=False)
        if self.virtual_gpu is not None:
            choose_gpu(self.virtual_gpu, self.virtual_memory, self.nproc)
            if self.device == "cpu":
                raise MemprofError(
                    f'a virtual GPU is not a CPU: leave the device "cpu" out, or virtual_gpu {self.virtual_gpu}'
                )
        elif self.virtual_memory is not None:
            raise MemprofError("virtual_memory is the memory of a virtual GPU: choose its kind with virtual_gpu")
        if self.physical_batch_size > self.batch_size:
            raise MemprofError(
                f"max_physical_batch_size is {self.max_physical_batch_size} and batch_size {self.batch_size}: "
                "a physical batch is a part of the logical one, so make it at most as large"
            )
        if self.nproc > 1 and self.mode not in _SHARDED:
            raise MemprofError(
                f'"{self.mode}" trains in one process, because Opacus shards a model with ghost clipping only: use '
                f"{' or '.join(_SHARDED)}, or nproc 1"
            )
        if self.checkpointing and (self.mode == "ew" or self.nproc > 1):
            why = (
                "Opacus' expanded weights cannot follow it" if self.mode == "ew" else "it is tried in one process alone"
            )
            raise MemprofError(f"checkpointing is not possible here, because {why}: leave it out, or use another mode")
        if not self.model:
            raise MemprofError("the model has no name: give one")
        if self.pretrained and (overridden := [name for name in SIZES if getattr(self, name) is not None]):
            raise MemprofError(
                f'{overridden[0]} cannot be set for the model "{self.model}", whose sizes are its own: '
                "leave it out, or use a built-in configuration"
            )

    @property
    def physical_batch_size(self) -> int:
        """The maximum number of samples that go through the model at once."""
        return self.max_physical_batch_size or self.batch_size

    @property
    def grad_sample_mode(self) -> str:
        """The mode's name in Opacus."""
        return "ghost_fsdp" if self.nproc > 1 and self.mode == "ghost" else self.mode

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name, for a JSON file. `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Configuration":
        """Returns the configuration with these fields; missing fields have their defaults.

        Raises:
            MemprofError: a field is unknown, or a value cannot be trained.
        """
        known = [field.name for field in fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise MemprofError(f'a configuration has no "{unknown[0]}": use {", ".join(known)}')
        return cls(**values)


def _check_count(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise MemprofError(f"{name} is {value!r}: give a whole number from {minimum} on")


def _check_number(name: str, value: float, *, positive: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise MemprofError(f"{name} is {value!r}: give a number {'above 0' if positive else 'from 0 on'}")


SIZES_NOTE = "S: sequence length · B: batch / physical batch · r: LoRA rank"  # of the labels below


@dataclass(frozen=True)
class Cell:
    """One configuration of several that differ only in the sizes `varied`."""

    configuration: Configuration
    varied: ClassVar[tuple[str, ...]] = ("seq_length", "batch_size", "max_physical_batch_size", "lora_rank")

    @property
    def name(self) -> str:
        """A name for files, unique among such cells: `seq128_batch8_physical1_lora16`, or `…_full` without LoRA."""
        sizes = self.configuration
        rank = "full" if sizes.lora_rank is None else f"lora{sizes.lora_rank}"
        return f"seq{sizes.seq_length}_batch{sizes.batch_size}_physical{sizes.physical_batch_size}_{rank}"

    @property
    def label(self) -> str:
        """A label for pictures: `S 128 · B 8/1 · r 16` (logical/physical batch)."""
        sizes = self.configuration
        rank = "full" if sizes.lora_rank is None else f"r {sizes.lora_rank}"
        return f"S {sizes.seq_length} · B {sizes.batch_size}/{sizes.physical_batch_size} · {rank}"


class MethodCell(Cell):
    """One configuration of several that differ only in their mode."""

    varied = ("mode",)

    @property
    def name(self) -> str:
        return self.configuration.mode

    @property
    def label(self) -> str:
        return LABELS[self.configuration.mode]


def grid(
    base: Configuration,
    seq_lengths: Sequence[int],
    batch_sizes: Sequence[int],
    max_physical_batch_sizes: Sequence[int],
    lora_ranks: Sequence[int],
) -> tuple[list[Cell], int]:
    """Returns all combinations of sizes, the smallest first, and the number of omitted combinations.

    Combinations are omitted if their physical batch is larger than the logical one.

    Args:
        base: the common settings of all combinations.
        seq_lengths: tokens per sample.
        batch_sizes: logical batch sizes.
        max_physical_batch_sizes: physical batch sizes.
        lora_ranks: LoRA ranks; 0 trains all parameters.

    Raises:
        MemprofError: a list is empty, a value is not a size, or nothing is left.
    """
    lists = {
        "seq_lengths": (seq_lengths, 1),
        "batch_sizes": (batch_sizes, 1),
        "max_physical_batch_sizes": (max_physical_batch_sizes, 1),
        "lora_ranks": (lora_ranks, 0),
    }
    for name, (values, least) in lists.items():
        if not values:
            raise MemprofError(f"the grid is empty: give --{name} at least one number")
        if wrong := [value for value in values if value < least]:
            raise MemprofError(f"--{name} has {wrong[0]}: give whole numbers from {least} on")
    axes = [sorted(set(values)) for values, _ in lists.values()]
    combinations = list(product(*axes))
    cells = [
        Cell(
            replace(
                base, seq_length=length, batch_size=logical, max_physical_batch_size=physical, lora_rank=rank or None
            )
        )
        for length, logical, physical, rank in combinations
        if physical <= logical
    ]
    if not cells:
        raise MemprofError(
            f"no combination is possible: every physical batch ({min(axes[2])} and more) is larger than every logical "
            f"one ({max(axes[1])} and less), of which it is a part"
        )
    return cells, len(combinations) - len(cells)


def one_at_a_time(base: Configuration) -> list[Cell]:
    """Returns nine configurations that show the cost of each size.

    The base has sequences of 128 and batches of 8. The others change one size: other lengths, other logical batches,
    LoRA, other physical batches.
    """
    middle = replace(base, seq_length=128, batch_size=8, max_physical_batch_size=1, lora_rank=None)
    return [
        Cell(middle),
        *(Cell(replace(middle, seq_length=length)) for length in (64, 256)),
        *(Cell(replace(middle, batch_size=size)) for size in (16, 32)),
        *(Cell(replace(middle, lora_rank=rank)) for rank in (16, 32)),
        *(Cell(replace(middle, max_physical_batch_size=size)) for size in (2, 4)),
    ]


def methods(base: Configuration, modes: Sequence[str]) -> list[Cell]:
    """Returns a configuration for each of `modes` (default: all that `base` allows).

    Vanilla comes first, because the others are compared with it.

    Raises:
        MemprofError: a mode is unknown.
    """
    allowed = [mode for mode in MODES if not (base.checkpointing and mode == "ew")]
    chosen = {replace(base, mode=mode.replace("-", "_")) for mode in modes or allowed}  # type: ignore[arg-type]
    return [MethodCell(each) for each in sorted(chosen, key=lambda configuration: MODES.index(configuration.mode))]


def shape_of(configuration: Configuration) -> tuple[str, dict[str, Any]]:
    """Returns the family ("transformer", "gpt2" or "llama") and its sizes, with the overrides of the configuration.

    A Llama of another width keeps the proportion of its MLP, and a Llama with other heads that of its groups, as far as
    possible with whole numbers.

    Raises:
        MemprofError: there is no such built-in configuration, or its heads do not divide its width.
    """
    if configuration.model not in _SHAPES:
        raise MemprofError(
            f'there is no built-in configuration "{configuration.model}": use {", ".join(BUILT_IN)}, '
            "or pass a hub id or a local path as the model's name"
        )
    family, shape = _SHAPES[configuration.model]
    sizes = dict(shape)
    names = dict(zip(SIZES, _SIZE_NAMES[family], strict=True))
    for name, family_name in names.items():
        if (value := getattr(configuration, name)) is not None:
            sizes[family_name] = value
    width, heads = sizes[names["hidden_dim"]], sizes[names["num_heads"]]
    if width % heads:
        raise MemprofError(f"{heads} heads do not divide a width of {width}: choose num_heads and hidden_dim that fit")
    if family == "llama":
        _fit_llama(sizes, shape, width, heads)
    return family, sizes


def _fit_llama(sizes: dict[str, Any], shape: Mapping[str, Any], width: int, heads: int) -> None:
    if width // heads % 2:
        raise MemprofError(
            f"{heads} heads of a width of {width} are {width // heads} wide, which rotary positions cannot halve: "
            "choose num_heads and hidden_dim that fit"
        )
    sizes["head_dim"] = width // heads
    sizes["intermediate_size"] = shape["intermediate_size"] * width // shape["hidden_size"]
    groups = max(1, heads * shape["num_key_value_heads"] // shape["num_attention_heads"])
    sizes["num_key_value_heads"] = next(count for count in range(groups, 0, -1) if heads % count == 0)
