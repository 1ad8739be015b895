# SPDX-License-Identifier: Apache-2.0
"""Records the shapes of forward passes.

Modules are probed in the forward pass of each batch that is larger than all earlier ones. After a failure, this pass is
repeated on fake tensors, for the shapes of modules that it did not reach.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from opacus_memprof.hooks.fake_forward import FakeForward
from opacus_memprof.hooks.shapes import capture_shape
from opacus_memprof.profiles.layer_shapes import CaptureShape, TrainingShapes
from opacus_memprof.recording import native, observations
from opacus_memprof.recording.attachment import Attachment
from opacus_memprof.recording.faults import contain
from opacus_memprof.versions import variables_of

_EVALUATIONS = 1000  # the number of evaluations whose steps are remembered
_MOST_NODES = 10_000  # of autograd's graph that are looked at
_FEWEST_NODES = 3  # a matrix of two by two can be anything


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
        samples: the number of samples of the largest batch.
        has_squares: whether its forward pass has returned a matrix of samples by samples; None before it has ended.
        is_told_apart: whether no other dimension of what it has returned can be taken for the samples.
    """

    root: "weakref.ref[nn.Module]"
    modules: "list[tuple[str, weakref.ref[nn.Module]]]"
    forward: FakeForward
    largest_batch: int = 0
    evaluated_in: list[int] = field(default_factory=list)
    largest_trained: int = 0
    largest_evaluated: int = 0
    probe_handles: list[RemovableHandle] = field(default_factory=list)
    samples: int = 0
    has_squares: bool | None = None
    is_told_apart: bool = False

    def mixes_samples(self) -> bool:
        """Returns whether the largest forward pass, or the loss of it, makes a matrix of samples by samples.

        A matrix that only happens to be square is told from it by other batches. Where the output shows nothing, these
        are tried only if the first forward pass has not ended.
        """
        if self.has_squares is not False and self.forward.mixes_samples(self.samples):
            return True
        return self.is_told_apart and _has_squares_behind(_tensors_in_frames(), self.samples)

    def peak_of_evaluation(self) -> int:
        """Returns the peak of the latest forward pass, an evaluation without a graph; 0 if it was not the largest."""
        evaluation = observations.layer_shapes().evaluation
        return self.forward.peak_without_graph() if evaluation and evaluation[0] == self.samples else 0

    def remove_probes(self) -> None:
        while self.probe_handles:
            self.probe_handles.pop().remove()


_watched: WatchedModel | None = None
# Called where the forward pass of the largest batch begins; `diagnosis`, which imports this module, adds to it.
observe_largest: list[Callable[[TrainingShapes], None]] = []


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
    shapes.mixes_samples = cache(_watched.mixes_samples)
    shapes.runs_in = cache(_watched.forward.runs_in)
    shapes.peak_without_graph = _watched.peak_of_evaluation
    shapes.whole_forward = partial(_watched.forward.run, shapes.modules, captures=bool(shapes.mode))


def watched_model() -> nn.Module | None:
    """Returns the outermost module of the model whose shapes are recorded; None if there is none."""
    return None if _watched is None else _watched.root()


def _unwatch(model: WatchedModel) -> None:
    global _watched
    model.remove_probes()
    if _watched is model:
        _watched = None


def on_zero_grad(optimizer: Optimizer) -> None:
    """Records whether zero_grad comes after the forward pass of its step, if it is the step's first.

    Optimizers of other models are ignored.
    """
    shapes, step = observations.layer_shapes(), native.step()[0]
    is_late = shapes.forward_step == step
    if shapes.cleared_step == step or _watched is None:
        return
    if is_late or shapes.clears_late or shapes.cleared_step is None:  # what is looked at is not new in most steps
        root = _watched.root()
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if root is None or not any(id(parameter) in own for parameter in root.parameters()):
            return
        shapes.clears_late = is_late
    shapes.cleared_step = step


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
        shapes.forward_step = native.step()[0]
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
        model.largest_batch, model.samples = elements, samples
        tensors = native.tensors_in(inputs)
        shapes.input_bytes = sum(tensor.nbytes for tensor in tensors)
        shapes.has_nodes = any(_has_edges(tensor, samples) for tensor in tensors[1:])
        observations.record("largest_batch", 0, shapes.input_bytes, step=native.step()[0], has_graph=has_graph)
        model.forward.record_inputs(inputs)
        for observe in observe_largest:
            observe(shapes)
        alive = [(name, reference()) for name, reference in model.modules]
        model.probe_handles[:] = [
            module.register_forward_hook(ShapeProbe(name)) for name, module in alive if module is not None
        ]


def _has_edges(tensor: Tensor, nodes: int) -> bool:
    """Returns whether a tensor has the edges of a graph: as a matrix of its nodes, or as two rows of their numbers."""
    if tensor.dim() != 2 or nodes < _FEWEST_NODES:
        return False
    pairs = tensor.dtype == torch.long and len(tensor) == 2
    return tuple(tensor.shape) == (nodes, nodes) or (pairs and tensor.shape[1] >= nodes)


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


def on_output(root: nn.Module, output: Any) -> None:
    """Removes the probes of this model's forward pass, which has ended; records whether it returns a square matrix."""
    model = _watched
    if model is None or model.root() is not root:
        return
    if model.probe_handles and model.samples > 1:
        outputs = native.tensors_in((output,))
        model.has_squares = any(tensor.shape.count(model.samples) > 1 for tensor in outputs)
        model.is_told_apart = all(size % model.samples for tensor in outputs for size in tensor.shape[1:])
        for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
            _metadata_of(node)[WatchedModel] = model.samples
    model.remove_probes()


def running_frames() -> Iterator[FrameType]:
    """Yields the frames of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _tensors_in_frames() -> list[Tensor]:
    """Returns the tensors of autograd's graph that variables of the functions that are running refer to."""
    found: list[Tensor] = []
    for frame in running_frames():
        # Nothing else is kept: this function's own frame, in a list of its own, would live until garbage is collected.
        values = variables_of(frame).values()
        found += [each for each in values if isinstance(each, Tensor) and each.grad_fn is not None]
    return found


def _metadata_of(node: Any) -> dict[object, object]:
    return cast("dict[object, object]", node.metadata)  # which torch declares as a method


def _has_squares_behind(tensors: Sequence[Tensor], samples: int) -> bool:
    """Returns whether the tensors were computed from the model's output by a matrix of samples by samples.

    Its sides can be multiples of the batch, as for two outputs that are concatenated. The nodes of outputs are marked.
    """
    waiting, seen = [each.grad_fn for each in tensors], set[Any]()
    outputs, users = list[Any](), dict[Any, list[Any]]()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if WatchedModel in _metadata_of(node):
            outputs.append(node)
            continue
        for following, _ in node.next_functions:
            users.setdefault(following, []).append(node)
            waiting.append(following)
    computed = set[Any]()  # from outputs: the graph of another model, such as a reference, has squares of its own
    while outputs:
        later = [node for node in users.get(outputs.pop(), ()) if node not in computed]
        computed.update(later)
        outputs += later
    shapes = [tuple(each.shape) for node in computed for each in node._input_metadata]
    return any(size >= samples and size % samples == 0 and shape.count(size) > 1 for shape in shapes for size in shape)


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
