# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients on CUDA: norms and clipped sums of kept ones, and the gradients of norms' weights.

Stacks of gradients are read once and accumulated in float32. There are many small ones (a bias of each layer).
Launching a kernel for each would take the host longer than the device needs for all. One launch processes all of them,
by a table of their addresses.

The gradients of GroupNorm, LayerNorm and RMSNorm take one launch, and the normalized input is never in memory. For
GroupNorm one program per sample and group reads the group's inputs three times, the last two times from a cache: for
the mean, for the variance, and for the products with the output's gradients, which it reads once. For LayerNorm and
RMSNorm each program reads some tokens of a sample, once.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping.cost import NORM_TOKENS
from opacus_memprof.clipping.kernels.native import address_table, empty_sums, launch
from opacus_memprof.clipping.workspace import KERNEL_DTYPES

TYPES = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for dtype in KERNEL_DTYPES}
"""Triton's name of each dtype."""

_TILE = 2048  # numbers that a program of GroupNorm processes at once
_TOKEN_TILE = 4096  # numbers that a program of LayerNorm processes at once, unless one token has more


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


@triton.jit(do_not_specialize=["channels", "tokens"])  # type: ignore[untyped-decorator, unused-ignore]
def group_gradients(  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    x, g, weight, bias, channels, tokens, eps, CHANNELS: tl.constexpr, TOKENS: tl.constexpr
):
    group = tl.program_id(0).to(tl.int64)
    size = channels * tokens
    x += group * size
    g += group * size
    weight += group * channels
    bias += group * channels

    at = tl.arange(0, CHANNELS * TOKENS)
    total = tl.zeros((CHANNELS * TOKENS,), dtype=tl.float32)
    for start in range(0, size, CHANNELS * TOKENS):
        total += tl.load(x + start + at, mask=start + at < size, other=0.0).to(tl.float32)
    mean = tl.sum(total) / size
    total = tl.zeros((CHANNELS * TOKENS,), dtype=tl.float32)
    for start in range(0, size, CHANNELS * TOKENS):
        inside = start + at < size
        apart = tl.where(inside, tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32) - mean, 0.0)
        total += apart * apart
    scale = tl.rsqrt(tl.sum(total) / size + eps)

    for first in range(0, channels, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        sums = tl.zeros((CHANNELS, TOKENS), dtype=tl.float32)
        products = tl.zeros((CHANNELS, TOKENS), dtype=tl.float32)
        for start in range(0, tokens, TOKENS):
            token = start + tl.arange(0, TOKENS)
            inside = (channel < channels)[:, None] & (token < tokens)[None, :]
            offset = channel[:, None] * tokens + token[None, :]
            each = tl.load(g + offset, mask=inside, other=0.0).to(tl.float32)
            sums += each
            products += each * (tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) - mean)
        tl.store(weight + channel, tl.sum(products, 1) * scale, mask=channel < channels)
        tl.store(bias + channel, tl.sum(sums, 1), mask=channel < channels)


def group_norm_gradients_cuda(
    x: torch.Tensor, g: torch.Tensor, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the per-sample gradients of the weight and the bias, each [N, C] float32.

    Args:
        x: the input, [N, C, ...], contiguous, not empty; float32, float16 or bfloat16.
        g: the gradient of the output, of the same shape; one of these dtypes.
        groups: the number of groups; each is normalized separately.
        eps: added to the variance.
    """
    samples, channels = x.shape[:2]
    tokens = x.shape[2:].numel()
    weight = torch.empty(samples, channels, dtype=torch.float32, device=x.device)
    bias = torch.empty_like(weight)
    width = 64 if tokens <= 64 else 256 if tokens <= 256 else 1024
    sizes = {"CHANNELS": _TILE // width, "TOKENS": width}
    arguments = (x, g, weight, bias, channels // groups, tokens, eps)
    launch(group_gradients, (samples * groups, 1, 1), *arguments, num_warps=8, **sizes)
    return weight, bias


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator, unused-ignore]
def token_gradients(  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    x,
    g,
    out,
    tokens,
    features,
    eps,
    OWN: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    MEAN: tl.constexpr,
):
    part, parts = tl.program_id(0), tl.num_programs(0)
    sample, samples = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    feature = tl.arange(0, FEATURES)
    weight = tl.zeros((FEATURES,), dtype=tl.float32)
    bias = tl.zeros((FEATURES,), dtype=tl.float32)
    for first in range(part * OWN, tl.minimum((part + 1) * OWN, tokens), TOKENS):
        token = first + tl.arange(0, TOKENS)
        inside = (token < tokens)[:, None] & (feature < features)[None, :]
        at = (sample * tokens + token)[:, None] * features + feature[None, :]
        apart = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        each = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        if MEAN:
            apart = tl.where(inside, apart - (tl.sum(apart, 1) / features)[:, None], 0.0)
        scale = tl.where(token < tokens, tl.rsqrt(tl.sum(apart * apart, 1) / features + eps), 0.0)  # eps may be 0
        weight += tl.sum(each * apart * scale[:, None], 0)
        bias += tl.sum(each, 0)
    out += (sample * parts + part) * features + feature
    tl.store(out, weight, mask=feature < features)
    if MEAN:
        tl.store(out + samples * parts * features, bias, mask=feature < features)


def token_norm_gradients_cuda(
    x: torch.Tensor, g: torch.Tensor, eps: float, *, has_mean: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the per-sample gradients of the weight and the bias of a LayerNorm or an RMSNorm, each [N, C] float32.

    Those of the bias are None without a mean: RMSNorm has no bias. Each sample's sums are those of any other batch.

    Args:
        x: the input, [N, T, C], contiguous, not empty; float32, float16 or bfloat16.
        g: the gradient of the output, of the same shape; one of these dtypes.
        eps: added to the variance, or to the mean square.
        has_mean: whether the mean over features is subtracted.
    """
    samples, tokens, features = x.shape
    parts = triton.cdiv(tokens, NORM_TOKENS)
    sums = torch.empty(1 + has_mean, samples, parts, features, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(features)
    sizes = {"OWN": NORM_TOKENS, "TOKENS": max(1, min(_TOKEN_TILE // width, NORM_TOKENS)), "FEATURES": width}
    arguments = (x, g, sums, tokens, features, eps)
    launch(token_gradients, (parts, samples, 1), *arguments, num_warps=8, **sizes, MEAN=has_mean)
    sums = sums.sum(2) if parts > 1 else sums.squeeze(2)
    return sums[0], sums[1] if has_mean else None
