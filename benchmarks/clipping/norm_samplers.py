# SPDX-License-Identifier: Apache-2.0
"""What contrib/norm_samplers.py saves: peaks of ghost clipping on the CPU, by Opacus' norm samplers and by these.

    python -m benchmarks.clipping.norm_samplers                       # a GPT at 1024 to 8192 tokens, one sample; 2.5 GB

Prints a table: requested bytes at the peak of forward and first backward, measured by the profiler's CPU allocator, and
how far the sample's norm in float32 is from plain autograd's in float64.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import warnings
from pathlib import Path

import torch
from opacus.grad_sample import GradSampleModuleFastGradientClipping

import opacus_memprof
from contrib.norm_samplers import register_norm_samplers
from opacus_memprof.experiments.models import Transformer
from opacus_memprof.profiles.units import format_bytes

VOCABULARY, WIDTH, LAYERS, HEADS = 1024, 256, 2, 4


def model_and_ids(tokens: int) -> tuple[Transformer, torch.Tensor]:
    torch.manual_seed(0)
    return Transformer(VOCABULARY, WIDTH, LAYERS, HEADS, tokens), torch.randint(0, VOCABULARY, (1, tokens))


def norm_by_autograd(tokens: int) -> float:
    """The gradient norm of the one sample, in float64."""
    model, ids = model_and_ids(tokens)
    model.double()(ids).square().mean().backward()
    return sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5


def measure(tokens: int, workspace_bytes: int | None) -> tuple[int, float]:
    """(bytes at the peak of forward and first backward, norm of the one sample). None: Opacus' samplers."""
    gc.collect()  # what the last measurement left in circles
    samplers = GradSampleModuleFastGradientClipping.NORM_SAMPLERS
    before = dict(samplers)
    model, ids = model_and_ids(tokens)
    if workspace_bytes is not None:
        register_norm_samplers(workspace_bytes)
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            opacus_memprof.profile(Path(directory) / "profile", device="cpu") as session,
        ):
            private = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, loss_reduction="sum")
            private(ids).square().mean().backward()
            return session.peak()["cpu"].requested_bytes, float(private.get_norm_sample())
    finally:
        samplers.clear()
        samplers.update(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--workspace-mib", type=float, default=16)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| tokens | Opacus' samplers | error of the norm | these | error of the norm |\n|---:|---:|---:|---:|---:|")
    for tokens in arguments.tokens:
        row, expected = f"| {tokens} |", norm_by_autograd(tokens)
        for workspace_bytes in (None, int(arguments.workspace_mib * 2**20)):
            peak, norm = measure(tokens, workspace_bytes)
            row += f" {format_bytes(peak)} | {abs(norm - expected) / expected:.0e} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
