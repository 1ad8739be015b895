# SPDX-License-Identifier: Apache-2.0
"""Bookkeeping: the tensors that the backward passes since the last step have kept for each layer, and the clip factors.

Book-keeping as in Bu et al. 2023 (arXiv 2210.00038): norms are complete only when backward has reached the first layer,
so each layer keeps what its clipped sum needs, and the sums are formed afterwards.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from opacus_memprof.clipping.agreement import KeptRefusal
from opacus_memprof.clipping.arguments import ClipRule, Nonfinite
from opacus_memprof.clipping.bookkeeping.backward_pass import BackwardPass, Factors, Limit, NormCheck, limit_of_batch
from opacus_memprof.clipping.forwards.state import GivenRows, check_given_once
from opacus_memprof.clipping.layers import KeptTensors, Layer
from opacus_memprof.clipping.workspace import Workspace, accumulation_dtype, sum_dtype
from opacus_memprof.errors import MemprofError

_MOST_FORWARDS = 1024  # of which something is remembered until their backward
_Noted = TypeVar("_Noted")


def _remember(notes: dict[int, _Noted], forward: int, note: _Noted) -> None:
    """Adds a note about a forward, by its number, and drops the oldest one if there are too many."""
    notes[forward] = note
    if len(notes) > _MOST_FORWARDS:
        del notes[next(iter(notes))]


class Bookkeeping:
    """The tensors that backward keeps until the optimizer's step. The module adds them, and the optimizer removes them.

    Attributes:
        rule: how gradients are clipped.
        places: each parameter's index in the optimizer.
        norms: per-sample gradient norms of the last clipped batch, [B]. Not private.
        mode: the task of the next backward: "keep" the tensors that clipped sums need; compute "norms" only, as the
            first of two passes; or form the "sums", as the second.
        passes_in_last_step: number of backward passes that the last `pop_clipped_sums` has added up.
        samples_in_last_step: number of samples in these passes.
        unclipped_in_last_step: number of these samples whose gradients were not clipped, a scalar. Not private.
        beside_layers: names of trained parameters that autograd has given a gradient outside of the layers.
        loss_mixes: whether the loss of a backward mixes samples, as far as it is known.
        loss_carries: whether it depends on what other samples have left in an earlier step, as far as it is known.
        limit: the limit of the clipped sums' norms, over all passes since the sums began.
        nonfinite: the treatment of samples whose gradient norm is not finite: "refuse" refuses the step, and "drop"
            leaves these samples out of it.
        dropped: the indices of the samples that were dropped since the sums began, counted through all physical batches
            of a step. Not private.
        dropped_in_all: the number of samples that were dropped in all steps. Not private.
        refusal: the error that the next step raises, where several ranks train the model.
        first_forward: the number of the first forward with the layers that the model has now.
        is_captured: whether a CUDA graph of the pass is captured, whose norms are checked after each replay.
        is_copy: whether it is the copy of another one, which no private optimizer steps.
    """

    def __init__(
        self, rule: ClipRule, loss_reduction: str, workspace: Workspace, nonfinite: Nonfinite = "refuse"
    ) -> None:
        self.rule = rule
        self.loss_reduction = loss_reduction
        self.workspace = workspace
        self.places: dict[nn.Parameter, int] = {}
        self.accumulation_allowed = True
        self.norms: torch.Tensor | None = None
        self.passes_in_last_step = 1
        self.samples_in_last_step = 0
        self.unclipped_in_last_step: torch.Tensor | int = 0
        self.mode: Literal["keep", "norms", "sums"] = "keep"
        self.beside_layers: list[str] = []
        self.loss_mixes = self.loss_carries = False
        self.limit = Limit()
        self.nonfinite = nonfinite
        self.dropped: list[int] = []
        self.dropped_in_all = 0
        self.first_forward = 0
        self.is_captured = self.is_copy = False
        self.refusal = KeptRefusal()
        self._factors_of_sums: torch.Tensor | None = None
        self._passes: list[BackwardPass] = []
        self._tasks: dict[int, set[int]] = {}  # autograd's numbers of the backwards of each forward
        self._norm_checks: list[NormCheck] = []
        self._found_shared = False
        self._unclipped: torch.Tensor | int = 0
        self._given: dict[int, GivenRows] = {}  # by the number of the forward
        self._counted: list[GivenRows] = []  # in earlier physical batches of this step
        self._called: dict[int, set[Layer]] = {}  # by the number of the forward

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "is_copy": True, "_given": {}, "_counted": [], "_called": {}}

    def give_to(self, optimizer: Optimizer) -> None:
        """Gives the gradients to a private optimizer. The one that it wraps must not step while they wait."""
        self.is_copy, reference = False, weakref.ref(self)

        def refuse_step(*_: Any) -> None:
            own = reference()
            if own is not None and own.passes:
                raise MemprofError(
                    "the optimizer that was given to make_private is stepped itself, but the model's gradients wait "
                    "for the private optimizer: call step() and zero_grad() of the one that make_private has returned."
                )

        optimizer.register_step_pre_hook(refuse_step)

    def clear(self) -> None:
        """Drops everything that is kept."""
        self._passes.clear()
        self._tasks.clear()
        self.beside_layers.clear()
        self.loss_mixes = self.loss_carries = False
        self._norm_checks.clear()
        self._unclipped = 0

    def kept_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yields all kept tensors: (the profiler's category, name of the layer, tensor)."""
        for each in self._passes:
            for layer, kept in each.kept.items():
                yield from ((category, layer.name, tensor) for category, tensor in kept.tensors())
            for shared in each.shared.values():
                yield from ((category, shared.name, tensor) for category, tensor in shared.tensors())

    def kept_tensors_of(self, layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that the newest pass keeps for a layer: (the profiler's category, tensor)."""
        newest = self._passes[-1]
        if layer in newest.kept:
            yield from newest.kept[layer].tensors()
        for parameter in layer.trainable():
            if parameter in newest.shared:
                yield from newest.shared[parameter].tensors()
            if parameter in newest.sums:
                yield "summed_gradients", newest.sums[parameter]

    def add(self, layer: Layer, x: Any, g: Any, forward: int) -> None:
        """Adds the backward of one layer.

        Args:
            layer: the layer.
            x: its input, [B, ...]; None where it is not needed. For a GenericLayer the Call.
            g: the gradient of its output, [B, ...]. For a GenericLayer the gradients of the call's outputs.
            forward: the number of the forward in which the layer ran.

        Raises:
            MemprofError: the layer saw another batch size than earlier layers, or the model has changed since its
                forward.
            ValueError: a second backward without a step, where gradients must not accumulate (as in Opacus).
        """
        if forward < self.first_forward:  # a parameter may have a part in this forward's layers and one in later ones
            raise MemprofError(
                f"backward reaches {layer.describe()} in a forward that ran before layers or trained parameters of the "
                "model were changed, and another forward has run since: call backward() before the model changes."
            )
        size = layer.batch_size(x, g)
        current = self._pass_of(forward, size)
        if size != current.batch_size:
            raise MemprofError(
                f"{layer.describe()} saw a batch of {size}, but other layers saw {current.batch_size}. Give "
                "every forward of the model before a backward the same samples."
            )
        if layer.is_shared and self.mode != "keep" and isinstance(g, torch.Tensor):
            # Norms are those of the summed uses, but clipped sums are formed for each use: they differ by rounding.
            g = g.to(accumulation_dtype(g.dtype))
        if self.mode == "sums":
            assert self._factors_of_sums is not None
            first = current.first_of(layer)
            sums = layer.sums_of_backward(x, g, self._factors_of_sums, current.samples, self.workspace, first)
            for parameter, total in sums.items():
                current.sums[parameter] = current.sums[parameter] + total if parameter in current.sums else total
        elif layer.is_shared:
            current.add_shared(layer, layer.keep(x, g, self.workspace, norms=False), self.workspace)
        elif layer in current.kept:
            self._share(current, layer, x, g)
        elif self.mode == "norms":
            current.kept[layer] = layer.keep_norms(x, g, self.workspace)
        else:
            kept = current.kept[layer] = layer.keep(x, g, self.workspace)
            kept.noted_version = kept.version()

    def _share(self, current: BackwardPass, layer: Layer, x: Any, g: Any) -> None:
        """Adds a second use of a layer that seemed to be used only once."""
        layer.is_shared = True
        if self.mode == "norms":
            self._found_shared = True  # tensors of the first use were not kept: the pass is repeated
        else:
            current.add_shared(layer, current.kept.pop(layer), self.workspace)
            current.add_shared(layer, layer.keep(x, g, self.workspace, norms=False), self.workspace)

    def note_samples(self, forward: int, tensors: Iterable[torch.Tensor], batch: int) -> None:
        """Notes which samples a forward was given, for `check_complete`."""
        _remember(self._given, forward, GivenRows(tensors, batch))

    def note_layers(self, forward: int, called: set[Layer]) -> None:
        """Notes which layers a forward has called, for `check_complete`."""
        _remember(self._called, forward, called)

    def begin_backward(self, forward: int) -> None:
        """Called when a backward reaches the outputs of a forward, before any layer adds anything.

        Raises:
            MemprofError: no private optimizer was made for a copy of a private model.
        """
        if self.is_copy:
            raise MemprofError(
                "this model is a copy of a private model, and no private optimizer steps it, so that its gradients "
                "would be lost: copy the model before make_private, or call remove_hooks() of a copy that make_private "
                "has wrapped, and then train it or make it private. Freeze a copy that only passes gradients on."
            )
        task = torch._C._current_graph_task_id()
        self._tasks.setdefault(forward, set()).add(task)
        for each in self._passes:
            if forward in each.forwards:
                each.tasks.add(task)

    def _pass_of(self, forward: int, batch_size: int) -> BackwardPass:
        """Returns the pass of a forward: forwards in one call of `backward` have the same samples, and share a pass."""
        for each in reversed(self._passes):
            if forward in each.forwards:
                return each
        # A checkpoint runs backward inside of backward, with another number than the backward that reached the outputs.
        tasks = self._tasks.get(forward) or {torch._C._current_graph_task_id()}
        for each in reversed(self._passes):
            if each.tasks & tasks:
                each.forwards.add(forward)
                each.tasks |= tasks
                return each
        return self._begin_pass(BackwardPass(batch_size, forwards={forward}, tasks=set(tasks)))

    def _begin_pass(self, new: BackwardPass) -> BackwardPass:
        if self._passes and not self.accumulation_allowed:
            raise ValueError(
                "Poisson sampling is not compatible with grad accumulation. You need to call optimizer.step() "
                "after every forward/backward pass or consider using BatchMemoryManager"
            )
        self._passes.append(new)
        return new

    def begin_two_passes(self) -> None:
        """Called before the first of two backwards.

        Raises:
            MemprofError: another forward's backward has begun since the last forward.
        """
        if any(torch._C._current_graph_task_id() in each.tasks for each in self._passes):
            raise MemprofError(
                "several forwards for one backward need flash_clip_passes=1: two passes find the norms of each forward "
                "by itself."
            )

    def must_repeat_norms(self) -> bool:
        """Returns whether the backward for the norms must run again, because a layer is used more than once.

        The norms of such a backward are dropped.
        """
        repeats, self._found_shared = self._found_shared, False
        if repeats:
            self._passes.pop()
        return repeats

    def begin_sums(self) -> None:
        """Computes the clip factors of the newest pass, before a second backward forms its sums.

        The layers apply the factors to the same gradients whose norms they have computed. Scaling the outputs'
        gradients instead would round all gradients again, and would need outputs whose first dimension is the batch.
        """
        newest = self._passes[-1]
        newest.clipped = True
        factors = self._factors(newest)
        newest.release_shared()
        assert isinstance(factors, torch.Tensor)
        self._factors_of_sums = newest.factors = factors
        self.mode = "sums"

    def end_two_passes(self) -> None:
        """Called after the second of two backwards, or after a failure."""
        self._factors_of_sums = None
        self.mode = "keep"

    def _factors(self, each: BackwardPass) -> Factors:
        """Returns the clip factors of a pass, [B], for all parameters or by parameter.

        They are those of Opacus. For a mean loss they are multiplied by the batch size, because the gradients are those
        of loss / B. A sample adds its gradient times its factor to the clipped sum. This has a norm of at most the
        bound of the rule, which is the sensitivity of the sum.
        """
        parameters, squares, owners = each.squared_norms(self.workspace)
        device, dtype = squares[0].device, squares[0].dtype
        same = all(s.dtype == dtype and s.device == device for s in squares)
        by_parameter = torch.stack(squares if same else [s.to(device, dtype) for s in squares])
        scale = each.batch_size if self.loss_reduction == "mean" else 1
        self.norms = by_parameter.sum(0).sqrt_().mul_(scale)
        each.limit = limit_of_batch(each.batch_size, self.rule)
        if self.nonfinite == "drop":
            self._drop(each, self.norms)
        else:
            self._norm_checks.append(NormCheck(self.norms, by_parameter, owners))
            if not self.is_captured:
                self._norm_checks[-1].begin()
        if self.rule.by_parameter:
            norms = by_parameter.sqrt().mul_(scale)
            return {p: self.rule.factors_of(self.places[p], norms[i]).mul_(scale) for i, p in enumerate(parameters)}
        factors = self.rule.factors(self.norms)
        if self.rule.clipping == "adaptive":
            self._unclipped = self._unclipped + (factors >= 1).sum()
        return factors.mul_(scale)

    def _drop(self, each: BackwardPass, norms: torch.Tensor) -> None:
        """Drops the samples of a pass whose norms are not finite (a factor of 0 would give NaN). The host waits."""
        finite = norms.isfinite()
        each.dropped = (~finite).nonzero().flatten().tolist()
        if each.dropped:
            each.samples = finite.nonzero().flatten()

    def take_norm_check(self) -> NormCheck:
        """Removes the newest check of norms and returns it."""
        return self._norm_checks.pop()

    def add_clipped(
        self,
        batch_size: int,
        sums: Mapping[nn.Parameter, torch.Tensor],
        check: NormCheck,
        tensors: Iterable[torch.Tensor],
    ) -> None:
        """Adds a pass whose clipped sums a CUDA graph has formed.

        Args:
            batch_size: the size of the physical batch.
            sums: the clipped sums by parameter.
            check: the check of its norms, which has begun.
            tensors: the program's batch.

        Raises:
            ValueError: a second backward without a step, where gradients must not accumulate (as in Opacus).
        """
        limit = limit_of_batch(batch_size, self.rule)
        given = [GivenRows(tensors, batch_size)]
        self._begin_pass(BackwardPass(batch_size, sums=dict(sums), clipped=True, limit=limit, given=given))
        self.norms = check.norms
        self._norm_checks.append(check)

    def begin_step(self) -> None:
        """Begins the sums of the next step. Called when the sums of the last step are not needed any more."""
        self.limit = Limit()
        self._counted.clear()

    def copy_sums(self, given: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Replaces the given clipped sums by copies in each pass since the last step that holds them."""
        for each in self._passes:
            for parameter, total in each.sums.items():
                if total is given.get(parameter):
                    each.sums[parameter] = total.clone()

    def check_norms(self) -> None:
        """Waits for the norms of all clip factors, and raises MemprofError unless they are finite."""
        checks, self._norm_checks = self._norm_checks, []
        for check in checks:
            check.raise_unless_finite()

    def check_complete(
        self, parameters: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str], known: Set[Layer] = frozenset()
    ) -> None:
        """Checks that every pass has a gradient for each parameter, and that what it has kept is as backward left it.

        The gradient of a layer that the pass's forwards have left out is zero, as in LayerDrop, and so is that of a
        layer whose output only such layers use.

        Args:
            parameters: the parameters of the optimizer.
            names: their names.
            known: the layers that any forward has called; those of a pass may leave them out.

        Raises:
            MemprofError: a parameter has no gradient, there was no backward pass, its loss mixes samples, the program
                has written to a tensor that a pass has kept, or several passes had the same samples.
        """
        if not self._passes:
            raise MemprofError(
                "optimizer.step() was called without a backward pass since the last step or zero_grad(), or with one "
                "of a forward in eval mode or under torch.no_grad(), or with one for some inputs only "
                "(torch.autograd.grad, backward(inputs=...)): call model.train() before the forward, and "
                "backward() before step()."
            )
        if self.beside_layers:
            raise MemprofError(
                f"the gradient of {self.beside_layers[0]} comes from outside of the layers that use it, so that it "
                "cannot be clipped: from a term of the loss that depends on the parameter itself, or from a part of "
                "the model that was not followed. Use weight_decay of the optimizer for a penalty, and call the model "
                "itself."
            )
        if self.loss_mixes:
            raise MemprofError(
                "the loss of the model's outputs is not a sum, or a mean, of terms of one sample each: what it makes "
                "of one half of the batch depends on the other half, as for losses over pairs of samples, statistics "
                "of the batch, the root of a mean, and means over all valid or weighted labels. Compute one loss for "
                "each sample from its own outputs, divided by its own number of labels, and sum or average these. "
                "Numbers and arrays that are new after the program has read numbers of the batch (item(), tolist(), "
                "numpy()) count as made of them: make schedules before the call, and what is of one sample by torch."
            )
        if self.loss_carries:
            raise MemprofError(
                "the loss of the model's outputs gets what other samples have left in an earlier step, beside the "
                "updates of the parameters: such as a queue or bank of features, a moving average of outputs or "
                "losses, prototypes of classes, or earlier outputs as targets. These samples change the gradients of "
                "others there, which no clipping bounds. Compute it anew in each step, from the parameters and each "
                "sample's own data or from public data, or use it for logging alone."
            )
        for each in self._passes:
            present = each.parameter_ids()
            missing = [parameter for parameter in parameters if id(parameter) not in present]
            if missing and self._leaves_out_layers(each, known):
                of_known = {id(parameter) for layer in known for parameter in layer.trainable()}
                for parameter in missing:
                    if id(parameter) in of_known:
                        like = torch.view_as_real(parameter) if parameter.is_complex() else parameter
                        each.sums[parameter] = torch.zeros_like(like, dtype=sum_dtype(parameter.dtype))
                missing = [parameter for parameter in missing if id(parameter) not in of_known]
            if missing:
                raise MemprofError(
                    f"no gradient reached {', '.join(names[parameter] for parameter in missing)}: not used in the "
                    "forward, or in eval mode. Freeze what is not trained with requires_grad_(False)."
                )
            each.check_unchanged()
        check_given_once(map(self._given_to, self._passes), self._counted)

    def _leaves_out_layers(self, each: BackwardPass, known: Set[Layer]) -> bool:
        """Returns whether no forward of a pass has called some of the known layers."""
        if not each.forwards or not each.forwards <= self._called.keys():
            return False
        called = set[Layer]().union(*(self._called[forward] for forward in each.forwards))
        return any(layer not in called and layer.trainable() for layer in known)

    def _given_to(self, each: BackwardPass) -> list[GivenRows]:
        return [*each.given, *(self._given[forward] for forward in each.forwards if forward in self._given)]

    def backward_passes(self) -> Iterator[BackwardPass]:
        """Yields the backward passes since the last step."""
        yield from self._passes

    @property
    def passes(self) -> int:
        """The number of backward passes since the last step."""
        return len(self._passes)

    def sort(self) -> None:
        """Sorts the kept tensors in the order of the optimizer's parameters, those with several uses first."""

        def last_first(item: tuple[Layer, KeptTensors]) -> int:
            return -min(self.places[parameter] for parameter in item[1].norms)

        for each in self._passes:
            each.kept = dict(sorted(each.kept.items(), key=last_first))

    def in_order(
        self, sums: Iterator[tuple[nn.Parameter, torch.Tensor]]
    ) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields the sums of each pass in the order of the optimizer's parameters, whatever order the layers have.

        Call `sort` first, so that few sums wait for others.
        """
        ready: dict[int, torch.Tensor] = {}
        parameters, place = list(self.places), 0
        for parameter, total in sums:
            ready[self.places[parameter]] = total
            del total
            while place in ready:
                yield parameters[place], ready.pop(place)
                place = (place + 1) % len(parameters)

    def pop_clipped_sums(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yields each parameter with its clipped sum, once for every pass, and removes the kept tensors.

        Adding or removing one sample changes the sums by at most the bound of the clipping rule, in L2 norm over all
        parameters. Call `check_norms` before the sums are used.
        """
        factors = [None if each.clipped else self._factors(each) for each in self._passes]
        self.unclipped_in_last_step, self._unclipped = self._unclipped, 0
        passes, self._passes = self._passes, []
        self._counted = [rows for rows in self._counted if not rows.are_gone()]
        self._counted += [rows for each in passes for rows in self._given_to(each)]
        self._tasks.clear()
        self.passes_in_last_step = len(passes)
        self.samples_in_last_step = sum(each.batch_size for each in passes)
        if not self.limit.samples:
            self.dropped = []
        for each in passes:
            self.dropped += [self.limit.samples + i for i in each.dropped]
            self.dropped_in_all += len(each.dropped)
            self.limit.add(each.limit)
        for each, own in zip(passes, factors, strict=True):
            yield from each.pop_clipped_sums(own, self.workspace)
