# SPDX-License-Identifier: Apache-2.0
"""Convolutions for workspaces.py: of common networks, of single samples' gradients, and drawn ones.

The networks are those of convolution_networks.py.
"""

import itertools
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from benchmarks.virtual_gpu.convolution_networks import Shape

DTYPES = ("tf32", "fp32", "fp16", "bf16")
FIRST, LAST = False, True  # channels
BATCHES = (8, 16, 32, 64, 128, 256)
OTHER_BATCHES = (1, 2, 4, 12, 24, 48, 96, 192, 512)
LARGE_BATCHES = (320, 384, 448, 640, 768, 1024, 1536, 2048, 2560, 3072, 4096)
POISSON_BATCHES = (*range(48, 81), *range(112, 145), *range(228, 286))  # of about 64, 128 and 256
CHANNELS = (3, 16, 32, 64, 128, 256, 512, 1024, 2048)
MAX_BYTES = 5 << 29  # of one case's tensors


class Conv(NamedTuple):
    """One convolution; `weight` is as torch has it, with the groups divided out."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    dtype: str
    channels_last: bool

    def key(self) -> str:
        """One word for each field, separated by blanks."""

        def join(values: tuple[int, ...]) -> str:
            return "x".join(map(str, values))

        return (
            f"{join(self.input)} {join(self.weight)} {join(self.stride)} {join(self.padding)} {join(self.dilation)} "
            f"{self.groups} {'t' if self.transposed else '-'} {self.dtype} {'last' if self.channels_last else 'first'}"
        )

    @staticmethod
    def parse(key: str) -> "Conv":
        """The convolution whose `key` this is."""
        fields = key.split()
        sizes = [tuple(map(int, field.split("x"))) for field in fields[:5]]
        return Conv(*sizes, int(fields[5]), fields[6] == "t", fields[7], fields[8] == "last")  # type: ignore[arg-type]

    def output(self) -> tuple[int, ...]:
        """The sizes of the output."""
        dims = []
        for size, kernel, stride, padding, dilation in zip(
            self.input[2:], self.weight[2:], self.stride, self.padding, self.dilation, strict=True
        ):
            extent = dilation * (kernel - 1) + 1
            if self.transposed:
                dims.append((size - 1) * stride - 2 * padding + extent)
            else:
                dims.append((size + 2 * padding - extent) // stride + 1)
        channels = self.weight[1] * self.groups if self.transposed else self.weight[0]
        return (self.input[0], channels, *dims)

    def cudnn_key(self, direction: str) -> str:
        """As cuDNN is asked: with two dimensions in place of one, and a transposed one as the gradient that it is."""
        sizes = self.output() if self.transposed else self.input
        fields = [sizes, self.weight, self.stride, self.padding, self.dilation]
        if len(sizes) == 3:
            ones = [(*sizes[:2], 1, *sizes[2:]), (*self.weight[:2], 1, *self.weight[2:])]
            fields = [*ones, (1, *self.stride), (0, *self.padding), (1, *self.dilation)]
        words = ["x".join(map(str, field)) for field in fields]
        asked = {"f": "d", "d": "f", "w": "w"}[direction] if self.transposed else direction
        return " ".join([*words, self.dtype, "last" if self.channels_last else "first", asked])

    def fits(self) -> bool:
        """Whether it exists at all, and is small enough to be measured."""
        output = self.output()
        numbers = sum(_product(sizes) for sizes in (self.input, self.weight, output))
        return min(output) > 0 and numbers * 4 <= MAX_BYTES


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


# -- which convolutions -------------------------------------------------------------------------------------------


def batched(
    shapes: "list[Shape]", batches: tuple[int, ...], dtypes: tuple[str, ...], layouts: tuple[bool, ...]
) -> Iterator[Conv]:
    """Networks' convolutions at several batch sizes."""
    for dtype in dtypes:
        for last in layouts:
            for batch in batches:
                for image, weight, stride, padding, dilation, (groups, transposed) in shapes:
                    if not last or len(image) > 3:
                        sizes = (batch, *image[1:])
                        yield Conv(sizes, weight, stride, padding, dilation, groups, bool(transposed), dtype, last)


def single_samples(shapes: "list[Shape]", batches: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[Conv]:
    """Gradients of single samples as functorch's vmap computes them: the samples are groups of one call."""
    for dtype in dtypes:
        for batch in batches:
            for image, weight, stride, padding, dilation, (groups, transposed) in shapes:
                if not transposed:
                    sizes = (1, batch * image[1], *image[2:])
                    weights = (batch * weight[0], *weight[1:])
                    yield Conv(sizes, weights, stride, padding, dilation, batch * groups, False, dtype, FIRST)


def grid(randomly: random.Random) -> Iterator[Conv]:
    """Drawn convolutions, without end."""
    while True:
        dims = randomly.choice((1, 2, 2, 2, 2, 3))
        channels, outputs = randomly.choice(CHANNELS), randomly.choice(CHANNELS)
        kernel = randomly.choice((1, 3, 3, 5, 7))
        groups = randomly.choice((1, 1, 1, 1, 2, 8, 32, channels))
        transposed = randomly.random() < 0.12
        if channels % groups or outputs % groups:
            continue
        size = randomly.choice({1: (32, 128, 500, 1000, 4000), 2: (7, 14, 28, 32, 56, 112, 224), 3: (8, 16, 28)}[dims])
        stride = randomly.choice((1, 1, 1, 2, 4))
        dilation = randomly.choice((1, 1, 1, 1, 2)) if kernel > 1 else 1
        batch = randomly.choice((1, 2, 8, 16, 32, 50, 64, 128, 256))
        weight = (channels, outputs // groups) if transposed else (outputs, channels // groups)
        yield Conv(
            (batch, channels, *(size,) * dims), (*weight, *(kernel,) * dims), (stride,) * dims,
            (randomly.choice((0, kernel // 2, kernel // 2)),) * dims, (dilation,) * dims, groups, transposed,
            randomly.choice(DTYPES), dims > 1 and randomly.random() < 0.5,
        )  # fmt: skip


def network(randomly: random.Random) -> list[Conv]:
    """Draws a network: convolutions of all kinds over one sample, each of what the one before it gives."""
    dims = randomly.choice((1, 2, 2, 3))
    sides = tuple(randomly.randint(*{1: (200, 8000), 2: (21, 140), 3: (9, 40)}[dims]) for _ in range(dims))
    sizes, convs = (1, randomly.choice((1, 3, 3, 4, 12)), *sides), list[Conv]()
    length = randomly.randint(2, 5)
    kernels = {1: (1, 2, 3, 3, 5, 8, 10), 2: (1, 2, 3, 3, 4, 5, 7), 3: (1, 2, 3, 3)}[dims]
    while len(convs) < length:
        inside = sizes[1]
        kind = randomly.choice(("plain", "plain", "strided", "dilated", "transposed", "grouped", "depthwise"))
        groups = {"grouped": randomly.choice((2, 4)), "depthwise": inside}.get(kind, 1)
        outside = randomly.choice((8, 20, 32, 36, 64, 72, 96, 100, 128, 160, 256, 384))
        if kind == "depthwise":
            outside = inside * randomly.choice((1, 1, 2) if inside > 4 else (8, 16))
        kernel = tuple(randomly.choice(kernels) for _ in range(dims))
        stride = randomly.choice((2, 2, 3)) if kind in ("strided", "transposed") else 1
        dilation = randomly.choice((2, 3)) if kind == "dilated" else 1
        weight = (inside, outside) if kind == "transposed" else (outside, inside // groups)
        conv = Conv(
            sizes, (*weight, *kernel), (stride,) * dims, tuple(randomly.choice((0, k // 2)) for k in kernel),
            (dilation,) * dims, groups, kind == "transposed", "tf32", False,
        )  # fmt: skip
        output = conv.output()
        if (
            not inside % groups
            and min(output) > 0
            and _product(output) < 1_000_000
            and _product(conv.weight) < 2_000_000
        ):
            convs.append(conv)
            sizes = output
    return convs


def cases(most: int) -> list[Conv]:
    """At most `most` convolutions, the most important first."""
    from benchmarks.virtual_gpu.convolution_networks import COMMON, OTHERS, SMALL, shapes_of  # loads torch

    common, others, small = shapes_of(COMMON), shapes_of(OTHERS), shapes_of(SMALL)
    sources = (
        batched(common, BATCHES, ("tf32",), (FIRST,)),
        single_samples(small, BATCHES, ("tf32",)),
        batched(shapes_of(SMALL[:1]), POISSON_BATCHES, ("tf32",), (FIRST,)),
        batched(common, BATCHES, ("bf16",), (FIRST, LAST)),
        batched(common, BATCHES, ("tf32",), (LAST,)),
        batched(common, OTHER_BATCHES, ("tf32",), (FIRST,)),
        batched(common, LARGE_BATCHES, ("tf32", "bf16"), (FIRST,)),
        batched(others, BATCHES, ("tf32",), (FIRST,)),
        batched(others, BATCHES, ("bf16",), (FIRST, LAST)),
        batched(common, OTHER_BATCHES, ("bf16",), (FIRST,)),
        batched(common, BATCHES, ("fp16",), (FIRST, LAST)),
        batched(common, BATCHES, ("fp32",), (FIRST,)),
        single_samples(small, BATCHES, ("bf16", "fp32")),
        batched(others, BATCHES, ("fp16", "fp32"), (FIRST, LAST)),
        grid(random.Random(0)),
    )
    chosen: dict[Conv, None] = {}
    for conv in itertools.chain.from_iterable(sources):
        if len(chosen) >= most:
            break
        if conv.fits():
            chosen[conv] = None
    return list(chosen)
