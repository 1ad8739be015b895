# SPDX-License-Identifier: Apache-2.0
"""A call of the model by the program: what it needs until its backward, and which of its steps are explained."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.bookkeeping.autograd_functions import TwoPassBackward, run_two_passes
from opacus_memprof.clipping.bookkeeping.bookkeeping import Bookkeeping
from opacus_memprof.clipping.forwards.arrangement import PLAIN, Arrangement
from opacus_memprof.clipping.forwards.random_state import RandomState
from opacus_memprof.clipping.layer_hooks import LayerHooks
from opacus_memprof.clipping.proof.explanation import RecordedForward, check_explained
from opacus_memprof.clipping.proof.outputs import alias_leaves
from opacus_memprof.clipping.proof.program_context import without_compiled_autograd, without_saved_tensors_hooks
from opacus_memprof.clipping.proof.situations import Situation
from opacus_memprof.errors import MemprofError

Outputs = list[tuple[torch.Tensor, "Arrangement | None"]]
"""Tensors of the model's output, each with where it has the samples; None for what all samples share."""


@dataclass
class Call:
    """A call of the model, or of a part of it, by the program.

    Attributes:
        entry: the module that is called.
        args, kwargs: what it is called with.
        is_off: whether nothing is followed: without gradients, or in eval mode.
        depth: how often the module is running, as one that calls itself is.
        random: what the random number generators began with; None while a CUDA graph is captured.
        key: of the situation.
        situation: the situation.
        is_proved: whether this forward was proved, rather than one before.
        cannot_run: why the module cannot run on other samples.
        record: what is needed to repeat the forward, if its step is going to be explained.
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
    cannot_run: BaseException | None = None
    record: RecordedForward | None = None


class ExplainedSteps:
    """The forwards whose steps are compared with what the outputs of the model explain.

    Args:
        hooks: of the layers.
        bookkeeping: what backward keeps.
    """

    def __init__(self, hooks: LayerHooks, bookkeeping: Bookkeeping) -> None:
        self.hooks, self.bookkeeping = hooks, bookkeeping
        self._records: dict[int, RecordedForward] = {}  # by the number of the forward

    def clear(self) -> None:
        """Drops all records."""
        self._records.clear()

    def add(self, call: Call, output: Any, outputs: Outputs) -> tuple[Any, Outputs]:
        """Adds a forward. Returns the output, and its tensors, with aliases of these: of an output from which others
        are computed, only what the program does with it counts.
        """
        assert call.record is not None
        assert call.random is not None
        output, aliases = alias_leaves(output, [x for x, _ in outputs])
        wheres = [where for _, where in outputs]
        call.record.wheres = wheres
        call.record.draws = call.random.has_moved()
        proof = None if call.situation is None else call.situation.record
        call.record.proof = None if proof is None else (proof, proof.forwards)
        self._records[self.hooks.forward] = call.record
        return output, list(zip(aliases, wheres, strict=True))

    def begin_backward(self, forward: int, record: RecordedForward | None, place: int, gradient: torch.Tensor) -> None:
        """Called when a backward reaches one of the outputs of a forward."""
        self.bookkeeping.begin_backward(forward)
        if record is not None and forward in self._records:
            record.add(place, gradient)

    def check(self, trained: dict[nn.Parameter, str]) -> None:
        """Compares what recorded steps have kept with what their outputs explain. Called before sums are formed.

        Raises:
            MemprofError: a gradient has come beside the outputs.
        """
        records, self._records = self._records, {}
        for each in self.bookkeeping.backward_passes():
            own = [records[forward] for forward in each.forwards if forward in records]
            if own and len(own) == len(each.forwards) and each.samples is None:
                try:
                    with self.hooks.off(), without_compiled_autograd(), without_saved_tensors_hooks():
                        check_explained(each, own, trained, self.bookkeeping.workspace)
                except torch.OutOfMemoryError:  # beside what the step needs; a later forward is explained instead
                    continue
                for proof, forward in (record.proof for record in own if record.proof is not None):
                    proof.note("explained", forward=forward)
        for record in records.values():
            record.release()


def detach_for_two_passes(output: Any, outputs: Outputs, hooks: LayerHooks) -> tuple[Any, Outputs]:
    """Detaches outputs from the model's graph, through which their backward runs twice: for the norms, and for the
    clipped sums.

    Args:
        output: of the model.
        outputs: its tensors that the loss may be computed from.
        hooks: of the layers.

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
    """Returns whether what one pass keeps fits into device memory. Backward releases what forward has allocated, so
    only the bytes beyond that must be free.

    Args:
        kept_bytes: what backward will keep.
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
    """Returns torch.cuda.memory_allocated(), in a fifth of its time: it sorts all statistics."""
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return int(statistics["allocated_bytes"]["all"]["current"]) if statistics else 0


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Returns the device of the first tensor among the model's inputs."""
    tensors = (leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the length of the first tensor among the model's inputs."""
    for leaf in tree_flatten((args, kwargs))[0]:
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return len(leaf)
    raise MemprofError("flash_clip needs a tensor among the model's inputs whose first dimension is the batch.")


def wheres_by_shape(tensors: list[torch.Tensor], batch: int) -> list[Arrangement | None]:
    """Returns where the outputs of an empty batch have the samples, before any other batch has told."""
    return [PLAIN if x.dim() and len(x) == batch else None for x in tensors]
