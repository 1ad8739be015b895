# SPDX-License-Identifier: Apache-2.0
"""A program's call of the model, the data that its backward needs, and the check of steps against outputs."""

import functools
import threading
import warnings
from collections import UserDict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from opacus_memprof.clipping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.bookkeeping.autograd_functions import TwoPassBackward, run_two_passes
from opacus_memprof.clipping.forwards.repetition import Modes
from opacus_memprof.clipping.forwards.state import INTERNAL, PLAIN, Arrangement, ModuleState, RandomState
from opacus_memprof.clipping.kernels.native import OperationLog, is_backward_of_inputs
from opacus_memprof.clipping.layer_hooks import LayerHooks
from opacus_memprof.clipping.proof.batches import leaves_of_call, tensors_in
from opacus_memprof.clipping.proof.explanation import RecordedForward, check_explained
from opacus_memprof.clipping.proof.model_state import only_saved_tensors_hooks, without_compiled_autograd
from opacus_memprof.clipping.proof.situations import Situation
from opacus_memprof.errors import MemprofError

Outputs = list[tuple[torch.Tensor, "Arrangement | None"]]
"""Tensors of the model's output, each with the position of its samples; None for tensors that all samples share."""


@dataclass
class Call:
    """A program's call of the model or of a part of it.

    Attributes:
        entry: the module that is called.
        args, kwargs: its arguments.
        is_off: whether the call is ignored, because gradients are disabled or the module is in eval mode.
        depth: the number of running calls of this module; above 1 if it calls itself.
        random: the initial state of the random number generators; None while a CUDA graph is captured.
        key: the key of the situation.
        situation: the situation.
        is_proved: whether this forward was proved, rather than an earlier one.
        operations: the log of the operations that it runs; None if these are not checked.
        has_new_operations: whether they, or their numbers, are in no proof.
        state: the module's state before the forward, if the forward changes it; otherwise None.
        cannot_run: the error for which the module cannot run on other samples.
        record: the data that is needed to repeat the forward, if its step will be explained.
        modes: the modes of the program that it runs under; see `Modes.key`.
        thread: the thread that calls the module.
        other_thread: the error if another thread has called a layer meanwhile.
        is_followed: see `Parts.is_followed`.
    """

    entry: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_off: bool
    depth: int = 1
    random: RandomState | None = None
    key: Any = None
    situation: Situation | None = None
    is_proved: bool = False
    operations: OperationLog | None = None
    has_new_operations: bool = False
    state: ModuleState | None = None
    cannot_run: BaseException | None = None
    record: RecordedForward | None = None
    modes: tuple[Any, ...] = field(default_factory=lambda: Modes.now().key())
    thread: int = field(default_factory=threading.get_ident)
    other_thread: MemprofError | None = None
    is_followed: bool | None = None

    def has_gradients_of_inputs(self) -> bool:
        """Returns whether a backward may give its inputs gradients, such as those of an adversarial attack."""
        leaves = leaves_of_call(self.args, self.kwargs)
        return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)

    def is_elsewhere(self) -> bool:
        """Returns whether the current thread is another one than the call's, and not a backward's of a checkpoint."""
        if threading.get_ident() == self.thread or torch._C._current_graph_task_id() != -1:
            return False
        self.other_thread = MemprofError(
            "several threads run the model, or parts of it, at once, so that it cannot be seen whose gradient is "
            "whose: call it and its layers from one thread, one after the other."
        )
        return True


class ExplainedSteps:
    """Forwards whose gradients are compared with plain autograd's from the outputs of the model.

    Args:
        hooks: the hooks of the layers.
        bookkeeping: the tensors that backward keeps.
    """

    def __init__(self, hooks: LayerHooks, bookkeeping: Bookkeeping) -> None:
        self.hooks, self.bookkeeping = hooks, bookkeeping
        self._records: dict[int, RecordedForward] = {}  # by the number of the forward

    def clear(self) -> None:
        """Drops all records."""
        self._records.clear()

    def add(self, call: Call, outputs: Outputs) -> None:
        """Adds a forward."""
        assert call.record is not None
        assert call.random is not None
        call.record.arrangements = [where for _, where in outputs]
        call.record.draws = call.random.has_moved()
        call.record.computed_in = None if call.situation is None else call.situation.computed_in
        proof = None if call.situation is None else call.situation.record
        call.record.proof = None if proof is None else (proof, proof.forwards)
        self._records[self.hooks.forward] = call.record

    def begin_backward(
        self,
        forward: int,
        modes: tuple[Any, ...] | None,
        record: RecordedForward | None,
        place: int,
        gradient: torch.Tensor,
    ) -> None:
        """Called when a backward reaches one of the outputs of a forward.

        Args:
            forward: the number of the forward.
            modes: the modes that it ran under, see `Modes.key`; None if nothing is checked.
            record: its record, if its step will be explained.
            place: the index of the output.
            gradient: the gradient of the output.

        Raises:
            MemprofError: backward runs under a mode of the program that the forward did not run under.
        """
        if is_backward_of_inputs():
            return
        if modes is not None and not set(Modes.now().key()) <= set(modes):
            error = MemprofError(
                f"backward() runs under {Modes.now().names()}, which the model's call did not run under and which may "
                "mix the gradients of samples: enter it before the call, so that the step is checked with it."
            )
            self.bookkeeping.refusal.add(error)
        self.bookkeeping.begin_backward(forward)
        if record is not None and forward in self._records:
            record.add(place, gradient)

    def check(self, trained: dict[nn.Parameter, str]) -> None:
        """Compares the kept gradients with those from the outputs. Called before sums are formed.

        Raises:
            MemprofError: a gradient did not come through the outputs.
        """
        records, self._records = self._records, {}
        for each in self.bookkeeping.backward_passes():
            own = [records[forward] for forward in each.forwards if forward in records]
            declared = self.bookkeeping.loss_reduction
            for other in {kind for record in own for kind in record.reductions} - {declared}:
                sentence = (
                    f"the loss is a {other} over the samples, but loss_reduction={declared!r} was declared, so that a "
                    f"sample's norm would depend on the size of the batch: pass loss_reduction={other!r}, or reduce "
                    "the loss as declared."
                )
                if other == "mean":
                    raise MemprofError(sentence)
                warnings.warn(sentence, stacklevel=2)  # "mean" may be a default that nobody has thought of
            if own and len(own) == len(each.forwards) and each.samples is None:
                try:
                    with self.hooks.off(), without_compiled_autograd(), only_saved_tensors_hooks():
                        check_explained(each, own, trained, self.bookkeeping.workspace)
                except torch.OutOfMemoryError:  # no memory left beside the step; a later forward is explained instead
                    continue
                except (RuntimeError, TypeError, ValueError) as error:
                    message = str(error).strip().partition("\n")[0]
                    raise MemprofError(
                        "the forward of this step does not run a second time, before optimizer.step() "
                        f"({type(error).__name__}: {message}): change the model, its dtype or its device after the "
                        "step, and not between forward and step."
                    ) from error
                for proof, forward in (record.proof for record in own if record.proof is not None):
                    proof.note("explained", forward=forward)
        for record in records.values():
            record.release()


def detach_for_two_passes(output: Any, outputs: Outputs, hooks: LayerHooks) -> tuple[Any, Outputs]:
    """Detaches outputs from the model's graph. Backward runs through this graph twice, for norms and for clipped sums.

    Args:
        output: the output of the model.
        outputs: its tensors from which the loss may be computed.
        hooks: the hooks of the layers.

    Returns:
        The output and its tensors.

    Raises:
        MemprofError: the output has no tensors that could be detached.
    """
    if not outputs and hooks.trace:
        raise MemprofError(
            "flash_clip_passes=2 needs tensors, or tuples, lists or dictionaries of them, as outputs, but the "
            f"model returned a {type(output).__name__}: return these, or use flash_clip_passes=1."
        )
    if not outputs:
        return output, outputs
    leaves, structure = tree_flatten(output)
    places = [next(i for i, leaf in enumerate(leaves) if leaf is x) for x, _ in outputs]
    inner = [x for x, _ in outputs]
    outer = TwoPassBackward.apply(
        hooks.anchor(inner[0].device), inner, functools.partial(run_two_passes, hooks.bookkeeping)
    )
    for i, leaf in zip(places, outer, strict=True):
        leaves[i] = leaf
    return tree_unflatten(leaves, structure), [(x, where) for x, (_, where) in zip(outer, outputs, strict=True)]


def one_pass_fits(kept_bytes: int, allocated_before: int) -> bool:
    """Returns whether the tensors that one pass keeps fit into device memory.

    Backward releases what forward has allocated, so only the bytes beyond that must be free.

    Args:
        kept_bytes: bytes that backward will keep.
        allocated_before: bytes that were allocated before the forward.
    """
    if kept_bytes == 0:
        return True
    allocated = allocated_bytes()
    growth = kept_bytes - (allocated - allocated_before)
    if growth <= 0:
        return True
    free, _ = torch.cuda.mem_get_info()
    return growth <= free + torch.cuda.memory_reserved() - allocated


def allocated_bytes() -> int:
    """Returns torch.cuda.memory_allocated(), which sorts all statistics and takes five times as long."""
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["allocated_bytes"]["all"]["current"]) if statistics else 0


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Returns the device of the first tensor among the model's inputs."""
    tensors = (leaf for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def open_objects(arguments: Any) -> None:
    """Makes torch's trees see the tensors in dataclasses and mappings among a model's arguments.

    Their types are registered for this process, as programs do themselves with types of their own.
    """
    for leaf in tree_flatten(arguments)[0]:
        if isinstance(leaf, torch.Tensor) or not (is_dataclass(leaf) or isinstance(leaf, UserDict)):
            continue
        if isinstance(leaf, (type, torch.nn.Module)) or not tensors_in(leaf):
            continue
        cls = type(leaf)
        register_pytree_node(cls, _attributes, functools.partial(_made, cls), flatten_with_keys_fn=_named_attributes)
        open_objects(leaf)


def _attributes(instance: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = vars(instance) if hasattr(instance, "__dict__") else [each.name for each in fields(instance)]
    return [getattr(instance, name) for name in names], tuple(names)


def _named_attributes(instance: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    values, names = _attributes(instance)
    return [(GetAttrKey(name), value) for name, value in zip(names, values, strict=True)], names


def _made(cls: type, values: Iterable[Any], names: tuple[str, ...]) -> Any:
    instance: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # also if it is frozen
    return instance


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the length of the first tensor among the model's inputs.

    Raises:
        MemprofError: there is none, or a nested tensor, whose samples cannot be taken apart.
    """
    leaves = leaves_of_call(args, kwargs)
    if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in leaves):
        raise MemprofError(
            "the model is called with a nested tensor, whose samples flash_clip cannot replace one by one: pass a "
            "padded tensor with the samples' lengths or a mask."
        )
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise MemprofError(
        "flash_clip needs a tensor among the model's inputs whose first dimension is the batch: pass tensors, or "
        "tuples, lists, dictionaries and dataclasses of them, instead of strings, arrays and objects of other kinds."
    )


def has_parameters_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call of a module has no samples: no arguments, or parameters, as a parametrization's has."""
    return all(isinstance(leaf, nn.Parameter) for leaf in tree_flatten((args, kwargs))[0])


def without_samples(call: Call, batch: int) -> str:
    """Returns the sentence for a module that cannot run on some samples of its inputs."""
    return (
        "flash_clip needs inputs whose first dimension is the batch, of the same length in all of them: this "
        "model ran on its whole input, but not on some samples of it "
        f"({type(call.cannot_run).__name__}: {call.cannot_run}). Pass the batch first in every tensor that has "
        "it." + _advice_for_shapes(call, batch) + _advice_for_attributes(call.entry, batch)
    )


def _advice_for_attributes(module: nn.Module, batch: int) -> str:
    """Returns what to do with a tensor that the program has put into the module, as a hidden state for each batch."""
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            shapes = (
                [x.shape for x in tree_leaves(value) if isinstance(x, torch.Tensor)] if name not in INTERNAL else []
            )
            if any(batch in shape[:2] for shape in shapes):
                return (
                    f" The attribute {'.'.join(filter(None, (path, name)))} has a tensor with the size of this batch: "
                    "make it in the model's forward, or pass it as an argument."
                )
    return ""


def _advice_for_shapes(call: Call, batch: int) -> str:
    """Returns how to pass tensors of other lengths than the first: one that all samples share, or a recurrent state."""
    leaves = [leaf for leaf in leaves_of_call(call.args, call.kwargs) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    advice = ""
    if (
        any(isinstance(each, torch.nn.EmbeddingBag) for each in call.entry.modules())
        and leaves
        and leaves[0].dim() == 1
    ):
        return (
            " Where each bag of an nn.EmbeddingBag begins in flat ids, its offsets, cannot be followed: pass the model "
            "ids of shape [B, T] that are padded, with the lengths of the bags, and make the flat ids and offsets of "
            "them in its forward."
        )
    if leaves and any(len(x) != batch for x in leaves[1:]):
        advice = (
            f" The first tensor, of shape {tuple(leaves[0].shape)}, counts as the one with the samples: if all samples "
            "share it, pass it after one that has them, or expand it over the batch."
        )
    shape = next((tuple(x.shape) for x in leaves if x.dim() > 2 and len(x) != batch and x.shape[1] == batch), None)
    if shape is None:
        return advice
    return (
        f"{advice} A state such as that of shape {shape}, with the batch second, is passed as state.transpose(0, 1), "
        "and transposed back in the model's forward; so is a state that the model returns."
    )


def gradient_of_shared_output(gradient: torch.Tensor) -> MemprofError | None:
    """Returns the refusal of a loss that is not a sum over samples, by the gradient of an output without samples.

    A sum or a mean gives all elements the same gradient.
    """
    first = gradient.flatten()[0]  # norms that are not finite have a sentence of their own
    if not bool(((gradient != first) & first.isfinite()).any()):
        return None
    return MemprofError(
        f"the loss uses an output of shape {tuple(gradient.shape)} that has no dimension for the samples, and not as a "
        "sum or mean: samples influence one another there. Return outputs whose first dimension is the batch."
    )


def gradient_of_cache(repeated: str) -> MemprofError:
    """Returns the error of a loss that depends on a cache, for a layer that is repeated in backward."""
    return MemprofError(
        "the loss depends on the keys and values in the model's cache (past_key_values), but "
        f"{repeated} is repeated in backward, which gives these no gradient: compute the loss from the other outputs, "
        "or call the model without a cache (use_cache=False)."
    )


def arrangements_by_shape(tensors: list[torch.Tensor], batch: int) -> list[Arrangement | None]:
    """Returns the position of samples in the outputs of an empty batch, before any other batch has shown it."""
    return [PLAIN if x.dim() and len(x) == batch else None for x in tensors]
