# SPDX-License-Identifier: Apache-2.0
"""The base class of all layers: exact per-sample norms, kept tensors, and clipped sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from opacus_memprof.clipping.agreement import computing_device
from opacus_memprof.clipping.cost import Choice
from opacus_memprof.clipping.kernels.norm_bounds import pair_for_sums
from opacus_memprof.clipping.kernels.norms import has_kernels, squared_norms, squared_norms_unless_deferred
from opacus_memprof.clipping.kernels.sums import scale_single_samples, sum_stack
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, sum_dtype
from opacus_memprof.errors import MemprofError


@dataclass(slots=True)
class KeptTensors:
    """The tensors that one layer's backward keeps until the clip factors are known.

    Attributes:
        norms: squared norms, [B], float32 (float64), by parameter; None until `find_deferred_norms` computes them.
        stacks: per-sample gradients, [B, *parameter.shape], by parameter.
        pair: input and output gradient, if these are smaller than the weight's per-sample gradients.
        lost: on CUDA, booleans [B]: samples whose tokens cancel, so that the product that forms the clipped sum of
            `pair` would lose digits. None if there are no such samples.
        noted_version: the value of `version()` when backward had just kept the tensors.
    """

    norms: dict[nn.Parameter, torch.Tensor | None] = field(default_factory=dict)
    stacks: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    pair: tuple[torch.Tensor, torch.Tensor] | None = None
    lost: torch.Tensor | None = None
    noted_version: int = 0

    def version(self) -> int:
        """Returns a number that grows when a program writes to one of the tensors, which may be its own input."""
        found: int = sum(map(_version, self.stacks.values()))
        return found if self.pair is None else found + self.pair[0]._version + self.pair[1]._version

    @property
    def squared_norms(self) -> torch.Tensor:
        """The squared norms, [B], of all parameters of the layer together."""
        found = [norms for norms in self.norms.values() if norms is not None]
        assert len(found) == len(self.norms), "find_deferred_norms has not been called"
        return torch.stack(found).sum(0)

    def select(self, samples: torch.Tensor) -> None:
        """Drops all samples except those with these indices. The norms stay."""
        self.stacks = {parameter: stack[samples.to(stack.device)] for parameter, stack in self.stacks.items()}
        if self.pair is not None:
            rows = samples.to(self.pair[1].device)
            self.pair = self.pair[0][rows], self.pair[1][rows]
        self.lost = None if self.lost is None else self.lost[samples.to(self.lost.device)]

    def split(self) -> Iterator[tuple[nn.Parameter, KeptTensors]]:
        """Yields the kept tensors of each parameter."""
        for parameter, norms in self.norms.items():
            stacks = {parameter: self.stacks[parameter]} if parameter in self.stacks else {}
            if stacks:
                yield parameter, KeptTensors({parameter: norms}, stacks)
            else:
                yield parameter, KeptTensors({parameter: norms}, pair=self.pair, lost=self.lost)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors: (the profiler's category, tensor)."""
        yield from (("norm_samples", norms) for norms in self.norms.values() if norms is not None)
        yield from (("per_sample_gradients", stack) for stack in self.stacks.values())
        if self.pair is not None:
            yield "activation_hooks", self.pair[0]
            yield "backprop_copies", self.pair[1]


_version = attrgetter("_version")


class SplitFactors(NamedTuple):
    """Clip factors of the samples of a pair.

    Attributes:
        rounded: the factors, with 0 for samples whose tokens cancel.
        lost: the factors of samples whose tokens cancel, with 0 for others; None if there are no such samples.
    """

    rounded: torch.Tensor
    lost: torch.Tensor | None


def split_factors(factors: torch.Tensor, lost: torch.Tensor | None) -> SplitFactors:
    """Splits clip factors by `KeptTensors.lost`, without waiting for the device."""
    if lost is None:
        return SplitFactors(factors, None)
    own = factors * lost
    return SplitFactors(factors - own, own)


def keep_stacks(stacks: dict[nn.Parameter, torch.Tensor]) -> KeptTensors:
    """Keeps per-sample gradients, and their norms unless these are deferred."""
    return KeptTensors({p: squared_norms_unless_deferred(stack) for p, stack in stacks.items()}, stacks)


KeepFunction = Callable[[torch.Tensor, torch.Tensor, Workspace], KeptTensors]


class Layer:
    """A layer of the model.

    The per-sample gradients of small parameters are always formed. For a large weight, input and output gradient (a
    pair) are kept instead if they are smaller than its per-sample gradients.

    In all methods `x` is the layer's input and `g` the gradient of its output, both with the batch first. Methods
    change neither.
    """

    any_arrangement = False  # whether dimensions between samples and features may be arranged in any way

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.running_module = module  # in a sharded model, `module` is a twin of the running module
        self.is_shared = False  # whether its parameters are used more than once in a pass, as far as known
        self._seen: list[nn.Parameter] = []
        self._chosen: tuple[object, Choice | None] | None = None  # the last choice, and its shapes
        self._keep_function: tuple[object, KeepFunction] | None = None  # state of the last backward, and its method
        self.excluded: set[str] = set()  # names of parameters that another layer clips

    def trainable(self) -> list[nn.Parameter]:
        own = self.module._parameters.items()
        return [p for name, p in own if p is not None and p.requires_grad and name not in self.excluded]

    def running_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that `trainable` returns while the layer runs.

        In a sharded model these are whole parameters instead of shards.
        """
        if self.running_module is self.module:
            return self.trainable()
        own = self.module._parameters.items()
        running: dict[str, Any] = self.running_module._parameters
        self._seen = [running[n] for n, p in own if p is not None and p.requires_grad and n not in self.excluded]
        return self._seen

    def seen_parameters(self) -> list[nn.Parameter]:
        """Returns the `running_parameters` of the last run."""
        return self.trainable() if self.running_module is self.module else self._seen

    def is_trainable(self, name: str) -> bool:
        parameter = self.module._parameters.get(name)
        return parameter is not None and parameter.requires_grad and name not in self.excluded

    def device(self) -> torch.device:
        return computing_device(next(self.module.parameters()))

    def describe(self) -> str:
        return f"layer {self.name!r} ({type(self.module).__name__})"

    # --- methods that subclasses define ---
    def min_dimensions(self) -> int:
        """Returns the least number of dimensions of an input that has a batch dimension."""
        raise NotImplementedError

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the input as autocast will cast it, so that the kept tensor is the one that the layer uses."""
        return x

    def small_gradients(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> dict[str, torch.Tensor]:
        """Returns the per-sample gradients, by name, of the trainable parameters other than the large weight."""
        raise NotImplementedError

    def choose(self, x: torch.Tensor, g: torch.Tensor, keep: bool) -> Choice | None:
        """Returns how to clip the large weight, from shapes and dtypes; None if the layer has no such weight."""
        return None

    def weight_gradients(self, x: torch.Tensor, g: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """Returns the per-sample gradients of the weight, [B, *weight.shape]."""
        raise NotImplementedError

    def terms(self, x: torch.Tensor) -> int:
        """Returns the largest number of output positions, in one channel, that use the same element of the input.

        1 for linear layers. For inputs that are indices, returns the number of indices in a sample.
        """
        return 1

    def defers_norms(self, x: torch.Tensor, g: torch.Tensor, choice: Choice) -> bool:
        """Returns whether the norms of a weight with a kept pair are deferred to the optimizer's step.

        See small_layers.py.
        """
        return False

    def weight_squared_norms(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        choice: Choice,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the squared norms of the weight's per-sample gradients, [B], without keeping the gradients.

        On CUDA, `lost` is set for samples whose clipped sum would lose digits (see KeptTensors).
        """
        raise NotImplementedError

    def weight_sum(
        self,
        x: torch.Tensor,
        g: torch.Tensor,
        factors: torch.Tensor,
        workspace: Workspace,
        lost: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the clipped sum, of the weight's shape; float32 if `g` is of low precision.

        On CUDA, `lost` has the clip factors, [B] float32, of samples whose gradients are formed in float64; their
        `factors` are 0.
        """
        raise NotImplementedError

    # --- methods that all layers share ---
    def check_input(self, x: object) -> torch.Tensor:
        """Raises MemprofError unless `x` is a tensor with a batch dimension."""
        if not isinstance(x, torch.Tensor):
            raise MemprofError(
                f"{self.describe()} was not called with a tensor as its first argument; pass it by position."
            )
        if x.dim() < self.min_dimensions():
            raise MemprofError(
                f"{self.describe()} got an input of shape {tuple(x.shape)}, which has no batch dimension; "
                f"flash_clip needs at least {self.min_dimensions()} dimensions, the batch first (use unsqueeze(0))."
            )
        return x

    def kept_bytes(self, x: torch.Tensor, y: torch.Tensor) -> int:
        """Returns the bytes that backward will keep for the large weight, from shapes alone. `y` is the output."""
        choice = self._choice(x, y, keep=True)
        return 0 if choice is None else choice.kept_bytes

    def batch_size(self, x: torch.Tensor | None, g: torch.Tensor) -> int:
        """Returns the number of samples of a backward."""
        return g.shape[0]

    def keep(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace, norms: bool = True) -> KeptTensors:
        """Keeps per-sample gradients or the pair (x, g), whichever is smaller, and exact norms if `norms` is True.

        Norms that are deferred to the optimizer's step are None.
        """
        if not norms or x is None or self.excluded or type(self).keep_function is Layer.keep_function:
            return self._keep(x, g, workspace, norms)
        # The choice depends on these alone. A new choice would take longer than a small layer's kernels.
        own = [p is not None and p.requires_grad for p in self.module._parameters.values()]
        state = (x.shape, g.shape, x.stride(), g.stride(), x.dtype, g.dtype, x.device, own)
        if self._keep_function is not None and self._keep_function[0] == state:
            return self._keep_function[1](x, g, workspace)
        kept = self._keep(x, g, workspace, norms)
        function = self.keep_function(kept, x, g, workspace)
        self._keep_function = None if function is None else (state, function)
        return kept

    def keep_function(
        self, kept: KeptTensors, x: torch.Tensor, g: torch.Tensor, workspace: Workspace
    ) -> KeepFunction | None:
        """Returns a function that repeats for later tensors what `keep` has done for these, without a new choice.

        Later tensors must have the shapes, strides, dtypes and device of `x` and `g`. Returns None if the layer has no
        such function.
        """
        return None

    def _keep(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace, norms: bool) -> KeptTensors:
        stacks = dict(self._small(x, g, workspace))
        kept = keep_stacks(stacks) if norms else KeptTensors(stacks=stacks)
        choice = self._choice(x, g, keep=True)
        if choice is None or x is None:
            return kept
        weight = self.weight()
        if choice.keep == "gradient":
            stack = kept.stacks[weight] = self.weight_gradients(x, g, workspace)
            if norms:
                kept.norms[weight] = squared_norms_unless_deferred(stack)
        else:
            kept.pair = (x, g)
            if norms:
                if self.defers_norms(x, g, choice):
                    kept.norms[weight] = None
                else:
                    self._keep_norms(kept, x, g, choice, workspace)
        return kept

    def _keep_norms(
        self, kept: KeptTensors, x: torch.Tensor, g: torch.Tensor, choice: Choice, workspace: Workspace
    ) -> None:
        """Keeps the pair and its norms, both from float64 where float32 would be too imprecise."""
        if has_kernels(g) and g.dim() > 2:
            kept.lost = torch.empty(len(g), dtype=torch.bool, device=g.device)
        squares = self.weight_squared_norms(x, g, choice, workspace, kept.lost)
        pair = pair_for_sums(x, g, squares, self.terms(x))
        if pair[1] is not g:
            squares = self.weight_squared_norms(*pair, choice, workspace).to(squares.dtype)
        kept.pair, kept.norms[self.weight()] = pair, squares

    def keep_norms(self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace) -> KeptTensors:
        """Keeps only the exact squared norms, [B]."""
        kept = KeptTensors({parameter: squared_norms(stack) for parameter, stack in self._small(x, g, workspace)})
        choice = self._choice(x, g, keep=False)
        if choice is not None and x is not None:
            self._keep_norms(kept, x, g, choice, workspace)
            kept.pair = None
        return kept

    def sums_of_backward(
        self,
        x: torch.Tensor | None,
        g: torch.Tensor,
        factors: torch.Tensor,
        samples: torch.Tensor | None,
        workspace: Workspace,
        first: KeptTensors | None = None,
    ) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the clipped sums by parameter in the second of two passes, without keeping anything.

        Sums of weights that are used several times may be float64, because their uses may cancel.

        Args:
            x: see Layer.
            g: see Layer.
            factors: clip factors, [B].
            samples: the indices of the samples to include; None for all.
            workspace: limit on temporaries.
            first: the tensors that the first pass has kept.
        """
        own = factors.to(g.device, accumulation_dtype(g.dtype))
        lost = None if first is None else first.lost
        if samples is not None:
            rows = samples.to(g.device)
            x, g, own = None if x is None else x[rows], g[rows], own[rows]
            lost = None if lost is None else lost[rows]
        sums = {p: sum_stack(stack, own, sum_dtype(p.dtype), workspace) for p, stack in self._small(x, g, workspace)}
        if self._choice(x, g, keep=False) is not None and x is not None:
            weight = self.weight()
            squares = None if first is None else first.norms.get(weight)
            if squares is not None:
                x, g = pair_for_sums(x, g, squares if samples is None else squares[rows], self.terms(x))
            split = split_factors(own, lost)
            total = self.weight_sum(x, g, split.rounded, workspace, split.lost)
            is_wide = self.is_shared and total.dtype == torch.float64
            sums[weight] = total if is_wide else total.to(sum_dtype(weight.dtype))
        return sums

    def clipped_sums(
        self, kept: KeptTensors, factors: torch.Tensor, workspace: Workspace, split: SplitFactors | None = None
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields the clipped sums, in float32 for parameters of low precision. Releases kept tensors as it uses them.

        Args:
            kept: the kept tensors.
            factors: clip factors, [B].
            workspace: limit on temporaries.
            split: the factors for the pair of input and output gradient; by default `split_factors` of `factors`.
        """
        while kept.stacks:
            parameter, stack = kept.stacks.popitem()
            if self.is_scaled_in_place(parameter, stack):
                (total,) = scale_single_samples([stack], factors)
            else:
                total = sum_stack(stack, factors, sum_dtype(parameter.dtype), workspace)
            del stack
            yield parameter, total
        if kept.pair is not None:
            (x, g), kept.pair = kept.pair, None
            own = split_factors(factors, kept.lost) if split is None else split
            total = self.weight_sum(x, g, own.rounded, workspace, own.lost).to(sum_dtype(self.weight().dtype))
            del x, g
            yield self.weight(), total

    owns_weight_gradients = False

    def is_scaled_in_place(self, parameter: nn.Parameter, stack: torch.Tensor) -> bool:
        """Returns whether the clipped sum is the gradient of a single sample, scaled in place.

        Only the weight's gradients may be overwritten, because others may be views of gradients that autograd uses.
        """
        is_owned = self.owns_weight_gradients and parameter is self.module._parameters.get("weight")
        is_single = stack.shape[0] == 1 and stack.numel() > 0 and stack.is_contiguous()
        return is_owned and is_single and stack.dtype == sum_dtype(parameter.dtype)

    def weight(self) -> nn.Parameter:
        weight = self.module._parameters["weight"]
        assert isinstance(weight, nn.Parameter)
        return weight

    def _small(
        self, x: torch.Tensor | None, g: torch.Tensor, workspace: Workspace
    ) -> list[tuple[nn.Parameter, torch.Tensor]]:
        own = self.module._parameters
        return [(own[n], s) for n, s in self.small_gradients(x, g, workspace).items()]  # type: ignore[misc]

    def _choice(self, x: torch.Tensor | None, g: torch.Tensor, keep: bool) -> Choice | None:
        if x is None or not self.is_trainable("weight"):
            return None
        shapes = (x.shape, g.shape, x.dtype, g.dtype, keep)
        if self._chosen is None or self._chosen[0] != shapes:
            self._chosen = shapes, self.choose(x, g, keep)
        return self._chosen[1]
