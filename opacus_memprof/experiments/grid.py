# SPDX-License-Identifier: Apache-2.0
"""The configurations of an experiment, each with a name that distinguishes it from the others. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import MODES, Configuration

LABELS: dict[str, str] = {
    "vanilla": "Vanilla (No DP-SGD)",
    "hooks": "Hooks (DP-SGD)",
    "functorch": "Functorch (DP-SGD)",
    "ew": "Expanded Weights (DP-SGD)",
    "ghost": "Ghost Clipping (DP-SGD)",
    "flash_clip": "Flash Clipping (DP-SGD)",
}


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
