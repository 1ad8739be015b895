# SPDX-License-Identifier: Apache-2.0
"""The situation of a forward: everything on which a proof depends and that a program may change between two steps."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import chain
from operator import attrgetter, itemgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from opacus_memprof.clipping.forwards.state import INTERNAL

_is_trained = attrgetter("requires_grad")
_is_training = attrgetter("training")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SMALL_BATCH = 16
_DEPTH = 3
_MOST_SEARCHES = 32
_MOST_ENTRIES = 256
_KNOWN = {"builtins", "collections", "functools", "logging", "numpy", "opacus", "opacus_memprof", "torch", "typing"}
_MOST_VALUES = 8
"""The largest number of values of a plain number, such as a step count, that is part of a situation.

Numbers among the arguments that have had more values are ignored.
"""


class ModelState:
    """The modes, hooks, parameters and submodules of a model, read in a few microseconds.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._children = [m._modules for m in self._modules]
        self._parameters = [m._parameters for m in self._modules]
        self._hooks = [getattr(m, kind) for m in self._modules for kind in _HOOKS]
        self._dicts = [m.__dict__ for m in self._modules]
        self._seen_hooks: list[int] = []
        self._user_hooks: tuple[int, ...] = ()
        self._attributes = Attributes(self._dicts, map(type, self._modules))

    def structure(self) -> tuple[Any, ...]:
        """Returns the submodules, and the parameters with their requires_grad flags. The layers depend on these."""
        parameters = [p for p in chain.from_iterable(map(dict.values, self._parameters)) if p is not None]
        children = map(id, chain.from_iterable(map(dict.values, self._children)))
        return tuple(children), tuple(map(id, parameters)), tuple(map(_is_trained, parameters))

    def modes(self) -> tuple[Any, ...]:
        """Returns training flags, classes, users' hooks, and forwards that were replaced on instances.

        Also returns the attributes that are plain values.
        """
        replaced = tuple(id(d["forward"]) for d in self._dicts if "forward" in d)
        classes = tuple(map(type, self._modules))
        return (
            tuple(map(_is_training, self._modules)),
            classes,
            self._hooks_of_users(),
            replaced,
            self._attributes.now(),
        )

    def _hooks_of_users(self) -> tuple[int, ...]:
        seen = list(map(id, chain.from_iterable(map(dict.values, self._hooks))))
        if seen != self._seen_hooks:
            hooks = chain.from_iterable(map(dict.values, self._hooks))
            self._seen_hooks, self._user_hooks = seen, tuple(id(hook) for hook in hooks if not is_own(hook))
        return self._user_hooks


class Attributes:
    """The plain values (numbers, strings, flags) that a model may read.

    These are attributes of its modules, values in configurations, dictionaries and lists among these attributes,
    attributes of its classes, and global and closure variables that its methods name.

    Args:
        dicts: the dictionaries of the modules' attributes.
        classes: the classes of the modules.
    """

    def __init__(self, dicts: list[dict[str, Any]], classes: Iterable[type]) -> None:
        self._own = dicts
        self._classes = list(dict.fromkeys(classes))
        self._others = Holders(set())
        self._searches = 0
        self._shape: list[int] = []
        self._changes: Counter[Any] = Counter()
        self._readers: list[tuple[Mapping[Any, Any], Callable[[Any], tuple[Any, ...]]]] = []
        self._keys: list[tuple[int, Any]] = []
        self._values: list[Any] = []
        self._seen: dict[tuple[int, Any], set[Any]] = {}
        self._now: tuple[Any, ...] = ()

    def now(self) -> tuple[Any, ...]:
        """Returns the values. Omits values that have changed more than a few times, such as a count of steps."""
        if self._searches < _MOST_SEARCHES and self._shape_now() != self._shape:
            self._find()
        try:
            values = self._read()
        except (KeyError, ValueError):  # the same number of values, but other names
            self._find()
            values = self._read()
        if values != self._values:
            self._values = values
            every = zip(self._keys, chain.from_iterable(values), strict=True)
            self._now = tuple(v for key, v in every if self._is_stable(key, v))
        return self._now

    def _read(self) -> list[Any]:
        values: list[Any] = [read(d) for d, read in self._readers]
        values.append([cell.cell_contents for cell in self._others.cells])
        values.append([*map(tuple, self._others.lists)])
        return values

    def _shape_now(self) -> list[int]:
        """Returns the numbers of values, and the identities of their holders."""
        others = self._others
        sizes = [*map(len, self._own), *map(len, others.mappings), *map(len, others.lists)]
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
            names = [k for k, v in list(d.items()) if k not in INTERNAL and _is_plain(v)]
            places[id(d)] = d, names
        for d, k in self._others.variables:
            if _is_plain(d.get(k)):
                places.setdefault(id(d), (d, []))[1].append(k)
        self._readers = [(d, _reader(names)) for d, names in places.values() if names]
        self._keys = [(id(d), k) for d, names in places.values() for k in names]
        self._keys += [(id(each), None) for each in (*self._others.cells, *self._others.lists)]
        self._shape, self._values = self._shape_now(), []

    def _search(self) -> None:
        before, self._others = self._others, Holders({key for key, n in self._changes.items() if n > _MOST_VALUES})
        for d in self._own:
            self._others.add_values(d, _DEPTH)
        for kind in self._classes:
            self._others.add_class(kind)
        now = {(id(d), k): id(d.get(k)) for d, k in self._others.places}
        self._changes.update(key for key, held in now.items() if before.held.get(key, held) != held)
        sizes = {id(each): len(each) for each in (*self._others.mappings, *self._others.lists)}
        self._changes.update(key for key, size in sizes.items() if before.sizes.get(key, size) != size)
        self._others.held, self._others.sizes = now, sizes

    def _is_stable(self, key: tuple[int, Any], value: Any) -> bool:
        if not (_is_plain(value) or type(value) is tuple):
            return False
        seen = self._seen.setdefault(key, set())
        seen.add(value)
        return len(seen) <= _MOST_VALUES


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

    def _add(self, value: Any, depth: int) -> bool:
        """Adds the holders in a value. Returns whether it has any."""
        if depth == 0 or value is None or type(value) in (bool, int, float, str):
            return False
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            self._add_function(getattr(value, "func", getattr(value, "__func__", value)), depth)
            return True
        if isinstance(value, (torch.Tensor, nn.Module, type, ModuleType)):
            return False
        if type(value) is list:
            if id(value) in self._ignored or len(value) > _MOST_ENTRIES or not all(map(_is_plain, value)):
                return False
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self.lists.append(value)
            return True
        mapping = value if type(value) is dict else None if _is_known(type(value)) else getattr(value, "__dict__", None)
        if type(mapping) is not dict or id(mapping) in self._ignored or len(mapping) > _MOST_ENTRIES:
            return False
        if id(mapping) not in self._seen:
            self._seen.add(id(mapping))
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
            if _is_plain(value):
                self.cells.append(cell)
            else:
                self._add(value, depth - 1)
        for name in _names(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                if _is_plain(value):
                    self.variables.append((function.__globals__, name))
                elif (id(function.__globals__), name) not in self._ignored and self._add(value, depth - 1):
                    self.places.append((function.__globals__, name))


def _names(code: CodeType) -> set[str]:
    """Returns the names that a function's code uses, including functions inside it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names, *chain.from_iterable(map(_names, inner))}


def _is_known(each: Any) -> bool:
    """Returns whether a class or function belongs to Python, torch or this package, whose state is not a model's."""
    return (getattr(each, "__module__", None) or "").partition(".")[0] in _KNOWN


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, Enum)


def is_own(hook: Any) -> bool:
    """Returns whether a hook belongs to this package. The profiler adds and removes its hooks at any time."""
    function = getattr(hook, "__func__", hook)
    kind = getattr(function, "__module__", None) or type(hook).__module__
    return kind.startswith("opacus_memprof") or getattr(hook, "_is_opacus_memprof", False)


class Arguments:
    """Distinguishes kinds of arguments by their structure, dtypes, numbers of dimensions, and plain values."""

    def __init__(self) -> None:
        self._values: dict[Any, set[Any]] = {}

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Any:
        """Returns a key that is equal for arguments of the same kind.

        Args:
            args: positional arguments of a forward.
            kwargs: its keyword arguments.
            batch: the number of samples.
        """
        leaves, structure = tree_flatten((args, kwargs))
        kind = str(structure)
        described = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                sizes = tuple("B" if n == batch else "1" if n == 1 else "n" for n in leaf.shape)
                described.append((sizes, leaf.dtype, leaf.requires_grad))
            else:
                described.append(self._plain((kind, i), leaf))
        return kind, tuple(described)

    def _plain(self, place: Any, leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, (bool, str)):
            return leaf
        if not isinstance(leaf, (int, float)):
            return type(leaf)
        known = self._values.setdefault(place, set())
        known.add(leaf)
        return type(leaf) if len(known) > _MOST_VALUES else leaf


def size_class(batch: int) -> int:
    """Returns a number that batches of nearly the same size share.

    Each small size has its own number; larger sizes have one for each power of 2.
    """
    return batch if batch <= _SMALL_BATCH else _SMALL_BATCH + batch.bit_length()


def autocast_key(devices: Iterable[str]) -> tuple[Any, ...]:
    """Returns the state of autocast."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
