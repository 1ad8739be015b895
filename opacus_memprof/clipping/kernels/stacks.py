# SPDX-License-Identifier: Apache-2.0
"""Norms and clipped sums of per-sample gradients on CUDA: they are read once, and accumulated in float32.

There are many small stacks (a bias of each layer). Launching a kernel for each would take the host longer than the
device needs for all. One launch processes all of them, by a table of their addresses.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping.kernels.launch import launch
from opacus_memprof.clipping.kernels.native import address_table, empty_sums
from opacus_memprof.clipping.workspace import KERNEL_DTYPES

TYPES = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for dtype in KERNEL_DTYPES}
"""Triton's name of each dtype."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def weighted_sum(stack, factors, out, count, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    source = stack + at
    for n in range(count):
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + n)
        source += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def weighted_sums(  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    table, factors, count, BLOCK: tl.constexpr, SOURCE: tl.constexpr, TARGET: tl.constexpr
):
    row = table + 3 * tl.program_id(1)
    size = tl.load(row + 2)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK >= size:
        return
    inside = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    source = tl.load(row).to(tl.pointer_type(SOURCE)) + at
    for n in range(count):
        total += tl.load(source, mask=inside, other=0.0).to(tl.float32) * tl.load(factors + n)
        source += size
    tl.store(tl.load(row + 1).to(tl.pointer_type(TARGET)) + at, total.to(TARGET), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def squared_norms(table, out, BLOCK: tl.constexpr, SOURCE: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(0).to(tl.int64)
    size = tl.load(table + 2 * tl.program_id(1) + 1)
    source = tl.load(table + 2 * tl.program_id(1)).to(tl.pointer_type(SOURCE)) + n * size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + n, tl.sum(total))


def weighted_sum_cuda(stack: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `sum_n factors[n] stack[n]` in `dtype`.

    Args:
        stack: [N, ...], contiguous.
        factors: [N], float32.
        dtype: the dtype of the result.
    """
    out = torch.empty(stack.shape[1:], dtype=dtype, device=stack.device)
    if out.numel():
        _launch_weighted_sum(stack, factors, out)
    return out


def _launch_weighted_sum(stack: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    block = 2048
    grid = (triton.cdiv(out.numel(), block), 1, 1)
    launch(weighted_sum, grid, stack, factors, out, len(stack), out.numel(), num_warps=8, BLOCK=block)


def weighted_sums_cuda(stacks: Sequence[torch.Tensor], factors: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns `sum_n factors[n] stack[n]` in `dtype` for each stack, with one launch.

    Args:
        stacks: each [N, ...], contiguous, not empty; of one dtype.
        factors: [N], float32.
        dtype: the dtype of the results.
    """
    totals = empty_sums(stacks, dtype)
    _launch_weighted_sums(stacks, factors, totals)
    return totals


def _launch_weighted_sums(
    stacks: Sequence[torch.Tensor], factors: torch.Tensor, totals: Sequence[torch.Tensor]
) -> None:
    block = 1024
    grid = (triton.cdiv(max(total.numel() for total in totals), block), len(totals), 1)
    table = address_table(list(zip(stacks, totals, strict=True)), True)
    types = {"SOURCE": TYPES[stacks[0].dtype], "TARGET": TYPES[totals[0].dtype]}
    launch(weighted_sums, grid, table, factors, len(factors), BLOCK=block, **types)


def scale_cuda(stacks: Sequence[torch.Tensor], factors: torch.Tensor) -> None:
    """Multiplies the per-sample gradients of a single sample by its factor in place, with one launch.

    Args:
        stacks: each [1, ...], contiguous, not empty; of one dtype.
        factors: [1], float32.
    """
    if len(stacks) == 1:
        _launch_weighted_sum(stacks[0], factors, stacks[0])  # faster for a large stack
    else:
        _launch_weighted_sums(stacks, factors, stacks)


def squared_norms_cuda(stacks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the squared norms of every `stack[n]`, [stacks, N] float32, with one launch.

    Args:
        stacks: each [N, ...], contiguous, not empty; of one dtype and device.
    """
    count = len(stacks[0])
    out = torch.empty(len(stacks), count, dtype=torch.float32, device=stacks[0].device)
    table = address_table([(stack,) for stack in stacks], True)
    launch(squared_norms, (count, len(stacks), 1), table, out, BLOCK=512, SOURCE=TYPES[stacks[0].dtype])
    return out
