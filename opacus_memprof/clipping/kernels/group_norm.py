# SPDX-License-Identifier: Apache-2.0
"""The per-sample gradients of GroupNorm on CUDA, with one launch and no temporaries.

One program per sample and group reads the group's inputs three times, the last two times from a cache: for the mean,
for the variance, and for the products with the output's gradients, which it reads once. The normalized input is never
in memory.
"""

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping.kernels.launch import launch

_TILE = 2048  # numbers that a program processes at once


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
