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
    Reference,
    dense,
    dispatches,
    has_rows,
    has_storage,
    has_values,
    is_like,
    key_of,
    memory_of,
    reference_to,
)
from opacus_memprof.clipping.module.calls import device_of
from opacus_memprof.clipping.module.read_numbers import (
    ARITHMETIC,
    FollowingMode,
    ReadNumbers,
    is_of_few,
    makes_no_values,
    unfollowed,
)
from opacus_memprof.clipping.proof.batches import Perturbed, graph_nodes, leaves_of, variables
from opacus_memprof.clipping.proof.model_state import written_leaves
from opacus_memprof.clipping.proof.recorder import far_apart, mixes_rows
from opacus_memprof.clipping.proof.summary import (
    KnownSamples,
    Rows,
    Tensors,
    halves,
    has_unequal_weights,
    is_regular,
    may_be_table,
    release,
)

OTHER_BYTES = 64 << 20
"""Limit on the copies of a call's tensors, for other samples."""
_MOST_BYTES = 256 << 20
"""Limit on the size of one tensor that is copied when it is written to."""
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
_CARRIED = 3
"""The plans of what earlier steps have left: one half of their samples are others, the other half, and all."""
_PRUNED_AFTER = 64


_UNCHANGED = "unchanged"
"""Stands for memory that has the program's own values, although it depends on samples in another plan."""
_Storage = torch.UntypedStorage | torch.Tensor | str | Perturbed | None
"""Memory with the values of a plan, or the tensor of one without memory of its own; None if they are not known."""


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
        self.kept = [torch.tensor(plan) for plan in halves(batch)[: max(2, OTHER_BYTES // max(1, size))]]
        self.reads_numbers = False  # whether a number of the samples has become an argument or a condition
        self.weighs_unequally = False  # whether a mean gives some samples more weight, so that weights are shared
        self._numbers = ReadNumbers(batch)
        self._earlier = ReadNumbers(batch)  # of the step before
        self._others: dict[int, tuple[Reference, list[_Storage]]] = {}
        self._perturbed: dict[int, Perturbed] = {}  # outputs and labels that nothing has written to since
        self._given: set[int] = set()  # the memory of inputs, of labels that are integers, and of gradients
        self._labels: set[int] = set()  # that of other labels, which a program may have computed
        self._known: set[int] = set()  # that of such labels of the step before
        self._samples = KnownSamples()
        self._stay: list[torch.Tensor] = []  # which samples must stay in the plans of earlier steps
        self._inputs_with_gradients: list[ReferenceType[torch.Tensor]] = []
        self.waiting: set[int] = set()  # the numbers of calls that no backward has reached
        self.has_ended_some = False  # whether a backward has reached a call
        self.has_loss = False  # whether the loss of the running backward was checked
        self.is_earlier = False  # whether the step of its calls has ended
        self.took_earlier = False  # whether it has something of an earlier step
        self.is_over = False  # whether its backwards are over
        self._count = 0
        self._shared: dict[int, Reference] = {}  # of tensors that do not depend on the samples

    @property
    def _plans(self) -> int:
        """The number of plans: the halves of the batch, no sample, and those of earlier steps."""
        return len(self.kept) + 1 + len(self._stay)

    def add(self, x: torch.Tensor, where: Arrangement, is_label: bool = False, is_given: bool = True) -> None:
        """Adds a tensor with samples at `where`. Other samples' labels are those of the batch in another order."""
        if self.depends(x) and self._storages_of(x)[0] is not _UNCHANGED:
            return
        by_sample = where.by_sample(x.detach(), self.batch)
        if by_sample.stride(0) == 0:
            return  # one number for all samples
        # Losses of probabilities take no other numbers, and on a GPU end the process.
        in_range = is_label or (x.is_floating_point() and bool(((x >= 0) & (x <= 1)).all()))
        others, storage, count = Perturbed(x, where, self.kept, in_range), x.untyped_storage(), len(self.kept)
        before = self._storages_of(x)[count + 1 :] if self.depends(x) else [_UNCHANGED] * len(self._stay)
        self._set(x, [*others.storages(storage, count), *before])
        self._perturbed[storage._cdata] = others
        if is_given:
            (self._labels if is_label and x.is_floating_point() else self._given).add(storage._cdata)

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
            if gradient is not None and self.depends(gradient):
                self._given.discard(key_of(gradient))
        for x in (each() for each in self._inputs_with_gradients):
            gradient = x.grad if x is not None and (x.is_leaf or x.retains_grad) else None
            if gradient is not None and has_rows(gradient):
                self.add(gradient, PLAIN, is_given=False)

    def other(self, x: torch.Tensor, plan: int) -> torch.Tensor | None:
        """Returns what the tensor is for other samples; None if it is not known."""
        storage = self._storages_of(x)[plan]
        if not isinstance(storage, torch.UntypedStorage):
            return storage if storage is None or isinstance(storage, torch.Tensor) else x.detach()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())

    def depends(self, x: Any) -> bool:
        """Returns whether a value was computed from the call's samples, or from those of earlier steps."""
        return has_values(x) and key_of(x) in self._others and not self._others[key_of(x)][0].expired()

    def _storages_of(self, x: torch.Tensor) -> list[_Storage]:
        storages = self._others[key_of(x)][1]
        if isinstance(perturbed := storages[-1], Perturbed):
            others = perturbed.storages(x.untyped_storage(), _CARRIED - 1)
            for i in range(-_CARRIED, 0):
                storages[i] = others[i] if storages[i] is perturbed else storages[i]
        return storages

    def share(self, x: torch.Tensor) -> None:
        """Notes a tensor that does not depend on the samples."""
        if not self._is_shared(x):
            self._shared[key_of(x)] = reference_to(x)

    def _is_shared(self, x: torch.Tensor) -> bool:
        return key_of(x) in self._shared and not self._shared[key_of(x)].expired()

    def _add_from_elsewhere(self, name: str, args: Any, leaves: Sequence[Any]) -> None:
        """Adds those arguments of an operation that have samples and that no call and no operation has returned."""
        table = args[0] if name in _OF_TABLES else args[2] if name in _OF_CLASSES and args[2] is not None else None
        for x in leaves:
            if self._known and self.depends(x) and key_of(x) in self._known:
                self._known.discard(key_of(x))  # as it is, it is the program's data again
                del self._others[key_of(x)]
            if isinstance(x, nn.Parameter) or not has_storage(x) or self.depends(x) or self._is_shared(x):
                continue
            if not self.is_over and self._numbers.is_late(x, self.constants):
                others = {i: self._numbers.other(x, i) for i in range(len(self.kept) + 1)}
                self._set(x, [others[i].untyped_storage() if i in others else _UNCHANGED for i in range(self._plans)])
                continue
            if not has_rows(x) or x is table:
                continue
            self.found.add(x)
            self.found.counts.add([x], self.batch, -1)
            is_constant = self._is_of_columns(name, args, x, leaves) or (
                may_be_table(x) if self.constants is None else self.constants.has(x) or is_regular(x)
            )
            if is_constant or len(x) != self.batch or not x.is_contiguous():
                self.share(x)
            else:
                self.add(x, PLAIN, is_label=True)
        if table is not None and name in _OF_TABLES and not any(map(self.depends, tree_flatten(args[1:])[0])):
            self._add_from_elsewhere("", args, [table])

    def _is_of_columns(self, name: str, args: Any, x: torch.Tensor, leaves: Sequence[Any]) -> bool:
        """Returns whether an operation takes a tensor's elements for columns of the samples' rows."""
        if name in ARITHMETIC:
            return x.dim() == 1 and any(self.depends(each) and each.dim() > 1 for each in leaves)
        return name == "index" and args[1][0] is None

    def keep(self) -> None:
        """Goes on with what is left after its backward, except inputs and labels, which are the program's data.

        Nor gradients, which stay until the step: what a program has of them is followed if it is small.

        Labels that are no integers may be outputs of another model, so that what follows from them is of the samples.
        """
        count = len(self.kept)
        self._samples.end_step(self.kept[:2])
        self.kept, self._stay = self.kept[:2], []
        left, size = {}, 0
        for key, (storage, others) in self._others.items():
            own = [others[0], others[1], others[count]]
            if all(each is _UNCHANGED for each in own):
                own = others[count + 1 :]
            if storage.expired() or key in self._given or all(each is _UNCHANGED for each in own):
                continue
            if key in self._perturbed:
                own = [self._perturbed[key]] * _CARRIED
            size += sum(each.nbytes() for each in own if isinstance(each, torch.UntypedStorage))
            left[key] = storage, own if size <= OTHER_BYTES else [None, None, own[2]]
        self._others = left
        self._perturbed.clear()
        self._shared.clear()
        self.is_over = self.is_on = True
        release()

    def take(self, earlier: "OtherSamples", given: Sequence[torch.Tensor]) -> None:
        """Takes over what an earlier step has left, for a call with these inputs."""
        self._samples, self._earlier, self.took_earlier = earlier._samples, earlier._numbers, earlier.is_earlier
        self._known, self._stay = earlier._labels, self._samples.staying(given, self.batch)
        if not earlier.is_earlier and earlier.batch == self.batch:  # the same samples, such as those of an attack
            self._stay = [*earlier.kept, torch.zeros(self.batch, dtype=torch.bool)]
        inputs = set(map(key_of, given))
        for key, (storage, others) in earlier._others.items():
            if not (storage.expired() or (key in inputs and key in self._known)):
                self._others[key] = storage, [*[_UNCHANGED] * (len(self.kept) + 1), *others]

    @torch.no_grad()
    def has_left(self, x: Any, given: Sequence[torch.Tensor]) -> bool:
        """Returns whether an argument of a call has what other samples have left in an earlier step.

        Args:
            x: the argument.
            given: the call's tensors with samples.
        """
        if isinstance(x, float):
            numbers = self._numbers if self.is_over else self._earlier
            return numbers.repeats(x, numbers)
        if not self.depends(x) or key_of(x) in self._labels | self._known:
            return False
        if not (has_rows(x) and given and len(x) == len(given[0]) and (self.is_over or len(x) == self.batch)):
            return (self.is_over or bool(self._stay)) and self._changes_in(x, self._plans - 1)
        stay, first = self._stay, len(self.kept) + 1
        if self.is_over:
            known = [each for each in given if not self.depends(each)]
            stay, first = self._samples.staying(known, len(x)), 0
        rows = Rows.of(x.detach())
        others = ((self.other(x, plan), kept) for plan, kept in enumerate(stay, first))
        return any(other is not None and far_apart(rows, Rows.of(other), kept) for other, kept in others)

    def changes(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor that all samples share has what samples have left there, in this step or before."""
        return self.depends(x) and any(self._changes_in(x, plan) for plan in (len(self.kept), self._plans - 1))

    @torch.no_grad()
    def _changes_in(self, x: torch.Tensor, plan: int) -> bool:
        other = self.other(x, plan) if x.numel() else None
        if other is None:
            return False
        a, b = (Rows.of(dense(each).reshape(1, -1)) for each in (x.detach(), other))
        return far_apart(a, b, torch.ones(1, dtype=torch.bool))

    def is_needed(self) -> bool:
        """Returns whether a loss may come that is computed from the samples. Not after a backward that has failed."""
        own = self._given | self._labels  # the program's data
        alive = (not each.expired() for key, (each, _) in self._others.items() if key not in own)
        return self.is_on and not self.is_over and (bool(self._numbers.read) or self.reads_numbers or any(alive))

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
        self._others.clear()
        self._shared.clear()
        release()

    @torch.no_grad()
    def mixes_gradients(self, gradient: torch.Tensor, where: Arrangement) -> bool:
        """Returns whether a loss gives an output other gradients for a sample where other samples change."""
        if not self.depends(gradient):
            return False
        rows = Rows.of(where.by_sample(dense(gradient), self.batch))
        return self._differs(gradient, where, rows, dict(enumerate(self.kept)))

    @torch.no_grad()
    def carries_gradients(self, gradient: torch.Tensor, where: Arrangement) -> bool:
        """Returns whether a loss gives an output other gradients where other samples of earlier steps change."""
        if not self._stay or not self.depends(gradient):
            return False
        rows = Rows.of(where.by_sample(dense(gradient), self.batch))
        return self._differs(gradient, where, rows, dict(enumerate(self._stay, len(self.kept) + 1)))

    def _differs(self, gradient: torch.Tensor, where: Arrangement, rows: Rows, plans: dict[int, torch.Tensor]) -> bool:
        for plan, kept in plans.items():
            other = self.other(gradient, plan)
            if other is not None and far_apart(rows, Rows.of(where.by_sample(dense(other), self.batch)), kept):
                return True
        return False

    @torch.no_grad()
    def mixes(self, x: Any) -> bool:
        """Returns whether an argument of the next call has rows of other samples, or of several."""
        if not self.depends(x):
            return self._numbers.has("full", x)
        others = [self.other(x, i) for i in range(len(self.kept))]
        known = [dense(each) for each in others if each is not None]
        return len(known) == len(others) and mixes_rows(dense(x), known, self.kept)

    @torch.no_grad()
    def adds_up(self, losses: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None]) -> bool:
        """Returns whether losses are sums over the samples; True if this is unknown.

        Args:
            losses: the tensors that backward starts from.
            weights: their gradients; None for a scalar loss.
        """
        totals = []
        for plan in (None, 0, 1, len(self.kept)):  # of all samples, two complementary halves, and none
            total = 0.0
            for each in zip(losses, weights, strict=True):
                loss, weight = (x if x is None or plan is None else self._in_plan(x, plan) for x in each)
                if loss is None or (weight is None and each[1] is not None):
                    return True
                total += float((loss.double() if weight is None else loss.double() * weight.double()).sum())
            totals.append(total)
        whole, first, second, none = totals
        size = sum(map(abs, totals))
        rounding = max(_SAME_SUM.get(loss.dtype, 3e-2) for loss in losses)
        return not math.isfinite(size) or abs(whole + none - first - second) <= rounding * size

    def _in_plan(self, x: torch.Tensor, plan: int) -> torch.Tensor | None:
        return self.other(x, plan) if self.depends(x) else x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or makes_no_values():
            return func(*args, **kwargs)
        if any(map(dispatches, types)):
            return NotImplemented  # they run it on the tensors that they wrap, which is followed
        if self.is_on and not self.is_over and not self.is_needed():  # such as after the last call of a training
            self.is_on, self.is_over = False, True
        with unfollowed():
            follow = self._prepare(func, args, kwargs) if self.is_on else None
        output = func(*args, **kwargs)
        if follow is not None:
            with unfollowed():
                follow(output)
        return output

    def _prepare(self, func: Any, args: Any, kwargs: Any) -> Callable[[Any], None] | None:
        """Prepares to follow an operation that the program is about to run.

        Returns:
            What is called with its output; None if the operation need not be followed.
        """
        leaves, structure = tree_flatten((args, kwargs))
        name = func._schema.name.split("::")[1]
        if self.is_over:
            self._prune()
        else:
            self.reads_numbers |= any(self._numbers.has(name, leaf) for leaf in leaves)
            self._add_from_elsewhere(name, args, leaves)
        depends = any(map(self.depends, leaves))
        read = self._numbers_in(name, leaves, depends)
        if not depends and not read:
            return None if self.is_over else self._share_all
        if func.namespace in _OF_RANKS:
            return self._set_unknown
        if name in _OF_CLASSES and args[3] == 1 and not self.is_over:
            self.weighs_unequally |= has_unequal_weights(args[1], args[2], args[4], self.batch)
        plans = range(self._plans)
        numbers = {i: self._in_other_plan(leaves, read, i) for i in plans}
        changed = [i for i in plans if numbers[i] or any(self._is_changed(x, i) for x in leaves)]
        if func._schema.is_mutable:
            for leaf in filter(has_values, written_leaves(func, args, kwargs)):
                self._write(leaf, changed)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        before = RandomState.now(device_of(args, kwargs)) if draws else None
        inputs = {i: [self.other(x, i) if self.depends(x) else x for x in leaves] for i in changed}
        for i in changed if read else ():
            inputs[i] = [numbers[i].get(place, x) for place, x in enumerate(inputs[i])]

        def follow(output: Any) -> None:
            others = {
                i: None if _misses(a, leaves) else self._run(func, a, structure, before) for i, a in inputs.items()
            }
            if name == "_local_scalar_dense":
                self._note_number(output, others)
            else:
                self._set_outputs(name, output, others)

        return follow

    def _share_all(self, output: Any) -> None:
        for x in filter(has_storage, leaves_of(output)):
            self.share(x)
            self.found.add_computed(x)

    def _set_unknown(self, output: Any) -> None:
        for x in filter(has_values, leaves_of(output)):
            self._set(x, [None] * self._plans)

    def _note_number(self, number: Any, others: dict[int, Any]) -> None:
        if any(each is not None and each != number for each in others.values()):
            self.reads_numbers |= isinstance(number, bool)
            self._numbers.add(number, {i: each for i, each in others.items() if each is not None})

    def _set_outputs(self, name: str, output: Any, others: dict[int, Any]) -> None:
        for place, x in enumerate(leaves_of(output)):
            if has_values(x) and others and not self.depends(x):
                found = {i: None if each is None else leaves_of(each)[place] for i, each in others.items()}
                like = {i: memory_of(y) if y is not None and is_like(x, y) else None for i, y in found.items()}
                self._set(x, [like.get(i, _UNCHANGED) for i in range(self._plans)])
                # Gradients; flash_clip keeps copies of some.
                if torch._C._current_graph_task_id() != -1 and (name == "clone" or not is_of_few(x)):
                    self._given.add(key_of(x))

    def _is_changed(self, x: Any, plan: int) -> bool:
        """Returns whether a value is another one in a plan, or not known there."""
        return self.depends(x) and self._storages_of(x)[plan] is not _UNCHANGED

    def _in_other_plan(self, leaves: Sequence[Any], read: dict[int, bool], plan: int) -> dict[int, Any]:
        """Returns what numbers that were read, in this step or in the one before, are in a plan, if other ones."""
        others: dict[int, Any] = {}
        for place, is_now in read.items():
            is_other = self.is_over or is_now == (plan <= len(self.kept))
            by = self._numbers.other if is_now and not self.is_over else lambda x, _: 1.25 * x
            others[place] = by(leaves[place], plan) if is_other else leaves[place]
        return {i: x for i, x in others.items() if isinstance(x, torch.Tensor) or x != leaves[i]}

    def note_read(self, x: torch.Tensor) -> None:
        if self.is_on and has_storage(x):
            with torch.no_grad(), _disable_current_modes():
                others = {i: self.other(x, i) for i in range(self._plans) if self._is_changed(x, i)}
                self._numbers.add_array(x.detach().clone(), others)

    def _prune(self) -> None:
        """Does without the mode if nothing is left that depends on the samples."""
        self._count += 1
        if self._count % _PRUNED_AFTER == 0:
            self._others = {key: each for key, each in self._others.items() if not each[0].expired()}
            self.is_on = bool(self._others)

    def _numbers_in(self, name: str, leaves: Sequence[Any], depends: bool) -> dict[int, bool]:
        """Returns which arguments of an operation are numbers, or tensors of numbers, that the program has read.

        Returns:
            for each position of one, whether it was read in this step, or else in the one before.
        """
        found: dict[int, bool] = {}
        if not (depends or name in _OF_NUMBERS):
            return found
        for place, x in enumerate(leaves):
            if name in ARITHMETIC and not (self.is_over or self.depends(x)):
                self.found.counts.divide_by(x)
            if name != "lift_fresh" and is_of_few(x):
                continue
            now, earlier = self._numbers, self._earlier
            if now.repeats(x, now if self.is_over else earlier) or (not self.is_over and now.gives(x, self.constants)):
                found[place] = True
            elif not self.is_over and earlier.repeats(x, earlier):
                found[place] = False
            if depends and not self.is_over:
                self._numbers.note_use(x)
                self.found.numbers.update({abs(x)} if isinstance(x, float) else ())
        return found

    def _run(self, func: Any, leaves: list[Any], structure: Any, before: RandomState | None) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        try:
            with before.restored() if before is not None else nullcontext():
                return func(*args, **kwargs)
        except Exception:  # not for these samples
            return None

    def _write(self, x: torch.Tensor, plans: Sequence[int]) -> None:
        """Gives a tensor that is written memory of its own in these plans, with its values, as far as the bytes allow.

        It stops to be an input or a label.
        """
        key = key_of(x)
        if self._perturbed.pop(key, None) is not None:
            self._given.discard(key)
        self._labels.discard(key)
        storages = self._storages_of(x) if self.depends(x) else [_UNCHANGED] * self._plans
        new = [i for i in plans if storages[i] is _UNCHANGED]
        if not new:
            return
        size = x.untyped_storage().nbytes() if has_storage(x) else 0
        # The plans come first that are needed most: no sample, the first two halves, and those of earlier steps.
        order = sorted(new, key=lambda i: (i < len(self.kept), i not in (0, 1), i))
        fits = order[: max(_CARRIED, 1 + OTHER_BYTES // max(1, size))] if size <= _MOST_BYTES else []
        copies = {i: memory_of(x).clone() if i in fits else None for i in new}
        self._set(x, [copies.get(i, each) for i, each in enumerate(storages)])

    def _set(self, x: torch.Tensor, storages: list[_Storage]) -> None:
        self._others = {key: each for key, each in self._others.items() if not each[0].expired()}
        key = key_of(x)
        if key not in self._others:  # another tensor may have been there
            self._perturbed.pop(key, None)
            self._given.discard(key)
            self._labels.discard(key)
        self._others[key] = reference_to(x), storages


def _misses(others: list[Any], leaves: list[Any]) -> bool:
    return any(other is None and leaf is not None for other, leaf in zip(others, leaves, strict=True))
