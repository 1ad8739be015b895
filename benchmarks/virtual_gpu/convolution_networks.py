# SPDX-License-Identifier: Apache-2.0
"""Networks whose convolutions are measured, as functions that make them and the sizes of one sample."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn

Shape = tuple[tuple[int, ...], ...]  # input, weight, stride, padding, dilation, (groups, transposed); of one sample
Network = tuple[Callable[[], nn.Module], tuple[int, ...]]
models = torchvision.models


def stack(dims: int, channels: list[int], kernel: int, stride: int, padding: int) -> nn.Module:
    """Convolutions one after the other."""
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return nn.Sequential(*(kind(a, b, kernel, stride, padding) for a, b in itertools.pairwise(channels)))


def pooled(channels: list[int]) -> nn.Module:
    """3x3 convolutions, each followed by a pooling that halves the sides."""
    pairs = itertools.pairwise(channels)
    layers = [layer for a, b in pairs for layer in (nn.Conv2d(a, b, 3, padding=1), nn.AvgPool2d(2, ceil_mode=True))]
    return nn.Sequential(*layers)


def unet(first: int, depth: int, classes: int, doubled: bool) -> list[Network]:
    """Returns the convolutions of a U-Net over 64 or 128 pixels: down, up with skip connections, and its head.

    With `doubled` each level has two convolutions and transposed ones lead up, as in the original.
    """
    size = 128 if doubled else 64
    widths = [first << level for level in range(depth)]
    found: list[Network] = []
    for level, width in enumerate(widths):
        before, sides = widths[level - 1] if level else 3, size >> level
        found.append((lambda a=before, b=width: nn.Conv2d(a, b, 3, padding=1), (1, before, sides, sides)))
        joined = width + widths[level + 1] if level + 1 < depth and not doubled else 2 * width
        for inside in (width, joined) if doubled else (joined,):
            found.append((lambda a=inside, b=width: nn.Conv2d(a, b, 3, padding=1), (1, inside, sides, sides)))
        if doubled and level + 1 < depth:
            below = size >> (level + 1)
            found.append((lambda a=width: nn.ConvTranspose2d(2 * a, a, 2, 2), (1, 2 * width, below, below)))
    found.append((lambda: nn.Conv2d(first, classes, 1), (1, first, size, size)))
    return found


def patches(channels: int, width: int, size: int) -> Network:
    """A patch embedding of a Vision Transformer."""
    sides = 224 if size >= 14 else 96 if size == 8 else 32
    return lambda: nn.Conv2d(channels, width, size, size), (1, channels, sides, sides)


SMALL: list[Network] = [
    (lambda: pooled([3, 32, 64, 64, 128]), (1, 3, 32, 32)),  # Opacus' example for CIFAR-10
    (lambda: stack(2, [1, 16], 8, 2, 3), (1, 1, 28, 28)),  # Opacus' example for MNIST
    (lambda: stack(2, [16, 32], 4, 2, 0), (1, 16, 13, 13)),
    (lambda: stack(2, [1, 32, 64], 3, 1, 0), (1, 1, 28, 28)),  # PyTorch's example for MNIST
    (lambda: stack(2, [3, 6], 5, 1, 0), (1, 3, 32, 32)),  # LeNet
    (lambda: stack(2, [6, 16], 5, 1, 0), (1, 6, 14, 14)),
    (lambda: stack(2, [3, 32, 32, 64, 64, 128, 128], 3, 1, 1), (1, 3, 32, 32)),
]

_RESNET = [(16, 32), (32, 16), (64, 32), (128, 16), (256, 8)]  # channels, sides: ResNet-20, WideResNet-16-4
COMMON: list[Network] = [
    *SMALL,
    *[(models.resnet18, (1, 3, size, size)) for size in (32, 64, 96, 128, 224)],
    *[(models.resnet50, (1, 3, size, size)) for size in (64, 128, 224)],
    *[(lambda w=width: stack(2, [w, w], 3, 1, 1), (1, width, size, size)) for width, size in _RESNET],
    *[(lambda w=width: nn.Conv2d(w, 2 * w, 3, 2, 1), (1, width, size, size)) for width, size in _RESNET],
    (lambda: stack(2, [3, 16], 3, 1, 1), (1, 3, 32, 32)),
    (lambda: stack(2, [3, 64], 3, 1, 1), (1, 3, 32, 32)),
    (models.vgg11, (1, 3, 32, 32)),
    (models.vgg11, (1, 3, 64, 64)),
    *unet(32, 3, 10, doubled=False),
    *unet(64, 5, 2, doubled=True),
    *[patches(3, width, 16) for width in (192, 384, 768, 1024)],
    *[patches(3, width, size) for width, size in ((1280, 14), (768, 32), (384, 8), (384, 4), (192, 4), (96, 4))],
    *[(lambda k=kernel: nn.Conv1d(128, 128, k, padding=k // 2), (1, 128, 200)) for kernel in (3, 4, 5)],
    *[(lambda k=kernel: nn.Conv1d(128, 100, k), (1, 128, 64)) for kernel in (3, 4, 5)],
    *[(lambda k=kernel: nn.Conv1d(300, 100, k), (1, 300, 128)) for kernel in (3, 4, 5)],
    (lambda: nn.Conv1d(1, 64, 80, 4), (1, 1, 16000)),  # M5, for sounds
    *[
        (lambda a=inside, b=outside: nn.Conv1d(a, b, 3), (1, inside, length))
        for inside, outside, length in ((64, 64, 995), (64, 128, 248), (128, 256, 61))
    ],
]

OTHERS: list[Network] = [
    *[(make, (1, 3, 224, 224)) for make in (models.convnext_tiny, models.vgg16, models.efficientnet_b0)],
    *[(make, (1, 3, 224, 224)) for make in (models.mobilenet_v2, models.densenet121)],
    (lambda: stack(2, [3, 64, 128, 256, 512], 4, 2, 1), (1, 3, 64, 64)),  # DCGAN
    (lambda: nn.ConvTranspose2d(100, 512, 4, 1, 0), (1, 100, 1, 1)),
    (lambda: nn.ConvTranspose2d(512, 256, 4, 2, 1), (1, 512, 4, 4)),
    (lambda: nn.ConvTranspose2d(256, 128, 4, 2, 1), (1, 256, 8, 8)),
    (lambda: nn.ConvTranspose2d(128, 64, 4, 2, 1), (1, 128, 16, 16)),
    (lambda: stack(1, [300, 256], 4, 1, 0), (1, 300, 256)),
    (lambda: nn.Conv1d(1, 512, 10, 5), (1, 1, 16000)),  # wav2vec 2.0
    (lambda: stack(1, [512, 512], 3, 2, 0), (1, 512, 3199)),
    (lambda: stack(1, [512, 512], 2, 2, 0), (1, 512, 199)),
    (lambda: nn.Conv1d(768, 768, 128, padding=64, groups=16), (1, 768, 49)),
    (lambda: stack(1, [80, 384, 384], 3, 1, 1), (1, 80, 3000)),  # Whisper
    (lambda: stack(3, [3, 64, 128, 256], 3, 1, 1), (1, 3, 8, 56, 56)),  # C3D
    (lambda: stack(3, [1, 16, 32, 64], 3, 2, 1), (1, 1, 32, 32, 32)),
]


def shapes_of(networks: list[Network]) -> list[Shape]:
    """The convolutions of networks, each once."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[Shape, None] = {}

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.convolution.default:
                x, w, _, stride, padding, dilation, transposed, _, groups = args
                shape = (x.shape, w.shape, stride, padding, dilation, (groups, int(transposed)))
                found[tuple(tuple(map(int, field)) for field in shape)] = None
            return func(*args, **(kwargs or {}))

    with torch.device("meta"), Note(), torch.no_grad():
        for make, shape in networks:
            make().eval()(torch.empty(shape))
    return list(found)
