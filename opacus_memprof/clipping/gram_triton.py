# SPDX-License-Identifier: Apache-2.0
"""The tiled Gram product on CUDA, which never writes ggT or aaT to device memory.

One program per sample and tile pair (i >= j) forms a tile of ggT and the same tile of aaT in registers, multiplies
them elementwise and writes the sum; tiles off the diagonal count twice. There are no atomics: the sums are added up
afterwards, so the result is deterministic. Imported only for CUDA tensors (Triton is a dependency of PyTorch's CUDA
wheels).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def gram_tile(  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    g,
    a,
    parts,
    tokens,
    rows,
    columns,
    g_sample,
    g_token,
    g_feature,
    a_sample,
    a_token,
    a_feature,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i = tl.program_id(0)
    j = tl.program_id(1)
    sample = tl.program_id(2).to(tl.int64)
    if j > i:
        return
    here = (i * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    there = (j * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    depth = tl.arange(0, DEPTH).to(tl.int64)
    here_inside = here[:, None] < tokens
    there_inside = there[None, :] < tokens

    gram = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    left = g + sample * g_sample + here[:, None] * g_token + depth[None, :] * g_feature
    right = g + sample * g_sample + there[None, :] * g_token + depth[:, None] * g_feature
    for start in range(0, rows, DEPTH):
        inside = start + depth < rows
        x = tl.load(left, mask=here_inside & inside[None, :], other=0.0)
        y = tl.load(right, mask=there_inside & inside[:, None], other=0.0)
        gram = tl.dot(x, y, gram, input_precision=PRECISION)
        left += DEPTH * g_feature
        right += DEPTH * g_feature

    other = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    left = a + sample * a_sample + here[:, None] * a_token + depth[None, :] * a_feature
    right = a + sample * a_sample + there[None, :] * a_token + depth[:, None] * a_feature
    for start in range(0, columns, DEPTH):
        inside = start + depth < columns
        x = tl.load(left, mask=here_inside & inside[None, :], other=0.0)
        y = tl.load(right, mask=there_inside & inside[:, None], other=0.0)
        other = tl.dot(x, y, other, input_precision=PRECISION)
        left += DEPTH * a_feature
        right += DEPTH * a_feature

    twice = tl.where(i == j, 1.0, 2.0)
    tiles = tl.num_programs(0)
    tl.store(parts + (sample * tiles + i) * tiles + j, tl.sum(gram * other) * twice)


def gram_squared_norms_cuda(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Squared norms of ``g[n] @ a[n]``.

    Args:
        g: [N, rows, T], any strides; float32, float16 or bfloat16.
        a: [N, T, columns], same dtype and device.

    Returns:
        [N] float32, accumulated in float32. float32 operands use TF32 exactly where ``torch.matmul`` would.
    """
    count, rows, tokens = g.shape
    side = 128 if tokens >= 512 else 64 if tokens > 32 else 32
    tiles = triton.cdiv(tokens, side)
    parts = torch.zeros(count, tiles, tiles, dtype=torch.float32, device=g.device)
    if parts.numel() == 0:
        return torch.zeros(count, dtype=torch.float32, device=g.device)
    # Reading allow_tf32 or get_float32_matmul_precision raises once the program has set fp32_precision.
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    with torch.cuda.device(g.device) if g.is_cuda else nullcontext():
        gram_tile[(tiles, tiles, count)](
            *(g, a, parts, tokens, rows, a.shape[2]),
            *(g.stride(0), g.stride(2), g.stride(1), a.stride(0), a.stride(1), a.stride(2)),
            SIDE=side,
            DEPTH=32 if g.dtype == torch.float32 else 64,
            PRECISION="tf32" if tf32 else "ieee",
            num_warps=8 if side == 128 else 4,
        )
    return parts.sum((1, 2)).clamp_(min=0)
