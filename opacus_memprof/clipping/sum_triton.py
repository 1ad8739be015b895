# SPDX-License-Identifier: Apache-2.0
"""The clipped sum of kept per-sample gradients on CUDA: reads them once, and accumulates in float32."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]


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


def weighted_sum_cuda(stack: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``sum_n factors[n] stack[n]`` in ``dtype``.

    Args:
        stack: [N, ...], contiguous.
        factors: [N], float32.
        dtype: of the result.
    """
    out = torch.empty(stack.shape[1:], dtype=dtype, device=stack.device)
    if out.numel():
        block = 2048
        with torch.cuda.device(stack.device) if stack.is_cuda else nullcontext():
            weighted_sum[(triton.cdiv(out.numel(), block),)](
                stack, factors, out, len(stack), out.numel(), BLOCK=block, num_warps=8
            )
    return out
