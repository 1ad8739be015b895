# SPDX-License-Identifier: Apache-2.0
"""The table of convolutions' workspaces, from what virtual_gpu_workspaces.py measured, and how well it serves others.

A row is a convolution without its batch size, and for forward, input gradient and weight gradient each what was
measured at some batch sizes: `8:393232` is bytes, and `16=` what cuDNN answers without a GPU.
"""

import random
import statistics
from pathlib import Path
from typing import NamedTuple

from convolution_cases import Conv

DIRECTIONS = "fdw"


class Measured(NamedTuple):
    """Bytes of one call."""

    real: int
    answered: int  # by cuDNN without a GPU


Sizes = dict[int, Measured]  # by batch size


def shape_of(key: str) -> tuple[str, int]:
    """The convolution of a `Conv.cudnn_key` without its batch size and direction, and the batch size.

    The groups of a call for one sample, which may stand for samples (functorch's vmap), are a batch size too.
    """
    sizes, weights, *rest = key.split()[:-1]
    batch, channels, *image = map(int, sizes.split("x"))
    outputs, inputs, *kernel = map(int, weights.split("x"))
    groups = channels // inputs
    grouped = ""
    if batch == 1 and groups > 1 and outputs % groups == 0:
        batch, channels, outputs, grouped = groups, inputs, outputs // groups, "g"
    one = "x".join(map(str, (channels, *image)))
    weight = "x".join(map(str, (outputs, inputs, *kernel)))
    return " ".join([grouped + one, weight, *rest]), batch


def collect(real: dict[str, list[object]], virtual: dict[str, list[object]]) -> dict[str, dict[str, Sizes]]:
    """What both measured, by shape and direction."""
    found: dict[str, dict[str, Sizes]] = {}
    for key in real.keys() & virtual.keys():
        conv = Conv.parse(key)
        for direction, measured, answered in zip(DIRECTIONS, real[key], virtual[key], strict=True):
            if isinstance(measured, int) and isinstance(answered, int):
                asked = conv.cudnn_key(direction)
                shape, batch = shape_of(asked)
                found.setdefault(shape, {}).setdefault(asked[-1], {})[batch] = Measured(measured, answered)
    return found


def text_of(sizes: Sizes) -> str:
    """One field of a row."""
    if sizes and all(size.real == size.answered for size in sizes.values()):
        return "="
    words = [
        f"{batch}=" if real == answered else f"{batch}:{real}" for batch, (real, answered) in sorted(sizes.items())
    ]
    return " ".join(words)


def write(found: dict[str, dict[str, Sizes]], origin: str, output: Path) -> None:
    """Writes the shapes that were measured at several batch sizes, which are those of networks."""
    lines = []
    for shape in sorted(found):
        sizes = [found[shape].get(direction, {}) for direction in DIRECTIONS]
        if max(map(len, sizes)) > 1:
            lines.append("{" + ", ".join(f'"{text}"' for text in (shape, *map(text_of, sizes))) + "},")
    output.write_text(
        "// SPDX-License-Identifier: Apache-2.0\n"
        "// Written by benchmarks/virtual_gpu_workspaces.py. Input, weight, stride, padding, dilation, type, layout;\n"
        f"// forward, input gradient, weight gradient. On an {origin}.\n" + "\n".join(lines) + "\n"
    )


def serve(sizes: Sizes, batch: int, answered: int) -> float:
    """What cudnn_workspaces.cpp takes for a batch size that was not measured."""
    larger = [other for other in sizes if other >= batch]
    nearest = min(larger) if larger else max(sizes)
    size = sizes[nearest]
    if size.real == size.answered:
        return answered
    return size.real if larger else size.real * batch / nearest


def held_out(found: dict[str, dict[str, Sizes]], share: float = 0.25) -> None:
    """Says how far off the table is for batch sizes that are left out of it, one at a time."""
    randomly = random.Random(0)
    errors = []
    for directions in found.values():
        for sizes in directions.values():
            for batch, (real, answered) in sizes.items():
                if len(sizes) > 1 and randomly.random() < share:
                    others = {other: size for other, size in sizes.items() if other != batch}
                    errors.append((serve(others, batch, answered) - real) / 2**20)
    below, above = [-error for error in errors if error < 0], [error for error in errors if error > 0]
    print(f"{len(errors)} left out: {1 - (len(below) + len(above)) / len(errors):.1%} equal")
    for name, some in (("too little", below), ("too much", above)):
        half, tenth = statistics.median(some), statistics.quantiles(some, n=10)[-1]
        print(f"{name}: {len(some) / len(errors):.1%}, by MiB: median {half:.2f}, 90 % within {tenth:.2f}")
