# SPDX-License-Identifier: Apache-2.0
"""Batches, states and sums of gradients, as the judge compares them."""

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Batch = dict[str, torch.Tensor]
Sums = dict[str, torch.Tensor]
COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def seed_all(seed: int) -> None:
    """Seeds the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts floating-point and, unlike ``Module.to``, complex parameters and buffers to the precision of ``dtype``."""
    return model._apply(lambda x: cast_tensor(x, dtype))


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Returns the batch in the precision of ``dtype``."""
    return {key: cast_tensor(x, dtype) for key, x in batch.items()}


def cast_tensor(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor in the precision of ``dtype``; integers stay."""
    if x.is_complex():
        return x.to(COMPLEX[dtype])
    return x.to(dtype) if x.is_floating_point() else x


def size_of(batch: Batch) -> int:
    """Returns the number of samples."""
    return len(next(iter(batch.values())))


def select(batch: Batch, samples: list[int]) -> Batch:
    """Returns some samples of a batch."""
    return {key: x[samples] for key, x in batch.items()}


def widened(g: torch.Tensor) -> torch.Tensor:
    """Returns a gradient in double precision."""
    g = g.detach().to_dense() if g.is_sparse else g.detach()
    return g.to(torch.complex128) if g.is_complex() else g.double()


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Returns a parameter's gradient in double precision; zeros if it has none."""
    return torch.zeros_like(parameter, dtype=torch.float64) if parameter.grad is None else widened(parameter.grad)


def norm_of(tensors: Any) -> float:
    """The Euclidean norm of some tensors together, without overflow at 1e200."""
    norms = [float(torch.linalg.vector_norm(t)) for t in tensors]
    return math.hypot(*norms) if norms else 0.0


def state_of(model: nn.Module) -> Sums:
    """Returns copies of parameters and buffers."""
    named: Mapping[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: x.detach().clone() for name, x in named.items()}


def load_state(model: nn.Module, state: Sums) -> None:
    """Copies parameters and buffers into the model."""
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            x.data.copy_(state[name])
