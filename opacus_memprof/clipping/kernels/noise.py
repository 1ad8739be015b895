# SPDX-License-Identifier: Apache-2.0
"""Noise on CUDA that is drawn where it is added, so that it is never in memory.

One launch reads every sum, adds the numbers that torch would have drawn for it, and writes the result in the dtype of
its target. It also adds up the squares of what it has read, so that the norms of sums need no other pass over memory.

torch draws a tensor's normal numbers as follows (distribution_elementwise_grid_stride_kernel in
ATen/native/cuda/DistributionTemplates.h, and curand_normal4). Thread i of n takes the Philox4x32-10 number (Salmon et
al. 2011, doi 10.1145/2063384.2063405) of the generator's seed and of the counter (c, i), where c is the generator's
offset / 4, makes four normal numbers of its four words by Box and Muller's formula, and writes them to i, i + n, i + 2n
and i + 3n. Then it continues with c + 1 at i + 4n. The kernel here gives the same numbers for the same generator,
except for the rounding of the logarithm and the root.
"""

import functools
import math
import os
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped, import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-untyped, import-not-found, unused-ignore]
from triton.language.extra import libdevice  # type: ignore[import-untyped, import-not-found, unused-ignore]

from opacus_memprof.clipping.kernels.native import address_table, launch, reserve_normal
from opacus_memprof.clipping.kernels.stacks import TYPES

_BLOCK = 512  # threads of torch whose numbers one program draws
_COLUMNS = tl.constexpr(6)  # columns of the table
_THREADS = 256  # threads in each of torch's blocks
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # on the CPU, without CUDA's functions


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def normal4(seed, low, high, thread):  # type: ignore[no-untyped-def]  # Triton would interpret annotations as its types
    """Returns four normal numbers for the counter (low, high) and each thread."""
    zero = thread * 0
    x, y, z, w = tl.philox(seed, zero + low, zero + high, thread, zero)
    a, b = box_muller(x, y)
    c, d = box_muller(z, w)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def box_muller(x, y):  # type: ignore[no-untyped-def]
    unit: tl.constexpr = 2.3283064365386963e-10  # 2 ** -32
    turn: tl.constexpr = 1.4629180792671596e-09  # 2 ** -32 * 2 pi
    length = tl.sqrt(tl.maximum(-2.0 * tl.log(x.to(tl.float32) * unit + unit / 2), 0.0))
    angle = y.to(tl.float32) * turn + turn / 2
    if _INTERPRETED:
        return tl.sin(angle) * length, tl.cos(angle) * length
    return libdevice.fast_sinf(angle) * length, libdevice.fast_cosf(angle) * length  # as curand_normal4


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_normals(  # type: ignore[no-untyped-def]
    table,
    targets,
    squares,
    count,
    std,
    divisor,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,
    TARGET: tl.constexpr,
    STEP: tl.constexpr,
    BY_POWER_OF_2: tl.constexpr,
    ADDS_SQUARES: tl.constexpr,
):
    program = tl.program_id(0)
    row, end = program * 0, program * 0 + count  # the last row whose first program is not after this one
    while end - row > 1:
        middle = (row + end) // 2
        is_after = tl.load(table + _COLUMNS * middle + 4) > program
        row = tl.where(is_after, row, middle)
        end = tl.where(is_after, middle, end)
    table += _COLUMNS * row
    size, threads, counter = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    block = program - tl.load(table + 4)
    blocks = tl.cdiv(threads, BLOCK)  # blocks that share a counter
    turn = block // blocks
    thread = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
    counter += turn
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = normal4(tl.load(table + 5), low, high, thread.to(tl.uint32))
    source, target = tl.load(table).to(tl.pointer_type(TYPE)), tl.load(targets + STEP * row).to(tl.pointer_type(TARGET))
    at = 4 * turn * threads + thread
    size = tl.where(thread < threads, size, 0)
    of_all = add_normal(source, target, at, size, a * std, divisor, BY_POWER_OF_2)
    of_all += add_normal(source, target, at + threads, size, b * std, divisor, BY_POWER_OF_2)
    of_all += add_normal(source, target, at + 2 * threads, size, c * std, divisor, BY_POWER_OF_2)
    of_all += add_normal(source, target, at + 3 * threads, size, d * std, divisor, BY_POWER_OF_2)
    if ADDS_SQUARES:
        tl.atomic_add(squares + row, tl.sum(of_all).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def add_normal(source, target, at, size, normal, divisor, BY_POWER_OF_2: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the squares of the numbers without noise."""
    element = source.dtype.element_ty
    inside = at < size
    total = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    square = total * total
    total += normal.to(element).to(tl.float32)  # torch rounds noise to the dtype of the tensor that it fills
    total = total.to(element).to(tl.float32)  # torch divides the sum after rounding it
    total = total * tl.div_rn(1.0, divisor) if BY_POWER_OF_2 else tl.div_rn(total, divisor)
    tl.store(target + at, total.to(element).to(target.dtype.element_ty), mask=inside)
    return square


@functools.cache
def draws_as_torch(device: torch.device) -> bool:
    """Returns whether the kernel adds the numbers that torch draws on this device.

    It is tested once on two small tensors: privacy depends on the noise, and nothing else would detect a wrongly
    compiled kernel.
    """
    generators = [torch.Generator(device).manual_seed(2**40 + 1) for _ in range(2)]
    sums = [torch.zeros(size, device=device) for size in (5, 300)]
    add_normal_cuda(sums, 2.0, generators[0])
    drawn = [torch.normal(0, 2.0, total.shape, generator=generators[1], device=device) for total in sums]
    return all(torch.allclose(total, other, rtol=0, atol=1e-4) for total, other in zip(sums, drawn, strict=True))


def add_normal_cuda(
    sums: Sequence[torch.Tensor],
    std: float,
    generator: torch.Generator | None,
    divisor: float = 1,
    targets: Sequence[torch.Tensor] | None = None,
    squares: torch.Tensor | None = None,
) -> None:
    """Adds noise of this standard deviation to every sum, and divides it, with one launch.

    Args:
        sums: contiguous, less than 2 GiB each, not empty, of one dtype in `KERNEL_DTYPES`, and on one device.
        std: the standard deviation.
        generator: a generator of that device; None for the device's default one. It advances as if torch had drawn the
            noise.
        divisor: the divisor of the noisy sums.
        targets: what the noisy sums are written to, contiguous, of the shapes of the sums and of one dtype; None for
            the sums themselves.
        squares: the squared norm of each sum without noise is added to it, [sums], float64.
    """
    properties = torch.cuda.get_device_properties(sums[0].device)
    most = properties.multi_processor_count * (properties.max_threads_per_multi_processor // _THREADS)
    table, programs = reserve_normal(sums, generator, most * _THREADS, _BLOCK)
    numbers = (len(table), std, float(divisor))
    addresses, step = table, _COLUMNS.value  # a sum's address is in the first column
    if targets is None:
        targets = sums
    else:
        addresses, step = address_table([(target.view(-1),) for target in targets], False), 1
    constants = {
        "TYPE": TYPES[sums[0].dtype],
        "TARGET": TYPES[targets[0].dtype],
        "STEP": step,
        "BY_POWER_OF_2": math.frexp(divisor)[0] == 0.5,
        "ADDS_SQUARES": squares is not None,
    }
    squares = addresses if squares is None else squares  # not read then
    launch(add_normals, (programs, 1, 1), table, addresses, squares, *numbers, BLOCK=_BLOCK, **constants)
