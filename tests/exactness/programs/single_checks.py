# SPDX-License-Identifier: Apache-2.0
"""Mixing that one check of a proof alone can find: in an output, in a layer's input, or in an output gradient.

Samples depend on others that are far away, so that only a proof with as many samples sees it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.exactness.program import Graph, Program, changed_in_backward, loss_of_the_model, of_shape

_DISTANCE = 4
Mix = Callable[[torch.Tensor], torch.Tensor]


def _pair(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Graph(function, first=nn.Linear(6, 6), last=nn.Linear(6, 3))


def _with_later_samples(h: torch.Tensor, size: float = 1.0) -> torch.Tensor:
    """Adds later samples to earlier ones, without their gradients."""
    later = h.detach()[_DISTANCE : 2 * _DISTANCE]
    return torch.cat([h[: len(later)] + size * later, h[len(later) :]])


def _with_sample_0(h: torch.Tensor) -> torch.Tensor:
    """Adds sample 0 to sample 7, whose index has every binary digit 1 where that of 0 has 0."""
    return torch.cat([h[:7], h[7:8] + h.detach()[: len(h[7:8])], h[8:]])


def _with_sample_8(h: torch.Tensor) -> torch.Tensor:
    """Adds a sample to sample 0 whose index differs in the highest binary digit alone."""
    return torch.cat([h[:1] + h.detach()[8:9].sum(0), h[1:]])


@changed_in_backward
def _scaled_in_backward(g: torch.Tensor) -> torch.Tensor:
    """Limits the gradient of the first samples by the size of the later ones."""
    return g / (1 + g[_DISTANCE:].norm())


def _in_outputs(mix: Mix) -> Callable[[], nn.Module]:
    return _pair(lambda m, x: mix(m.last(torch.tanh(m.first(x)))))


def _by_hook(mix: Mix) -> Callable[[], nn.Module]:
    """The hook is one of the model itself."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        model.register_forward_hook(lambda module, args, output: mix(output))
        return model

    return build


def _by_pre_hook(mix: Mix) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        model.register_forward_pre_hook(lambda module, args: (mix(args[0]),))
        return model

    return build


PROGRAMS = [
    Program("single_hook", _by_hook(_with_later_samples), of_shape(9, 6), "refused"),
    Program("single_pre_hook", _by_pre_hook(_with_later_samples), of_shape(9, 6), "refused"),
    Program("single_output_of_later", _in_outputs(_with_later_samples), of_shape(9, 6), "refused"),
    Program("single_output_of_0", _in_outputs(_with_sample_0), of_shape(9, 6), "refused"),
    Program("single_output_of_8", _in_outputs(_with_sample_8), of_shape(9, 6), "refused"),
    Program(
        "single_output_of_later_weakly",
        _in_outputs(lambda h: _with_later_samples(h, 1e-6)),
        of_shape(9, 6),
        "refused",
    ),
    *(
        Program(
            f"single_input_of_{name}",
            # The loss is the model's, and linear in what the layer makes of its input.
            _pair(lambda m, x, mix=mix: m.last(mix(torch.tanh(m.first(x)))).sum()),
            of_shape(9, 6),
            "refused",
            loss_of_the_model,
        )
        for name, mix in (("later", _with_later_samples), ("0", _with_sample_0))
    ),
    Program("single_gradient", _pair(lambda m, x: m.last(_scaled_in_backward(m.first(x)))), of_shape(9, 6), "refused"),
]
