"""Typed face of the compiled extension. Only opacus_memprof.clipping.native imports it. The comments are in
csrc/clipping."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Call = TypeVar("Call")

def tap_gradient(
    output: torch.Tensor,
    anchor: torch.Tensor | None,
    input: torch.Tensor | None,
    receive: Callable[[Call, torch.Tensor | None, torch.Tensor], None],
    call: Call,
) -> torch.Tensor: ...
def unfold(
    input: torch.Tensor, pads: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor: ...
def group_alike(lists: Sequence[Sequence[torch.Tensor]], whole_shapes: bool) -> list[list[int]]: ...
def address_table(lists: Sequence[Sequence[torch.Tensor]], with_sizes: bool) -> torch.Tensor: ...
def begin_tables_of_graph(memory: torch.Tensor) -> None: ...
def end_tables_of_graph() -> list[tuple[torch.Tensor, torch.Tensor]]: ...
def empty_sums(stacks: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]: ...
def sum_outer_products(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], factors: torch.Tensor, most: int
) -> list[torch.Tensor]: ...
def reserve_normal(
    sums: Sequence[torch.Tensor], generator: torch.Generator | None, most_threads: int, threads_of_program: int
) -> tuple[torch.Tensor, int]: ...
def draw_normal(
    references: Sequence[torch.Tensor], std: float, generator: torch.Generator | None
) -> list[torch.Tensor]: ...
