# SPDX-License-Identifier: Apache-2.0
"""What a program computes after a call of the model, or of its parts: for the next call, and for its loss.

Samples must not be mixed there.
"""

import functools
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from opacus_memprof.clipping.arguments import Check, is_checked
from opacus_memprof.clipping.forwards.state import PLAIN, Arrangement, Difference, has_rows, has_storage
from opacus_memprof.clipping.kernels.native import is_backward_of_inputs
from opacus_memprof.clipping.module.calls import Call, Outputs, arrangements_by_shape
from opacus_memprof.clipping.module.other_samples import OtherSamples
from opacus_memprof.clipping.module.other_values import OTHER_BYTES
from opacus_memprof.clipping.module.read_numbers import following_modes, makes_no_values, unfollowed
from opacus_memprof.clipping.proof.batches import (
    alias_leaves,
    cotangents,
    graph_nodes,
    has_samples,
    leaves_of_call,
    tensors_in,
)
from opacus_memprof.clipping.proof.loss_graph import loss_of_backward
from opacus_memprof.clipping.proof.summary import Counts, Tensors, halves, release
from opacus_memprof.errors import MemprofError

_MOST_NEW = 16
"""So many times the steps after one with a new loss are checked."""


class Parts:
    """The outputs of the model, and of parts that the program has called by themselves, since the last step.

    What the program computes from them for the next call is in no proof.

    Args:
        check: in which steps it is checked without gradients, too.
    """

    def __init__(self, check: Check) -> None:
        self.check_steps = check
        self._outputs: deque[tuple[Any, Arrangement, int]] = deque(maxlen=64)
        self._modes: list[OtherSamples] = []  # of calls whose losses may come; several for batches of several sizes
        self._left: OtherSamples | None = None  # with what the backward before has left
        self._of_models: list[OtherSamples] = []  # modes of other models, which do not follow a call
        self.carries = False  # whether the loss depends on what samples of earlier steps have left
        self._step = 1
        self._new_at, self._left_for_new = 0, _MOST_NEW
        self._constants: Tensors | None = None
        self._found: Tensors | None = None
        self._counts = Counts()
        self._is_too_small = False  # whether all calls of this step had one sample, of which nothing can be seen

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_modes": [],
            "_left": None,
            "_of_models": [],
            "_outputs": deque(maxlen=64),
            "_constants": None,
            "_found": None,
            "_counts": Counts(),
        }

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for mode in self._all_modes():  # may still be entered
                mode.end()

    def _all_modes(self) -> list[OtherSamples]:
        return self._modes if self._left is None else [*self._modes, self._left]

    def end_step(self) -> None:
        """Forgets the calls of a step, all of which were checked, and remembers which tensors are constants.

        What the step has left is kept for the next one, if that is checked.

        Raises:
            MemprofError: the loss is divided by what was counted over all samples.
        """
        counts, self._counts = self._counts, self._counts.after_step()
        if counts.is_divided_by_counts():
            raise MemprofError(
                "the model's loss is not a sum, or a mean, of terms of one sample each: it is divided by a number of "
                "labels that was counted over all samples of the step, which have different numbers of them, such "
                "as num_items_in_batch of transformers' Trainer. Each sample changes the others' weight there: "
                "compute one loss for each sample, divided by its own number of labels, and average these (of the "
                "Trainer, override compute_loss)."
            )
        if self._found is not None:
            self._constants = self._constants or Tensors()
            self._constants.update(self._found)
        for mode in self._modes:
            if mode.has_ended_some:
                self._keep(mode)
        left, self._left = self._left, None
        if left is not None:
            left.is_earlier = True
        step, new_at = self._step + (not self._is_too_small), self._new_at
        self.forget()
        self._step, self._new_at = step, new_at
        if self.is_due():
            self._left = left

    def forget(self) -> None:
        """Forgets the calls of a step that is refused. Steps are checked as from the first one again."""
        self._step, self._new_at = 1, 0
        self._outputs.clear()
        self.pause()
        for mode in self._all_modes():
            mode.end()
        self._modes, self._left = [], None
        self.carries = False
        self._found, self._counts = None, self._counts.after_step()
        self._is_too_small = False

    def pause(self) -> None:
        """Stops following what the program computes, because it calls the model."""
        if self._modes:
            release()
        for mode in self._all_modes():
            mode.leave()

    def pause_all(self) -> None:
        """Stops following the program, for other models as well, while something else computes."""
        self.pause()
        for mode in following_modes():
            if isinstance(mode, OtherSamples):
                mode.leave()
                if mode.is_needed():
                    self._of_models.append(mode)

    def resume_all(self) -> None:
        """Follows the program again after `pause_all`."""
        self._follow_by_others()
        self.resume()

    def begin_call(self, is_off: bool) -> None:
        """Stops following what the program computes, because it calls the model.

        Other models' modes do not follow a call that is proved not to mix samples: its operations are those of a proof.
        Where no loss is to come any more, they end: their training may have, too.
        """
        self.pause_all()
        if is_off:
            self._follow_by_others()

    def end_call(self, call: Call, output: Any, batch: int, model: nn.Module) -> None:
        """Makes other models' modes go on, in which the output of a call of a batch has other samples' rows.

        The parameters of this model have none, although they may have as many rows.
        """
        models = self._of_models if not call.is_off else []
        tensors = tensors_in(output) if models and output is not None else []
        places = call.situation.arrangements if call.situation is not None else arrangements_by_shape(tensors, batch)
        with unfollowed():
            for mode in models:
                for parameter in model.parameters():
                    mode.values.share(parameter)
                if mode.batch != batch:
                    continue
                for x, where in zip(tensors, places, strict=False):
                    if where is not None and has_rows(x) and x.untyped_storage().nbytes() <= OTHER_BYTES:
                        mode.values.add(x, where, is_given=False)
        self._follow_by_others()

    def _follow_by_others(self) -> None:
        for mode in self._of_models:
            mode.enter()
        self._of_models.clear()

    def resume(self) -> None:
        """Goes on to follow what the program computes, from earlier calls or from what a backward has left."""
        for mode in self._modes or self._all_modes():
            if mode.is_on and not mode.is_entered:
                mode.enter()

    def end(self, mode: OtherSamples, forward: int, where: Arrangement, gradient: torch.Tensor) -> bool:
        """Ends a call, because a backward has reached its output, with samples at `where`.

        Its mode cannot be left there. It goes on after the backward for calls that no backward has reached.

        Returns whether the loss mixes samples.
        """
        if mode.is_over or is_backward_of_inputs():
            return False
        with unfollowed():
            return self._mixes(mode, forward, where, gradient)

    def _mixes(self, mode: OtherSamples, forward: int, where: Arrangement, gradient: torch.Tensor) -> bool:
        mixes = mode.mixes_gradients(gradient, where)
        self.carries |= mode.carries_gradients(gradient, where)
        mode.has_ended_some = True
        losses, given, keeps_graph = loss_of_backward()
        if not keeps_graph:  # otherwise another loss may be computed from the same outputs
            mode.waiting.discard(forward)
        is_first, mode.has_loss = not mode.has_loss, True
        self._stop(mode, losses)
        if is_first:
            mixes |= mode.weighs_unequally
            mixes |= bool(losses) and not mode.adds_up(losses, given)
        return mixes

    def _stop_at(self, mode: OtherSamples, gradient: torch.Tensor) -> None:
        if mode.is_on and not (mode.is_over or is_backward_of_inputs()):
            self._stop(mode, loss_of_backward()[0])

    def _stop(self, mode: OtherSamples, losses: Sequence[torch.Tensor]) -> None:
        """Does not follow the rest of a backward, which is the model's, except for the loss of other calls' outputs."""
        if not mode.is_on:
            return
        mode.is_on = False
        nodes = graph_nodes(losses, stop_at_outputs=True)
        handles = []
        for node in nodes if mode.waiting else ():
            handles += [node.register_prehook(mode.go_on), node.register_hook(mode.go_off)]
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(mode, nodes, handles))

    def _end_backward(self, mode: OtherSamples, nodes: list[Any], handles: list[Any]) -> None:
        for handle in handles:
            handle.remove()
        mode.has_loss = False
        with unfollowed():
            mode.add_gradients(nodes)
        if mode.waiting:
            mode.is_on = True
        elif mode in self._modes:  # otherwise the step was refused meanwhile
            self._keep(mode)
            self._modes.remove(mode)

    def _keep(self, mode: OtherSamples) -> None:
        with unfollowed():
            mode.keep()
        self._left = mode

    def add_samples(self, x: torch.Tensor) -> None:
        """Notes that a tensor has a number of each sample of the step before, such as the norms of their gradients."""
        left = self._left
        if left is not None and left.is_on and left.batch == len(x):
            with unfollowed():
                left.values.add(x, PLAIN, is_given=False)

    def are_from_samples(self, x: Any, now: float) -> bool:
        """Returns whether a setting of the optimizer was computed from samples of this step or of the one before.

        Args:
            x: a number, or a tensor of one.
            now: the setting's present value, of which a moving average may be made.
        """
        return any(mode.values.depends(x) or mode.numbers.sets(x, now) for mode in self._all_modes())

    def add(self, outputs: Outputs, batch: int) -> None:
        """Adds outputs that have gradients."""
        self._outputs += [(get_gradient_edge(x), where, batch) for x, where in outputs if where is not None]

    def follow(self, call: Call, outputs: Outputs, forward: int | None) -> OtherSamples | None:
        """Follows what the program computes from a call's outputs and inputs until its next call.

        Another model may be followed meanwhile, such as one whose loss comes later.

        Args:
            call: the call.
            outputs: its outputs.
            forward: its number, if a backward may reach it.

        Returns:
            What follows it; None if this step is not checked, or the tensors are too large.
        """
        with unfollowed():
            mode = self._add_call(call, outputs)
        if mode is not None and forward is not None:
            mode.waiting.add(forward)
        self.resume()
        return mode

    def follow_off(self, call: Call, output: Any) -> Any:
        """Follows what the program computes from a call that gives no parameters gradients. Returns its output.

        A backward may reach its inputs: those of an adversarial attack, or what a generator has made.
        """
        aliases: list[torch.Tensor] = []
        if call.has_gradients_of_inputs():
            output, aliases = alias_leaves(output, [x for x in tensors_in(output) if x.requires_grad])
        mode = self.follow(call, [(x, PLAIN) for x in tensors_in(output)], None)
        if mode is not None:
            for x in aliases:
                x.register_hook(functools.partial(self._stop_at, mode))  # type: ignore[no-untyped-call]
        return output

    def _add_call(self, call: Call, outputs: Outputs) -> OtherSamples | None:
        leaves = leaves_of_call(call.args, call.kwargs)
        given = [leaf for leaf in leaves if has_rows(leaf)]
        batch = len(given[0]) if given else 0
        if self.is_due() and not (call.is_off or makes_no_values()):
            self._counts.add(leaves, batch)
        known = [(x, where) for x, where in outputs if where is not None and has_rows(x)]
        if call.is_off:
            known = [(x, where) for x, where in known if len(x) == batch]
        else:
            self._is_too_small = batch < 2 and (self._is_too_small or not self._modes)
        if batch < 2 or not known or not self.is_due() or makes_no_values():
            return None
        given = [x for x in given if len(x) == batch and x.is_contiguous()]
        size = sum(x.untyped_storage().nbytes() for x in (*given, *(x for x, _ in known)))
        if size > OTHER_BYTES:
            return None
        self._found = self._found or Tensors(self._counts)
        modes = (mode for mode in self._modes if mode.batch == batch and mode.is_on and not mode.has_ended_some)
        mode = next(modes, None)
        if mode is None:
            mode = OtherSamples(batch, size, self._constants, self._found)
            self._modes.append(mode)
            if self._left is not None:
                mode.take(self._left, given)
                self._left = None
        mode.add_inputs(given)
        for x, where in known:
            mode.values.add(x, where, is_given=False)
        for x in given:
            mode.values.add(x, PLAIN)
        for x, place in outputs:
            if place is None and has_storage(x):
                mode.values.share(x)
        return mode

    def is_followed(self, mode: OtherSamples | None, outputs: Outputs) -> bool | None:
        """Returns whether a mode follows what is computed from these outputs; None if they are too large for a check.

        Also None where no step is checked.
        """
        if mode is not None:
            return True
        is_large = sum(x.nbytes for x, _ in outputs) > OTHER_BYTES
        return None if is_large or self.check_steps == "off" else False

    def check_next(self) -> None:
        """Makes the next steps checked ones, because the loss of this one is new. Not for ever."""
        self._left_for_new -= 1
        if self._left_for_new >= 0:
            self._new_at = self._step

    def is_due(self) -> bool:
        """Returns whether calls of this step are checked: in pairs of steps, for what one leaves for the next."""
        step, check = self._step, self.check_steps
        if self._new_at < step <= self._new_at + 2:
            return check != "off"
        return is_checked(check, step) or (step > 1 and is_checked(check, step - 1))

    @torch.no_grad()
    def check_rows(self, call: Call, model: nn.Module) -> None:
        """Checks that a sample's input of a call does not depend on other samples of earlier calls.

        Neither must parameters and buffers, except for what the optimizer's steps have made of them.

        Raises:
            MemprofError: it does.
        """
        own = [mode for mode in self._all_modes() if mode.is_on]
        if not (own or self._modes or self._of_models):
            return
        modes = [mode for mode in (*own, *self._of_models) if not mode.is_earlier]
        leaves = leaves_of_call(call.args, call.kwargs)
        mixes = any(any(map(mode.mixes, leaves)) for mode in modes)
        if mixes or any(mode.reads_numbers for mode in self._modes):
            self._refuse(call)
        given = [leaf for leaf in leaves if has_rows(leaf)]
        given = [leaf for leaf in given if len(leaf) == len(given[0])]
        for mode in own:
            found = [f"'{name}'" for name, x in (*model.named_parameters(), *model.named_buffers()) if mode.changes(x)]
            if mode.is_earlier or mode in self._modes:
                found += [f"argument {i + 1} of the model" for i, x in enumerate(leaves) if mode.has_left(x, given)]
            if found and (mode.is_earlier or mode.took_earlier):
                self.forget()
                raise MemprofError(
                    f"{found[0]} gets what other samples have left in an earlier "
                    "step, beside the updates of the parameters: such as a queue or bank of features, a moving average "
                    "of outputs or losses, prototypes of classes, or earlier outputs as targets. These samples change "
                    "the gradients of others there, which no clipping bounds. Compute it anew in each step, from the "
                    "parameters and each sample's own data or from public data, or use it for logging alone."
                )
            if found:
                self._refuse(call)

    def left_in(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[tuple[dict[str, Any], str]], call: Call
    ) -> list[Difference]:
        """Returns what of this depends on samples of calls before this one, with what it would be without them.

        Args:
            tensors: tensors that the model may read.
            numbers: attributes that are numbers.
            call: the call.
        """
        given = [leaf for leaf in leaves_of_call(call.args, call.kwargs) if has_rows(leaf)]
        modes = [mode for mode in self._all_modes() if mode.is_on]
        found = ((x, mode.left_in(x, given)) for mode in modes for x in tensors if not x.requires_grad)
        left = [Difference(x, None, x.detach().clone(), other) for x, other in found if other is not None]
        for d, key in numbers:
            if any(mode.has_left(d[key], given) for mode in modes):
                left.append(Difference(d, key, d[key], 1.25 * d[key]))
        return left

    def check_gradients(self, call: Call, batch: int) -> None:
        """Checks the same by derivatives, for all parts that were called in this step.

        Raises:
            MemprofError: an input depends on outputs of other samples.
        """
        known = [(edge, where) for edge, where, size in self._outputs if size == batch]
        leaves = [leaf for leaf in leaves_of_call(call.args, call.kwargs) if has_samples(leaf, batch)]
        inputs = [leaf for leaf in leaves if leaf.grad_fn is not None]
        for plan in halves(batch) if known and inputs else ():
            kept = torch.tensor(plan, dtype=torch.float64)
            given = cotangents(inputs, [PLAIN] * len(inputs), batch, kept, True)
            edges = [edge for edge, _ in known]
            found = torch.autograd.grad(inputs, edges, given, retain_graph=True, allow_unused=True)
            for gradient, (_, where) in zip(found, known, strict=True):
                if gradient is None:
                    continue
                others = where.by_sample(gradient, batch)[(kept == 0).to(gradient.device)]
                if bool(others.any()):
                    self._refuse(call)

    def _refuse(self, call: Call) -> None:
        self.forget()  # the program may go on with another batch, without zero_grad
        raise MemprofError(
            "samples are mixed between two calls of the model, or of parts of it, before the call of its "
            f"{type(call.entry).__name__}: compute each sample's input from its own outputs, in the same order and "
            "without numbers of the batch (item(), if), or in the forward of one module."
        )
