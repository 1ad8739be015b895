# SPDX-License-Identifier: Apache-2.0
"""Repeats a forward pass on a copy of the model whose tensors have shapes and no memory.

This tells what every module keeps for backward, including modules that the real pass did not reach because memory ran
out. The model's own code runs a second time then: changes to the model stay in the copy, and output is printed twice.
"""

import copy
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from opacus_memprof.hooks.shapes import capture_shape, copies_layout
from opacus_memprof.profiles.layer_shapes import CaptureShape, KeptBlock, WholeForward
from opacus_memprof.recording.attachment import remove_scoped_forwards

T = TypeVar("T")


@dataclass(frozen=True)
class TensorShape:
    """The shape of an input or a parameter."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)

    def with_samples(self, samples: int, number: int) -> "TensorShape":
        """Returns the shape of another number of samples, if the first dimension has `samples`."""
        is_batch = bool(self.shape) and self.shape[0] == samples
        return replace(self, shape=torch.Size((number, *self.shape[1:]))) if is_batch else self

    def in_type(self, dtype: torch.dtype | None) -> "TensorShape":
        """Returns the shape with another floating-point type, if it has one and `dtype` is given."""
        return replace(self, dtype=dtype) if dtype is not None and self.dtype.is_floating_point else self


@dataclass(frozen=True)
class Call:
    """A forward pass: its arguments, as the leaves of a pytree with shapes for tensors, and its state.

    Attributes:
        autocast: its contexts.
        training: of each module, whether it is in training mode.
        dtype: of floating-point parameters and buffers, if it is another one than theirs.
    """

    leaves: Sequence[Any]
    structure: Any
    autocast: Sequence[torch.autocast]
    training: Sequence[bool]
    dtype: torch.dtype | None = None


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
        self._found: tuple[Call, frozenset[str], WholeForward | None] | None = None  # what `run` has returned last

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
        training = [module is not None and module.training for module in (each() for _, each in self._named)]
        self._call = Call(shapes, structure, autocast, training) if plain else None

    def run(self, layers: Iterable[str], *, captures: bool) -> WholeForward | None:
        """Repeats the whole forward pass without values, and returns the tensors that it keeps for backward.

        Returns None if the pass cannot be repeated: for example if shapes depend on values, or on one of several ranks.

        Args:
            layers: the names of the modules whose parameters are trained.
            captures: whether Opacus captures their inputs.
        """
        call, trained = self._call, frozenset(layers)
        if call is None:
            return None
        if self._found is None or self._found[0] is not call or self._found[1] != trained:
            self._found = call, trained, self._repeat(_run, call, trained, captures)
        return self._found[2]

    def peak_without_graph(self) -> int:
        """Returns the most bytes that are live at once in the pass if it records no graph; 0 if that is not known."""
        return 0 if self._call is None else self._repeat(_peak_without_graph, self._call) or 0

    def mixes_samples(self, samples: int) -> bool:
        """Returns whether the pass makes a matrix of samples by samples, as a contrastive loss does.

        It is repeated with two other numbers of samples. What has both of them twice grows with the batch in two
        dimensions. False if it cannot be repeated.
        """
        if self._call is None:
            return False
        results = []
        for number in (samples + 1, samples + 2):
            leaves = [
                leaf.with_samples(samples, number) if isinstance(leaf, TensorShape) else leaf
                for leaf in self._call.leaves
            ]
            shapes = self._repeat(_shapes, replace(self._call, leaves=leaves))
            if shapes is None:
                return False
            results.append([{i for i, size in enumerate(shape) if size == number} for shape in shapes])
        return any(len(one & other) > 1 for one, other in zip(*results, strict=False))

    def runs_in(self, dtype: str) -> bool:
        """Returns whether the pass runs with parameters and inputs of another floating-point type, such as "bfloat16".

        It does not if the model makes float32 tensors itself and multiplies them with its weights, as some embeddings
        of time steps are. True if the pass cannot be repeated at all, so that nothing is known.
        """
        call = self._call
        if call is None or self._repeat(_shapes, call) is None:
            return True
        leaves = [
            leaf.in_type(getattr(torch, dtype)) if isinstance(leaf, TensorShape) else leaf for leaf in call.leaves
        ]
        return self._repeat(_shapes, replace(call, leaves=leaves, dtype=getattr(torch, dtype))) is not None

    def _repeat(self, function: Callable[..., T], *args: Any) -> T | None:
        """Returns the result of a function of the named modules and `args` that repeats the pass; None if it cannot."""
        named = [(name, module) for name, reference in self._named if (module := reference()) is not None]
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if len(named) < len(self._named) or not named or distributed:
            return None
        state = random.getstate()
        try:
            if not torch.cuda.is_available():
                _set_device_guard()
            # In a separate thread, because the failed operation has left its dispatch state in this thread.
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(function, named, *args).result()
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


class _ShapeRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the shapes of all results, in their order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        types_of = {each.dtype for each in args if isinstance(each, Tensor) and each.is_floating_point()}
        if func in _OF_ONE_TYPE and len(types_of) > 1:  # fake tensors are multiplied all the same
            raise TypeError(f"{func} of {types_of}")
        result = func(*args, **(kwargs or {}))
        self.shapes += [tensor.shape for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        return result


def _shapes(named: Sequence[tuple[str, nn.Module]], call: Call) -> list[torch.Size]:
    recorder = _ShapeRecorder()
    with _fake_mode(call) as fake, torch.no_grad():
        model, _ = _copy(named, fake, call)
        leaves = [leaf.make() if isinstance(leaf, TensorShape) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.structure)
        with recorder:
            model(*args, **(kwargs or {}))
    return recorder.shapes


def _peak_without_graph(named: Sequence[tuple[str, nn.Module]], call: Call) -> int:
    with _fake_mode(call) as fake, torch.no_grad():
        model, _ = _copy(named, fake, call)
        leaves = [leaf.make() if isinstance(leaf, TensorShape) else leaf for leaf in call.leaves]
        excluded = [*model.parameters(), *model.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        args, kwargs = tree_unflatten(leaves, call.structure)
        with (recorder := _Recorder(excluded, frozenset(), captures=False)):
            model(*args, **(kwargs or {}))
    return recorder.peak


def _run(named: Sequence[tuple[str, nn.Module]], call: Call, layers: frozenset[str], captures: bool) -> WholeForward:
    with _fake_mode(call) as fake:
        model, copies = _copy(named, fake, call)
        leaves = [leaf.make() if isinstance(leaf, TensorShape) else leaf for leaf in call.leaves]
        excluded = [*model.parameters(), *model.buffers(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        recorder = _Recorder(excluded, layers, captures)
        with recorder:
            for name, module in copies:
                module.register_forward_pre_hook(partial(recorder.enter, name))
                module.register_forward_hook(partial(recorder.leave, name))
            args, kwargs = tree_unflatten(leaves, call.structure)
            with _checkpoints(recorder), torch.autograd.graph.saved_tensors_hooks(recorder.keep, _unpack):
                output = model(*args, **(kwargs or {}))
        samples = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)
        return recorder.result(output, samples)


@contextmanager
def _fake_mode(call: Call) -> Iterator[FakeTensorMode]:
    """Uses fake tensors, within the call's autocast contexts.

    Models of transformers ask whether positions begin anew within a sequence, which fake tensors do not answer: they
    do not where the model itself numbers them.
    """
    masks = sys.modules.get("transformers.masking_utils")
    asks = getattr(masks, "find_packed_sequence_indices", None)
    _, named = tree_unflatten(list(call.leaves), call.structure)
    with FakeTensorMode() as fake, ExitStack() as stack:
        for context in call.autocast:
            stack.enter_context(context)
        if masks is not None and asks is not None and (named or {}).get("position_ids") is None:
            vars(masks)["find_packed_sequence_indices"] = lambda position_ids: None
            stack.callback(vars(masks).update, find_packed_sequence_indices=asks)
        yield fake


@contextmanager
def _checkpoints(recorder: "_Recorder") -> Iterator[None]:
    """Within it, activation checkpoints run their functions with gradients, as backward does when it runs them again.

    The recorder knows what they would keep then, and which tensors are kept instead, so that they can run again.
    """

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            with recorder.checkpoint(args):
                return function(*args)

    def run(*args: Any, **kwargs: Any) -> Iterator[None]:
        with recorder.checkpoint((args, kwargs)):
            yield

    module = torch.utils.checkpoint
    names = (
        "_checkpoint_without_reentrant_generator",
        "_checkpoint_without_reentrant_generator_impl",
    )  # by torch's version
    replaced = {"CheckpointFunction": Reentrant, **dict.fromkeys(names, run)}
    before = {name: getattr(module, name) for name in replaced if hasattr(module, name)}
    try:
        for name in before:
            setattr(module, name, replaced[name])
        yield
    finally:
        for name, original in before.items():
            setattr(module, name, original)


def _copy(named: Sequence[tuple[str, nn.Module]], fake: FakeTensorMode, call: Call) -> tuple[nn.Module, list[Any]]:
    """Returns a copy of the model with fake tensors and without hooks, and its named modules, in the call's state."""
    memo: dict[int, Any] = {}
    for _, module in named:
        for key, value in vars(module).items():
            if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                memo[id(value)] = type(value)()
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(
                    shape_of(parameter).in_type(call.dtype).make(), parameter.requires_grad
                )
    with FakeCopyMode(fake):
        model = copy.deepcopy(named[0][1], memo)
    copies = [(name, memo[id(module)]) for name, module in named]
    for (_, module), trains in zip(copies, call.training, strict=True):
        remove_scoped_forwards(module)
        module.training = trains
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(shape_of(buffer).in_type(call.dtype).dtype)
    return model, copies


_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
_BATCHED_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)  # as of queries and keys
_PRODUCTS = (*_BATCHED_PRODUCTS, torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_CONVOLUTION = torch.ops.aten.convolution.default
_OF_ONE_TYPE = (*_PRODUCTS, torch.ops.aten.linear.default, _CONVOLUTION)


@dataclass
class _Storage:
    """A storage that the pass has allocated, and its tensors that are alive. It is held, so that its address is unique.

    Attributes:
        calls_before: the number of calls of layers that had begun.
        checkpoint: the number of the activation checkpoint in which it was allocated; None outside of them.
        is_attention: see KeptBlock.
        is_recomputed: whether backward keeps it once the checkpoint's function has run again.
        first_save: how many tensors had been saved when it first was; 0 if it was not.
    """

    storage: Any
    module: str
    calls_before: int
    is_softmax: bool
    checkpoint: int | None
    tensors: int = 0
    is_recomputed: bool = False
    is_saved: bool = False
    saves: int = 0
    first_save: int = 0
    captor: str | None = None
    is_attention: bool = False

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
        self._products: set[int] = set()  # batched ones and what was computed from them elementwise, by address
        self._live = self._peak = self._product_peak = self._saves = 0
        self._forwards: dict[str, CaptureShape] = {}
        self._checkpoints = 0
        self._checkpoint: int | None = None  # the one that runs
        self._inside: dict[str, int] = {}  # layers in checkpoints, in the order of their calls
        self._excluded = {id_of(tensor): tensor for tensor in excluded}

    @property
    def peak(self) -> int:
        return self._peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SUMS and isinstance(args[1], Tensor):
            self._add_up(result, *args[:2])
        sizes = {each.numel() for each in args if isinstance(each, Tensor) and id_of(each) in self._products}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (key := id_of(tensor)) not in self._excluded:
                is_product = func in _BATCHED_PRODUCTS or tensor.numel() in sizes
                if is_product:
                    self._products.add(key)
                if key not in self._storages:
                    is_softmax = "softmax" in func.__name__
                    storage = tensor.untyped_storage()
                    self._storages[key] = _Storage(
                        storage, self._path[-1], len(self._called), is_softmax, self._checkpoint
                    )
                    self._storages[key].is_attention = is_softmax and is_product
                found = self._storages[key]
                self._change(found, tensors=found.tensors + 1)
                weakref.finalize(tensor, self._free, found)
        if func is _CONVOLUTION and result.is_cuda and copies_layout(args[1], args[3], args[8], result):
            copies = args[0].nbytes + args[1].nbytes + result.nbytes  # its library's workspace, until it returns
            self._peak = max(self._peak, self._live + copies)
        if func in _PRODUCTS:
            self._product_peak = max(self._product_peak, self._live)
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
            self._saves += 1
            found.first_save = found.first_save or self._saves
            if self._checkpoint is not None and found.checkpoint == self._checkpoint:
                found.is_recomputed = True
            else:
                self._change(found, is_saved=True, saves=found.saves + 1)

    @contextmanager
    def checkpoint(self, arguments: Any) -> Iterator[None]:
        """Within it, an activation checkpoint runs, which keeps its arguments. One inside of another is part of it."""
        if self._checkpoint is not None:
            yield
            return
        for tensor in tree_leaves(arguments):
            self.keep(tensor)
        self._checkpoints += 1
        self._checkpoint = self._checkpoints
        try:
            yield
        finally:
            self._checkpoint = None

    def enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._path.append(name)
        self._streams.update(id_of(tensor) for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor))
        if name in self._layers:
            self._called.append(name)
            if self._checkpoint is not None:
                self._inside[name] = self._checkpoint

    def leave(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self._path.pop()
        if name in self._layers and self._captures and module.training and torch.is_grad_enabled():
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor) and (found := self._storages.get(id_of(tensor))) is not None:
                    if self._checkpoint is not None and found.checkpoint == self._checkpoint:
                        found.is_recomputed = True
                    else:
                        self._change(found, captor=name)
        if name in self._layers and (shape := capture_shape(module, inputs, output)) is not None:
            seen = self._forwards.get(name)
            self._forwards[name] = shape if seen is None else seen.with_call(shape)
            self._outputs[id_of(output)] = name

    def result(self, output: Any, samples: int) -> WholeForward:
        outputs = {id_of(tensor) for tensor in tree_leaves(output) if isinstance(tensor, Tensor)}
        caches = [leaf for leaf in tree_leaves(output) if hasattr(leaf, "get_seq_length")]  # of transformers
        of_layers = [vars(layer).values() for cache in caches for layer in getattr(cache, "layers", ())]
        cached = {id_of(each) for values in of_layers for each in values if isinstance(each, Tensor)}
        around = {""} | {name[:end] for name in self._layers for end in range(len(name)) if name[end] == "."}
        innermost = self._forwards.keys() - (around if self._layers - {""} else set())

        def layer_of(found: _Storage) -> str | None:
            if found.module in innermost:
                return found.module
            return next((name for name in self._called[found.calls_before :] if name in self._forwards), None)

        blocks = [
            KeptBlock(
                found.bytes,
                found.module,
                layer_of(found),
                key in outputs,
                found.saves > 1,
                None if found.is_saved else found.captor,
                found.is_softmax,
                found.first_save,
                found.is_attention,
                key in cached,
            )
            for key, found in self._storages.items()
            if found.is_kept or key in outputs
        ]
        recomputed = []
        for found in self._storages.values():
            if found.is_recomputed:
                layer = layer_of(found)
                inside = [name for name, number in self._inside.items() if number == found.checkpoint]
                layer = layer if layer in inside else inside[-1] if inside else None
                kinds = (found.is_softmax, found.first_save, found.is_attention)
                recomputed.append(KeptBlock(found.bytes, found.module, layer, False, False, None, *kinds))
        return WholeForward(
            self._forwards,
            tuple(blocks),
            self._peak,
            samples,
            self._sums,
            frozenset(self._added),
            tuple(recomputed),
            self._inside,
            self._product_peak,
        )


def _unpack(kept: Any) -> Tensor:
    raise RuntimeError("a forward pass on fake tensors has no backward")


def id_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage object."""
    return int(tensor.untyped_storage()._cdata)
