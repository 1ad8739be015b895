# SPDX-License-Identifier: Apache-2.0
"""What cuDNN says that a recurrent layer takes: workspace, what forward keeps for backward, and weights.

Asks cuDNN itself, in the way that torch does (ATen/native/cudnn/RNN.cpp), without running anything: a sweep along each
dimension of two layers, from which a formula can be read, and drawn layers, with which it can be checked.

    python -m benchmarks.virtual_gpu.recurrent_workspaces h200.tsv
"""

import argparse
import ctypes
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TYPES = {  # cudnnDataType_t, the type it computes in, cudnnMathType_t
    "fp32": (0, 0, 3),
    "tf32": (0, 0, 0),
    "fp16": (2, 0, 1),
    "bf16": (9, 0, 0),
    "fp64": (1, 1, 0),
}
MODES = {"tanh": 1, "lstm": 2, "gru": 3}
STANDARD, PERSISTENT, SMALL = 0, 1, 3  # cudnnRNNAlgo_t
SWEEPS = {
    "steps": (1, 2, 3, 7, 16, 31, 48, 50, 64, 100, 128, 200, 256, 512),
    "batch": (1, 2, 4, 5, 8, 15, 16, 24, 32, 48, 96, 100, 128, 256),
    "inputs": (1, 8, 16, 31, 64, 100, 256, 300, 512, 513, 768, 1024),
    "hidden": (1, 8, 16, 32, 50, 64, 96, 100, 128, 192, 200, 255, 256, 300, 384, 512, 513, 640, 768, 1000, 1024, 2048),
    "layers": (1, 2, 3, 4, 6),
    "directions": (1, 2),
    "projected": (0, 8, 32, 50),
    "dropout": (0.0, 0.3),
    "packed": (False, True),
    "training": (False, True),
}


class Layer(NamedTuple):
    """A recurrent layer as torch describes it to cuDNN."""

    mode: str
    dtype: str
    algorithm: int
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int = 1
    directions: int = 1
    projected: int = 0
    dropout: float = 0.0
    packed: bool = False
    training: bool = True

    def lengths(self) -> list[int]:
        """Of the batch's sequences: all `steps` long or, where they are packed, ever shorter."""
        if not self.packed:
            return [self.steps] * self.batch
        return [max(1, self.steps - index * self.steps // self.batch) for index in range(self.batch)]


def layers(randomly: random.Random) -> Iterator[Layer]:
    """The sweeps, and then drawn ones without end."""
    kinds = [
        (mode, dtype, algorithm)
        for mode, dtype, algorithm in itertools.product(MODES, TYPES, (STANDARD, SMALL, PERSISTENT))
        if algorithm == STANDARD or dtype not in ("fp64", "bf16")
        if algorithm != PERSISTENT or dtype == "fp16"
    ]
    small = Layer("", "", 0, 50, 16, 300, 100, 2, 2)
    large = Layer("", "", 0, 32, 64, 128, 256)
    for (mode, dtype, algorithm), base in itertools.product(kinds, (large, small)):
        layer = base._replace(mode=mode, dtype=dtype, algorithm=algorithm)
        for name, values in SWEEPS.items():
            for value in values:
                yield layer._replace(**{name: value})
    while True:
        mode, dtype, algorithm = randomly.choice(kinds)
        drawn: dict[str, Any] = {name: randomly.choice(values) for name, values in SWEEPS.items()}
        if randomly.random() < 0.7:
            drawn["projected"] = 0
        yield Layer(mode, dtype, algorithm, **drawn)


class Cudnn:
    """The library that torch has loaded, or the virtual GPU's."""

    def __init__(self) -> None:
        everybody = ctypes.CDLL(None)
        self.library = everybody if hasattr(everybody, "cudnnCreate") else ctypes.CDLL("libcudnn.so.9")
        self.handle = self.make("cudnnCreate")

    def call(self, name: str, *args: Any) -> None:
        """Calls a function; raises ValueError with the status that is not 0."""
        if status := getattr(self.library, name)(*args):
            raise ValueError(status)

    def make(self, name: str) -> ctypes.c_void_p:
        """A handle or descriptor."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made))
        return made

    def sizes(self, layer: Layer) -> tuple[int, int, int]:
        """Bytes of the workspace, of what is kept for backward and of the weights; ValueError where it has none."""
        recurrent, sequence = self.make("cudnnCreateRNNDescriptor"), self.make("cudnnCreateRNNDataDescriptor")
        dropout = self.make("cudnnCreateDropoutDescriptor")
        try:
            dtype, computed, math = TYPES[layer.dtype]
            padded = 0 if layer.packed else 1
            self.call(
                "cudnnSetDropoutDescriptor", dropout, self.handle, ctypes.c_float(layer.dropout), None,
                ctypes.c_size_t(0), ctypes.c_ulonglong(0),
            )  # fmt: skip
            self.call(
                "cudnnSetRNNDescriptor_v8", recurrent, layer.algorithm, MODES[layer.mode], 2, layer.directions - 1, 0,
                dtype, computed, math, layer.inputs, layer.hidden, layer.projected or layer.hidden, layer.layers,
                dropout, padded,
            )  # fmt: skip
            lengths = (ctypes.c_int * layer.batch)(*layer.lengths())
            self.call(
                "cudnnSetRNNDataDescriptor", sequence, dtype, int(layer.packed), layer.steps, layer.batch,
                layer.inputs, lengths, None,
            )  # fmt: skip
            workspace, kept, weights = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
            self.call(
                "cudnnGetRNNTempSpaceSizes", self.handle, recurrent, int(layer.training), sequence,
                ctypes.byref(workspace), ctypes.byref(kept),
            )  # fmt: skip
            self.call("cudnnGetRNNWeightSpaceSize", self.handle, recurrent, ctypes.byref(weights))
        finally:
            self.library.cudnnDestroyRNNDescriptor(recurrent)
            self.library.cudnnDestroyRNNDataDescriptor(sequence)
            self.library.cudnnDestroyDropoutDescriptor(dropout)
        return workspace.value, kept.value, weights.value


def main() -> None:
    """Writes a line for each layer: its fields, and the sizes or the status of the failure alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the file to write")
    parser.add_argument("--most", type=int, default=40000, help="at most this many layers")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--virtual-gpu", help="run on a virtual GPU of this kind")
    options = parser.parse_args()
    if options.virtual_gpu:
        from opacus_memprof import virtual_gpu

        virtual_gpu.start(options.virtual_gpu)
    import torch

    torch.zeros(1, device="cuda")
    start = time.perf_counter()
    cudnn = Cudnn()
    done: set[Layer] = set()
    with options.output.open("w") as file:
        print("\t".join((*Layer._fields, "workspace", "kept", "weights")), file=file)
        for layer in layers(random.Random(0)):
            if len(done) >= options.most or time.perf_counter() - start > options.seconds:
                break
            if layer in done:
                continue
            done.add(layer)
            try:
                found: tuple[int, ...] = cudnn.sizes(layer)
            except ValueError as error:
                found = error.args
            print(*layer, *found, sep="\t", file=file, flush=True)  # also if the library should crash at the next
    print(f"{len(done)} recurrent layers in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
