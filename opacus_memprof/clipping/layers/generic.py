# SPDX-License-Identifier: Apache-2.0
"""Any module: computes per-sample gradients by repeating its forward, some samples at a time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.forwards.repetition import Call, Gradients, Repetition, Way
from opacus_memprof.clipping.kernels.norms import squared_norms, squared_norms_unless_deferred
from opacus_memprof.clipping.kernels.sums import sum_stack
from opacus_memprof.clipping.layers.base import KeptTensors, Layer
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, sum_dtype


class GenericLayer(Layer):
    """A module whose forward is repeated to compute and keep the per-sample gradients of some of its parameters.

    In all methods `x` is the module's Call, and `g` lists the gradients of the call's outputs.

    Args:
        name: the name of the module.
        module: the module.
        names: the names of the parameters in the module.
    """

    def __init__(self, name: str, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__(name, module)
        self.names = list(names)
        self.way: Way = "vmap"
        self.changes_state = False  # whether its forward changes buffers or attributes of the module

    def trainable(self) -> list[nn.Parameter]:
        return list(self._parameters().values())

    def _parameters(self) -> dict[str, nn.Parameter]:
        found = {name: self.module.get_parameter(name) for name in self.names}
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def per_sample_gradients(
        self, call: Call, g: Sequence[torch.Tensor], workspace: Workspace
    ) -> Iterator[tuple[slice, Gradients]]:
        """Yields per-sample gradients, [n, *shape] by name, of as many samples at a time as fit into the workspace."""
        parameters = self._parameters()
        size = workspace.fit(sample_bytes(call, g, parameters.values()), call.batch)
        for n, found in Repetition(self.module, parameters, self.way).chunks(call, g, max(1, size)):
            # Clipping and noise treat a complex number as two real numbers.
            yield n, {name: torch.view_as_real(part) if part.is_complex() else part for name, part in found.items()}

    def batch_size(self, x: Any, g: Any) -> int:
        batch: int = int(x.batch)
        return batch

    def keep(self, x: Any, g: Any, workspace: Workspace, norms: bool = True) -> KeptTensors:
        call: Call = x
        kept, parameters = KeptTensors(), self._parameters()
        for n, gradients in self.per_sample_gradients(x, g, workspace):
            for name, part in gradients.items():
                parameter = parameters[name]
                if len(part) == call.batch:
                    kept.stacks[parameter] = part
                    continue
                if parameter not in kept.stacks:
                    kept.stacks[parameter] = part.new_empty(call.batch, *part.shape[1:])
                kept.stacks[parameter][n] = part
        if norms:
            kept.norms = {parameter: squared_norms_unless_deferred(stack) for parameter, stack in kept.stacks.items()}
        return kept

    def keep_norms(self, x: Any, g: Any, workspace: Workspace) -> KeptTensors:
        found: dict[nn.Parameter, list[torch.Tensor]] = {}
        parameters = self._parameters()
        for _, gradients in self.per_sample_gradients(x, g, workspace):
            for name, part in gradients.items():
                found.setdefault(parameters[name], []).append(squared_norms(part))
        return KeptTensors({parameter: torch.cat(parts) for parameter, parts in found.items()})

    def sums_of_backward(
        self,
        x: Any,
        g: Any,
        factors: torch.Tensor,
        samples: torch.Tensor | None,
        workspace: Workspace,
        first: KeptTensors | None = None,
    ) -> dict[nn.Parameter, torch.Tensor]:
        found: dict[nn.Parameter, torch.Tensor] = {}
        parameters = self._parameters()
        counts = torch.ones(len(factors), dtype=torch.bool, device=factors.device)
        if samples is not None:
            counts = torch.zeros_like(counts).index_fill_(0, samples, True)
        for n, gradients in self.per_sample_gradients(x, g, workspace):
            for name, part in gradients.items():
                parameter, own = parameters[name], factors[n].to(part.device, accumulation_dtype(part.dtype))
                if samples is not None:
                    rows = counts[n].to(part.device)
                    part, own = part[rows], own[rows]
                total = sum_stack(part, own, sum_dtype(parameter.dtype), workspace)
                found[parameter] = found[parameter].add_(total) if parameter in found else total
        return found


def sample_bytes(call: Call, g: Sequence[torch.Tensor], parameters: Iterable[nn.Parameter]) -> int:
    """Estimates the bytes for one sample: its gradients, and four times its inputs and outputs."""
    tensors = [x for x, where in zip(call.leaves, call.arrangements, strict=True) if where is not None]
    moved: int = sum(x.numel() * x.element_size() for x in [*tensors, *g]) // max(1, call.batch)
    return 4 * moved + sum(p.numel() * p.element_size() for p in parameters)
