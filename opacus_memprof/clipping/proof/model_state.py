# SPDX-License-Identifier: Apache-2.0
"""The situation of a forward: everything on which a proof depends and that a program may change between two steps."""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from opacus_memprof.clipping.forwards.module_state import INTERNAL

_is_trained = attrgetter("requires_grad")
_is_training = attrgetter("training")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SMALL_BATCH = 16
_MOST_VALUES = 8
"""A plain number among the arguments that has had more values than this, such as a step's, does not count as part of
a situation."""


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
        self._attributes = Attributes(self._dicts)

    def structure(self) -> tuple[Any, ...]:
        """Returns the submodules, and the parameters with whether they are trained. The layers depend on it."""
        parameters = [p for p in chain.from_iterable(map(dict.values, self._parameters)) if p is not None]
        children = map(id, chain.from_iterable(map(dict.values, self._children)))
        return tuple(children), tuple(map(id, parameters)), tuple(map(_is_trained, parameters))

    def modes(self) -> tuple[Any, ...]:
        """Returns the training flags, the classes, the hooks of users, the forwards that are replaced on instances, and
        the attributes that are plain values."""
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
    """The plain values (numbers, strings, flags) among the attributes of modules.

    Args:
        dicts: the dictionaries of the modules' attributes.
    """

    def __init__(self, dicts: list[dict[str, Any]]) -> None:
        self._dicts = dicts
        self._sizes: list[int] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._values: list[Any] = []
        self._seen: dict[tuple[int, str], set[Any]] = {}
        self._now: tuple[Any, ...] = ()

    def now(self) -> tuple[Any, ...]:
        """Returns the values. One that has had more than a few, such as a count of steps, is left out."""
        sizes = list(map(len, self._dicts))
        if sizes != self._sizes:
            self._sizes = sizes
            self._places = [(d, k) for d in self._dicts for k, v in d.items() if k not in INTERNAL and _is_plain(v)]
            self._values = []
        values = [d.get(k) for d, k in self._places]
        if values != self._values:
            self._values = values
            self._now = tuple(v for (d, k), v in zip(self._places, values, strict=True) if self._is_stable(d, k, v))
        return self._now

    def _is_stable(self, d: dict[str, Any], key: str, value: Any) -> bool:
        if not _is_plain(value):
            return False
        seen = self._seen.setdefault((id(d), key), set())
        seen.add(value)
        return len(seen) <= _MOST_VALUES


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def is_own(hook: Any) -> bool:
    """Returns whether a hook belongs to this package: those of the profiler come and go."""
    function = getattr(hook, "__func__", hook)
    kind = getattr(function, "__module__", None) or type(hook).__module__
    return kind.startswith("opacus_memprof") or getattr(hook, "_is_opacus_memprof", False)


class Arguments:
    """Tells kinds of arguments apart: their structure, dtypes, numbers of dimensions, and plain values."""

    def __init__(self) -> None:
        self._values: dict[Any, set[Any]] = {}

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Any:
        """Returns a key that is equal for arguments of the same kind.

        Args:
            args, kwargs: of a forward.
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
    """Returns a number that batches of nearly the same size share: small ones have one each, others one for each power
    of 2."""
    return batch if batch <= _SMALL_BATCH else _SMALL_BATCH + batch.bit_length()


def autocast_key(devices: Iterable[str]) -> tuple[Any, ...]:
    """Returns the state of autocast."""
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
