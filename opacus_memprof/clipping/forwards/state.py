# SPDX-License-Identifier: Apache-2.0
"""The samples and the state of a forward.

An arrangement says where a batch's samples are in a tensor, and rows say which samples a call was given. The state is
what a forward may change: random number generators, and the module's buffers, attributes and what these hold.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from opacus_memprof.errors import MemprofError


@dataclass
class RandomState:
    """The states of the generators of torch, Python and NumPy at one moment.

    Attributes:
        cpu: the state of torch's CPU generator.
        cuda: for each GPU that is used, its index and the state of its generator.
        python: the state of Python's generator.
        numpy: the state of NumPy's legacy generator; None if NumPy was not imported.
    """

    cpu: torch.Tensor
    cuda: list[tuple[int, torch.Tensor]]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, *devices: torch.device) -> RandomState:
        """Returns the current states of the CPU's generators, and of the GPUs among `devices`."""
        gpus = sorted({each.index for each in devices if each.type == "cuda"})
        cuda = [(index, torch.cuda.get_rng_state(index)) for index in gpus]
        numpy = sys.modules.get("numpy.random")
        return cls(torch.get_rng_state(), cuda, random.getstate(), None if numpy is None else numpy.get_state())

    def by_generator(self) -> dict[torch.Generator, torch.Tensor]:
        """Returns the states of torch's default generators."""
        return {torch.default_generator: self.cpu, **{torch.cuda.default_generators[i]: s for i, s in self.cuda}}

    def device_type(self) -> str:
        """Returns the type of the device whose generator is included in addition to the CPU's."""
        return "cuda" if self.cuda else "cpu"

    def later(self) -> RandomState:
        """Returns the current states of the same generators."""
        return RandomState.now(*[torch.device("cuda", index) for index, _ in self.cuda])

    def is_same(self, other: RandomState) -> bool:
        """Returns whether these are the other states."""
        mine, others = ([state.cpu, *[each for _, each in state.cuda]] for state in (self, other))
        return self.is_same_outside_torch(other) and all(map(torch.equal, mine, others))

    def is_same_outside_torch(self, other: RandomState) -> bool:
        """Returns whether the states of Python's and NumPy's generators are the other ones."""
        return bool(self.python == other.python) and _same_numpy(self.numpy, other.numpy)

    def has_moved(self) -> bool:
        """Returns whether a random number has been drawn since then."""
        return not self.is_same(self.later())

    def restore(self) -> None:
        """Sets the generators to these states."""
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda:
            torch.cuda.set_rng_state(state, index)
        self._set_others(sys.modules.get("numpy.random"), self.python, self.numpy)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Sets the generators to these states inside the context, and to their previous states afterwards."""
        with torch.random.fork_rng([index for index, _ in self.cuda]):
            numpy = sys.modules.get("numpy.random")
            others = random.getstate(), None if numpy is None else numpy.get_state()
            self.restore()
            try:
                yield
            finally:
                self._set_others(numpy, *others)

    def _set_others(self, numpy: Any, python: Any, of_numpy: Any) -> None:
        random.setstate(python)
        if numpy is not None and of_numpy is not None:
            numpy.set_state(of_numpy)


def _same_numpy(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a[0] == b[0] and (a[1] == b[1]).all() and a[2:] == b[2:])


INTERNAL = frozenset(nn.Module().__dict__)
"""The attributes that torch gives every module."""
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_COLLECTIONS = (list, set, deque)
_PLAIN = frozenset((bool, float, int, str, type(None), torch.dtype, torch.device))
_MOST_ITEMS = 1000  # longer collections are logs of numbers, inside of which nothing changes
_MOST_BYTES = 1 << 20  # larger arrays and tensors that are no buffers are data


class ModuleState:
    """What a forward may change in a module and its submodules, at one moment.

    These are buffers, attributes and hooks, and what attributes hold: collections, arrays, tensors, and objects of
    classes that the module's own package defines. A proof's forwards leave all of it as it was.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._attributes = [(m.__dict__, _attributes(m.__dict__)) for m in modules]
        self._dicts = [(m._buffers, dict(m._buffers)) for m in modules]
        self._collections: list[tuple[Any, Any]] = []
        arrays: list[Any] = [x for x in module.buffers() if _can_be_restored(x)]
        for value in _contents(modules, [saved for _, saved in self._attributes]):
            if isinstance(value, dict):
                self._dicts.append((value, dict(value)))
            elif type(value) in _COLLECTIONS:
                self._collections.append((value, value.copy()))
            else:
                arrays.append(value)
        self._arrays = [(x, _copy_of(x)) for x in arrays]
        self._hooks = [(h, dict(h)) for m in modules for h in (m._forward_hooks, m._forward_pre_hooks)]

    def has_changed(self) -> bool:
        """Returns whether anything has changed since then."""
        return (
            any(_differ(_attributes(d), saved) for d, saved in self._attributes)
            or any(_differ(d, saved) for d, saved in self._dicts)
            or any(not _same_items(value, copy) for value, copy in self._collections)
            or any(not _equal(x, old) for x, old in self._arrays)
        )

    def differences(self) -> list[Difference]:
        """Returns what has other values than then, and is in the same places."""
        found = [
            Difference(d, key, value, d[key])
            for d, saved in (*self._attributes, *self._dicts)
            for key, value in saved.items()
            if key in d and d[key] is not value
        ]
        found += [
            Difference(value, None, copy, value.copy())
            for value, copy in self._collections
            if not _same_items(value, copy)
        ]
        return found + [Difference(x, None, old, _copy_of(x)) for x, old in self._arrays if not _equal(x, old)]

    def restore(self) -> None:
        """Restores buffers, attributes, what they hold, and hooks."""
        self._restore_hooks()
        for d, saved in self._attributes:
            if _differ(_attributes(d), saved):
                for key in _attributes(d).keys() - saved.keys():
                    del d[key]
                d.update(saved)
        for d, saved in self._dicts:
            if _differ(d, saved):
                d.clear()
                d.update(saved)
        for value, copy in self._collections:
            if not _same_items(value, copy):
                value.clear()
                value.update(copy) if isinstance(value, set) else value.extend(copy)
        with torch.no_grad():
            for x, old in self._arrays:
                if not _equal(x, old):
                    x[...] = old

    def _restore_hooks(self) -> None:
        """Restores the program's hooks; flash_clip's own stay as they are.

        A model may register hooks in its first forward, and note in an attribute that it has.
        """
        for hooks, saved in self._hooks:
            own = {key: hook for key, hook in hooks.items() if is_own(hook)}
            before = {key: hook for key, hook in saved.items() if key in own or not is_own(hook)} | own
            if before.keys() != hooks.keys():
                hooks.clear()
                hooks.update(before)


@dataclass
class Difference:
    """A place in a module that has another value at one moment than at another one.

    Attributes:
        holder: a dictionary, a collection, an array or a tensor.
        key: the key in a dictionary; None for what is changed as a whole.
        then, now: its values.
    """

    holder: Any
    key: Any
    then: Any
    now: Any

    def is_as_then(self) -> bool:
        """Returns whether the place has its first value."""
        if self.key is not None:
            return self.holder.get(self.key) is self.then
        is_collection = type(self.holder) in _COLLECTIONS
        return _same_items(self.holder, self.then) if is_collection else _equal(self.holder, self.then)

    def was_empty(self) -> bool:
        """Returns whether its first value was None, which has no data of samples."""
        return self.key is not None and self.then is None

    def is_empty(self) -> bool:
        """Returns whether its value is None now."""
        return self.holder.get(self.key) is None

    def undo(self) -> None:
        """Gives the place its first value."""
        Difference(self.holder, self.key, self.now, self.then).apply()

    def apply(self) -> None:
        """Gives the place its second value."""
        if self.key is not None:
            self.holder[self.key] = self.now
        elif type(self.holder) in _COLLECTIONS:
            self.holder.clear()
            self.holder.update(self.now) if isinstance(self.holder, set) else self.holder.extend(self.now)
        else:
            with torch.no_grad():
                self.holder[...] = self.now


def _attributes(d: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in d.items() if key not in INTERNAL}


def _contents(modules: Iterable[nn.Module], attributes: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yields the collections, arrays and tensors that attributes hold, and the attributes of objects, as dicts."""
    waiting: list[tuple[Any, str]] = []
    for module, own in zip(modules, attributes, strict=True):
        package = _package(module)
        waiting += [(value, package) for value in own.values()]
    seen: set[int] = set()
    while waiting:
        value, package = waiting.pop()
        kind = type(value)
        if kind in _PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        items: Any = ()
        if kind in _DICTS:
            items = value.values()
        elif kind in _COLLECTIONS or kind is tuple:
            items = value
        elif isinstance(getattr(value, "__dict__", None), dict) and _is_of_program(value, package):
            value = vars(value)
            items = value.values()
        elif not _is_array(value):
            continue
        if kind is not tuple:
            yield value
        if len(items) <= _MOST_ITEMS:
            waiting += [(item, package) for item in items]


def _package(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _is_of_program(value: Any, package: str) -> bool:
    """Returns whether an object's class is of the module's package. A library's objects may have a state elsewhere."""
    if isinstance(value, (nn.Module, type, torch.Tensor)) or package in ("torch", "opacus", "opacus_memprof"):
        return False
    return type(value) is SimpleNamespace or _package(value) == package


def _is_array(value: Any) -> bool:
    """Returns whether an attribute is an array that a forward may write to, and not an activation that has a graph."""
    if type(value) is torch.Tensor:
        is_leaf = value.grad_fn is None and not value.requires_grad
        return is_leaf and _can_be_restored(value) and value.nbytes <= _MOST_BYTES
    numpy = sys.modules.get("numpy")
    is_numpy = numpy is not None and type(value) is numpy.ndarray
    return is_numpy and value.flags.writeable and not value.dtype.hasobject and value.nbytes <= _MOST_BYTES


def _can_be_restored(x: torch.Tensor) -> bool:
    """Returns whether a tensor's values can be compared and copied: those of sparse and meta tensors cannot."""
    return has_storage(x) and not x.is_meta


def _differ(d: dict[Any, Any], saved: dict[Any, Any]) -> bool:
    return d.keys() != saved.keys() or any(d[key] is not value for key, value in saved.items())


def _same_items(value: Any, copy: Any) -> bool:
    if len(value) != len(copy):
        return False
    return value == copy if isinstance(value, set) else all(a is b for a, b in zip(value, copy, strict=True))


def _copy_of(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x.copy()


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool((a == b).all())


def is_own(hook: Any) -> bool:
    """Returns whether a hook belongs to this package. The profiler adds and removes its hooks at any time."""
    function = getattr(hook, "__func__", hook)
    kind = getattr(function, "__module__", None) or type(hook).__module__
    return kind.startswith("opacus_memprof") or getattr(hook, "_is_opacus_memprof", False)


@contextmanager
def restoring_state(module: nn.Module) -> Iterator[ModuleState]:
    """Restores a module's buffers, attributes and hooks at the end of the context, to the state that it yields."""
    state = ModuleState(module)
    try:
        yield state
    finally:
        state.restore()


@dataclass(frozen=True)
class Arrangement:
    """The position of samples in a tensor.

    Attributes:
        dim: the dimension that has the samples, 0 or 1.
        sample_major: for a dimension with several rows per sample (windows of an image, tokens of a text): whether all
            rows of the first sample come first. Otherwise the first rows of all samples come first.
    """

    dim: int = 0
    sample_major: bool = True

    def rows(self, x: torch.Tensor, batch: int) -> int | None:
        """Returns the number of rows per sample in `x`, for `batch` samples; None if this arrangement does not fit."""
        if x.dim() <= self.dim or (batch and x.shape[self.dim] % batch):
            return None
        rows = x.shape[self.dim] // batch if batch else 1
        return rows if rows > 0 and (self.dim == 0 or rows == 1) else None

    def by_sample(self, x: torch.Tensor, batch: int) -> torch.Tensor:
        """Returns `x` as [batch, *shape of x in a batch of one sample]."""
        if self.dim == 1:
            return x.movedim(1, 0).unsqueeze(2)
        rows = x.shape[0] // batch if batch else 1
        if self.sample_major:
            return x.reshape(batch, rows, *x.shape[1:])
        return x.reshape(rows, batch, *x.shape[1:]).transpose(0, 1)


PLAIN = Arrangement()
CANDIDATES = (PLAIN, Arrangement(sample_major=False), Arrangement(dim=1))


class GivenRows:
    """The rows of memory that a call was given as samples.

    The same rows are the same samples, unless they were written to in between. Equal rows elsewhere may be other
    samples. The tensors are not kept alive.

    Args:
        tensors: the tensors of the arguments. Those without a dimension of samples do not count.
        batch: the number of samples.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], batch: int) -> None:
        self._batch = batch
        rows = [x for x in tensors if x.dim() and len(x) == batch and x.numel()]
        # Samples are the same if all of their tensors are, so that the memory of all must be known.
        is_known = all(x.layout == torch.strided and not (x.is_nested or x.is_inference()) for x in rows)
        self._tensors = [
            (StorageWeakRef(x.untyped_storage()), x._version, x.dtype, int(x.storage_offset()), x.stride(0))  # type: ignore[no-untyped-call]
            for x in (rows if is_known else ())
            if x.stride(0) or batch == 1
        ]

    def are_gone(self) -> bool:
        """Returns whether the memory has been freed, and may have been given to others."""
        return any(storage.expired() for storage, *_ in self._tensors)  # type: ignore[no-untyped-call]

    def shift_to(self, others: GivenRows) -> int | None:
        """Returns by how many rows the samples of another call are further on; None if they are in other tensors."""
        if not self._tensors or len(self._tensors) != len(others._tensors) or self.are_gone() or others.are_gone():
            return None
        shifts = set()
        for (*own, offset, stride), (*other, other_offset, other_stride) in zip(
            self._tensors, others._tensors, strict=True
        ):
            shift, rest = divmod(other_offset - offset, max(1, stride))
            if own != other or rest or (stride != other_stride and shift):
                return None
            shifts.add(shift)
        return shifts.pop() if len(shifts) == 1 else None

    def overlap(self, others: GivenRows) -> bool:
        """Returns whether a sample of one call has the same rows in all tensors as a sample of the other."""
        shift = self.shift_to(others)
        return shift is not None and -others._batch < shift < self._batch


def check_given_once(passes: Iterable[list[GivenRows]], earlier: Iterable[GivenRows]) -> None:
    """Checks that no sample is in several backward passes of a step, each of which would clip it to C.

    And that the forwards of a backward pass have the same samples, which are clipped together.

    Args:
        passes: the rows that the forwards of each backward pass were given.
        earlier: those of earlier physical batches of the step.

    Raises:
        MemprofError: a sample is in several passes, or a pass has several samples instead of one.
    """
    known = list(earlier)
    for own in passes:
        if any(a.overlap(b) for a in own for b in known):
            raise MemprofError(
                "several backward passes of one step were given the same samples (the model's inputs are the same rows "
                "of the same tensor), so that each of these samples would count several times, up to max_grad_norm "
                "each time: add their losses up and call backward() once, or call optimizer.step() after each. If they "
                "are other samples with equal inputs, pass copies (clone())."
            )
        if any(own[0].shift_to(each) for each in own[1:]):
            raise MemprofError(
                "several forwards of one backward pass were given other rows of the same tensor, so that samples at "
                "the same place in these parts of the batch would be clipped together, as one: call backward() on the "
                "loss of each part, or the model on the whole batch. If the rows are parts of the same samples, pass "
                "copies (clone())."
            )
        known += own


def expand_over_batch(x: torch.Tensor, batch: int) -> torch.Tensor:
    """Returns a view of `x`, which has no batch dimension, with a batch dimension in front.

    A first dimension of size 1 is expanded; any other dimension stays behind the new one.
    """
    return (x if x.dim() and x.shape[0] == 1 else x.unsqueeze(0)).expand(batch, *[-1] * _rank(x))


def _rank(x: torch.Tensor) -> int:
    return x.dim() - 1 if x.dim() and x.shape[0] == 1 else x.dim()


def dispatches(cls: Any) -> bool:
    """Returns whether a class of tensors runs operations itself, on tensors that it wraps."""
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_values(x: Any) -> bool:
    """Returns whether something is a tensor that wraps no other ones, of any class."""
    is_plain = isinstance(x, torch.Tensor) and not dispatches(type(x))
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def has_storage(x: Any) -> bool:
    """Returns whether something is a tensor whose memory has its values, unlike a sparse, nested or quantized one."""
    return has_values(x) and x.layout == torch.strided and not (x.is_nested or x.is_quantized)


def has_rows(x: Any) -> bool:
    """Returns whether something is a tensor whose memory has its values, with at least one dimension."""
    return has_storage(x) and x.dim() > 0


class Reference(Protocol):
    """A weak reference to what has a tensor's values."""

    def expired(self) -> bool:
        """Returns whether that is gone."""


class _Alive:
    """A reference to a tensor that has no memory of its own."""

    def __init__(self, x: torch.Tensor) -> None:
        self._tensor = TensorWeakRef(x)

    def expired(self) -> bool:
        return self._tensor() is None


def memory_of(x: torch.Tensor) -> Any:
    """Returns what has a tensor's values: its memory, or the tensor itself if it has none of its own."""
    return x.untyped_storage() if has_storage(x) else x


def key_of(x: torch.Tensor) -> int:
    """Returns a number that no other tensor's memory has, as long as a reference to it is held."""
    return x.untyped_storage()._cdata if has_storage(x) else -id(x)


def reference_to(x: torch.Tensor) -> Reference:
    """Returns a weak reference to what has a tensor's values."""
    found: Reference = StorageWeakRef(x.untyped_storage()) if has_storage(x) else _Alive(x)  # type: ignore[no-untyped-call]
    return found


def is_like(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether a tensor can stand for another one: of the same kind and, in memory, at the same places."""
    if not has_storage(x):
        return (x.layout, x.is_nested, x.dtype) == (other.layout, other.is_nested, other.dtype)
    a, b = ((each.shape, each.stride(), each.storage_offset(), each.dtype) for each in (x, other))
    return a == b and x.untyped_storage().nbytes() == other.untyped_storage().nbytes()


def dense(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's values with memory of their own."""
    if x.is_nested:
        return x.to_padded_tensor(0.0)
    if x.is_quantized:
        return x.dequantize()
    return x if x.layout == torch.strided else x.to_dense()
