# SPDX-License-Identifier: Apache-2.0
"""Repeats a module's forward to compute per-sample gradients of its parameters, for any module.

There are three ways, from the fastest to the most general: all samples at once under `torch.func.vmap`; one sample at a
time; and the whole batch with the same random numbers, followed by one backward for each sample. `matches` says whether
a way reproduces the module's output.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from opacus_memprof.clipping.forwards.checkpoints import without_checkpoints
from opacus_memprof.clipping.forwards.state import Arrangement, ModuleState, RandomState, expand_over_batch
from opacus_memprof.clipping.workspace import slices
from opacus_memprof.errors import MemprofError

Way = Literal["vmap", "loop", "whole"]
WAYS: tuple[Way, ...] = ("vmap", "loop", "whole")
Gradients = dict[str, torch.Tensor]
_PLACE = object()  # stands for a tensor that autograd has saved


class _Thread(threading.local):
    repeating = False


_thread = _Thread()


def is_repeating() -> bool:
    """Returns whether this thread repeats a forward, during which hooks do nothing."""
    return _thread.repeating


@contextmanager
def repeating() -> Iterator[None]:
    """Makes `is_repeating` true inside the context."""
    before, _thread.repeating = is_repeating(), True
    try:
        yield
    finally:
        _thread.repeating = before


class _WithoutHooks(nn.Module):
    """A module without its own hooks, which change the output after the part that is repeated."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _by_all_names(module: nn.Module, parameters: Gradients) -> Gradients:
    """Returns values for `functional_call` of `_WithoutHooks`: one for each name of each parameter.

    A module that has several names appears under one of them. Otherwise `functional_call` would replace its parameter
    twice, and restore the first replacement instead of the original.
    """
    given = {id(module.get_parameter(name)): value for name, value in parameters.items()}
    return {
        ".".join(filter(None, ("module", path, name))): given[id(parameter)]
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if id(parameter) in given
    }


@dataclass
class Modes:
    """Modes that are on in a thread, the innermost one last.

    Attributes:
        function: the TorchFunctionModes.
        dispatch: the TorchDispatchModes that the program has defined.
    """

    function: list[TorchFunctionMode] = field(default_factory=list)
    dispatch: list[TorchDispatchMode] = field(default_factory=list)

    @classmethod
    def now(cls) -> Modes:
        """Returns the modes that are on in this thread."""
        function = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        return cls(function, [mode for mode in mode_stack() if _is_of_program(mode)])

    def key(self) -> tuple[Any, ...]:
        """Returns the code of the modes that the program has defined: they may change any operation."""
        dispatch: list[Any] = [type(mode).__torch_dispatch__ for mode in self.dispatch]
        function: list[Any] = [type(mode).__torch_function__ for mode in self.function if _is_of_program(mode)]
        return tuple(map(code_of, dispatch + function))

    def names(self) -> str:
        """Returns the names of these modes."""
        return " and ".join(type(mode).__name__ for mode in [*self.dispatch, *filter(_is_of_program, self.function)])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Makes these the only modes of the program inside the context, without calling their `__enter__`."""
        now = Modes.now()
        if now != self:
            now._exchange(self)
        try:
            yield
        finally:
            if (left := Modes.now()) != now:
                left._exchange(now)

    @contextmanager
    def staying(self, module: nn.Module) -> Iterator[None]:
        """Refuses a call of a module that does not end under these modes, which are on when it begins.

        Raises:
            MemprofError: it ends under others.
        """
        left = self
        with self.restored():
            yield
            left = Modes.now()
        if left != self:
            names = {type(mode).__name__ for a, b in ((self, left), (left, self)) for mode in a.without(b)}
            raise MemprofError(
                f"the forward of {type(module).__name__} enters {' and '.join(sorted(names))} and leaves it on when it "
                "ends, or the reverse, so that what runs afterwards is another program: leave modes before the forward "
                "ends, or enter them around the model's call and its backward."
            )

    def without(self, other: Modes) -> list[object]:
        """Returns the modes that are not among the other ones."""
        return [mode for mode in (*self.function, *self.dispatch) if mode not in (*other.function, *other.dispatch)]

    def _exchange(self, other: Modes) -> None:
        for _ in self.function:
            torch._C._pop_torch_function_stack()
        for function_mode in other.function:
            torch._C._push_on_torch_function_stack(function_mode)
        with collecting_later():
            others = [mode for mode in leave_dispatch_modes() if mode not in self.dispatch]
            enter_dispatch_modes([*others, *other.dispatch])


@contextmanager
def collecting_later() -> Iterator[None]:
    """Garbage is not collected inside: that of a model ends its modes, which would change the stack in mid-move."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def mode_stack() -> list[TorchDispatchMode]:
    """Returns the dispatch modes of this thread, the innermost one last."""
    with collecting_later():
        return list(_get_current_dispatch_mode_stack())


def dispatch_modes() -> list[TorchDispatchMode]:
    """Returns the same without PyTorch's own modes, which it keeps apart."""
    return [mode for mode in mode_stack() if not mode.is_infra_mode()]


def leave_dispatch_modes(count: int = 0) -> list[TorchDispatchMode]:
    """Leaves all of these modes but the outermost `count`, without the program's `__exit__`, and returns them."""
    with collecting_later():
        inner = dispatch_modes()[count:]
        for mode in reversed(inner):
            if mode.old_dispatch_mode_flags:
                TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
            else:  # it was left in a backward, at whose end PyTorch restores the stack of its beginning
                _pop_mode()
        return inner


def enter_dispatch_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Enters modes, the innermost one last, without the program's `__enter__`."""
    with collecting_later():
        for mode in modes:
            TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]


def _is_of_program(mode: object) -> bool:
    """Returns whether a mode is not PyTorch's own, which looks at operations or is a part of PyTorch's features."""
    return not type(mode).__module__.startswith(("torch.", "opacus_memprof."))


def code_of(function: Any) -> Any:
    """Returns what functions of the same definition share: a context manager makes its own each time."""
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


@dataclass
class Surroundings:
    """What a forward runs under, and must run under again when it is repeated.

    Attributes:
        device: the type of the device of its autocast.
        dtype: the dtype of autocast.
        has_autocast: whether autocast was enabled.
        modes: the modes of PyTorch and the program.
    """

    device: str
    dtype: torch.dtype
    has_autocast: bool
    modes: Modes

    @classmethod
    def now(cls, device: str) -> Surroundings:
        """Returns what this thread runs under now. `device` is a type, such as "cuda", whose autocast is meant."""
        return cls(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), Modes.now())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Makes the context run under them."""
        with torch.autocast(self.device, self.dtype, self.has_autocast, cache_enabled=False), self.modes.restored():
            yield


@dataclass
class Call:
    """One call of a module.

    Attributes:
        batch: the number of samples.
        leaves: the arguments, flattened; `structure` is their tree structure.
        arrangements: the position of the samples in each leaf; None for leaves that all samples share.
        outputs: the position of the samples in the output's leaves, by index; None for leaves that all samples share.
        random: the initial state of the random number generators, if the forward is repeated as a whole.
        surroundings: what it runs under.
        state: the initial state of the module, if its forward changes it.
        draws: whether the module draws random numbers in this call.
    """

    batch: int
    leaves: list[Any]
    structure: TreeSpec
    arrangements: list[Arrangement | None]
    outputs: dict[int, Arrangement | None]
    random: RandomState | None
    surroundings: Surroundings
    state: ModuleState | None = None
    draws: bool = False

    def leave_caches_out(self) -> None:
        """Drops caches of keys and values (of transformers), because a repeated forward would append to them again."""
        self.leaves = [None if hasattr(leaf, "get_seq_length") else leaf for leaf in self.leaves]

    def detached_tensors(self) -> list[torch.Tensor]:
        """Removes and returns the leaves that are tensors, detached. `with_tensors` puts them back."""
        places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [self.leaves[i].detach() for i in places]
        for i in places:
            self.leaves[i] = _PLACE
        return tensors

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Call:
        """Returns this call with the tensors that `detached_tensors` has returned."""
        remaining = iter(tensors)
        return replace(self, leaves=[next(remaining) if leaf is _PLACE else leaf for leaf in self.leaves])

    def run(self, module: nn.Module, parameters: Gradients, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Runs the module and returns the output's leaves that are listed in `outputs`."""
        args, kwargs = tree_unflatten(list(leaves), self.structure)
        with self._in_its_state(module), repeating(), without_checkpoints(), self.surroundings.restored():
            values = _by_all_names(module, parameters)
            output = functional_call(_WithoutHooks(module), values, args, kwargs, tie_weights=False)
        found = tree_flatten(output)[0]
        return [found[i] for i in self.outputs]

    @contextmanager
    def _in_its_state(self, module: nn.Module) -> Iterator[None]:
        """Sets the module to its state before the call inside the context."""
        if self.state is None:
            yield
            return
        now = ModuleState(module)
        self.state.restore()
        try:
            yield
        finally:
            now.restore()

    def by_sample(self) -> list[Any]:
        """Returns the leaves; leaves with samples have the shape [batch, *shape in a batch of one]."""
        pairs = zip(self.leaves, self.arrangements, strict=True)
        return [leaf if where is None else where.by_sample(leaf, self.batch) for leaf, where in pairs]

    def sample_gradients(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the output's gradients as [batch, *shape of the output for a batch of one]."""
        arrangements = self.outputs.values()
        return [
            g if where is None else where.by_sample(g, self.batch)
            for g, where in zip(gradients, arrangements, strict=True)
        ]


class Repetition:
    """Per-sample gradients of some parameters of a module, from a call and the gradients of its outputs.

    Args:
        module: the module, whose hooks the caller has switched off.
        parameters: the parameters by their names in the module.
        way: how the call is repeated.
    """

    def __init__(self, module: nn.Module, parameters: dict[str, nn.Parameter], way: Way) -> None:
        self.module, self.way = module, way
        self.values = {name: parameter.detach() for name, parameter in parameters.items()}

    def chunks(self, call: Call, gradients: Sequence[torch.Tensor], size: int) -> Iterator[tuple[slice, Gradients]]:
        """Yields per-sample gradients, [n, *shape] by name, of `size` samples at a time.

        Args:
            call: the call.
            gradients: the gradients of the outputs that the call lists. Their batch is in the outputs' dimension, or in
                the first one for outputs that all samples share.
            size: number of samples.
        """
        if call.batch == 0:
            yield slice(0, 0), {name: value.new_zeros(0, *value.shape) for name, value in self.values.items()}
        elif self.way == "whole":
            yield from self._from_whole_batch(call, gradients)
        else:
            compute = self._vmapped if self.way == "vmap" else self._looped
            leaves, by_sample = call.by_sample(), call.sample_gradients(gradients)
            for n in slices(call.batch, size if self.way == "vmap" else 1):
                cut = [x if where is None else x[n] for x, where in zip(leaves, call.arrangements, strict=True)]
                yield n, compute(call, cut, [g[n] for g in by_sample])

    def _vmapped(self, call: Call, leaves: list[Any], gradients: list[torch.Tensor]) -> Gradients:
        has_samples = [i for i, where in enumerate(call.arrangements) if where is not None]

        def of_one(of_sample: list[torch.Tensor], g: list[torch.Tensor]) -> Gradients:
            inputs = list(leaves)
            for i, leaf in zip(has_samples, of_sample, strict=True):
                inputs[i] = leaf
            outputs, pull = vjp(  # type: ignore[misc]  # three only with has_aux
                lambda values: tuple(call.run(self.module, values, inputs)), self.values
            )
            result: Gradients = pull(tuple(d.reshape(o.shape) for d, o in zip(g, outputs, strict=True)))[0]
            return result

        with torch.no_grad():  # torch.func has an autograd of its own
            found: Gradients = _vmapped(of_one, [leaves[i] for i in has_samples], gradients)
        return found

    def _looped(self, call: Call, leaves: list[Any], gradients: list[torch.Tensor]) -> Gradients:
        inputs = [x if where is None else x[0] for x, where in zip(leaves, call.arrangements, strict=True)]
        with torch.enable_grad():
            values = {name: value.requires_grad_() for name, value in self._fresh().items()}
            outputs = call.run(self.module, values, inputs)
        return {name: g.unsqueeze(0) for name, g in _gradients(outputs, [g[0] for g in gradients], values).items()}

    def _from_whole_batch(self, call: Call, gradients: Sequence[torch.Tensor]) -> Iterator[tuple[slice, Gradients]]:
        assert call.random is not None
        with call.random.restored(), torch.enable_grad():
            values = {name: value.requires_grad_() for name, value in self._fresh().items()}
            outputs = call.run(self.module, values, call.leaves)
        for n in range(call.batch):
            of_sample = []
            for output, g, where in zip(outputs, gradients, call.outputs.values(), strict=True):
                if where is None:
                    of_sample.append(g[n])
                else:
                    masked = torch.zeros(output.shape, dtype=g.dtype, device=g.device)  # contiguous, for a view
                    where.by_sample(masked, call.batch)[n] = where.by_sample(g, call.batch)[n]
                    of_sample.append(masked)
            found = _gradients(outputs, of_sample, values, retain_graph=n + 1 < call.batch)
            yield slice(n, n + 1), {name: g.unsqueeze(0) for name, g in found.items()}

    def matches(self, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        """Returns whether repeating the call in this way gives the same outputs and gradients."""
        return self._gives_outputs(call, outputs) and self._gives_gradients(call, outputs)

    def _gives_gradients(self, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        zeros = [
            torch.zeros_like(expand_over_batch(output, call.batch) if where is None else output)
            for output, where in zip(outputs, call.outputs.values(), strict=True)
        ]
        try:
            with _undoing_changes(self.module):
                next(self.chunks(call, zeros, call.batch))
        except Exception:  # vmap may support an operation, but not its gradient
            return False
        return True

    def _gives_outputs(self, call: Call, outputs: Sequence[torch.Tensor]) -> bool:
        try:
            with torch.no_grad(), _undoing_changes(self.module):
                if self.way == "whole":
                    assert call.random is not None
                    with call.random.restored():
                        found = call.run(self.module, self.values, call.leaves)
                    return all(map(close, found, outputs))
                leaves, expected = call.by_sample(), self._expected(call, outputs)
                if self.way == "vmap":
                    return all(map(close, self._vmapped_outputs(call, leaves), expected))
                for n in range(call.batch):
                    pairs = zip(leaves, call.arrangements, strict=True)
                    found = call.run(self.module, self.values, [x if where is None else x[n] for x, where in pairs])
                    if not all(close(f, e[n]) for f, e in zip(found, expected, strict=True)):
                        return False
                return True
        except Exception:  # the user's module or vmap may raise anything: this way does not work
            return False

    def _expected(self, call: Call, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            output.unsqueeze(0).expand(call.batch, *output.shape) if w is None else w.by_sample(output, call.batch)
            for output, w in zip(outputs, call.outputs.values(), strict=True)
        ]

    def _vmapped_outputs(self, call: Call, leaves: list[Any]) -> list[torch.Tensor]:
        has_samples = [i for i, where in enumerate(call.arrangements) if where is not None]

        def of_one(of_sample: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            inputs = list(leaves)
            for i, leaf in zip(has_samples, of_sample, strict=True):
                inputs[i] = leaf
            return tuple(call.run(self.module, self.values, inputs))

        return list(_vmapped(of_one, [leaves[i] for i in has_samples]))

    def _fresh(self) -> Gradients:
        return {name: value.detach() for name, value in self.values.items()}


def _vmapped(function: Callable[..., Any], *args: Any) -> Any:
    """Applies a function to all samples at once.

    vmap's warning about operations that have no rule for batches asks for reports about operations that the program
    has not put into vmap: nobody can act on it.
    """
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        return vmap(function, randomness="error")(*args)
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


@contextmanager
def _undoing_changes(module: nn.Module) -> Iterator[None]:
    """Undoes changes of the module's structure that a forward has begun and not ended, because it has failed.

    Such as those of adapters that register a parametrization for one forward.
    """
    before = [(each, type(each), dict(each._parameters), dict(each._modules)) for each in module.modules()]
    try:
        yield
    except Exception:
        for each, kind, parameters, modules in before:
            if type(each) is not kind:
                each.__class__ = kind
            for now, then in ((each._parameters, parameters), (each._modules, modules)):
                now.clear()
                now.update(then)  # type: ignore[arg-type]
        raise


def _gradients(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], values: Gradients, retain_graph: bool = False
) -> Gradients:
    used = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad]
    if not used:
        return {name: torch.zeros_like(value) for name, value in values.items()}
    found = torch.autograd.grad(
        [o for o, _ in used],
        list(values.values()),
        [g.reshape(o.shape) for o, g in used],
        retain_graph=retain_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(values, found, strict=True))


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Returns whether two tensors agree to the square root of their precision, infinities and NaN included."""
    if actual.is_complex() and expected.is_complex():
        actual, expected = torch.view_as_real(actual.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    if actual.shape != expected.shape or not actual.is_floating_point():
        return actual.shape == expected.shape and bool((actual == expected).all())
    if actual.numel() == 0 or torch.equal(actual, expected):  # nearly always, and found out in one pass
        return True
    precision = torch.finfo(actual.dtype).eps ** 0.5
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(actual, expected, rtol=precision, atol=precision * scale, equal_nan=True)
