# SPDX-License-Identifier: Apache-2.0
"""What a program computes after a call of the model, or of its parts: for the next call, and for its loss.

Samples must not be mixed there.
"""

import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_memprof.clipping.arguments import Check, is_checked
from opacus_memprof.clipping.forwards.state import PLAIN, Arrangement, RandomState
from opacus_memprof.clipping.kernels.native import is_backward_of_inputs
from opacus_memprof.clipping.module.calls import Call, Outputs, device_of
from opacus_memprof.clipping.proof.batches import (
    GENTLE,
    VARIANTS,
    as_output,
    cotangents,
    has_samples,
    leaves_of,
    leaves_of_call,
    perturbed,
)
from opacus_memprof.clipping.proof.explanation import roots_of_backward
from opacus_memprof.clipping.proof.recorder import differing, far_apart
from opacus_memprof.clipping.proof.summary import Rows, halves, release
from opacus_memprof.errors import MemprofError

_OTHER_BYTES = 64 << 20
"""Limit on the copies of a call's tensors, for other samples."""
_MOST_NUMBERS = 64
_MOST_OF_A_MARK = 1 << 16
_SAME_SUM = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The relative rounding of a loss; 3e-2 in low precision."""
_OF_TABLES = ("index", "index_select", "embedding", "gather", "take")
"""Operations whose first argument has rows of its own where the second depends on the samples."""
_OF_CLASSES = ("nll_loss_forward", "nll_loss2d_forward")
"""Operations whose third argument is one weight for each class."""
_OF_RANKS = ("c10d", "_c10d_functional")
"""Namespaces of operations that all ranks call equally often, so that they cannot run again on one of them."""
_SMALL = [10.0**-i for i in range(3, 13)]
"""What programs add before they divide."""


class Tensors:
    """Tensors that a program has from elsewhere, by their values, and by their places in memory while these live.

    A tensor whose values change in its place is the program's own, such as an average of weights. A batch is a new one.
    """

    def __init__(self) -> None:
        self._marks: set[Any] = set()
        self._places: dict[Any, StorageWeakRef] = {}

    def add_computed(self, x: torch.Tensor) -> None:
        """Adds the memory of a tensor that an operation has returned."""
        storage = x.untyped_storage()
        self._places[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def add(self, x: torch.Tensor) -> None:
        """Adds a tensor."""
        self._marks.add(self._mark(x))
        self._places[self._place(x)] = StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]

    def update(self, other: "Tensors") -> None:
        """Adds the tensors of another instance."""
        self._marks |= other._marks
        both = {**self._places, **other._places}
        self._places = {place: known for place, known in both.items() if not known.expired()}  # type: ignore[no-untyped-call]

    def has(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor is there, or was with other values."""
        places = (self._places.get(place) for place in (self._place(x), x.untyped_storage()._cdata))
        is_kept = any(known is not None and not known.expired() for known in places)  # type: ignore[no-untyped-call]
        return is_kept or self._mark(x) in self._marks

    @staticmethod
    def _place(x: torch.Tensor) -> Any:
        return x.untyped_storage()._cdata, x.storage_offset(), x.shape

    @staticmethod
    @torch.no_grad()
    def _mark(x: torch.Tensor) -> Any:
        """Returns what is the same for equal tensors, and hardly for others."""
        numbers = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
        numbers = numbers[:: 1 + len(numbers) // _MOST_OF_A_MARK]
        places = torch.arange(1, len(numbers) + 1, device=x.device, dtype=torch.float64)
        return x.shape, x.dtype, float((numbers.double().nan_to_num() * places.sqrt()).sum())


class OtherSamples(TorchDispatchMode):
    """Computes what the program computes from the samples of a call again, for batches with some other samples.

    Each operation on a tensor that depends on the call runs once more for each of these batches, with or without
    gradients. A sample whose own data stays must keep its rows. A loss must add up: where both halves of the samples
    change, it must change by the sum of what it changes by where each of them changes.

    Tensors that the program has from elsewhere, such as labels and masks, have samples if they have as many rows, and
    are no constants: they have other values than in earlier steps or, in the first, are integers that repeat.

    Args:
        batch: the number of samples.
        size: the bytes of the call's tensors.
        constants: the tensors from elsewhere in earlier steps; None in the first step.
        found: gets those of this step.
    """

    supports_higher_order_operators = True
    _ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow", "fill", "fill_", "full", "full_like")

    def __init__(self, batch: int, size: int, constants: Tensors | None, found: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch, self.constants, self.found = batch, constants, found
        self.is_on = True
        self.kept = [torch.tensor(plan) for plan in halves(batch)[: max(2, _OTHER_BYTES // max(1, size))]]
        self.reads_numbers = False  # whether a number of the samples has become an argument or a condition
        self.weighs_unequally = False  # whether a mean gives some samples more weight, so that weights are shared
        self._numbers: list[float] = []  # that the program has read
        self._others: dict[int, tuple[StorageWeakRef, list[torch.UntypedStorage | None]]] = {}
        self._shared: dict[int, StorageWeakRef] = {}  # of tensors that do not depend on the samples

    def add(self, x: torch.Tensor, where: Arrangement, is_label: bool = False) -> None:
        """Adds a tensor with samples at `where`. Other samples' labels are those of the batch in another order."""
        if self.depends(x) or 0 in x.stride():  # an expanded tensor, as of one number, has no place for others
            return
        by_sample = where.by_sample(x.detach(), self.batch)
        # Losses of probabilities take no other numbers, and on a GPU end the process.
        in_range = is_label or (x.is_floating_point() and bool(((x >= 0) & (x <= 1)).all()))
        variants = [GENTLE[0] if in_range else i % VARIANTS for i in range(len(self.kept))]
        rows = [
            perturbed([by_sample], self.batch, k, v, i)[0]
            for i, (k, v) in enumerate(zip(self.kept, variants, strict=True))
        ]
        keep = self.kept[0].to(x.device).view(-1, *[1] * (by_sample.dim() - 1))
        rows.append(torch.where(keep, rows[1], rows[0]))
        self._storages(x)
        for i, each in enumerate(rows):
            other = self.other(x, i)
            assert other is not None
            other.copy_(as_output(each, where, x))

    def other(self, x: torch.Tensor, plan: int) -> torch.Tensor | None:
        """Returns what the tensor is for other samples; None if it is not known."""
        storage = self._others[x.untyped_storage()._cdata][1][plan]
        if storage is None:
            return None
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())

    def depends(self, x: Any) -> bool:
        """Returns whether a value was computed from the call's samples."""
        return _has_storage(x) and x.untyped_storage()._cdata in self._others

    def share(self, x: torch.Tensor) -> None:
        """Notes a tensor that does not depend on the samples."""
        storage = x.untyped_storage()
        if storage._cdata not in self._shared:
            self._shared[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _is_shared(self, x: torch.Tensor) -> bool:
        known = self._shared.get(x.untyped_storage()._cdata)
        return known is not None and not known.expired()  # type: ignore[no-untyped-call]

    def _add_from_elsewhere(self, name: str, args: Any, leaves: Sequence[Any]) -> None:
        """Adds those arguments of an operation that have samples and that no call and no operation has returned."""
        table = args[0] if name in _OF_TABLES else args[2] if name in _OF_CLASSES and args[2] is not None else None
        for x in leaves:
            if type(x) is not torch.Tensor or not _has_rows(x) or self.depends(x) or x is table:
                continue
            if self._is_shared(x):
                continue
            self.found.add(x)
            is_constant = self._is_of_columns(name, args, x, leaves) or (
                _may_be_table(x) if self.constants is None else self.constants.has(x) or _is_regular(x)
            )
            if is_constant or len(x) != self.batch or not x.is_contiguous():
                self.share(x)
            else:
                self.add(x, PLAIN, is_label=True)
        if table is not None and name in _OF_TABLES and not any(map(self.depends, tree_flatten(args[1:])[0])):
            self._add_from_elsewhere("", args, [table])

    def _is_of_columns(self, name: str, args: Any, x: torch.Tensor, leaves: Sequence[Any]) -> bool:
        """Returns whether an operation takes a tensor's elements for columns of the samples' rows."""
        if name in self._ARITHMETIC:
            return x.dim() == 1 and any(self.depends(each) and each.dim() > 1 for each in leaves)
        return name == "index" and args[1][0] is None

    def leave(self) -> None:
        """Leaves the mode. If the program has entered another one since, this one stays, without effect."""
        self.is_on &= _get_current_dispatch_mode() is self
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def free(self) -> None:
        """Frees the tensors, after the backward that has ended the mode's work."""
        self._others.clear()
        self._shared.clear()
        release()

    @torch.no_grad()
    def mixes_gradients(self, gradient: torch.Tensor, where: Arrangement) -> bool:
        """Returns whether a loss gives an output other gradients for a sample where other samples change."""
        if not self.depends(gradient):
            return False
        rows = Rows.of(where.by_sample(gradient, self.batch))
        for i, kept in enumerate(self.kept):
            other = self.other(gradient, i)
            if other is not None and far_apart(rows, Rows.of(where.by_sample(other, self.batch)), kept):
                return True
        return False

    @torch.no_grad()
    def mixes(self, x: Any) -> bool:
        """Returns whether an argument of the next call has rows of other samples, or of several."""
        if not self.depends(x):
            return bool(self._numbers) and self._is_read("full", x)
        count = self.batch
        ways = {(d, tiled) for d in range(min(2, x.dim())) if x.shape[d] % count == 0 for tiled in (True, False)}
        has_rows = any(d == 0 for d, _ in ways)
        of_all = torch.ones(len(x) if x.dim() else 1, dtype=torch.bool, device=x.device)
        for i, kept in enumerate(self.kept if x.numel() else ()):
            other = self.other(x, i)
            if other is None:
                return False
            for d, tiled in list(ways):
                times = x.shape[d] // count
                rows = kept.repeat(times) if tiled else kept.repeat_interleave(times)
                if far_apart(Rows.of(x.transpose(0, d)), Rows.of(other.transpose(0, d)), rows):
                    ways.discard((d, tiled))
            if not has_rows:
                of_all &= differing(*(Rows.of(each.reshape(len(of_all), -1)) for each in (x, other)))
        return not ways and x.numel() > 0 and (has_rows or bool(of_all.any()))

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

    def _has_unequal_weights(self, target: torch.Tensor, weight: torch.Tensor | None, ignored: int) -> bool:
        """Returns whether samples have different weights in the mean of a cross entropy, which all of them share."""
        weights = (target != ignored).double()
        if weight is not None:
            weights *= weight.double()[target.clamp(0, len(weight) - 1)]
        if weights.numel() % self.batch:
            return False
        sums = weights.reshape(self.batch, -1).sum(1), weights.reshape(-1, self.batch).sum(0)
        return all(float(each.max() - each.min()) > 1e-9 * float(each.max()) for each in sums)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_on or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        name = func._schema.name.split("::")[1]
        self.reads_numbers |= bool(self._numbers) and any(self._is_read(name, leaf) for leaf in leaves)
        self._add_from_elsewhere(name, args, leaves)
        if not any(map(self.depends, leaves)):
            output = func(*args, **kwargs)
            for x in leaves_of(output):
                if _has_storage(x) and not self._is_shared(x):
                    self.share(x)
                    self.found.add_computed(x)
            return output
        if func.namespace in _OF_RANKS:
            output = func(*args, **kwargs)
            for x in leaves_of(output):
                if _has_storage(x):
                    self._set(x, [None] * (len(self.kept) + 1))
            return output
        if name in _OF_CLASSES and args[3] == 1:
            self.weighs_unequally |= self._has_unequal_weights(args[1], args[2], args[4])
        if func._schema.is_mutable:
            for leaf in leaves:
                if _has_storage(leaf):
                    self._storages(leaf)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        before = RandomState.now(device_of(args, kwargs)) if draws else None
        inputs = [[self.other(x, i) if self.depends(x) else x for x in leaves] for i in range(len(self.kept) + 1)]
        output = func(*args, **kwargs)
        others = [None if _misses(a, leaves) else self._run(func, a, structure, before) for a in inputs]
        if name == "_local_scalar_dense":
            if any(each is not None and each != output for each in others):
                self.reads_numbers |= isinstance(output, bool)
                self._numbers = [*self._numbers[1 - _MOST_NUMBERS :], output]
            return output
        for place, x in enumerate(leaves_of(output)):
            if isinstance(x, torch.Tensor) and not self.depends(x):
                found = [None if each is None else leaves_of(each)[place] for each in others]
                self._set(x, [y.untyped_storage() if y is not None and _is_like(x, y) else None for y in found])
        return output

    def _run(self, func: Any, leaves: list[Any], structure: Any, before: RandomState | None) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        try:
            with before.restored() if before is not None else nullcontext():
                return func(*args, **kwargs)
        except Exception:  # not for these samples
            return None

    def _is_read(self, name: str, x: Any) -> bool:
        """Returns whether an argument is a number that was read, or a simple function of one.

        Other numbers that a program computes from it look like numbers of the program's text.
        """
        if name == "lift_fresh" and isinstance(x, torch.Tensor) and 0 < x.numel() <= _MOST_NUMBERS:
            return any(self._is_read("full", each) for each in x.flatten().tolist())
        if isinstance(x, bool) or not isinstance(x, (int, float)) or name not in self._ARITHMETIC:
            return False
        if isinstance(x, float) and abs(float(f"{x:.4g}") - x) > 1e-6 * abs(x):  # too long to be there by chance
            return any(abs(abs(x) - abs(each)) <= 1e-6 * abs(x) for each in self._derived())
        return abs(x) > 1 and x in self._numbers and not _is_in_text(x)

    def _derived(self) -> Iterator[float]:
        """Yields the numbers that were read, their sum and mean, and what programs scale and shift by."""
        read = [float(each) for each in self._numbers if math.isfinite(each)]
        for each in (*read, sum(read), sum(read) / max(1, len(read))):
            for shifted in (each, *(each + small for small in _SMALL)):
                if shifted:
                    yield from (shifted, 1 / shifted)
            yield from (each * each, math.sqrt(abs(each)), each * self.batch, each / self.batch)

    def _storages(self, x: torch.Tensor) -> None:
        if not self.depends(x):
            self._set(x, [x.untyped_storage().clone() for _ in range(len(self.kept) + 1)])  # type: ignore[no-untyped-call]

    def _set(self, x: torch.Tensor, storages: list[torch.UntypedStorage | None]) -> None:
        self._others = {key: each for key, each in self._others.items() if not each[0].expired()}  # type: ignore[no-untyped-call]
        storage = x.untyped_storage()
        self._others[storage._cdata] = StorageWeakRef(storage), storages  # type: ignore[no-untyped-call]


def _is_in_text(x: float) -> bool:
    """Returns whether a function that is running has this constant."""
    frame = sys._getframe()
    while frame is not None:
        if any(type(each) is type(x) and each == x for each in frame.f_code.co_consts):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _misses(others: list[Any], leaves: list[Any]) -> bool:
    return any(other is None and leaf is not None for other, leaf in zip(others, leaves, strict=True))


def _is_like(x: torch.Tensor, other: torch.Tensor) -> bool:
    a, b = ((each.shape, each.stride(), each.storage_offset(), each.dtype) for each in (x, other))
    return a == b and x.untyped_storage().nbytes() == other.untyped_storage().nbytes()


def _may_be_table(x: torch.Tensor) -> bool:
    """Returns whether a tensor may have rows of its own, instead of those of the samples, as far as one step tells."""
    return x.is_floating_point() or x.is_complex() or len(torch.unique(x, dim=0)) == len(x)


def _is_regular(x: torch.Tensor) -> bool:
    """Returns whether integers are numbers of the rows, as torch.arange returns them."""
    is_integer = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return is_integer and 2 < x.numel() == len(x) and not bool(x.flatten().diff(n=2).any())


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
        self._step = 1
        self._constants: Tensors | None = None
        self._found: Tensors | None = None
        self._is_too_small = False  # whether all calls of this step had one sample, of which nothing can be seen

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_others": None, "_outputs": deque(maxlen=64), "_constants": None, "_found": None}

    def end_step(self) -> None:
        """Forgets the calls of a step, all of which were checked, and remembers which tensors are constants."""
        if self._found is not None:
            self._constants = self._constants or Tensors()
            self._constants.update(self._found)
        step = self._step + (not self._is_too_small)
        self.forget()
        self._step = step

    def forget(self) -> None:
        """Forgets the calls of a step that is refused. Steps are checked as from the first one again."""
        self._step = 1
        self._outputs.clear()
        self.pause()
        self._others = None
        self._found = None
        self._is_too_small = False

    def pause(self) -> None:
        """Stops to follow what the program computes, because it calls the model."""
        if self._others is not None:
            release()
            self._others.leave()
            if not self._others.is_on:
                self._others = None

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
        if is_first:
            torch.autograd.Variable._execution_engine.queue_callback(others.free)
            roots = roots_of_backward()
            mixes |= others.weighs_unequally
            if len(roots) == 1:
                losses, arguments = roots[0]
                given = arguments[0] if arguments else [None] * len(losses)
                mixes |= not others.adds_up(losses, given)
        return mixes

    def add(self, outputs: Outputs, batch: int) -> None:
        """Adds outputs that have gradients."""
        self._outputs += [(get_gradient_edge(x), where, batch) for x, where in outputs if where is not None]

    def follow(self, call: Call, outputs: Outputs) -> bool:
        """Follows what the program computes from a call's outputs and inputs until its next call.

        Returns whether it does: if this step is checked, the tensors are not too large, and the program has no mode on.
        """
        while isinstance(mode := _get_current_dispatch_mode(), OtherSamples):
            mode.leave()  # of a model whose training has ended
        given = [leaf for leaf in leaves_of_call(call.args, call.kwargs) if _has_rows(leaf)]
        batch = len(given[0]) if given else 0
        known = [(x, where) for x, where in outputs if where is not None and _has_rows(x)]
        if call.is_off:
            known = [(x, where) for x, where in known if len(x) == batch]
        else:
            self._is_too_small = batch < 2 and (self._is_too_small or self._others is None)
        if batch < 2 or not known or not self.is_due() or mode is not None:
            return False
        known += [(x, PLAIN) for x in given if len(x) == batch and x.is_contiguous()]
        size = sum(x.untyped_storage().nbytes() for x, _ in known)
        if size > _OTHER_BYTES:
            return False
        self._found = self._found or Tensors()
        if self._others is None or self._others.batch != batch:
            self._others = OtherSamples(batch, size, self._constants, self._found)
        for x, where in known:
            self._others.add(x, where)
        for x, place in outputs:
            if place is None and _has_storage(x):
                self._others.share(x)
        self._others.__enter__()  # type: ignore[no-untyped-call]
        return True

    def is_due(self) -> bool:
        """Returns whether calls of this step are checked."""
        return is_checked(self.check_steps, self._step)

    def check_rows(self, call: Call) -> None:
        """Checks that a sample's input of a call does not depend on other samples of earlier calls in this step.

        Raises:
            MemprofError: it does.
        """
        others = self._others
        leaves = leaves_of_call(call.args, call.kwargs) if others is not None else []
        if others is not None and (others.reads_numbers or any(map(others.mixes, leaves))):
            self._refuse(call)

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


def _has_rows(x: Any) -> bool:
    return _has_storage(x) and x.dim() > 0


def _has_storage(x: Any) -> bool:
    is_plain = type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)
