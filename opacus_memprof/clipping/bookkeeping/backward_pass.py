# SPDX-License-Identifier: Apache-2.0
"""The tensors that the backward pass of one physical batch has kept."""

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from opacus_memprof.clipping.bookkeeping.norm_checks import Limit
from opacus_memprof.clipping.layers import KeptTensors, Layer
from opacus_memprof.clipping.layers.shared import SharedGradient
from opacus_memprof.clipping.layers.small_layers import find_deferred_norms
from opacus_memprof.clipping.workspace import Workspace

Factors: TypeAlias = "torch.Tensor | dict[nn.Parameter, torch.Tensor]"
"""Clip factors, [B], of all parameters or by parameter."""


@dataclass
class BackwardPass:
    """The tensors that the backward of one physical batch has kept.

    Attributes:
        batch_size: the size of the physical batch.
        kept: kept tensors by layer.
        shared: kept tensors of parameters that are used more than once.
        sums: clipped sums, by parameter, that a second backward has already formed.
        clipped: whether `sums` is used instead of `kept`.
        limit: the limit of the clipped sums' norms, once the clip factors are known.
        samples: the indices of the remaining samples, if others have been dropped.
        dropped: the indices of the dropped samples.
        factors: the clip factors, if a second backward has formed `sums` with them.
        forwards: numbers of the forwards that this backward belongs to: several if one call of `backward` goes through
            them; they then have the same samples.
        tasks: autograd's numbers of these calls.
    """

    batch_size: int
    kept: dict[Layer, KeptTensors] = field(default_factory=dict)
    shared: dict[nn.Parameter, SharedGradient] = field(default_factory=dict)
    sums: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    clipped: bool = False
    limit: Limit = field(default_factory=Limit)
    samples: torch.Tensor | None = None
    dropped: list[int] = field(default_factory=list)
    factors: torch.Tensor | None = None
    forwards: set[int] = field(default_factory=set)
    tasks: set[int] = field(default_factory=set)

    def add_shared(self, layer: Layer, kept: KeptTensors, workspace: Workspace) -> None:
        """Adds the tensors that backward has kept for one of several uses of a parameter."""
        for parameter in layer.trainable():
            if parameter not in self.shared:
                self.shared[parameter] = SharedGradient(parameter, layer)
            self.shared[parameter].add(layer, kept, workspace)

    def first_of(self, layer: Layer) -> KeptTensors | None:
        """Returns the tensors that the first of two passes has kept for a layer's weight."""
        for parameter in layer.trainable():
            if parameter in self.shared:
                return self.shared[parameter].kept_norms
        return self.kept.get(layer)

    def select(self, factors: Factors) -> Factors:
        """Drops excluded samples, one layer after the other, and returns the clip factors of the others."""
        samples = self.samples
        if samples is None:
            return factors
        for kept in self.kept.values():
            kept.select(samples)
        for shared in self.shared.values():
            shared.select(samples)
        if isinstance(factors, dict):
            return {parameter: own[samples] for parameter, own in factors.items()}
        return factors[samples]

    def release_shared(self) -> None:
        """Drops everything except the norms."""
        for shared in self.shared.values():
            shared.release()

    def parameter_ids(self) -> set[int]:
        """Returns the ids of the parameters that gradients have reached. They are faster than sets of tensors."""
        kept = {id(parameter) for kept in self.kept.values() for parameter in kept.norms}
        return kept | {*map(id, self.shared)} | {*map(id, self.sums)}

    def squared_norms(
        self, workspace: Workspace
    ) -> tuple[list[nn.Parameter], list[torch.Tensor], list[Layer | SharedGradient]]:
        """Returns the parameters, the squared norms of their gradients, [B] each, and the layer of each."""
        find_deferred_norms(self.kept)
        parameters: list[nn.Parameter] = []
        norms: list[torch.Tensor] = []
        owners: list[Layer | SharedGradient] = []
        for layer, kept in self.kept.items():
            for parameter, of_parameter in kept.norms.items():
                assert of_parameter is not None
                parameters.append(parameter)
                norms.append(of_parameter)
                owners.append(layer)
        for parameter, shared in self.shared.items():
            parameters.append(parameter)
            norms.append(shared.squared_norms(workspace))
            owners.append(shared)
        return parameters, norms, owners
