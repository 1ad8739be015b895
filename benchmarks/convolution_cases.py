# SPDX-License-Identifier: Apache-2.0
"""Convolutions for virtual_gpu_workspaces.py: of common networks, of single samples' gradients, and drawn ones."""

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

DTYPES = ("tf32", "fp32", "fp16", "bf16")
CHANNELS = (3, 16, 32, 64, 128, 256, 512, 1024, 2048)
MAX_BYTES = 6 << 30  # of one case's tensors


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


def network_shapes() -> list[tuple[tuple[int, ...], ...]]:
    """(input, weight, stride, padding, dilation, (groups, transposed)) of networks' convolutions, for one sample."""
    import torch
    import torchvision
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[tuple[tuple[int, ...], ...], None] = {}

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution.default:
                x, w, _, stride, padding, dilation, transposed, _, groups = args
                shape = (x.shape, w.shape, stride, padding, dilation, (groups, int(transposed)))
                found[tuple(tuple(map(int, field)) for field in shape)] = None
            return func(*args, **(kwargs or {}))

    def conv_stack(dims: int, channels: list[int], kernel: int, stride: int, padding: int) -> nn.Module:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        pairs = itertools.pairwise(channels)
        return nn.Sequential(*(kind(a, b, kernel, stride, padding) for a, b in pairs))

    models = torchvision.models
    with torch.device("meta"):
        runs: list[tuple[nn.Module, tuple[int, ...]]] = [
            (models.resnet18(), (1, 3, 224, 224)),
            (models.resnet18(), (1, 3, 32, 32)),
            (models.resnet50(), (1, 3, 224, 224)),
            (models.resnet50(), (1, 3, 64, 64)),
            (models.vgg11(), (1, 3, 32, 32)),
            (models.vgg16(), (1, 3, 224, 224)),
            (models.efficientnet_b0(), (1, 3, 224, 224)),
            (models.convnext_tiny(), (1, 3, 224, 224)),
            (models.mobilenet_v2(), (1, 3, 224, 224)),
            (models.densenet121(), (1, 3, 224, 224)),
            (models.vit_b_16(), (1, 3, 224, 224)),
            (conv_stack(2, [3, 32, 64, 64, 128], 3, 1, 1), (1, 3, 32, 32)),  # a CNN for CIFAR-10
            (conv_stack(2, [1, 16], 8, 2, 3), (1, 1, 28, 28)),  # Opacus' example for MNIST
            (conv_stack(2, [16, 32], 4, 2, 0), (1, 16, 13, 13)),
            (conv_stack(2, [3, 64, 128, 256, 512], 3, 1, 1), (1, 3, 128, 128)),  # a U-Net's way down
            (nn.ConvTranspose2d(512, 256, 2, 2), (1, 512, 16, 16)),
            (nn.ConvTranspose2d(128, 64, 2, 2), (1, 128, 64, 64)),
            (nn.ConvTranspose2d(100, 512, 4, 1, 0), (1, 100, 1, 1)),  # DCGAN
            (nn.ConvTranspose2d(512, 256, 4, 2, 1), (1, 512, 4, 4)),
            (nn.ConvTranspose2d(128, 64, 4, 2, 1), (1, 128, 16, 16)),
            (conv_stack(2, [3, 64, 128, 256, 512], 4, 2, 1), (1, 3, 64, 64)),
            (conv_stack(1, [128, 100], 3, 1, 0), (1, 128, 64)),  # a CNN for text
            (conv_stack(1, [128, 100], 5, 1, 0), (1, 128, 64)),
            (conv_stack(1, [300, 256], 4, 1, 0), (1, 300, 256)),
            (nn.Conv1d(1, 512, 10, 5), (1, 1, 16000)),  # wav2vec 2.0
            (conv_stack(1, [512, 512], 3, 2, 0), (1, 512, 3199)),
            (conv_stack(1, [512, 512], 2, 2, 0), (1, 512, 199)),
            (nn.Conv1d(768, 768, 128, padding=64, groups=16), (1, 768, 49)),
            (conv_stack(1, [80, 384, 384], 3, 1, 1), (1, 80, 3000)),  # Whisper
            (conv_stack(3, [3, 64, 128, 256], 3, 1, 1), (1, 3, 8, 56, 56)),  # C3D
            (conv_stack(3, [1, 16, 32, 64], 3, 2, 1), (1, 1, 32, 32, 32)),
        ]
        for width, size in ((16, 32), (64, 32), (128, 16), (256, 8)):  # WideResNet-16-4
            runs.append((conv_stack(2, [width, width], 3, 1, 1), (1, width, size, size)))
            runs.append((nn.Conv2d(width, 2 * width, 3, 2, 1), (1, width, size, size)))
        with Note(), torch.no_grad():
            for model, shape in runs:
                model.eval()(torch.empty(shape))
    return list(found)


def networks() -> Iterator[Conv]:
    """Common networks' convolutions at several batch sizes."""
    for shape in network_shapes():
        one, weight, stride, padding, dilation, (groups, transposed) = shape
        for batch in (1, 8, 16, 32, 64, 128, 256):
            for dtype in DTYPES:
                for last in (False, True) if len(one) > 3 else (False,):
                    sizes = (batch, *one[1:])
                    yield Conv(sizes, weight, stride, padding, dilation, groups, bool(transposed), dtype, last)


def single_samples() -> Iterator[Conv]:
    """Gradients of single samples as functorch's vmap computes them: the samples are groups of one call."""
    for batch in (4, 16, 32, 64):
        for channels, outputs, size, kernel, stride in (
            (3, 32, 32, 3, 1),
            (16, 32, 13, 4, 2),
            (32, 64, 32, 3, 1),
            (64, 64, 56, 3, 1),
            (64, 128, 28, 1, 2),
            (128, 128, 28, 3, 1),
            (256, 512, 14, 3, 2),
            (512, 512, 7, 3, 1),
        ):
            for dtype in DTYPES:
                sizes = (1, batch * channels, size, size)
                weight = (batch * outputs, channels, kernel, kernel)
                yield Conv(sizes, weight, (stride,) * 2, (kernel // 2,) * 2, (1, 1), batch, False, dtype, False)


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


def cases(most: int) -> list[Conv]:
    """At most `most` convolutions, shuffled: half of networks, an eighth of single samples, the others drawn."""
    randomly = random.Random(0)
    chosen: dict[Conv, None] = {}
    for source, share in ((networks(), 0.5), (single_samples(), 0.125)):
        conv = [conv for conv in source if conv.fits()]
        randomly.shuffle(conv)
        chosen.update(dict.fromkeys(conv[: int(most * share)]))
    for conv in grid(randomly):
        if len(chosen) >= most:
            break
        if conv.fits():
            chosen[conv] = None
    listed = list(chosen)
    randomly.shuffle(listed)
    return listed
