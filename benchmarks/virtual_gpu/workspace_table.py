# SPDX-License-Identifier: Apache-2.0
"""The table of convolutions' workspaces, from what workspaces.py measured, and how well it serves others.

A row is a convolution without its batch size, and for forward, input gradient and weight gradient each what was
measured at some batch sizes: `8:393232` is bytes, and `16=` what cuDNN answers without a GPU; `=` alone is that at all.
"""

import random
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from benchmarks.virtual_gpu.convolution_cases import BATCHES, OTHER_BATCHES, Conv

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


Field = dict[int, int | None]  # of a row: bytes by batch size, None where they are cuDNN's answer


def field_of(sizes: Sizes) -> Field:
    """What a row says of measured sizes."""
    return {batch: None if real == answered else real for batch, (real, answered) in sizes.items()}


def read_field(text: str) -> Field:
    """A field of a row that was written."""
    if text == "=":  # at all batch sizes that were measured then
        return {max(BATCHES + OTHER_BATCHES): None}
    words = re.findall(r"(\d+)(?::(\d+)|=)", text)
    return {int(batch): int(size) if size else None for batch, size in words}


def text_of(field: Field) -> str:
    """One field of a row."""
    if field and all(size is None for size in field.values()):
        return "="
    return " ".join(f"{batch}=" if size is None else f"{batch}:{size}" for batch, size in sorted(field.items()))


def read(table: Path) -> dict[str, list[Field]]:
    """The rows of a table, by shape."""
    lines = [line.split("\t") for line in table.read_text().splitlines() if not line.startswith("#")]
    return {shape: [*map(read_field, texts)] for shape, *texts in lines}


def write(found: dict[str, dict[str, Sizes]], origin: str, output: Path) -> None:
    """Adds the shapes measured at several batch sizes, which come from networks, to the existing table."""
    rows = read(output) if output.exists() else {}
    for shape, sizes in found.items():
        if max(map(len, sizes.values())) > 1:
            before = rows.get(shape, [{} for _ in DIRECTIONS])
            measured = [field_of(sizes.get(direction, {})) for direction in DIRECTIONS]
            rows[shape] = [old | new for old, new in zip(before, measured, strict=True)]
    lines = ["\t".join([shape, *map(text_of, rows[shape])]) for shape in sorted(rows)]
    output.write_text(
        f"# Workspaces of cuDNN's convolutions in bytes, measured on an {origin}.\n"
        "# Written by benchmarks/virtual_gpu/workspaces.py; read by csrc/virtual_gpu/cudnn/workspaces.cpp.\n"
        "# Columns: input, weight, stride, padding, dilation, type and layout of the convolution; then forward, input\n"
        "# gradient and weight gradient as batch:bytes, or batch= where cuDNN's answer without a GPU is the same.\n"
        + "\n".join(lines)
        + "\n"
    )


def serve(sizes: Sizes, batch: int, answered: int) -> int:
    """What cudnn_workspaces.cpp takes for a batch size that was not measured."""
    field = field_of(sizes)
    nearest = min((other for other in field if other >= batch), default=max(field))
    size = field[nearest]
    if size is None:
        return answered
    if nearest < batch:
        return -(-size * batch // nearest)
    below = max((other for other in field if other < batch), default=None)
    least = None if below is None else field[below]
    if below is None or least is None:
        return size
    return -(-(least * (nearest - batch) + size * (batch - below)) // (nearest - below))


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
