# SPDX-License-Identifier: Apache-2.0
"""What a program computes from the samples of a call is computed again for other samples.

What is still there after the step stays with the values that it would have, for what the next step makes of it.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.forwards.state import (
    PLAIN,
    Arrangement,
    RandomState,
    dense,
    dispatches,
    has_rows,
    has_storage,
    has_values,
)
from opacus_memprof.clipping.module.calls import device_of
from opacus_memprof.clipping.module.other_values import OtherValues
from opacus_memprof.clipping.module.read_numbers import (
    ARITHMETIC,
    FollowingMode,
    ReadNumbers,
    is_of_few,
    makes_no_values,
    unfollowed,
)
from opacus_memprof.clipping.proof.batches import graph_nodes, leaves_of, leaves_of_call, variables
from opacus_memprof.clipping.proof.model_state import written_leaves
from opacus_memprof.clipping.proof.recorder import far_apart, mixes_rows
from opacus_memprof.clipping.proof.summary import (
    KnownSamples,
    Rows,
    Tensors,
    has_unequal_weights,
    is_regular,
    may_be_table,
    release,
)

_SAME_SUM = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The relative rounding of a loss; 3e-2 in low precision."""
_OF_TABLES = ("index", "index_select", "embedding", "gather", "take")
"""Operations whose first argument has rows of its own where the second depends on the samples."""
_OF_CLASSES = ("nll_loss_forward", "nll_loss2d_forward")
"""Operations whose third argument is one weight for each class."""
_OF_NUMBERS = ("lift_fresh", "full", "full_like", "fill", "fill_", "scalar_tensor")
"""Operations that make a tensor of a number."""
_OF_RANKS = ("c10d", "_c10d_functional")
"""Namespaces of operations that all ranks call equally often, so that they cannot run again on one of them."""
_VIEWS = ("select", "slice", "narrow")
"""Operations that return a part of their first argument's memory."""
_MOST_OF_A_TABLE = 1 << 20
"""The bytes of a tensor of which parts are followed whose place depends on the samples."""
_PRUNED_AFTER = 64


class OtherSamples(FollowingMode):
    """Computes what the program computes from the samples of a call again, for batches with some other samples.

    Each operation on a tensor that depends on the call runs once more for each of these batches, with or without
    gradients. A sample whose own data stays must keep its rows. A loss must add up: where both halves of the samples
    change, it must change by the sum of what it changes by where each of them changes.

    Tensors that the program has from elsewhere, such as labels and masks, have samples if they have as many rows, and
    are no constants: they have other values than in earlier steps or, in the first, are integers that repeat.

    After its backward (`keep`) it goes on with what was computed from the samples, until the next call. What is left of
    that is then known to the next instance (`take`), in plans of its own, in which all samples of the next step stay.

    Args:
        batch: the number of samples.
        size: the bytes of the call's tensors.
        constants: the tensors from elsewhere in earlier steps; None in the first step.
        found: gets those of this step.
    """

    supports_higher_order_operators = True

    def __init__(self, batch: int, size: int, constants: Tensors | None, found: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch, self.constants, self.found = batch, constants, found
        self.is_on = True
        self.values = OtherValues(batch, size)
        self.reads_numbers = False  # whether a number of the samples has become an argument or a condition
        self.weighs_unequally = False  # whether a mean gives some samples more weight, so that weights are shared
        self.numbers = ReadNumbers(batch)
        self._earlier = ReadNumbers(batch)  # of the step before
        self._samples = KnownSamples()
        self._inputs_with_gradients: list[ReferenceType[torch.Tensor]] = []
        self.waiting: set[int] = set()  # the numbers of calls that no backward has reached
        self.has_ended_some = False  # whether a backward has reached a call
        self.has_loss = False  # whether the loss of the running backward was checked
        self.is_earlier = False  # whether the step of its calls has ended
        self.took_earlier = False  # whether it has something of an earlier step
        self.is_over = False  # whether its backwards are over
        self._is_following = self._is_ended = False
        self._count = 0
        self._rounding = 0.0  # of sums over samples in lower precision than float64, relative to their terms

    def add_inputs(self, given: Sequence[torch.Tensor]) -> None:
        """Notes which samples a call has, by its inputs, so that a later step knows them again.

        And which of them, or of the tensors that they were computed from, a backward may give gradients.
        """
        self._samples.add(given, self.batch)
        for x in (*given, *variables(graph_nodes(given))):
            if x.requires_grad and has_rows(x) and len(x) == self.batch and not isinstance(x, nn.Parameter):
                self._inputs_with_gradients.append(ref(x))

    def add_gradients(self, nodes: Sequence[Any]) -> None:
        """Adds the gradients that a backward has left, which ran through these nodes of the loss.

        A call's inputs, and what a program adds to them, have a gradient of each sample. That of a parameter, which the
        loss has beside the model, is followed to the next step, too, because its update depends on all samples.
        """
        for gradient in (x.grad for x in variables(nodes)):
            if gradient is not None:
                self.values.follow_gradient(gradient)
        for x in (each() for each in self._inputs_with_gradients):
            gradient = x.grad if x is not None and (x.is_leaf or x.retains_grad) else None
            if gradient is not None and has_rows(gradient):
                self.values.add(gradient, PLAIN, is_given=False)

    def _add_from_elsewhere(self, name: str, args: Any, leaves: Sequence[Any]) -> None:
        """Adds those arguments of an operation that have samples and that no call and no operation has returned."""
        table = args[0] if name in _OF_TABLES else args[2] if name in _OF_CLASSES and args[2] is not None else None
        for x in leaves:
            if not has_storage(x) or isinstance(x, nn.Parameter):
                continue
            self.values.forget_known(x)
            if self.values.depends(x) or self.values.is_shared(x):
                continue
            if not self.is_over and self.numbers.is_late(x, self.constants):
                plans = range(len(self.values.kept) + 1)
                self.values.write(x, plans)
                for i in plans:
                    if (other := self.values.other(x, i)) is not None:
                        other.copy_(self.numbers.other(x, i))
                continue
            if not has_rows(x) or x is table:
                continue
            self.found.add(x)
            self.found.counts.add([x], self.batch, -1)
            is_constant = self._is_of_columns(name, args, x, leaves) or (
                may_be_table(x) if self.constants is None else self.constants.has(x) or is_regular(x)
            )
            if is_constant or len(x) != self.batch or not x.is_contiguous():
                self.values.share(x)
            else:
                self.values.add(x, PLAIN, is_label=True)
        if table is not None and name in _OF_TABLES and not any(map(self.values.depends, tree_flatten(args[1:])[0])):
            self._add_from_elsewhere("", args, [table])

    def _is_of_columns(self, name: str, args: Any, x: torch.Tensor, leaves: Sequence[Any]) -> bool:
        """Returns whether an operation takes a tensor's elements for columns of the samples' rows."""
        if name in ARITHMETIC:
            return x.dim() == 1 and any(self.values.depends(each) and each.dim() > 1 for each in leaves)
        return name == "index" and args[1][0] is None

    def keep(self) -> None:
        """Goes on with what is left after its backward."""
        self._samples.end_step(self.values.kept[:2])
        self.values.keep()
        self.is_over = self.is_on = True
        release()

    def take(self, earlier: "OtherSamples", given: Sequence[torch.Tensor]) -> None:
        """Takes over what an earlier step has left, for a call with these inputs."""
        self._samples, self._earlier, self.took_earlier = earlier._samples, earlier.numbers, earlier.is_earlier
        stay = self._samples.staying(given, self.batch)
        if not earlier.is_earlier and earlier.batch == self.batch:  # the same samples, such as those of an attack
            stay = [*earlier.values.kept, torch.zeros(self.batch, dtype=torch.bool)]
        self.values.take(earlier.values, given, stay)

    @torch.no_grad()
    def has_left(self, x: Any, given: Sequence[torch.Tensor]) -> bool:
        """Returns whether an argument of a call has what other samples have left in an earlier step.

        Args:
            x: the argument.
            given: the call's tensors with samples.
        """
        if isinstance(x, float):
            numbers = self.numbers if self.is_over else self._earlier
            return numbers.repeats(x, numbers)
        if not self.values.depends(x) or self.values.is_label(x):
            return False
        if not (has_rows(x) and given and len(x) == len(given[0]) and (self.is_over or len(x) == self.batch)):
            return (self.is_over or bool(self.values.stay)) and self._changes_in(x, self.values.plans - 1)
        stay, first = self.values.stay, len(self.values.kept) + 1
        if self.is_over:
            known = [each for each in given if not self.values.depends(each)]
            stay, first = self._samples.staying(known, len(x)), 0
        rows = Rows.of(x.detach())
        others = ((self.values.other(x, plan), kept) for plan, kept in enumerate(stay, first))
        return any(other is not None and far_apart(rows, Rows.of(other), kept) for other, kept in others)

    def changes(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor that all samples share has what samples have left there, in this step or before."""
        plans = len(self.values.kept), self.values.plans - 1
        return self.values.depends(x) and any(self._changes_in(x, plan) for plan in plans)

    def left_in(self, x: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns what a tensor would be without the samples that are not its rows' own, if it depends on these.

        Args:
            x: a tensor that the model may read beside its arguments.
            given: the tensors with samples of the call that may read it.
        """
        if not self.values.depends(x) or self.values.is_of_program(x):
            return None
        if self.is_over:
            return self.values.other(x, self.values.plans - 1) if self.has_left(x, given) else None
        is_shared = not (x.dim() and len(x) == self.batch)
        plans = [i for i in (len(self.values.kept), self.values.plans - 1) if is_shared and self._changes_in(x, i)]
        return self.values.other(x, plans[0]) if plans else None

    @torch.no_grad()
    def _changes_in(self, x: torch.Tensor, plan: int) -> bool:
        other = self.values.other(x, plan) if x.numel() else None
        if other is None:
            return False
        a, b = (Rows.of(dense(each).reshape(1, -1)) for each in (x.detach(), other))
        return far_apart(a, b, torch.ones(1, dtype=torch.bool))

    def is_needed(self) -> bool:
        """Returns whether a loss may come that is computed from the samples. Not after a backward that has failed."""
        has_numbers = bool(self.numbers.read) or self.reads_numbers
        return self.is_on and not self.is_over and (has_numbers or self.values.has_computed())

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Returns whether the program's functions are compiled under it. A loss would not be seen in one."""
        return self.is_over

    def go_on(self, *_: Any) -> None:
        """Called before the program's part of a backward."""
        self.is_on = not self.is_over

    def go_off(self, *_: Any) -> None:
        """Called after the program's part of a backward."""
        self.is_on = False

    def end(self) -> None:
        """Ends its work, and frees the tensors."""
        self.leave()
        self.is_over, self.is_on = True, False
        if self._is_following:  # garbage collection ends a model's mode while it follows an operation
            self._is_ended = True
            return
        self.values.clear()
        release()

    @torch.no_grad()
    def mixes_gradients(self, gradient: torch.Tensor, where: Arrangement) -> bool:
        """Returns whether a loss gives an output other gradients for a sample where other samples change."""
        if not self.values.depends(gradient):
            return False
        rows = Rows.of(where.by_sample(dense(gradient), self.batch))
        return self._differs(gradient, where, rows, dict(enumerate(self.values.kept)))

    @torch.no_grad()
    def carries_gradients(self, gradient: torch.Tensor, where: Arrangement) -> bool:
        """Returns whether a loss gives an output other gradients where other samples of earlier steps change."""
        if not self.values.stay or not self.values.depends(gradient):
            return False
        rows = Rows.of(where.by_sample(dense(gradient), self.batch))
        return self._differs(gradient, where, rows, dict(enumerate(self.values.stay, len(self.values.kept) + 1)))

    def _differs(self, gradient: torch.Tensor, where: Arrangement, rows: Rows, plans: dict[int, torch.Tensor]) -> bool:
        for plan, kept in plans.items():
            other = self.values.other(gradient, plan)
            if other is not None and far_apart(rows, Rows.of(where.by_sample(dense(other), self.batch)), kept):
                return True
        return False

    @torch.no_grad()
    def mixes(self, x: Any) -> bool:
        """Returns whether an argument of the next call has rows of other samples, or of several."""
        if not self.values.depends(x):
            return self.numbers.has("full", x)
        kept = self.values.kept
        others = [self.values.other(x, i) for i in range(len(kept))]
        known = [dense(each) for each in others if each is not None]
        return len(known) == len(others) and mixes_rows(dense(x), known, kept)

    @torch.no_grad()
    def adds_up(self, losses: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None]) -> bool:
        """Returns whether losses are sums over the samples; True if this is unknown.

        Args:
            losses: the tensors that backward starts from.
            weights: their gradients; None for a scalar loss.
        """
        if not all(isinstance(loss, torch.Tensor) for loss in losses):  # an edge of the graph has no value
            return True
        totals = []
        for plan in (None, 0, 1, len(self.values.kept)):  # of all samples, two complementary halves, and none
            total = 0.0
            for each in zip(losses, weights, strict=True):
                loss, weight = (x if x is None or plan is None else self.values.in_plan(x, plan) for x in each)
                if loss is None or (weight is None and each[1] is not None):
                    return True
                total += float((loss.double() if weight is None else loss.double() * weight.double()).sum())
            totals.append(total)
        whole, first, second, none = totals
        size = sum(map(abs, totals))
        rounding = max(_SAME_SUM.get(loss.dtype, 3e-2) for loss in losses)
        if rounding == _SAME_SUM[torch.float64]:
            rounding += min(self._rounding, _SAME_SUM[torch.float32])
        return not math.isfinite(size) or abs(whole + none - first - second) <= rounding * size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or makes_no_values():
            return func(*args, **kwargs)
        if any(map(dispatches, types)):
            return NotImplemented  # they run it on the tensors that they wrap, which is followed
        if self.is_on and not self.is_over and not self.is_needed():  # such as after the last call of a training
            self.is_on, self.is_over = False, True
        if not self.is_on:
            return func(*args, **kwargs)
        self._is_following = True
        try:
            with unfollowed():
                follow = self._prepare(func, args, kwargs)
            output = func(*args, **kwargs)
            if follow is not None:
                with unfollowed():
                    follow(output)
        finally:
            self._is_following = False
            if self._is_ended:
                self.end()
        return output

    def _prepare(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """Prepares to follow an operation that the program is about to run.

        Returns:
            What is called with its output; None if the operation need not be followed.
        """
        leaves = leaves_of_call(args, kwargs)
        name = func._schema.name.split("::")[1]
        if self.is_over:
            self._prune()
        else:
            self.reads_numbers |= any(self.numbers.has(name, leaf) for leaf in leaves)
            self._add_from_elsewhere(name, args, leaves)
        depends = any(map(self.values.depends, leaves))
        read = self._numbers_in(name, leaves, depends)
        views = {place: others for place, x in enumerate(leaves) if (others := self.values.take_view(x))}
        integers = {} if self.is_over else self.numbers.integers(name, leaves)
        is_view = (
            name in _VIEWS and bool(integers) and has_storage(leaves[0]) and not depends
        )  # of a tensor that all samples share
        if is_view and leaves[0].untyped_storage().nbytes() > _MOST_OF_A_TABLE:
            integers = {}
        if not depends and not read and not integers:
            return None if self.is_over else self._share_all
        if func.namespace in _OF_RANKS:
            return self._set_unknown
        if name in _OF_CLASSES and args[3] == 1 and not self.is_over:
            self.weighs_unequally |= has_unequal_weights(args[1], args[2], args[4], self.batch)
        plans = range(self.values.plans)
        numbers = {i: self._in_other_plan(leaves, read, i) for i in plans}
        for i in plans:
            numbers[i] |= {at: each[i] for at, each in integers.items() if each.get(i, leaves[at]) != leaves[at]}
        if is_view:  # it is elsewhere there, and may be written to
            self.values.write(leaves[0], [i for i in plans if numbers[i]])
        changed = [i for i in plans if numbers[i] or any(self.values.is_changed(x, i) for x in leaves)]
        for leaf in filter(has_values, written_leaves(func, args, kwargs)):
            self.values.write(leaf, changed)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        before = RandomState.now(device_of(args, kwargs)) if draws else None
        structure = tree_flatten((args, kwargs))[1]
        inputs = {i: [self.values.in_plan(x, i) for x in leaves] for i in changed}
        is_elsewhere = integers or views or any(map(self.values.has_other_shape, leaves))
        for i in changed if read or integers or views else ():
            given = {**numbers[i], **{place: others[i] for place, others in views.items() if i in others}}
            inputs[i] = [given.get(place, x) for place, x in enumerate(inputs[i])]

        def follow(output: Any) -> None:
            others = {
                i: None if _misses(a, leaves) else self._run(func, a, structure, before) for i, a in inputs.items()
            }
            if name == "_local_scalar_dense":
                self._note_number(output, others)
            elif is_elsewhere and has_storage(output) and self.values.depends(output) and output is not leaves[0]:
                self.values.set_view(output, others)
            else:
                for x in leaves_of(output):
                    self.values.take_view(x)  # the program has made a view there itself
                self._set_outputs(name, output, others)
                self._note_rounding(output, leaves)

        return follow

    def _note_rounding(self, output: Any, leaves: Sequence[Any]) -> None:
        """Adds the bound on the rounding of numbers that are added up over the samples in lower precision than float64.

        A sum of n numbers is off by at most (n - 1) eps of the sum of their sizes. What is rounded for each sample is
        rounded alike in all plans.
        """
        for x in leaves_of(output):
            if has_values(x) and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.numel() < self.batch:
                most = max((each.numel() for each in leaves if has_values(each)), default=1)
                self._rounding += max(1, most // max(1, x.numel())) * torch.finfo(x.dtype).eps

    def _share_all(self, output: Any) -> None:
        for x in filter(has_storage, leaves_of(output)):
            self.values.share(x)
            self.found.add_computed(x)

    def _set_unknown(self, output: Any) -> None:
        for x in filter(has_values, leaves_of(output)):
            self.values.set_unknown(x)

    def _note_number(self, number: Any, others: dict[int, Any], is_length: bool = False) -> None:
        if any(each is not None and each != number for each in others.values()):
            self.reads_numbers |= isinstance(number, bool)
            self.numbers.add(number, {i: each for i, each in others.items() if each is not None}, is_length)

    def _set_outputs(self, name: str, output: Any, others: dict[int, Any]) -> None:
        for place, x in enumerate(leaves_of(output)):
            if has_values(x) and others and not self.values.depends(x):
                found = {i: None if each is None else leaves_of(each)[place] for i, each in others.items()}
                # Gradients; flash_clip keeps copies of some.
                is_gradient = torch._C._current_graph_task_id() != -1 and (name == "clone" or not is_of_few(x))
                self.values.add_output(x, found, is_gradient)
                if has_storage(x) and x.dim() and not self.is_over:
                    lengths = {i: len(each) for i, each in found.items() if each is not None}
                    self._note_number(len(x), lengths, is_length=True)

    def _in_other_plan(self, leaves: Sequence[Any], read: dict[int, bool], plan: int) -> dict[int, Any]:
        """Returns what numbers that were read, in this step or in the one before, are in a plan, if other ones."""
        others: dict[int, Any] = {}
        for place, is_now in read.items():
            is_other = self.is_over or is_now == (plan <= len(self.values.kept))
            by = self.numbers.other if is_now and not self.is_over else lambda x, _: 1.25 * x
            others[place] = by(leaves[place], plan) if is_other else leaves[place]
        return {i: x for i, x in others.items() if isinstance(x, torch.Tensor) or x != leaves[i]}

    def note_read(self, x: torch.Tensor) -> None:
        if self.is_on and has_storage(x):
            with torch.no_grad(), _disable_current_modes():
                changed = [i for i in range(self.values.plans) if self.values.is_changed(x, i)]
                self.numbers.add_array(x.detach().clone(), {i: self.values.other(x, i) for i in changed})

    def _prune(self) -> None:
        """Does without the mode if nothing is left that depends on the samples."""
        self._count += 1
        if self._count % _PRUNED_AFTER == 0:
            self.values.prune()
            self.is_on = not self.values.is_empty()

    def _numbers_in(self, name: str, leaves: Sequence[Any], depends: bool) -> dict[int, bool]:
        """Returns which arguments of an operation are numbers, or tensors of numbers, that the program has read.

        Returns:
            for each position of one, whether it was read in this step, or else in the one before.
        """
        found: dict[int, bool] = {}
        if not (depends or name in _OF_NUMBERS):
            return found
        for place, x in enumerate(leaves):
            if name in ARITHMETIC and not (self.is_over or self.values.depends(x)):
                self.found.counts.divide_by(x)
            if name != "lift_fresh" and is_of_few(x):
                continue
            now, earlier = self.numbers, self._earlier
            if now.repeats(x, now if self.is_over else earlier) or (not self.is_over and now.gives(x, self.constants)):
                found[place] = True
            elif not self.is_over and earlier.repeats(x, earlier):
                found[place] = False
            if depends and not self.is_over:
                self.numbers.note_use(x)
                self.found.numbers.update({abs(x)} if isinstance(x, float) else ())
        return found

    def _run(self, func: Any, leaves: list[Any], structure: Any, before: RandomState | None) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        try:
            with before.restored() if before is not None else nullcontext():
                return func(*args, **kwargs)
        except Exception:  # not for these samples
            return None


def _misses(others: list[Any], leaves: list[Any]) -> bool:
    return any(other is None and leaf is not None for other, leaf in zip(others, leaves, strict=True))
