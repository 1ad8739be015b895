# SPDX-License-Identifier: Apache-2.0
"""What tensors are in batches with some other samples. Such a batch is a plan: it says which samples stay."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opacus_memprof.clipping.forwards.state import (
    Arrangement,
    Reference,
    has_storage,
    has_values,
    is_like,
    key_of,
    memory_of,
    reference_to,
)
from opacus_memprof.clipping.proof.batches import Perturbed
from opacus_memprof.clipping.proof.summary import halves

OTHER_BYTES = 64 << 20
"""Limit on the copies of a call's tensors, for other samples."""
_MOST_BYTES = 256 << 20
"""Limit on the size of one tensor that is copied when it is written to."""
_CARRIED = 3
"""The plans of what earlier steps have left: one half of their samples are others, the other half, and all."""
_UNCHANGED = "unchanged"
"""Stands for memory that has the program's own values, although it depends on samples in another plan."""
_Storage = torch.UntypedStorage | torch.Tensor | str | Perturbed | None
"""Memory with the values of a plan, or the tensor of one without memory of its own; None if they are not known."""


class OtherValues:
    """The values that tensors have in the plans of a step, by the memory in which they are.

    The plans are, in this order: the halves of the batch, no sample, and those of earlier steps.

    Args:
        batch: the number of samples.
        size: the bytes of the call's tensors.

    Attributes:
        kept: which samples stay in each plan of this step; in the next one, which has no sample, none does.
        stay: which samples stay in the plans of earlier steps.
    """

    def __init__(self, batch: int, size: int) -> None:
        self.kept = [torch.tensor(plan) for plan in halves(batch)[: max(2, OTHER_BYTES // max(1, size))]]
        self.stay: list[torch.Tensor] = []
        self._batch = batch
        self._others: dict[int, tuple[Reference, list[_Storage]]] = {}
        self._perturbed: dict[int, Perturbed] = {}  # outputs and labels that nothing has written to since
        self._given: set[int] = set()  # the memory of inputs, of labels that are integers, and of gradients
        self._labels: set[int] = set()  # that of other labels, which a program may have computed
        self._known: set[int] = set()  # that of such labels of the step before
        self._shared: dict[int, Reference] = {}  # of tensors that do not depend on the samples
        self._views: dict[Any, Mapping[int, torch.Tensor]] = {}  # by place in memory, which depends on the samples
        self._of_other_shape: dict[int, tuple[Any, dict[int, torch.Tensor]]] = {}  # with the tensor's place

    @property
    def plans(self) -> int:
        """The number of plans."""
        return len(self.kept) + 1 + len(self.stay)

    def add(self, x: torch.Tensor, where: Arrangement, is_label: bool = False, is_given: bool = True) -> None:
        """Adds a tensor with samples at `where`. Other samples' labels are those of the batch in another order."""
        if self.is_changed(x, 0):
            return
        by_sample = where.by_sample(x.detach(), self._batch)
        if by_sample.stride(0) == 0:
            return  # one number for all samples
        # Losses of probabilities take no other numbers, and on a GPU end the process.
        in_range = is_label or (x.is_floating_point() and bool(((x >= 0) & (x <= 1)).all()))
        others, storage, count = Perturbed(x, where, self.kept, in_range), x.untyped_storage(), len(self.kept)
        before = self._storages_of(x)[count + 1 :] if self.depends(x) else [_UNCHANGED] * len(self.stay)
        self._set(x, [*others.storages(storage, count), *before])
        self._perturbed[storage._cdata] = others
        if is_given:
            (self._labels if is_label and x.is_floating_point() else self._given).add(storage._cdata)

    def add_output(self, x: torch.Tensor, others: Mapping[int, torch.Tensor | None], is_gradient: bool = False) -> None:
        """Adds what an operation has returned.

        Args:
            x: the tensor.
            others: what it is in the plans in which that is another one; None if it is not known there.
            is_gradient: whether it stays until the step, although it is the program's data.
        """
        like = {i: memory_of(y) if y is not None and is_like(x, y) else None for i, y in others.items()}
        self._set(x, [like.get(i, _UNCHANGED) for i in range(self.plans)])
        unlike = {i: y for i, y in others.items() if y is not None and like[i] is None}
        if unlike and has_storage(x):
            self._of_other_shape[key_of(x)] = _place_of(x), unlike
        if is_gradient:
            self._given.add(key_of(x))

    def set_view(self, x: torch.Tensor, others: Mapping[int, torch.Tensor | None]) -> None:
        """Notes a view that is at another place of its memory in these plans, for the operation that gets it next."""
        self._views[_place_of(x)] = {i: other for i, other in others.items() if other is not None}

    def take_view(self, x: Any) -> Mapping[int, torch.Tensor]:
        """Returns what such a view is in the plans, and forgets it."""
        return self._views.pop(_place_of(x), {}) if self._views and has_storage(x) else {}

    def has_other_shape(self, x: Any) -> bool:
        """Returns whether a tensor has another shape in some plan."""
        return has_storage(x) and self._of_other_shape.get(key_of(x), (None,))[0] == _place_of(x)

    def set_unknown(self, x: torch.Tensor) -> None:
        """Notes that it is not known what a tensor is in any plan."""
        self._set(x, [None] * self.plans)

    def share(self, x: torch.Tensor) -> None:
        """Notes a tensor that does not depend on the samples."""
        if not self.is_shared(x):
            self._shared[key_of(x)] = reference_to(x)

    def is_shared(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor is known not to depend on the samples."""
        return key_of(x) in self._shared and not self._shared[key_of(x)].expired()

    def depends(self, x: Any) -> bool:
        """Returns whether a value was computed from the call's samples, or from those of earlier steps."""
        return has_values(x) and key_of(x) in self._others and not self._others[key_of(x)][0].expired()

    def is_changed(self, x: Any, plan: int) -> bool:
        """Returns whether a value is another one in a plan, or not known there."""
        return self.depends(x) and self._storages_of(x)[plan] is not _UNCHANGED

    def other(self, x: torch.Tensor, plan: int) -> torch.Tensor | None:
        """Returns what a tensor that depends on samples is in a plan; None if it is not known."""
        storage = self._storages_of(x)[plan]
        if not isinstance(storage, torch.UntypedStorage):
            return storage if storage is None or isinstance(storage, torch.Tensor) else x.detach()
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())

    def in_plan(self, x: Any, plan: int) -> Any:
        """Returns what any value is in a plan, maybe in another shape; None if it is not known."""
        if not self.depends(x):
            return x
        other = self.other(x, plan)
        place, others = self._of_other_shape.get(key_of(x), (None, {})) if other is None else (None, {})
        return others.get(plan) if place is not None and place == _place_of(x) else other

    def _storages_of(self, x: torch.Tensor) -> list[_Storage]:
        storages = self._others[key_of(x)][1]
        if isinstance(perturbed := storages[-1], Perturbed):
            others = perturbed.storages(x.untyped_storage(), _CARRIED - 1)
            for i in range(-_CARRIED, 0):
                storages[i] = others[i] if storages[i] is perturbed else storages[i]
        return storages

    def write(self, x: torch.Tensor, plans: Sequence[int]) -> None:
        """Gives a tensor that is written memory of its own in these plans, with its values, as far as the bytes allow.

        It stops to be an input or a label.
        """
        key = key_of(x)
        if self._perturbed.pop(key, None) is not None:
            self._given.discard(key)
        self._labels.discard(key)
        storages = self._storages_of(x) if self.depends(x) else [_UNCHANGED] * self.plans
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
        self.prune()
        key = key_of(x)
        if key not in self._others:  # another tensor may have been there
            self._perturbed.pop(key, None)
            self._given.discard(key)
            self._labels.discard(key)
        self._others[key] = reference_to(x), storages

    def prune(self) -> None:
        """Forgets tensors that are gone."""
        others = self._others.copy()  # garbage collection may end a model's mode meanwhile, which clears it
        self._others = {key: each for key, each in others.items() if not each[0].expired()}
        if self._views or self._of_other_shape:
            self._views = {place: each for place, each in self._views.items() if place[0] in self._others}
            self._of_other_shape = {key: each for key, each in self._of_other_shape.items() if key in self._others}

    def is_empty(self) -> bool:
        """Returns whether nothing depends on the samples."""
        return not self._others

    def has_computed(self) -> bool:
        """Returns whether something is left that the program has computed from the samples, other than its data."""
        own = self._given | self._labels
        return any(not each.expired() for key, (each, _) in self._others.copy().items() if key not in own)

    def is_of_program(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor is the program's own data: an input, a label, or a gradient."""
        return key_of(x) in self._given | self._labels

    def is_label(self, x: torch.Tensor) -> bool:
        """Returns whether a tensor is one of the labels that are no integers, of this step or of the one before."""
        return key_of(x) in self._labels | self._known

    def forget_known(self, x: torch.Tensor) -> None:
        """Makes a label of the step before the program's data again."""
        if self._known and self.depends(x) and key_of(x) in self._known:
            self._known.discard(key_of(x))
            del self._others[key_of(x)]

    def follow_gradient(self, x: torch.Tensor) -> None:
        """Follows a gradient to the next step, as what the program has computed."""
        if self.depends(x):
            self._given.discard(key_of(x))

    def keep(self) -> None:
        """Goes on with what is left after a backward, in plans for the next step. Inputs and labels are not kept.

        Nor gradients, which stay until the step: what a program has of them is followed if it is small.

        Labels that are no integers may be outputs of another model, so that what follows from them is of the samples.
        """
        count = len(self.kept)
        self.kept, self.stay = self.kept[:2], []
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
        self._views.clear()
        self._of_other_shape.clear()

    def take(self, earlier: "OtherValues", given: Sequence[torch.Tensor], stay: list[torch.Tensor]) -> None:
        """Takes over what an earlier step has left, in plans of its own.

        Args:
            earlier: the values of that step.
            given: the inputs of the first call of this step.
            stay: which samples of this step stay in those plans.
        """
        self._known, self.stay = earlier._labels, stay
        inputs = set(map(key_of, given))
        for key, (storage, others) in earlier._others.items():
            if not (storage.expired() or (key in inputs and key in self._known)):
                self._others[key] = storage, [*[_UNCHANGED] * (len(self.kept) + 1), *others]

    def clear(self) -> None:
        """Frees the tensors."""
        self._others.clear()
        self._shared.clear()
        self._views.clear()
        self._of_other_shape.clear()


def _place_of(x: torch.Tensor) -> Any:
    return key_of(x), x.storage_offset(), x.shape, x.stride()
