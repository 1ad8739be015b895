# SPDX-License-Identifier: Apache-2.0
"""Compares a float32 step, whose norms and sums take few kernel launches, with clipping by hand.

Runs on a GPU and under Triton's interpreter.
"""

import pytest
import torch
from torch import nn

from opacus_memprof.clipping.kernels import formed as formed_triton
from opacus_memprof.clipping.kernels import gram as gram_triton
from opacus_memprof.clipping.kernels import stacks as stacks_triton
from tests.integration.clipping_by_hand import Batch, difference
from tests.integration.flash_clip_models import MODELS, criterion

LAUNCHES = {
    # Gram products: queries, keys and values; outputs and the two others of 12 columns; up; down; head. Gradients of
    # samples whose tokens cancel are added to all sums that are formed together.
    "transformer": {
        "gram_squared_norms_of_layers": 5,
        "token_norm_gradients_cuda": 5,
        "squared_norms_cuda": 1,
        "weighted_sums_cuda": 1,
        "add_products_cuda": 1,
    },
    "transformer_rms_norm": {
        "gram_squared_norms_of_layers": 5,
        "token_norm_gradients_cuda": 5,
        "squared_norms_cuda": 1,
        "weighted_sums_cuda": 1,
        "add_products_cuda": 1,
    },
    # Such gradients are added to the sum of each convolution that is unfolded.
    "convnet": {
        "group_norm_gradients_cuda": 2,
        "squared_norms_cuda": 1,
        "weighted_sums_cuda": 1,
        "add_products_cuda": 2,
    },
    # Gram products: 16 to 32 channels twice; 32 to 16. The others have strides, groups, or more taps.
    "bottlenecks": {
        "gram_squared_norms_of_layers": 2,
        "group_norm_gradients_cuda": 1,
        "squared_norms_cuda": 1,
        "weighted_sums_cuda": 1,
        "add_products_cuda": 4,
    },
    "mlp": {"squared_norms_cuda": 1, "weighted_sums_cuda": 1},
}


def float32_difference(name: str, device: str, samples: int = 4) -> float:
    """The largest relative difference of a small model's norms and clipped gradients from those by hand."""
    torch.manual_seed(0)
    build, data = MODELS[name]
    x, y = data(samples).tensors
    batch: Batch = {"x": (x.float() if x.is_floating_point() else x).to(device), "y": y.to(device)}

    def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
        return criterion("sum")(model(batch["x"]), batch["y"])

    return difference(build().to(device), batch, losses, check="off")  # a proof launches kernels, too


def count_launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts from now on how often each function is called that launches one kernel where there were many."""
    counts: dict[str, int] = {}
    for module, name in (
        (gram_triton, "gram_squared_norms_of_layers"),
        (stacks_triton, "group_norm_gradients_cuda"),
        (stacks_triton, "token_norm_gradients_cuda"),
        (formed_triton, "add_products_cuda"),
        (stacks_triton, "squared_norms_cuda"),
        (stacks_triton, "weighted_sums_cuda"),
    ):

        def counted(*args: object, name: str = name, call: object = getattr(module, name), **kwargs: object) -> object:
            counts[name] = counts.get(name, 0) + 1
            return call(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    return counts
