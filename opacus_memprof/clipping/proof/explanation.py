# SPDX-License-Identifier: Apache-2.0
"""Checks that the outputs of the model explain a step.

The gradients that backward has brought to the layers must equal autograd's gradients of the model's outputs alone. The
latter lack the gradients of a term of the loss that bypasses the outputs (through an attribute, a list, a hook), and
those of a layer that used other random numbers than the forward.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from opacus_memprof.clipping.bookkeeping.backward_pass import BackwardPass
from opacus_memprof.clipping.forwards.repetition import Modes, Surroundings
from opacus_memprof.clipping.forwards.state import Arrangement, ModuleState, RandomState
from opacus_memprof.clipping.layers import KeptTensors
from opacus_memprof.clipping.proof.batches import as_output, has_samples
from opacus_memprof.clipping.proof.by_hand import (
    GradientSums,
    add_gradients,
    all_real,
    without_cudnn,
    without_tf32,
    wrong_sums,
)
from opacus_memprof.clipping.proof.certificate import SituationRecord
from opacus_memprof.clipping.proof.loss_graph import reductions_of_loss
from opacus_memprof.clipping.proof.model_state import only_saved_tensors_hooks, saved_tensors_hooks
from opacus_memprof.clipping.proof.recorder import Sum
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, slices
from opacus_memprof.errors import MemprofError

_PARTS = 8
"""The batch is repeated in so many parts, if possible, so that this needs little memory in addition to backward's."""


@dataclass
class RecordedForward:
    """A forward whose step will be explained.

    Attributes:
        module: the module that was called.
        args, kwargs: copies of its arguments.
        batch: the number of samples.
        random: the initial state of the random number generators.
        state: the initial state of the module.
        surroundings: what it runs under.
        versions: how often the trained parameters had been written to.
        hooks: the program's saved-tensor hooks, if there are.
        runs_hooks: whether it is repeated under them.
        arrangements: the position of samples in the output's tensors; None for tensors that all samples share.
        gradients: the gradients of the output's tensors, by index.
        draws: whether the forward has drawn random numbers.
        computed_in: the coarsest dtype in which the module computes; None if that is not known.
        reductions: of the loss over the samples, as far as they are known.
        modes_of_backward: the modes that backward has run under.
        proof: the record of its situation, and the number of the forward in it.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: int
    random: RandomState
    state: ModuleState
    surroundings: Surroundings
    versions: dict[nn.Parameter, int]
    hooks: ElementwiseHooks | None
    runs_hooks: bool = False
    arrangements: list[Arrangement | None] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    draws: bool = False
    computed_in: torch.dtype | None = None
    reductions: set[str] = field(default_factory=set)
    modes_of_backward: Modes = field(default_factory=Modes)
    proof: tuple[SituationRecord, int] | None = None

    @classmethod
    def begin(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, random: RandomState
    ) -> RecordedForward:
        """Records the initial state of a forward."""
        args, kwargs = copied((args, kwargs))
        device = next((x.device.type for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)), "cpu")
        versions, hooks = _versions(module), saved_tensors_hooks()
        watched = None if hooks is None else ElementwiseHooks(*hooks)
        return cls(
            module, args, kwargs, batch, random, ModuleState(module), Surroundings.now(device), versions, watched
        )

    def release(self) -> None:
        """Drops all data, because the hooks of outputs that the program keeps still hold this object."""
        self.__dict__.clear()

    def changed(self) -> list[nn.Parameter]:
        """Returns the parameters that have been written to since then, but not through `.data`."""
        now = _versions(self.module)
        return [p for p, version in self.versions.items() if now.get(p, version) != version]

    def add(self, place: int, gradient: torch.Tensor) -> None:
        """Adds the gradient of one of the output's tensors."""
        if self.batch > 1 and not self.gradients:
            self.reductions = reductions_of_loss()
        self.modes_of_backward = Modes.now()
        gradient = gradient.detach()
        self.gradients[place] = self.gradients[place] + gradient if place in self.gradients else gradient.clone()

    def add_gradients(self, total: GradientSums, weights: torch.Tensor, parts: int) -> None:
        """Adds the gradients of parameters from the outputs alone, by plain autograd.

        Args:
            total: the gradients so far by parameter.
            weights: the factors of the samples' gradients, [B].
            parts: the number of parts of the batch, one after the other, if it can be split.
        """
        # Samples are independent, so the batch can be split, unless its parts would draw other random numbers.
        is_one = self.draws or any(self.arrangements[i] is None for i in self.gradients)
        size = self.batch if is_one else -(-self.batch // parts)
        for n in slices(self.batch, max(1, size)):
            self._add_part(n, total, weights)

    def _add_part(self, n: slice, total: GradientSums, weights: torch.Tensor) -> None:
        leaves, structure = tree_flatten(copied((self.args, self.kwargs)))  # a forward may write to its arguments
        is_whole = (n.start, n.stop) == (0, self.batch)
        args, kwargs = tree_unflatten(
            [leaf if is_whole or not has_samples(leaf, self.batch) else leaf[n] for leaf in leaves], structure
        )
        now = ModuleState(self.module)
        self.state.restore()
        hooks = () if self.hooks is None or not self.runs_hooks else ((self.hooks.pack_and_check, self.hooks.unpack),)
        try:
            with (
                self.random.restored(),
                torch.enable_grad(),
                self.surroundings.restored(),
                only_saved_tensors_hooks(*hooks),
            ):
                leaves = tree_flatten(self.module(*args, **kwargs))[0]
                tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        finally:
            now.restore()
        outputs, given = [], []
        for place, gradient in self.gradients.items():
            outputs.append(tensors[place])
            given.append(self._gradient(gradient, self.arrangements[place], n, tensors[place], weights))
        with self.modes_of_backward.restored():
            add_gradients(outputs, given, total)

    def _gradient(
        self, gradient: torch.Tensor, where: Arrangement | None, n: slice, output: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        if where is None:
            return gradient * weights[0].to(gradient)
        rows = where.by_sample(gradient, self.batch)[n]
        scale = weights[n].to(rows.device).view(-1, *[1] * (rows.dim() - 1))
        return as_output((rows * scale).to(rows.dtype), where, output)


class ElementwiseHooks:
    """Saved-tensor hooks of a program, which may round each element by itself, and read nothing from elsewhere.

    A scale from the whole tensor, or from earlier batches, would mix samples.

    Args:
        pack, unpack: the hooks.
    """

    def __init__(self, pack: Any, unpack: Any) -> None:
        self.pack, self.unpack = pack, unpack
        self.is_fixed = _is_fixed(pack) and _is_fixed(unpack)
        self._generator = torch.Generator().manual_seed(5)

    def name(self) -> str:
        """Returns the name of what gives backward a tensor."""
        return str(getattr(self.unpack, "__qualname__", type(self.unpack).__qualname__))

    def pack_and_check(self, x: torch.Tensor) -> Any:
        """Packs a tensor, and checks that its elements do not depend on one another."""
        with torch.no_grad():
            own = self.unpack(self.pack(x))
            if not (x.is_floating_point() or x.is_complex()):
                self.is_fixed &= torch.equal(own, x)
            for factor in (-4.0, 0.25) if self.is_fixed and x.numel() else ():
                kept = (torch.rand(x.shape, generator=self._generator) < 0.5).to(x.device)
                for stays in (kept, ~kept) if own.dtype.is_floating_point or own.dtype.is_complex else ():
                    other = self.unpack(self.pack(torch.where(stays, x.detach(), x.detach() * factor)))
                    self.is_fixed &= torch.equal(other[stays].nan_to_num(), own[stays].nan_to_num())
        return self.pack(x)


_OPEN = {"eval", "exec", "getattr", "globals", "vars", "__import__"}
"""Functions by which others reach what does not stand in their code."""


def _is_fixed(function: Any, depth: int = 4) -> bool:
    """Returns whether a function computes with nothing but its arguments and the constants that stand in its code."""
    if function is None or isinstance(function, (bool, str, torch.dtype, torch.device)):
        return True
    if isinstance(function, ModuleType):
        return function.__name__.partition(".")[0] in ("torch", "math")
    if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] in ("torch", "math"):
        is_torch = str(getattr(function, "__module__", "")).partition(".")[0] in ("torch", "math", "builtins")
        return is_torch and callable(function)
    codes = [function.__code__]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    names = {each.argval for code in codes for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    if names & _OPEN or any(each.opname == "IMPORT_NAME" for code in codes for each in dis.get_instructions(code)):
        return False
    values = [each.cell_contents for each in function.__closure__ or ()]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    values += [function.__globals__.get(name) for name in names]
    return depth > 0 and all(_is_fixed(each, depth - 1) for each in values)


def _versions(module: nn.Module) -> dict[nn.Parameter, int]:
    return {p: p._version for p in module.parameters() if p.requires_grad}


def copied(arguments: Any) -> Any:
    """Returns the arguments of a forward with copies of their tensors."""
    return tree_map(_copied, arguments)


def _copied(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def check_explained(
    each: BackwardPass,
    recorded: list[RecordedForward],
    names: Mapping[nn.Parameter, str],
    workspace: Workspace,
) -> None:
    """Checks that a backward pass has kept the same gradients that plain autograd finds from the outputs.

    Args:
        each: the pass.
        recorded: its forwards.
        names: the names of the trained parameters.
        workspace: limit on temporaries.

    Raises:
        MemprofError: they differ.
    """
    if each.factors is not None and any(f.arrangements[place] is None for f in recorded for place in f.gradients):
        return  # already clipped sums of a loss that all samples share: samples cannot be distinguished
    weights = torch.ones(each.batch_size) if each.factors is None else each.factors.detach()

    def autograd(scale: float, parts: int) -> GradientSums:
        total: GradientSums = dict.fromkeys(names)
        for forward in recorded:
            forward.add_gradients(total, weights * scale, parts)
        return total

    dtypes = [g.dtype for forward in recorded for g in forward.gradients.values()]
    dtypes += [each.dtype for each in (forward.surroundings for forward in recorded) if each.has_autocast]
    dtypes += [forward.computed_in for forward in recorded if forward.computed_in is not None]
    low = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    def wrong_in(parts: int, sums: Iterator[tuple[nn.Parameter, torch.Tensor]]) -> dict[nn.Parameter, float]:
        return wrong_sums(((p, Sum(total, [], low)) for p, total in sums), partial(autograd, parts=parts))[0]

    wrong = wrong_in(_PARTS, _sums(each, workspace))
    if wrong and any(parameter.is_cuda for parameter in wrong) and not wrong_in(1, _sums(each, workspace)):
        # The kernels of the step explain it, which cuDNN takes for the whole batch; those for a part of it may round to
        # another side of a ReLU. PyTorch's own kernels tell whether the parts add up to the whole.
        with without_cudnn(), without_tf32():
            wrong = wrong_in(_PARTS, ((p, g) for p, g in all_real(autograd(1.0, 1)).items() if g is not None))
    if wrong:
        written = sorted({names[p] for forward in recorded for p in forward.changed() if p in names})
        if written:
            named = ", ".join(written[:3]) + (" and others" if len(written) > 3 else "")
            raise MemprofError(
                f"{named} changed between the model's forward and optimizer.step(), so that the step's gradients "
                "cannot be checked: change parameters after optimizer.step(). What depends on the batch, such as the "
                "ascent of sharpness-aware minimisation, would not be private."
            )
        hooked = [forward for forward in recorded if forward.hooks is not None]
        hooks = [forward.hooks for forward in hooked if forward.hooks is not None]
        if hooks and all(each.is_fixed for each in hooks):
            for forward in hooked:
                forward.runs_hooks = True
            if not wrong_in(_PARTS, _sums(each, workspace)) and all(each.is_fixed for each in hooks):
                return
        if hooks:
            raise MemprofError(
                f"saved-tensor hooks around the model change what backward reads ({hooks[0].name()}), so that the "
                "step's gradients cannot be checked, and may mix samples: use hooks that give tensors back as they "
                "were, such as torch.autograd.graph.save_on_cpu, or functions that change each element by itself and "
                "whose numbers stand in their code, not in variables."
            )
        parameter, error = max(wrong.items(), key=lambda item: item[1])
        raise MemprofError(
            f"the gradient of {names[parameter]} is {error:.1%} off the one that the outputs of the model explain: a "
            "term of the loss reaches the model beside its outputs (through an attribute, a list or a hook), or its "
            "forward cannot be repeated. Return what the loss is computed from as outputs of the model; no parameter "
            "was changed."
        )


def _sums(each: BackwardPass, workspace: Workspace) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yields each parameter with the sum of its per-sample gradients in a backward pass.

    The gradients are not clipped, unless the pass has formed clipped sums already. The kept tensors stay.
    """
    yield from each.sums.items()
    if each.clipped:
        return
    for layer, kept in each.kept.items():
        tensors = [*kept.stacks.values(), *(kept.pair or ())[1:]]
        one = torch.ones(each.batch_size, device=tensors[0].device, dtype=accumulation_dtype(tensors[0].dtype))
        stacks = {p: stack.clone() if len(stack) == 1 else stack for p, stack in kept.stacks.items()}
        yield from layer.clipped_sums(KeptTensors(dict(kept.norms), stacks, kept.pair), one, workspace)
    for parameter, shared in each.shared.items():
        own = copy.copy(shared)
        own.uses = list(shared.uses)
        tensor = shared.stack if shared.stack is not None else shared.uses[0].g
        one = torch.ones(each.batch_size, device=tensor.device, dtype=accumulation_dtype(tensor.dtype))
        yield parameter, own.clipped_sum(one, workspace)
