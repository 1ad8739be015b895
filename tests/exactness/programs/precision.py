# SPDX-License-Identifier: Apache-2.0
"""Sums and norms in low precision: many equal samples, many physical batches, values that under- or overflow."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.judge import Step
from tests.exactness.program import Graph, Program, changed_in_backward, loss_of_the_model, of_shape, rounded_anew


def _linear() -> nn.Module:
    return nn.Linear(8, 4, bias=False)


def _equal(*sizes: int, scale: float = 1.0) -> Callable[[], list[Step]]:
    """Samples with the same gradient, up to the squares in the loss, in physical batches of these sizes."""

    def steps() -> list[Step]:
        x, scales = (
            torch.ones(max(sizes), 8, dtype=torch.float64),
            torch.full((max(sizes),), scale, dtype=torch.float64),
        )
        return [Step([{"x": x[:size], "scale": scales[:size]} for size in sizes])]

    return steps


@changed_in_backward
def _mixed_in_backward(g: torch.Tensor) -> torch.Tensor:
    """Adds a little of the gradient of the sample before."""
    return g + 1e-7 * g.roll(1, 0)


def _mixing_weakly() -> nn.Module:
    """Returns a loss, so that no gradient of another sample is zero, and rounds otherwise in every backward."""

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model.last(torch.tanh(_mixed_in_backward(rounded_anew(model.first(x)))))
        return output.square().sum()

    return Graph(forward, first=nn.Linear(6, 16), last=nn.Linear(16, 12))


def _rounded_by_size(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Stands for a kernel whose last bits depend on the size of the batch."""
    h = m.first(x)
    return m.last((h.to(m.dtype) * (1 + 1e-7 * len(x))).to(h.dtype))


@changed_in_backward
def _scaled_by_batch(g: torch.Tensor) -> torch.Tensor:
    """Scales by a mean over the batch, but by less than what a unit of ReLU may change in a batch of another size."""
    return g * (1 + 2e-3 * g.mean() / g.abs().mean().clamp(min=1e-30))


def _scaling_by_batch() -> nn.Module:
    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = model.last(torch.tanh(_scaled_by_batch(model.first(x))))
        return output.square().sum()

    return Graph(forward, first=nn.Linear(6, 16), last=nn.Linear(16, 12))


def _part_in(dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: Graph(_rounded_by_size, first=nn.Linear(6, 6), last=nn.Linear(6, 3), dtype=dtype)


_BF16, _FP16 = {"dtype": torch.bfloat16}, {"dtype": torch.float16}
PROGRAMS = [
    Program("precision_rounds_anew_and_mixes", _mixing_weakly, of_shape(8, 6), "refused", loss_of_the_model),
    Program(
        "precision_scales_by_batch",
        _scaling_by_batch,
        of_shape(8, 6),
        "refused",
        loss_of_the_model,
        {"dtype": torch.float32},
    ),
    Program("precision_float32_inside", _part_in(torch.float32), of_shape(5, 6), "exact", settings={"tolerance": 1e-5}),
    Program("precision_weak_mixing_in_float64", _part_in(torch.float64), of_shape(5, 6), "refused"),
    # Added up in bf16, a sum of ones stays at 256, and one of 512 equal numbers whatever they are.
    *(
        Program(
            f"precision_{name}",
            _linear,
            steps,
            "exact",
            settings={**settings, "removes": False},
            nightly=name in ("bf16_accumulated_ones", "bf16_large_batch_two_passes"),  # as those without the ending
        )
        for name, steps, settings in (
            ("bf16_accumulated", _equal(512, *[1] * 60), _BF16),
            ("bf16_accumulated_ones", _equal(*[1] * 400), _BF16),
            ("bf16_large_batch", _equal(600), _BF16),
            ("bf16_large_batch_two_passes", _equal(600), {**_BF16, "passes": 2}),
            ("bf16_per_layer", _equal(512, *[1] * 60), {**_BF16, "clipping": "per_layer"}),
            ("fp16_large_batch", _equal(600), _FP16),
        )
    ),
    *(
        Program(f"precision_{name}", _linear, _equal(4, 4, scale=scale), allowed, settings=settings)
        for name, scale, allowed, settings in (
            ("fp16_small", 2e-4, "exact", _FP16),
            ("fp16_large", 500.0, "exact", _FP16),
            ("bf16_small", 1e-25, "exact", _BF16),
            ("bf16_large", 1e25, "either", _BF16),
            ("fp32_small", 1e-25, "exact", {"dtype": torch.float32}),
            ("fp32_large", 1e25, "either", {"dtype": torch.float32}),
        )
    ),
]
