# SPDX-License-Identifier: Apache-2.0
"""Records the shapes of forward passes, and repeats a forward pass that ran out of memory on fake tensors.

Modules are probed in the forward pass of each batch that is larger than all earlier ones. After a failure, the pass is
repeated on a copy of the model whose tensors have shapes and no memory. This tells what every module keeps for
backward, including modules that the real pass did not reach. The model's own code runs a second time then: changes to
the model stay in the copy, and output is printed twice.
"""

import copy
import random
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.compiler import is_compiling
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from opacus_memprof.hooks.shapes import capture_shape
from opacus_memprof.profiles.layer_shapes import CaptureShape, KeptBlock, WholeForward
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import Attachment, remove_scoped_forwards
from opacus_memprof.recording.faults import contain


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
        """Records the shapes of a forward pass's positional and keyword arguments, and whether autocast is enabled.

        Arguments cannot be repeated if they contain objects other than tensors and plain values.
        """
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
        """Repeats the whole forward pass without values, and returns the tensors that it keeps for backward.

        Returns None if the pass cannot be repeated: for example if shapes depend on values, or on one of several ranks.

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
            # In a separate thread, because the failed operation has left its dispatch state in this thread.
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(_run, named, self._call, frozenset(layers), captures).result()
        except Exception:  # the model's own code may raise anything where values are missing
            return None
        finally:
            random.setstate(state)


@cache
def _set_device_guard() -> None:
    """Uses fake tensors in a thread that lives until the process ends.

    Without a GPU, torch sets a guard for one when fake tensors are first used. Torch 2.11 frees it at the end of the
    thread that did so, and later uses crash.
    """
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
        samples = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)
        return recorder.result(output, samples)


def _copy(named: Sequence[tuple[str, nn.Module]], fake: FakeTensorMode) -> tuple[nn.Module, list[Any]]:
    """Returns a copy of the model with fake tensors and without hooks, and its named modules."""
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
        remove_scoped_forwards(module)
    return model, copies


_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass
class _Storage:
    """A storage that the pass has allocated, and its tensors that are alive. It is held, so that its address is unique.

    Attributes:
        calls_before: the number of calls of layers that had begun.
    """

    storage: Any
    module: str
    calls_before: int
    is_softmax: bool
    tensors: int = 0
    is_saved: bool = False
    saves: int = 0
    captor: str | None = None

    @property
    def bytes(self) -> int:
        return int(self.storage.nbytes())

    @property
    def is_kept(self) -> bool:
        return self.is_saved or self.captor is not None


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which module allocates each storage, which storages are kept, and the most bytes that are live at once.

    Args:
        excluded: tensors that exist before the pass.
        layers, captures: see FakeForward.run.
    """

    def __init__(self, excluded: Sequence[Tensor], layers: frozenset[str], captures: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers, self._captures = layers, captures
        self._path = [""]  # of the modules whose forward is running
        self._called: list[str] = []  # the layers
        self._storages: dict[int, _Storage] = {}  # by address
        self._outputs: dict[int, str] = {}  # of layers, by address
        self._streams: set[int] = set()  # inputs of modules, and sums with them, by address
        self._sums: dict[str, int] = {}  # bytes by the module that adds
        self._added: set[str] = set()
        self._live = self._peak = 0
        self._forwards: dict[str, CaptureShape] = {}
        self._excluded = {id_of(tensor): tensor for tensor in excluded}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SUMS and isinstance(args[1], Tensor):
            self._add_up(result, *args[:2])
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := id_of(tensor)) not in self._excluded:
                if key not in self._storages:
                    is_softmax = "softmax" in func.__name__
                    storage = tensor.untyped_storage()
                    self._storages[key] = _Storage(storage, self._path[-1], len(self._called), is_softmax)
                found = self._storages[key]
                self._change(found, tensors=found.tensors + 1)
                weakref.finalize(tensor, self._free, found)
        return result

    def _add_up(self, result: Tensor, *parts: Tensor) -> None:
        """Records a sum with a residual stream: the input of a module, or another such sum."""
        first, second = map(id_of, parts)
        for one, other in ((first, second), (second, first)):
            if one in self._streams:
                self._streams.add(id_of(result))
                self._sums[self._path[-1]] = result.untyped_storage().nbytes()
                if other in self._outputs:
                    self._added.add(self._outputs[other])

    def _free(self, found: _Storage) -> None:
        self._change(found, tensors=found.tensors - 1)

    def _change(self, found: _Storage, **changes: object) -> None:
        """Changes attributes of a storage, and adds up what is live."""
        before = bool(found.tensors) or found.is_kept
        vars(found).update(changes)
        self._live += found.bytes * ((bool(found.tensors) or found.is_kept) - before)
        self._peak = max(self._peak, self._live)

    def keep(self, tensor: Any) -> None:
        """Records a tensor that autograd saves. A pack hook of autograd.

        Returns None instead of the tensor, because a node that holds its own output would never be freed.
        """
        if isinstance(tensor, Tensor) and (found := self._storages.get(id_of(tensor))) is not None:
            self._change(found, is_saved=True, saves=found.saves + 1)

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._path.append(name)
        self._streams.update(id_of(tensor) for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor))
        if name in self._layers:
            self._called.append(name)

    def leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._path.pop()
        if name in self._layers and self._captures and module.training and torch.is_grad_enabled():
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor) and (found := self._storages.get(id_of(tensor))) is not None:
                    self._change(found, captor=name)
        if name in self._layers and (shape := capture_shape(module, inputs, output)) is not None:
            seen = self._forwards.get(name)
            self._forwards[name] = shape if seen is None else seen.with_call(shape)
            self._outputs[id_of(output)] = name

    def result(self, output: Any, samples: int) -> WholeForward:
        outputs = {id_of(tensor) for tensor in tree_leaves(output) if isinstance(tensor, Tensor)}
        around = {""} | {name[:end] for name in self._layers for end in range(len(name)) if name[end] == "."}
        innermost = self._forwards.keys() - (around if self._layers - {""} else set())
        blocks = tuple(
            KeptBlock(
                found.bytes,
                found.module,
                found.module
                if found.module in innermost
                else next((name for name in self._called[found.calls_before :] if name in self._forwards), None),
                key in outputs,
                found.saves > 1,
                None if found.is_saved else found.captor,
                found.is_softmax,
            )
            for key, found in self._storages.items()
            if found.is_kept or key in outputs
        )
        return WholeForward(self._forwards, blocks, self._peak, samples, self._sums, frozenset(self._added))


def _unpack(kept: Any) -> Tensor:
    raise RuntimeError("a forward pass on fake tensors has no backward")


def id_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage object."""
    return int(tensor.untyped_storage()._cdata)


_EVALUATIONS = 1000  # of which steps are remembered


@dataclass
class WatchedModel:
    """The model whose shapes are recorded.

    Attributes:
        root: its outermost module.
        modules: the modules whose forward passes are probed, with their names.
        forward: repeats its largest forward pass on fake tensors.
        largest_batch: elements of the largest batch whose shapes were recorded.
        evaluated_in: the latest steps with forward passes in eval mode that recorded graphs.
        largest_trained: elements of the largest batch in training mode.
        largest_evaluated: the same of evaluations that recorded graphs.
        probe_handles: handles of the probes of the running forward pass.
    """

    root: "weakref.ref[nn.Module]"
    modules: "list[tuple[str, weakref.ref[nn.Module]]]"
    forward: FakeForward
    largest_batch: int = 0
    evaluated_in: list[int] = field(default_factory=list)
    largest_trained: int = 0
    largest_evaluated: int = 0
    probe_handles: list[RemovableHandle] = field(default_factory=list)

    def remove_probes(self) -> None:
        while self.probe_handles:
            self.probe_handles.pop().remove()


_watched: WatchedModel | None = None


def watch_model(
    attachment: Attachment, root: nn.Module, named: Sequence[tuple[str, nn.Module]], probed: Collection[nn.Module]
) -> None:
    """Probes the forward passes of the model whose shapes were recorded last, until it is detached.

    Args:
        attachment: the attachment of the model.
        root: the outermost module.
        named: the user's modules with their names, the model itself first.
        probed: the modules whose forward can be probed.
    """
    global _watched
    if _watched is not None:
        _watched.remove_probes()
    shapes = observations.layer_shapes()
    modules = [(name, weakref.ref(module)) for name, module in named if name in shapes.modules and module in probed]
    _watched = WatchedModel(weakref.ref(root), modules, FakeForward(named))
    attachment.on_detach(partial(_unwatch, _watched))
    shapes.whole_forward = partial(_watched.forward.run, shapes.modules, captures=bool(shapes.mode))


def _unwatch(model: WatchedModel) -> None:
    global _watched
    model.remove_probes()
    if _watched is model:
        _watched = None


def unwatch_modules(removed: set[nn.Module]) -> None:
    """Stops probing these modules, which are about to be compiled."""
    if _watched is not None:
        _watched.modules[:] = [(name, reference) for name, reference in _watched.modules if reference() not in removed]


def on_batch(root: nn.Module, samples: int, elements: int, inputs: tuple[Any, Any], captures_outstanding: bool) -> None:
    """Records the batch of a forward pass that begins, and probes the modules if it is the largest batch so far.

    Models other than the watched one are ignored.

    Args:
        root: the model's outermost module.
        samples: the first dimension of the model's first input.
        elements: the number of elements of all inputs.
        inputs: positional and keyword arguments.
        captures_outstanding: whether no backward has released Opacus' captures of an earlier forward pass.
    """
    model, shapes = _watched, observations.layer_shapes()
    if model is None or model.root() is not root:
        return
    batches = shapes.batches
    if not captures_outstanding:
        shapes.released = max(shapes.released, len(shapes.unreleased))
        shapes.unreleased.clear()
    has_graph = torch.is_grad_enabled()
    evaluates = not root.training and model.largest_trained > 0
    shapes.evaluation = (samples, has_graph) if evaluates else None
    if has_graph:
        shapes.unreleased.append(samples)
        if shapes.waiting is not None:
            shapes.waiting += 1
            observations.record("waiting_forwards", 0, shapes.waiting, step=native.step()[0])
        if root.training:
            model.largest_trained = max(elements, model.largest_trained)
        else:
            _record_evaluation(model, elements)
        if shapes.mode == "no_op" and torch._C._functorch.peek_interpreter_stack() is None:  # not in torch.func
            observations.record("no_op_graphs", 0, 0)
    if not evaluates and (not batches or batches[-1][1] != samples):
        batches.append((native.step()[0], samples))
    model.remove_probes()  # the previous forward pass may have raised
    if elements > model.largest_batch:
        model.largest_batch = elements
        shapes.input_bytes = sum(tensor.nbytes for tensor in native.tensors_in(inputs))
        observations.record("largest_batch", 0, shapes.input_bytes, step=native.step()[0], has_graph=has_graph)
        model.forward.record_inputs(inputs)
        alive = [(name, reference()) for name, reference in model.modules]
        model.probe_handles[:] = [
            module.register_forward_hook(ShapeProbe(name)) for name, module in alive if module is not None
        ]


def _record_evaluation(model: WatchedModel, elements: int) -> None:
    """Records an evaluation that builds a graph for backward: its step, and whether its batch is the largest."""
    step = native.step()[0]
    if model.evaluated_in[-1:] != [step]:
        model.evaluated_in = [*model.evaluated_in[-_EVALUATIONS:], step]
        observations.record("evaluations_with_graphs", 0, step, steps=model.evaluated_in)
    # Only the first of equal peaks counts.
    if elements > model.largest_evaluated and elements > model.largest_trained > 0:
        model.largest_evaluated = elements
        observations.record("evaluation_graphs", 0, elements, step=step)


def observe_transforms(root: nn.Module) -> None:
    """Records the batch whose per-sample gradients the program computes itself, by torch.func.vmap(torch.func.grad(f)).

    Its transforms surround the running forward pass of `root`.
    """
    shapes, kinds = observations.layer_shapes(), torch._C._functorch.TransformType
    outer, *inner = torch._C._functorch.get_interpreter_stack() or (None,)
    if shapes.mode or outer is None or outer.key() != kinds.Vmap or kinds.Grad not in [each.key() for each in inner]:
        return
    samples = torch._C._functorch.CVmapInterpreterPtr(outer).batchSize()
    size = sum(parameter.nbytes for parameter in root.parameters())
    if samples > 1 and (shapes.by_hand is None or samples > shapes.by_hand[0]):
        shapes.by_hand = (samples, size)
        observations.record("samples_by_hand", 0, samples * size, samples=samples)


def remove_probes(root: nn.Module) -> None:
    """Removes the probes of this model's forward pass, which has ended."""
    if _watched is not None and _watched.root() is root:
        _watched.remove_probes()


class ShapeProbe:
    """A forward hook that records a module's CaptureShape. It is registered for one pass only, because it is slow."""

    __slots__ = ("_name", "_seen")

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: CaptureShape | None = None

    @contain("recording the shapes of a forward pass")
    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not is_compiling() and (shape := capture_shape(module, inputs, output)) is not None:
            self._seen = shape if self._seen is None else self._seen.with_call(shape)
            observations.layer_shapes().forwards[self._name] = self._seen
