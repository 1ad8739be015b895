# SPDX-License-Identifier: Apache-2.0
"""Repeats a forward pass that ran out of memory, on a copy of the model whose tensors are fake: they have shapes and no
memory. So it is known what all modules keep for backward, also those that the real pass did not reach.

It runs the model's own code a second time, after the failure. What that code does to the model stays in the copy; what
it prints is printed twice."""

import copy
import random
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from opacus_memprof.hooks.capture_shape import capture_shape
from opacus_memprof.profiles.layer_shapes import CaptureShape, WholeForward
from opacus_memprof.recording import tracing


@dataclass(frozen=True)
class TensorShape:
    """The shape of an input or a parameter."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class Call:
    """The arguments of a forward pass, as the leaves of a pytree with shapes for tensors, and its autocast contexts."""

    leaves: Sequence[Any]
    structure: Any
    autocast: Sequence[torch.autocast]


def shape_of(tensor: Tensor) -> TensorShape:
    return TensorShape(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


class FakeForward:
    """A forward pass that can be repeated on fake tensors. It keeps neither the model nor a tensor alive.

    Args:
        named: the model's modules with their names, the model itself first.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        self._named = [(name, weakref.ref(module)) for name, module in named]
        self._call: Call | None = None

    def record_inputs(self, inputs: tuple[Any, Any]) -> None:
        """Records the shapes of the positional and keyword arguments of a forward pass, and whether autocast is
        enabled. Arguments cannot be repeated if they contain other objects than tensors and plain values."""
        leaves, structure = tree_flatten(inputs)
        plain = all(leaf is None or isinstance(leaf, (Tensor, bool, int, float, str)) for leaf in leaves)
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
        autocast = [
            torch.autocast(device, torch.get_autocast_dtype(device))
            for device in sorted(devices)
            if torch.is_autocast_enabled(device)
        ]
        shapes = [shape_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._call = Call(shapes, structure, autocast) if plain else None

    def run(self, layers: Iterable[str], *, captures: bool) -> WholeForward | None:
        """What a whole forward pass keeps; None if it cannot be repeated, as with shapes that depend on values, or on
        one of several ranks.

        Args:
            layers: the names of the modules whose parameters are trained.
            captures: whether Opacus captures their inputs.
        """
        named = [(name, module) for name, reference in self._named if (module := reference()) is not None]
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._call is None or len(named) < len(self._named) or not named or distributed:
            return None
        state = random.getstate()
        try:
            if not torch.cuda.is_available():
                _set_device_guard()
            # In a thread of its own: the operation that failed has left its dispatch state in this one.
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(_run, named, self._call, frozenset(layers), captures).result()
        except Exception:  # the model's own code may raise anything where values are missing
            return None
        finally:
            random.setstate(state)


@cache
def _set_device_guard() -> None:
    """Uses fake tensors in a thread that does not end before the process. Where there is no GPU, torch sets a guard for
    one when they are first used. Torch 2.11 frees it with the thread that did so, and later uses crash."""
    is_set = threading.Event()

    def set_guard() -> None:
        try:
            with FakeTensorMode():
                pass
        finally:
            is_set.set()
        threading.Event().wait()

    threading.Thread(target=set_guard, name="opacus_memprof_fake_tensors", daemon=True).start()
    is_set.wait()


def _run(named: Sequence[tuple[str, nn.Module]], call: Call, layers: frozenset[str], captures: bool) -> WholeForward:
    with FakeTensorMode() as fake, ExitStack() as stack:
        for context in call.autocast:
            stack.enter_context(context)
        model, copies = _copy(named, fake)
        leaves = [leaf.make() if isinstance(leaf, TensorShape) else leaf for leaf in call.leaves]
        excluded = [*model.parameters(), *model.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        recorder = _Recorder(excluded, layers, captures)
        with recorder:
            for name, module in copies:
                module.register_forward_pre_hook(partial(recorder.enter, name))
                module.register_forward_hook(partial(recorder.leave, name))
            args, kwargs = tree_unflatten(leaves, call.structure)
            with torch.autograd.graph.saved_tensors_hooks(recorder.keep, _unpack):
                output = model(*args, **(kwargs or {}))
            for tensor in tree_leaves(output):
                recorder.keep(tensor)
        return recorder.result()


def _copy(named: Sequence[tuple[str, nn.Module]], fake: FakeTensorMode) -> tuple[nn.Module, list[Any]]:
    """A copy of the model with fake tensors and without hooks, and the copies of its modules with their names."""
    memo: dict[int, Any] = {}
    for _, module in named:
        for key, value in vars(module).items():
            if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                memo[id(value)] = type(value)()
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(shape_of(parameter).make(), parameter.requires_grad)
    with FakeCopyMode(fake):
        model = copy.deepcopy(named[0][1], memo)
    copies = [(name, memo[id(module)]) for name, module in named]
    for _, module in copies:
        tracing.remove_scoped_forwards(module)
    return model, copies


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which module allocates each storage, and which storages are kept.

    Args:
        excluded: tensors that are there before.
        layers, captures: see FakeForward.run.
    """

    def __init__(self, excluded: Sequence[Tensor], layers: frozenset[str], captures: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers, self._captures = layers, captures
        self._path = [""]  # of the modules whose forward is running
        self._makers: dict[int, tuple[Any, str]] = {}  # by the storage's address; the storage itself, to stay unique
        self._kept: set[int] = set()
        self._forwards: dict[str, CaptureShape] = {}
        self._excluded = {id_of(tensor): tensor for tensor in excluded}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := id_of(tensor)) not in self._excluded:
                self._makers.setdefault(key, (tensor.untyped_storage(), self._path[-1]))
        return result

    def keep(self, tensor: Any) -> None:
        """Hook of autograd that keeps nothing in the place of the tensor: a node that held its own output would
        never be freed."""
        if isinstance(tensor, Tensor):
            self._kept.add(id_of(tensor))

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._path.append(name)

    def leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._path.pop()
        if name in self._layers and self._captures and module.training and torch.is_grad_enabled():
            for tensor in tree_leaves(inputs):
                self.keep(tensor)
        if name in self._layers and (shape := capture_shape(module, inputs, output)) is not None:
            seen = self._forwards.get(name)
            self._forwards[name] = shape if seen is None else seen.with_call(shape)

    def result(self) -> WholeForward:
        kept: dict[str, int] = {}
        largest: dict[str, int] = {}
        for key in self._kept & self._makers.keys():
            storage, name = self._makers[key]
            kept[name] = kept.get(name, 0) + storage.nbytes()
            largest[name] = max(largest.get(name, 0), storage.nbytes())
        return WholeForward(self._forwards, kept, largest)


def _unpack(kept: Any) -> Tensor:
    raise RuntimeError("a forward pass on fake tensors has no backward")


def id_of(tensor: Tensor) -> int:
    """The address of a tensor's storage object."""
    return int(tensor.untyped_storage()._cdata)
