# SPDX-License-Identifier: Apache-2.0
"""The configurations that are run side by side, each with a name that says how it differs. Needs no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from opacus_memprof.errors import MemprofError
from opacus_memprof.experiments.configuration import MODES, Configuration, Mode

LABELS: dict[Mode, str] = {
    "vanilla": "Vanilla (No DP-SGD)",
    "hooks": "Hooks (DP-SGD)",
    "functorch": "Functorch (DP-SGD)",
    "ew": "Expanded Weights (DP-SGD)",
    "ghost": "Ghost Clipping (DP-SGD)",
    "flash_clip": "Flash Clipping (DP-SGD)",
}


@dataclass(frozen=True)
class Cell:
    """One configuration of several that differ in `varied` only: in sizes."""

    configuration: Configuration
    varied: ClassVar[tuple[str, ...]] = ("seq_length", "batch_size", "max_physical_batch_size", "lora_rank")

    @property
    def name(self) -> str:
        """`seq128_batch8_physical1_lora16`, or `…_full` without LoRA: of files, and unique among such cells."""
        cell = self.configuration
        rank = "full" if cell.lora_rank is None else f"lora{cell.lora_rank}"
        return f"seq{cell.seq_length}_batch{cell.batch_size}_physical{cell.physical_batch_size}_{rank}"

    @property
    def label(self) -> str:
        """The same for people, in pictures: `S 128 · B 8/1 · r 16` (logical/physical batch)."""
        cell = self.configuration
        rank = "full" if cell.lora_rank is None else f"r {cell.lora_rank}"
        return f"S {cell.seq_length} · B {cell.batch_size}/{cell.physical_batch_size} · {rank}"


class MethodCell(Cell):
    """One configuration of several that differ in their mode only."""

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
    """Every combination, those with small samples first, and how many were left out for a physical batch that is larger
    than the logical one, of which it is a part.

    Args:
        base: what all of them share.
        lora_ranks: 0 trains all parameters.

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
            f"nothing is left of the grid: every physical batch ({min(axes[2])} and more) is larger than every logical "
            f"one ({max(axes[1])} and less), of which it is a part"
        )
    return cells, len(combinations) - len(cells)


def one_at_a_time(base: Configuration) -> list[Cell]:
    """What each choice costs, around sequences of 128 and batches of 8: other lengths, other logical batches, LoRA,
    other physical batches."""
    middle = replace(base, seq_length=128, batch_size=8, max_physical_batch_size=1, lora_rank=None)
    return [
        Cell(middle),
        *(Cell(replace(middle, seq_length=length)) for length in (64, 256)),
        *(Cell(replace(middle, batch_size=size)) for size in (16, 32)),
        *(Cell(replace(middle, lora_rank=rank)) for rank in (16, 32)),
        *(Cell(replace(middle, max_physical_batch_size=size)) for size in (2, 4)),
    ]


def methods(base: Configuration, modes: Sequence[str]) -> list[Cell]:
    """One for each of `modes` (none: all that can be trained so), vanilla first, which the others are held against.

    Raises:
        MemprofError: there is no such mode.
    """
    every = [mode for mode in MODES if not (base.checkpointing and mode == "ew")]
    cells = {replace(base, mode=mode.replace("-", "_")) for mode in modes or every}  # type: ignore[arg-type]
    return [MethodCell(chosen) for chosen in sorted(cells, key=lambda one: MODES.index(one.mode))]
