# SPDX-License-Identifier: Apache-2.0
"""What a program computes after a call of the model, or of its parts: for the next call, and for its loss.

Samples must not be mixed there.
"""

from collections import deque
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import _get_current_dispatch_mode

from opacus_memprof.clipping.arguments import Check, is_checked
from opacus_memprof.clipping.forwards.state import PLAIN, Arrangement
from opacus_memprof.clipping.kernels.native import is_backward_of_inputs
from opacus_memprof.clipping.module.calls import Call, Outputs
from opacus_memprof.clipping.module.other_samples import OTHER_BYTES, OtherSamples
from opacus_memprof.clipping.proof.batches import (
    cotangents,
    has_rows,
    has_samples,
    has_storage,
    leaves_of_call,
)
from opacus_memprof.clipping.proof.explanation import roots_of_backward
from opacus_memprof.clipping.proof.summary import Tensors, halves, release
from opacus_memprof.errors import MemprofError


class Parts:
    """The outputs of the model, and of parts that the program has called by themselves, since the last step.

    What the program computes from them for the next call is in no proof.

    Args:
        check: in which steps it is checked without gradients, too.
    """

    def __init__(self, check: Check) -> None:
        self.check_steps = check
        self._outputs: deque[tuple[Any, Arrangement, int]] = deque(maxlen=64)
        self._others: OtherSamples | None = None
        self._left: OtherSamples | None = None  # with what the backward before has left
        self.carries = False  # whether the loss depends on what samples of earlier steps have left
        self._step = 1
        self._constants: Tensors | None = None
        self._found: Tensors | None = None
        self._is_too_small = False  # whether all calls of this step had one sample, of which nothing can be seen

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_others": None,
            "_left": None,
            "_outputs": deque(maxlen=64),
            "_constants": None,
            "_found": None,
        }

    def __del__(self) -> None:
        if self._left is not None:  # its mode may still be entered
            self._left.is_on = False
            self._left.free()

    def end_step(self) -> None:
        """Forgets the calls of a step, all of which were checked, and remembers which tensors are constants.

        What the step has left is kept for the next one, if that is checked.
        """
        if self._found is not None:
            self._constants = self._constants or Tensors()
            self._constants.update(self._found)
        left = self._left
        step = self._step + (not self._is_too_small)
        self.forget()
        self._step = step
        self._left = left if self.is_due() else None

    def forget(self) -> None:
        """Forgets the calls of a step that is refused. Steps are checked as from the first one again."""
        self._step = 1
        self._outputs.clear()
        self.pause()
        self._others = self._left = None
        self.carries = False
        self._found = None
        self._is_too_small = False

    def pause(self) -> None:
        """Stops to follow what the program computes, because it calls the model."""
        if self._left is not None and self._left.is_entered:
            self._left.leave()
        # Also of another model, such as one whose training has ended: a proof is of the modes that it runs in.
        while isinstance(mode := _get_current_dispatch_mode(), OtherSamples) and mode.is_over:
            mode.leave()
        if self._others is not None:
            release()
            self._others.leave()
            if not self._others.is_on:
                self._others = None

    def resume(self) -> None:
        """Follows again what the program computes from what the backward before has left, until its next call."""
        if self._left is not None and self._left.is_on and _get_current_dispatch_mode() is None:
            self._left.enter()

    def end(self, where: Arrangement, batch: int, gradient: torch.Tensor) -> bool:
        """Ends it, because a backward has reached an output, with so many samples at `where`.

        The mode cannot be left there.

        Returns whether the loss mixes samples.
        """
        others = self._others
        if others is None or is_backward_of_inputs():
            return False
        is_first, others.is_on = others.is_on, False
        mixes = others.batch == batch and others.mixes_gradients(gradient, where)
        self.carries |= others.batch == batch and others.carries_gradients(gradient, where)
        if is_first:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(others))
            roots = roots_of_backward()
            mixes |= others.weighs_unequally
            if len(roots) == 1:
                losses, arguments = roots[0]
                given = arguments[0] if arguments else [None] * len(losses)
                mixes |= not others.adds_up(losses, given)
        return mixes

    def _end_backward(self, others: OtherSamples) -> None:
        others.keep()
        self._others, self._left = None, others

    def add(self, outputs: Outputs, batch: int) -> None:
        """Adds outputs that have gradients."""
        self._outputs += [(get_gradient_edge(x), where, batch) for x, where in outputs if where is not None]

    def follow(self, call: Call, outputs: Outputs) -> bool:
        """Follows what the program computes from a call's outputs and inputs until its next call.

        Returns whether it does: if this step is checked, the tensors are not too large, and the program has no mode on.
        """
        while isinstance(mode := _get_current_dispatch_mode(), OtherSamples):
            mode.leave()  # of a model whose training has ended
        is_followed = self._follow(call, outputs, mode is not None)
        if not is_followed:
            self.resume()
        return is_followed

    def _follow(self, call: Call, outputs: Outputs, has_mode: bool) -> bool:
        given = [leaf for leaf in leaves_of_call(call.args, call.kwargs) if has_rows(leaf)]
        batch = len(given[0]) if given else 0
        known = [(x, where) for x, where in outputs if where is not None and has_rows(x)]
        if call.is_off:
            known = [(x, where) for x, where in known if len(x) == batch]
        else:
            self._is_too_small = batch < 2 and (self._is_too_small or self._others is None)
        if batch < 2 or not known or not self.is_due() or has_mode:
            return False
        given = [x for x in given if len(x) == batch and x.is_contiguous()]
        size = sum(x.untyped_storage().nbytes() for x in (*given, *(x for x, _ in known)))
        if size > OTHER_BYTES:
            return False
        self._found = self._found or Tensors()
        if self._others is None or self._others.batch != batch:
            self._others = OtherSamples(batch, size, self._constants, self._found)
            if self._left is not None:
                self._others.take(self._left, given)
                self._left = None
        self._others.add_inputs(given)
        for x, where in known:
            self._others.add(x, where, is_given=False)
        for x in given:
            self._others.add(x, PLAIN)
        for x, place in outputs:
            if place is None and has_storage(x):
                self._others.share(x)
        self._others.enter()
        return True

    def is_due(self) -> bool:
        """Returns whether calls of this step are checked: in pairs of steps, for what one leaves for the next."""
        step, check = self._step, self.check_steps
        return is_checked(check, step) or (step > 1 and is_checked(check, step - 1))

    def check_rows(self, call: Call, model: nn.Module) -> None:
        """Checks that a sample's input of a call does not depend on other samples of earlier calls.

        Neither must parameters and buffers, except for what the optimizer's steps have made of them.

        Raises:
            MemprofError: it does.
        """
        others, left = self._others, self._left
        if others is None and left is None:
            return
        leaves = leaves_of_call(call.args, call.kwargs)
        if others is not None and (others.reads_numbers or any(map(others.mixes, leaves))):
            self._refuse(call)
        if left is not None:
            given = [leaf for leaf in leaves if has_rows(leaf)]
            given = [leaf for leaf in given if len(leaf) == len(given[0])]
            state = {f"'{name}'": x for name, x in (*model.named_parameters(), *model.named_buffers())}
            state |= {f"argument {i + 1} of the model": x for i, x in enumerate(leaves)}
            batch = len(given[0]) if given else 0
            name = next((name for name, x in state.items() if left.has_left(x, given, batch)), None)
            if name is not None:
                self.forget()
                raise MemprofError(
                    f"{name} gets what other samples have left in an earlier "
                    "step, beside the updates of the parameters: such as a queue or bank of features, a moving average "
                    "of outputs or losses, prototypes of classes, or earlier outputs as targets. These samples change "
                    "the gradients of others there, which no clipping bounds. Compute it anew in each step, from the "
                    "parameters and each sample's own data or from public data, or use it for logging alone."
                )

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
