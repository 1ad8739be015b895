# SPDX-License-Identifier: Apache-2.0
"""Gradients by plain autograd, to compare flash_clip's with.

Per-sample gradients come from a recorded forward: its inputs, random numbers and output cotangents. Sums of gradients
are compared with the sums that layers have computed.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from opacus_memprof.clipping.forwards.repetition import Surroundings
from opacus_memprof.clipping.forwards.state import GivenRows, RandomState
from opacus_memprof.clipping.kernels.norm_bounds import uses_tf32
from opacus_memprof.clipping.proof.recorder import Sum
from opacus_memprof.clipping.proof.summary import halves
from opacus_memprof.errors import MemprofError

Gradients = list[torch.Tensor | None]
_SAME_OUTPUT = 1e-5
_SAME_OUTPUT_LOW_PRECISION = 1e-2
GradientSums = dict[nn.Parameter, "torch.Tensor | None"]


class ForwardByHand:
    """A forward of a model in training, as it was called, and the gradients that backward brought to its outputs.

    Args:
        model: the plain model.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model = model
        self.args, self.kwargs = tree_map(_copied, (args, kwargs))
        devices = {each.device for each in [*model.parameters(), *_tensors((args, kwargs))]}
        self.random_state = RandomState.now(*devices)
        self._surroundings = Surroundings.now(next((each.type for each in devices if each.type != "cpu"), "cpu"))
        self._buffers = [buffer.clone() for buffer in model.buffers()]
        self.draws_random_numbers = False
        self.cotangents: dict[int, torch.Tensor] = {}
        self.shapes: list[torch.Size] = []
        batches = [len(each) for each in _tensors((args, kwargs)) if each.dim()]
        self.samples = batches[0] if batches else 0
        self.given = GivenRows(_tensors((args, kwargs)), self.samples)

    def watch(self, output: Any, is_counted: Callable[[], bool]) -> None:
        """Records the gradients of the outputs while `is_counted()` is True. Called when the forward has ended."""
        self.draws_random_numbers = self.random_state.has_moved()
        leaves = _tensors(output)
        self.shapes = [each.shape for each in leaves]
        for index, each in enumerate(leaves):
            if each.requires_grad:
                each.register_hook(  # type: ignore[no-untyped-call]
                    lambda g, i=index: self._add(i, g) if is_counted() else None
                )

    def _add(self, index: int, cotangent: torch.Tensor) -> None:
        known = self.cotangents.get(index)
        self.cotangents[index] = cotangent.detach().clone() if known is None else known + cotangent

    @property
    def is_low_precision(self) -> bool:
        """Whether the model, or a part of it, computed in float16 or bfloat16."""
        low = (torch.float16, torch.bfloat16)
        in_autocast = self._surroundings.has_autocast and self._surroundings.dtype in low
        tensors = [*self.cotangents.values(), *self.model.parameters()]
        return in_autocast or any(each.dtype in low for each in tensors)

    def refuse_without_samples(self) -> None:
        """Raises MemprofError if a gradient arrived at an output that has no batch dimension."""
        for index in self.cotangents:
            shape = tuple(self.shapes[index])
            if not shape or shape[0] != self.samples:
                raise MemprofError(
                    f"the check cannot certify {_name(self.model)}: the loss depends on an output of shape "
                    f"{list(shape)}, whose first dimension is not the batch of {self.samples} samples; return one "
                    "output per sample and compute the loss outside the model, or pass check='off'."
                )

    def per_sample_gradients(self, parameters: Sequence[nn.Parameter]) -> Iterator[Gradients]:
        """Yields each sample's gradients of `parameters`; None for parameters without a gradient.

        A model that draws no random numbers runs on each sample alone. Any other model runs on the whole batch with the
        same random numbers, and backward starts from one sample's outputs at a time.
        """
        alone = not self.draws_random_numbers and self._runs_alone()
        if not alone:
            whole = self._run()
        for sample in range(self.samples):
            outputs = self._run(slice(sample, sample + 1)) if alone else whole
            yield self._gradients(outputs, sample, alone, parameters)

    def _gradients(
        self, outputs: list[torch.Tensor], sample: int, alone: bool, parameters: Sequence[nn.Parameter]
    ) -> Gradients:
        starts, cotangents = [], []
        for index, cotangent in self.cotangents.items():
            own = cotangent[sample : sample + 1]
            start = outputs[index] if alone else outputs[index][sample : sample + 1]
            if start.requires_grad:
                starts.append(start)
                cotangents.append(own)
        if not starts:
            return [None] * len(parameters)
        return list(
            torch.autograd.grad(starts, list(parameters), cotangents, retain_graph=not alone, allow_unused=True)
        )

    def sum_of_gradients(self, parameters: Sequence[nn.Parameter]) -> Gradients:
        """Returns the gradients that come through the outputs, of all samples together."""
        outputs = self._run()
        given = {index: cotangent for index, cotangent in self.cotangents.items() if outputs[index].requires_grad}
        if not given:
            return [None] * len(parameters)
        starts = [outputs[index] for index in given]
        return list(torch.autograd.grad(starts, list(parameters), list(given.values()), allow_unused=True))

    def shards_of_gradients(
        self, parameters: Sequence[nn.Parameter], ranks: int, own_rank: int, most_samples: int, scale: float
    ) -> Iterator[Gradients]:
        """Yields this rank's shards of each sample's gradients, for the samples of all ranks. All ranks call it.

        FSDP2 gathers parameters and reduces gradients in every forward and backward, in which all ranks take part.
        Backward therefore starts from one sample of one rank, and from zeros on the others.

        Args:
            parameters: the sharded parameters. Their `grad` does not change.
            ranks: the number of ranks.
            own_rank: the number of this rank.
            most_samples: the largest batch of a rank.
            scale: the factor by which this rank's gradients are multiplied.
        """
        before = [parameter.grad for parameter in parameters]
        try:
            for rank in range(ranks):
                for sample in range(most_samples):
                    for parameter in parameters:
                        parameter.grad = None
                    outputs, starts, cotangents = self._run(), [], []
                    for index, cotangent in self.cotangents.items():
                        starts.append(outputs[index])
                        cotangents.append(torch.zeros_like(cotangent))
                        if rank == own_rank and sample < self.samples:
                            cotangents[-1][sample] = cotangent[sample] * scale
                    torch.autograd.backward(starts, cotangents)
                    # FSDP2 averages over the ranks.
                    yield [None if parameter.grad is None else parameter.grad * ranks for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def refuse_mixing(self, most_samples: int | None = None) -> None:
        """Checks that no sample's outputs depend on other samples, for every ordered pair of samples.

        Args:
            most_samples: the largest batch of a rank, if ranks run the model together: all ranks run it equally often.

        Raises:
            MemprofError: a sample's outputs depend on another sample.
        """
        with torch.no_grad():
            bound = _SAME_OUTPUT_LOW_PRECISION if self.is_low_precision else _SAME_OUTPUT
            before = self._run()
            changed: torch.Tensor | None = None
            runs = 0
            for kept, rows in exchanges(self.samples):
                runs += 1
                for a, b in zip(before, self._run(rows), strict=True):
                    if a.dim() and len(a) == self.samples and not are_close(a[kept], b[kept], bound):
                        changed = a
            for _ in range(runs, sum(1 for _ in exchanges(most_samples or 0))):
                self._run()
        if changed is not None:
            raise MemprofError(
                f"the samples of a batch influence one another in {_name(self.model)}: the output of shape "
                f"{list(changed.shape)} changed for samples whose own inputs had not; use layers that treat each "
                "sample by itself, such as GroupNorm instead of BatchNorm."
            )

    def _runs_alone(self) -> bool:
        """Returns whether the model accepts a single sample, and then returns one row of each output."""
        try:
            with torch.no_grad():
                outputs = self._run(slice(0, 1))
        except Exception:  # a model may raise anything on a batch of one
            return False
        expected = [(1, *shape[1:]) for shape in self.shapes]
        return all(index < len(outputs) and outputs[index].shape == expected[index] for index in self.cotangents)

    def _run(self, rows: slice | list[int] | None = None) -> list[torch.Tensor]:
        """Returns the outputs of the model on these samples, with the recorded state of all generators and buffers."""
        args, kwargs = tree_map(lambda x: self._rows_of(x, rows), (self.args, self.kwargs))
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        with self.random_state.restored(), contextlib.ExitStack() as stack:
            stack.callback(_copy_into, list(self.model.buffers()), buffers)
            stack.enter_context(self._surroundings.restored())
            _copy_into(list(self.model.buffers()), self._buffers)
            return _tensors(self.model(*args, **kwargs))

    def _rows_of(self, x: Any, rows: slice | list[int] | None) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        has_samples = x.dim() > 0 and len(x) == self.samples
        taken = x if rows is None or not has_samples else x[rows]
        # Copied, because a model may change its inputs in place.
        return taken.detach().clone().requires_grad_(x.requires_grad)


def exchanges(samples: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields batches in which some samples keep their inputs and the others get inputs of those.

    For every ordered pair of samples there is a batch in which the first is exchanged and the second is kept.

    Args:
        samples: the size of the batch.

    Yields:
        The samples that are kept, and for each position of the batch the index of the sample whose inputs it gets.
    """
    for half in halves(samples) if samples > 1 else ():
        kept = [i for i, is_kept in enumerate(half) if is_kept]
        yield kept, [i if is_kept else kept[i % len(kept)] for i, is_kept in enumerate(half)]


def are_close(a: torch.Tensor, b: torch.Tensor, bound: float) -> bool:
    if torch.equal(a, b):
        return True
    a, b = a.nan_to_num(), b.nan_to_num()  # the check of the sums reports NaN
    return bool(norm(a - b) <= bound * norm(a))


def norm(x: torch.Tensor) -> float:
    """Returns the L2 norm, computed in double precision."""
    found = x.to(torch.complex128 if x.is_complex() else torch.float64).norm()
    return float(found.full_tensor() if isinstance(found, DTensor) else found)


def _name(model: nn.Module) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(tree)[0] if isinstance(each, torch.Tensor)]


def _copied(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _copy_into(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def add_gradients(outputs: list[torch.Tensor], given: list[torch.Tensor], total: GradientSums) -> None:
    """Adds gradients of parameters by plain autograd, in place where there is one already.

    It calls `backward` rather than `grad`, which reentrant checkpoints do not support. The parameters' own gradients do
    not change.

    Args:
        outputs: tensors that depend on the parameters.
        given: the gradients of the outputs.
        total: the gradients so far by parameter; None for parameters that no output has depended on.
    """
    before = [p.grad for p in total]
    try:
        for p, gradient in total.items():
            p.grad = gradient
        with _without_hooks_on_gradients(total):
            torch.autograd.backward(outputs, given)
        total.update({p: p.grad for p in total})
    finally:
        for p, grad in zip(total, before, strict=True):
            p.grad = grad


@contextlib.contextmanager
def _without_hooks_on_gradients(parameters: Iterable[Any]) -> Iterator[None]:
    """Keeps hooks from seeing accumulated gradients inside the context.

    A program's hook may drop a gradient, or update its parameter with it, and here it is not the private one.
    """
    tables = [p._post_accumulate_grad_hooks for p in parameters if p._post_accumulate_grad_hooks]
    before = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.update(hooks)


def all_real(gradients: GradientSums) -> GradientSums:
    """Returns complex gradients as pairs of real numbers, as the layers store them."""
    return {p: torch.view_as_real(g) if g is not None and g.is_complex() else g for p, g in gradients.items()}


_OTHER_SCALE = 1.1


def wrong_sums(
    found: Iterable[tuple[nn.Parameter, Sum]], autograd: Callable[[float], GradientSums]
) -> tuple[dict[nn.Parameter, float], bool]:
    """Returns the parameters whose sums differ from autograd's by more than rounding.

    Args:
        found: the sums of the layers, once for each parameter. Consumed after `autograd` has returned.
        autograd: returns autograd's gradients, for outputs' gradients that are multiplied by a number.

    Returns:
        The errors by parameter, relative to the gradient's norm, and whether all numbers are finite; other numbers
        prove nothing.
    """
    expected = all_real(autograd(1.0))
    owned = [(p, own.dtype, _distance(own.total, expected.get(p))) for p, own in found]
    measured = {p: _norm(g) for p, g in expected.items() if g is not None}
    norms = dict(zip(measured, _numbers(measured.values()), strict=True))
    of_all = math.hypot(*norms.values())
    wrong: dict[nn.Parameter, float] = {}
    is_finite = math.isfinite(of_all)
    for (parameter, dtype, _), error in zip(owned, _numbers(each for *_, each in owned), strict=True):
        norm = norms.get(parameter, 0.0)
        if not math.isfinite(error) or not math.isfinite(norm):
            is_finite = False
        elif error > precision(dtype, parameter) * norm + 6.4 * torch.finfo(dtype).eps * of_all:
            wrong[parameter] = error
    if wrong and is_finite:
        _forgive_rounding(wrong, expected, autograd)
    return {p: error / max(norms.get(p, 0.0), 1e-30) for p, error in wrong.items()}, is_finite


def _forgive_rounding(
    wrong: dict[nn.Parameter, float], expected: GradientSums, autograd: Callable[[float], GradientSums]
) -> None:
    """Removes errors that are not much larger than what rounding changes in autograd's own sums.

    Gradients may cancel to less than their rounding errors. Autograd's sums then change when outputs' gradients are
    multiplied by a number, or without TF32. They also change if a backward is not linear, such as one that limits the
    gradient of the batch. Multiplying by 2 tells the two apart: it changes no rounding.
    """

    def differences(scale: float) -> dict[nn.Parameter, float]:
        return {p: float(_distance(g / scale, expected.get(p))) for p, g in _present(autograd(scale)) if p in wrong}

    other, doubled, again = differences(_OTHER_SCALE), differences(2.0), differences(1.0)
    for p, error in list(wrong.items()):
        of_doubled = doubled.get(p, 0.0)
        is_linear = of_doubled <= max(error / 4, 4 * again.get(p, 0.0)) or not math.isfinite(of_doubled)
        if is_linear and error <= 8 * other.get(p, 0.0):
            del wrong[p]
    if any(p.is_cuda for p in wrong):
        with without_tf32():
            exact = differences(1.0)
        for p, error in list(wrong.items()):
            if error <= 8 * exact.get(p, 0.0):
                del wrong[p]


def _present(sums: GradientSums) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    return ((parameter, total) for parameter, total in all_real(sums).items() if total is not None)


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Computes products and convolutions in full float32 inside the context."""
    cudnn: Any = torch.backends.cudnn
    backends = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Computes convolutions by PyTorch's own kernels inside the context.

    These take one sample at a time, and so give a sample the same bits in each batch.
    """
    before = torch.backends.cudnn.enabled
    try:
        torch.backends.cudnn.enabled = False
        yield
    finally:
        torch.backends.cudnn.enabled = before


def _distance(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    return _norm(a if b is None else a - b.view_as(a).to(a.dtype))


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Returns the norm as a scalar, in double precision."""
    dtype = torch.complex128 if x.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(x.detach(), dtype=dtype)
    return norm


def _numbers(scalars: Iterable[torch.Tensor]) -> list[float]:
    """Returns the values of scalars, which may be on several devices. The host waits once for each device."""
    scalars = list(scalars)
    found = [0.0] * len(scalars)
    for device in dict.fromkeys(each.device for each in scalars):
        places = [i for i, each in enumerate(scalars) if each.device == device]
        for i, value in zip(places, torch.stack([scalars[i].real for i in places]).tolist(), strict=True):
            found[i] = value
    return found


def precision(dtype: torch.dtype, parameter: torch.Tensor) -> float:
    """Returns the relative difference to autograd's sum that rounding in another order may cause.

    It is relative to the norm of the sum of a parameter's gradients.
    """
    if uses_tf32(dtype, parameter.device):
        return 1e-2
    return {torch.float64: 1e-7, torch.complex128: 1e-7, torch.bfloat16: 2e-2, torch.float16: 5e-3}.get(dtype, 1e-3)
