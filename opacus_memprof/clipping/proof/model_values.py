# SPDX-License-Identifier: Apache-2.0
"""Plain values and small tensors that a model may read, such as flags, configurations and buffers."""

import functools
import numbers
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from operator import itemgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from opacus_memprof.clipping.forwards.state import INTERNAL, has_storage

_DEPTH = 3
_MOST_SEARCHES = 32
_MOST_ENTRIES = 256
_KNOWN = {"builtins", "collections", "functools", "logging", "numpy", "opacus", "opacus_memprof", "torch", "typing"}
MOST_VALUES = 8
"""The largest number of values of a plain number, such as a step count, that is part of a situation.

Numbers among the arguments that have had more values are ignored.
"""
_MOST_CHANGES = 4
"""The largest number of changes of a tensor, between forwards, each of which makes a new situation."""
_READ_ELEMENTS = 16
"""The largest tensor on the CPU whose elements are compared, instead of its version counter."""
_PLAIN = (Enum, numbers.Number, bytes, torch.dtype, torch.device)


class Attributes:
    """The plain values (numbers, strings, flags) that a model may read.

    These are attributes of its modules, values in configurations, dictionaries and lists among these attributes,
    attributes of its classes, and global and closure variables that its methods name.

    Args:
        dicts: the dictionaries of the modules' attributes.
        tensors: the dictionaries of the modules' buffers and parameters.
        classes: the classes of the modules.

    Attributes:
        tensors: the tensors among these values.
    """

    def __init__(
        self,
        dicts: list[dict[str, Any]],
        tensors: list[dict[str, torch.Tensor | None]],
        classes: Iterable[type],
    ) -> None:
        self._own, self._own_tensors = dicts, tensors
        self._hooks: list[Any] = []
        self.tensors = SmallTensors()
        self._classes = list(dict.fromkeys(classes))
        self._others = Holders(set())
        self._searches = 0
        self._shape: list[int] = []
        self._kept: list[Any] = []  # the objects in the places: the address of a freed one would be used again
        self._changes: Counter[Any] = Counter()
        self._readers: list[tuple[Mapping[Any, Any], Callable[[Any], tuple[Any, ...]]]] = []
        self._keys: list[tuple[int, Any]] = []
        self._values: list[Any] = []
        self._seen: dict[tuple[int, Any], set[Any]] = {}
        self._now: tuple[Any, ...] = ()

    def now(self, hooks: list[Any]) -> tuple[Any, ...]:
        """Returns the values. Omits values that have changed more than a few times, such as a count of steps.

        Args:
            hooks: the hooks of users, in another list when they have changed.
        """
        if self._searches < _MOST_SEARCHES and (hooks is not self._hooks or self._shape_now() != self._shape):
            self._hooks = hooks
            self._find()
        try:
            values = self._read()
            has_changed = values != self._values
        except (KeyError, ValueError, RuntimeError):  # other names, or a tensor where a plain value was
            self._find()
            values, has_changed = self._read(), True
        if has_changed:
            every = [*chain.from_iterable(values)]
            if not all(map(is_plain, every)) and self._searches < _MOST_SEARCHES:
                self._find()
                values = self._read()
                every = [*chain.from_iterable(values)]
            self._values = values
            self._now = tuple(v for key, v in zip(self._keys, every, strict=True) if self._is_stable(key, v))
        return self._now, self.tensors.now()

    def _read(self) -> list[Any]:
        values: list[Any] = [read(d) for d, read in self._readers]
        values.append([cell.cell_contents for cell in self._others.cells])
        values.append([*map(tuple, self._others.lists)])
        return values

    def _shape_now(self) -> list[int]:
        """Returns the numbers of values, and the identities of their holders."""
        others = self._others
        sizes = [*map(len, (*self._own, *self._own_tensors, *others.mappings, *others.lists))]
        sizes += [id(d.get(k)) for d, k in others.places]
        return sizes

    def _find(self) -> None:
        """Finds the values.

        Omits holders whose objects or sizes change in every step. If modules get other attributes in every step, the
        model is searched only a few times, because a search takes milliseconds.
        """
        self._searches += 1
        self._search()
        places: dict[int, tuple[Mapping[Any, Any], list[Any]]] = {}
        for d in (*self._own, *self._others.mappings):
            names = [k for k, v in list(d.items()) if k not in INTERNAL and is_plain(v)]
            places[id(d)] = d, names
        for d, k in self._others.variables:
            if is_plain(d.get(k)):
                places.setdefault(id(d), (d, []))[1].append(k)
        self._readers = [(d, _reader(names)) for d, names in places.values() if names]
        self._keys = [(id(d), k) for d, names in places.values() for k in names]
        self._keys += [(id(each), None) for each in (*self._others.cells, *self._others.lists)]
        self._kept = [d.get(k) for d, k in self._others.places]
        self._shape, self._values = self._shape_now(), []
        self.tensors.find(self._places())

    def _places(self) -> Iterator[tuple[Any, Callable[[], Any]]]:
        """Yields the places that may have a tensor."""
        others = self._others
        holders = (*self._own, *self._own_tensors, *others.mappings)
        for holder, key in [*((each, key) for each in holders for key in list(each)), *others.tensors]:
            if key not in INTERNAL:
                yield (id(holder), key), functools.partial(holder.get, key)
        for cell in others.tensor_cells:
            yield id(cell), functools.partial(cell_contents, cell)

    def _search(self) -> None:
        before, self._others = self._others, Holders({key for key, n in self._changes.items() if n > MOST_VALUES})
        for d in self._own:
            self._others.add_values(d, _DEPTH)
        for kind in self._classes:
            self._others.add_class(kind)
        for hook in self._hooks:
            self._others.add_hook(hook)
        now = {(id(d), k): id(d.get(k)) for d, k in self._others.places}
        self._changes.update(key for key, held in now.items() if before.held.get(key, held) != held)
        sizes = {id(each): len(each) for each in (*self._others.mappings, *self._others.lists)}
        self._changes.update(key for key, size in sizes.items() if before.sizes.get(key, size) != size)
        self._others.held, self._others.sizes = now, sizes

    def _is_stable(self, key: tuple[int, Any], value: Any) -> bool:
        if not is_plain(value):
            return False
        seen = self._seen.setdefault(key, set())
        seen.add(value)
        return len(seen) <= MOST_VALUES


def _reader(names: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns a function that reads the values of these names from a mapping."""
    read = itemgetter(*names)
    return read if len(names) > 1 else lambda mapping: (read(mapping),)


class Holders:
    """Objects from which a model may read plain values, besides the attributes of its modules.

    Attributes:
        places: references to the objects below; another object in a place has other values.
        mappings: attributes of configurations and similar objects, dictionaries, and attributes of classes.
        lists: lists of plain values.
        variables: global variables, each as the module's dictionary and a name.
        cells: closure variables that are plain values.
        tensors, tensor_cells: global and closure variables that are tensors or small arrays.
        held, sizes: the identities of the objects in the places, and the lengths of mappings and lists.

    Args:
        ignored: identities of mappings and lists, and places, that are ignored.
    """

    def __init__(self, ignored: set[Any]) -> None:
        self._ignored = ignored
        self.held: dict[Any, int] = {}
        self.sizes: dict[int, int] = {}
        self.places: list[tuple[Mapping[Any, Any], Any]] = []
        self.mappings: list[Mapping[Any, Any]] = []
        self.lists: list[list[Any]] = []
        self.variables: list[tuple[Mapping[Any, Any], Any]] = []
        self.cells: list[CellType] = []
        self.tensors: list[tuple[Mapping[Any, Any], Any]] = []
        self.tensor_cells: list[CellType] = []
        self._seen: set[int] = set()

    def add_values(self, d: Mapping[Any, Any], depth: int) -> None:
        """Adds the holders among the values of a mapping."""
        for key, value in list(d.items()):
            if key not in INTERNAL and (id(d), key) not in self._ignored and self._add(value, depth):
                self.places.append((d, key))

    def add_class(self, kind: type) -> None:
        """Adds the attributes of a class, and the names that its methods use."""
        for base in kind.__mro__:
            if base is nn.Module or _is_known(base) or id(base) in self._seen:
                continue
            self._seen.add(id(base))
            self.mappings.append(vars(base))
            for value in list(vars(base).values()):
                self._add_function(getattr(value, "__func__", value), _DEPTH)
                self._add_function(getattr(value, "fget", None), _DEPTH)

    def add_hook(self, hook: Any) -> None:
        """Adds the attributes of a user's hook, or the names that it uses."""
        self._add(getattr(hook, "__self__", None), _DEPTH)
        self._add(hook, _DEPTH)
        if not isinstance(hook, (FunctionType, MethodType, functools.partial)):
            self.add_class(type(hook))

    def _add(self, value: Any, depth: int) -> bool:
        """Adds the lists, mappings and objects in a value. Returns whether it has any."""
        if depth == 0 or value is None or type(value) in (bool, int, float, str):
            return False
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._add_function(getattr(value, "func", getattr(value, "__func__", value)), depth)
            return True
        if isinstance(value, (torch.Tensor, nn.Module, type, ModuleType)):
            return False
        if type(value) is list:
            if id(value) in self._ignored or len(value) > _MOST_ENTRIES or not all(map(is_plain, value)):
                return False
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.lists.append(value)
            return True
        mapping = value if isinstance(value, dict) else None if _is_known(type(value)) else _attributes_of(value)
        if mapping is None or id(mapping) in self._ignored or len(mapping) > _MOST_ENTRIES:
            return False
        holder = value if isinstance(mapping, _Slots) else mapping
        if id(holder) not in self._seen:
            self._seen.add(id(holder))
            self.mappings.append(mapping)
            self.add_values(mapping, depth - 1)
        return True

    def _add_function(self, function: Any, depth: int) -> None:
        if not isinstance(function, FunctionType) or depth == 0 or id(function) in self._seen or _is_known(function):
            return
        self._seen.add(id(function))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            if is_plain(value):
                self.cells.append(cell)
            elif _is_followed(value):
                self.tensor_cells.append(cell)
            else:
                self._add(value, depth - 1)
        for name in _names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                if is_plain(value):
                    self.variables.append((function.__globals__, name))
                elif _is_followed(value):
                    self.tensors.append((function.__globals__, name))
                elif (id(function.__globals__), name) not in self._ignored and self._add(value, depth - 1):
                    self.places.append((function.__globals__, name))


class _Slots(Mapping[str, Any]):
    """The attributes of an object that has __slots__ instead of a dictionary."""

    def __init__(self, held: Any) -> None:
        self._held = held
        self._names = [name for kind in type(held).__mro__ for name in _slots_of(kind)]

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._held, name)
        except AttributeError:  # not set
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if hasattr(self._held, name)])

    def __len__(self) -> int:
        return sum(hasattr(self._held, name) for name in self._names)


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _attributes_of(value: Any) -> Mapping[str, Any] | None:
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict:
        return attributes
    return _Slots(value) if any(map(_slots_of, type(value).__mro__)) else None


def _names(code: CodeType) -> set[str]:
    """Returns the names that a function's code uses, including functions inside it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names, *chain.from_iterable(map(_names, inner))}


class SmallTensors:
    """Tensors that a model may read and that are not trained, such as buffers, and whether the program changed them.

    A change by the forward itself does not count: a proof runs it. A tensor that changes often, such as a count of
    steps, is ignored after a few changes.
    """

    def __init__(self) -> None:
        self._places: list[tuple[Any, Callable[[], Any]]] = []
        self._settled: dict[Any, tuple[Any, ...]] = {}
        self._changes: Counter[Any] = Counter()

    def find(self, places: Iterable[tuple[Any, Callable[[], Any]]]) -> None:
        """Finds the tensors.

        Args:
            places: a key for each place that may have a tensor, and a function that returns its value.
        """
        self._places = [(key, get) for key, get in places if _is_followed(get())]

    def held(self) -> list[Any]:
        """Returns the tensors and arrays."""
        return [get() for _, get in self._places]

    def now(self) -> tuple[int, ...]:
        """Returns how often each tensor has been changed between forwards."""
        for key, get in self._places:
            if self._changes[key] <= _MOST_CHANGES:
                state, settled = _state_of(get()), self._settled.get(key)
                if settled is not None and state != settled:
                    self._changes[key] += 1
                self._settled[key] = state
        return tuple(n for key, _ in self._places if (n := self._changes[key]) <= _MOST_CHANGES)

    def settle(self) -> None:
        """Takes the present values as unchanged."""
        for key, get in self._places:
            if self._changes[key] <= _MOST_CHANGES:
                self._settled[key] = _state_of(get())


def _is_followed(value: Any) -> bool:
    """Returns whether a value is a tensor other than a trained parameter or a large frozen one, or a small array."""
    if _is_array(value):
        return bool(value.size <= _MOST_ENTRIES)
    if not isinstance(value, nn.Parameter):
        return isinstance(value, torch.Tensor)
    return not value.requires_grad and value.numel() <= _READ_ELEMENTS


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


class TensorVersion:
    """A tensor at one moment; equal to the same tensor with no writes in between."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = -1 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorVersion) or self._version != other._version:
            return False
        return self._tensor() is other._tensor() is not None

    __hash__ = None  # type: ignore[assignment]


def _state_of(tensor: Any) -> tuple[Any, ...]:
    """Returns an object that compares unequal once the tensor has other values. Reads no memory of a GPU."""
    if _is_array(tensor):
        return tensor.dtype, tensor.shape, tensor.tobytes()
    if not isinstance(tensor, torch.Tensor):
        return (tensor if is_plain(tensor) else type(tensor),)
    if (
        tensor.device.type == "cpu"
        and has_storage(tensor)
        and tensor.numel() <= _READ_ELEMENTS
        and type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    ):
        return tensor.dtype, tensor.shape, repr(tensor.tolist())  # as text, in which NaN equals NaN
    return (TensorVersion(tensor),)


def _is_known(each: Any) -> bool:
    """Returns whether a class or function belongs to Python, torch or this package, whose state is not a model's."""
    return (getattr(each, "__module__", None) or "").partition(".")[0] in _KNOWN


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, text or a similar constant, or a tuple of these."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, _PLAIN):
        return True
    return type(value) is tuple and all(map(is_plain, value))


def cell_contents(cell: CellType) -> Any:
    """Returns the value of a closure variable; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
