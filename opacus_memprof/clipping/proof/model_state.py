# SPDX-License-Identifier: Apache-2.0
"""The situation of a forward: everything on which a proof depends and that a program may change between two steps.

Also context managers under which a proof runs without compiled autograd and without the program's saved-tensors hooks,
and functions that run the hooks of a module as a call of it would.
"""

import functools
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, count
from operator import attrgetter, is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from opacus_memprof.clipping.forwards.state import is_own
from opacus_memprof.clipping.proof.batches import is_plain_call
from opacus_memprof.clipping.proof.model_values import MOST_VALUES, Attributes, cell_contents, is_plain
from opacus_memprof.errors import MemprofError

_is_trained = attrgetter("requires_grad")
_is_training = attrgetter("training")
_hooks_of_gradient = attrgetter("_backward_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SMALL_BATCH = 16


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
        self._seen_children, self._seen_hooks = Seen(), Seen()
        self._users_hooks: list[Any] = []
        self._held: list[nn.Parameter] = []  # the parameters that `structure` has found
        self._child_tokens: tuple[Any, ...] = ()
        self._hook_tokens: tuple[Any, ...] = ()
        self._tokens = Tokens()
        tensors: list[Any] = [*(m._buffers for m in self._modules), *self._parameters]
        self._attributes = Attributes(self._dicts, tensors, map(type, self._modules))

    def structure(self) -> tuple[Any, ...]:
        """Returns the submodules, and the parameters with their names and requires_grad flags.

        The layers depend on these. A parameter may get another name, as where pruning begins and ends.
        """
        held = self._held = [p for p in chain.from_iterable(map(dict.values, self._parameters)) if p is not None]
        if self._seen_children.differ(chain.from_iterable(map(dict.values, self._children))):
            self._child_tokens = tuple(map(self._tokens.of, self._seen_children.objects))
        names = tuple(chain.from_iterable(self._parameters))
        return self._child_tokens, names, tuple(map(id, held)), tuple(map(_is_trained, held))

    def modes(self) -> tuple[Any, ...]:
        """Returns training flags, classes, users' hooks, and forwards that were replaced on instances.

        Also returns the number of parameters with hooks on their gradients, and the values of `Attributes`. Called
        after `structure`.
        """
        replaced = tuple(self._tokens.of(d["forward"]) for d in self._dicts if "forward" in d)
        classes = tuple(map(type, self._modules))
        return (
            tuple(map(_is_training, self._modules)),
            classes,
            self._hooks_of_users(),
            len(list(filter(None, map(_hooks_of_gradient, self._held)))),
            replaced,
            self._attributes.now(self._users_hooks),
        )

    def held_tensors(self) -> list[torch.Tensor]:
        """Returns the tensors in attributes of modules, and in variables that their methods and hooks use."""
        return [x for x in self._attributes.tensors.held() if isinstance(x, torch.Tensor)]

    def held_numbers(self) -> list[tuple[dict[str, Any], str]]:
        """Returns the attributes of modules that are floating-point numbers, each as a dictionary and a key."""
        return [(d, key) for d in self._dicts for key, value in d.items() if type(value) is float]

    def settle(self) -> None:
        """Ends a forward: what it wrote into tensors of the model does not count as a change by the program."""
        self._attributes.tensors.settle()

    def _hooks_of_users(self) -> tuple[Any, ...]:
        if self._seen_hooks.differ(chain.from_iterable(map(dict.values, self._hooks))):
            self._users_hooks = [hook for hook in self._seen_hooks.objects if not is_own(hook)]
            self._hook_tokens = tuple(map(self._tokens.of, self._users_hooks))
        return self._hook_tokens


class Seen:
    """Objects that are compared by identity. They are kept, because the address of a freed object is used again."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def differ(self, objects: Iterable[Any]) -> bool:
        """Takes other objects. Returns whether these are not the same ones."""
        held = list(objects)
        if len(held) == len(self.objects) and all(map(is_, held, self.objects)):
            return False
        self.objects = held
        return True


class Tokens:
    """Gives each object a number that no other object has, also after the object has been freed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], Any], int]] = {}
        self._counter = count()

    def of(self, held: Any) -> Any:
        """Returns the number of an object.

        Functions with the same code, closure and defaults have the same number, because a program may define the same
        function anew before each forward.
        """
        if isinstance(held, MethodType):
            return self.of(held.__self__), self.of(held.__func__)
        if isinstance(held, functools.partial):
            return tuple(map(self.of, (held.func, *held.args, *held.keywords.items())))
        if isinstance(held, tuple):
            return tuple(map(self.of, held))
        if isinstance(held, FunctionType):
            cells = [cell_contents(cell) for cell in held.__closure__ or ()]
            values = (*cells, *(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).items())
            return self._number_of(held.__code__), tuple(v if is_plain(v) else self._shallow(v) for v in values)
        return held if is_plain(held) else self._number_of(held)

    def _shallow(self, held: Any) -> Any:
        """Returns the number of a value in a function: functions may refer to themselves."""
        return self._number_of(held.__code__ if isinstance(held, FunctionType) else held)

    def _number_of(self, held: Any) -> int:
        known = self._known.get(id(held))
        if known is not None and known[0]() is held:
            return known[1]
        try:
            reference: Callable[[], Any] = weakref.ref(held)
        except TypeError:  # without weak references: kept, for its address must not be another one's
            reference = functools.partial(_identity, held)
        number = next(self._counter)
        self._known[id(held)] = reference, number
        return number


def _identity(held: Any) -> Any:
    return held


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
        leaves: list[Any] = list(args)
        kind: Any = len(args)
        if not is_plain_call(args, kwargs):
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
        return type(leaf) if len(known) > MOST_VALUES else leaf


class WriteGuard(TorchDispatchMode):
    """Refuses operations that write to parameters, before they do.

    Args:
        model: the model whose parameters are meant.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage()._cdata: name for name, p in model.named_parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable and not _sets_to_itself(func, args):
            self._refuse_parameters(written_leaves(func, args, kwargs))
        return func(*args, **kwargs)

    def _refuse_parameters(self, written: list[Any]) -> None:
        for x in written:
            if isinstance(x, torch.Tensor) and (name := self._names.get(x.untyped_storage()._cdata)) is not None:
                raise MemprofError(
                    f"the model's forward writes to its parameter {name}, whose value then depends on data that was "
                    "neither clipped nor noised. Let the optimizer alone change it, or use torch.no_grad() after "
                    "optimizer.step()."
                )


_UPDATES_STATISTICS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Operations that write to their arguments 3 and 4 if argument 5 is true, although their schemas do not say so."""


def written_leaves(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns what an operation of PyTorch's dispatcher writes to."""
    if not func._schema.is_mutable:
        is_update = func._schema.name.split("::")[1] in _UPDATES_STATISTICS and len(args) > 5 and args[5]
        return [x for x in args[3:5] if x is not None] if is_update else []
    given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
    arguments = (each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write)
    return tree_leaves([given.get(each.name) for each in arguments])


def _sets_to_itself(func: Any, args: Any) -> bool:
    """Returns whether a tensor is set to the memory that it has, as torch does for each parametrization."""
    if func is not torch.ops.aten.set_.source_Tensor:
        return False
    x, source = args
    return bool(x.is_set_to(source)) and x.dtype == source.dtype


def size_class(batch: int) -> int:
    """Returns a number that batches of nearly the same size share.

    Each small size has its own number; larger sizes have one for each power of 2.
    """
    return batch if batch <= _SMALL_BATCH else _SMALL_BATCH + batch.bit_length()


def context_key(modes: tuple[Any, ...], devices: Iterable[str]) -> tuple[Any, ...]:
    """Returns the key of the program's modes, and the state of autocast."""
    if not torch._C._is_any_autocast_enabled():
        return modes
    return *modes, *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """Returns the innermost saved-tensor hooks, unless they are a checkpoint's."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None or _is_of_checkpoint(hooks) else hooks


def _is_of_checkpoint(hooks: tuple[Any, Any]) -> bool:
    return getattr(hooks[0], "__module__", None) == torch.utils.checkpoint.__name__


def without_compiled_autograd() -> AbstractContextManager[Any]:
    """Keeps backward from being compiled inside the context, because a proof cannot follow compiled code."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if compiled is None else compiled._disable()


@contextmanager
def only_saved_tensors_hooks(*wanted: tuple[Any, Any]) -> Iterator[None]:
    """Makes these the only saved-tensor hooks inside the context; afterwards, those of before are on again.

    Otherwise a checkpoint around the model would treat the tensors of a proof as its own. One whose function raises
    leaves its hooks on until nothing refers to its frame any more (torch 2.11): here this ends inside the context.

    Args:
        wanted: pairs of functions that pack and unpack a tensor, the innermost last.
    """
    handled = sys.exc_info()[1]  # by the program, whose frames stay as they are
    before = _pop_saved_tensors_hooks()
    _push_saved_tensors_hooks(wanted)
    try:
        yield
    except BaseException as error:
        each: BaseException | None = error
        while each is not None and each is not handled:
            traceback.clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        raise
    finally:
        _pop_saved_tensors_hooks()
        _push_saved_tensors_hooks(before)


def _pop_saved_tensors_hooks() -> list[tuple[Any, Any]]:
    """Removes all saved-tensor hooks, and returns them, the innermost last."""
    autograd: Any = torch._C._autograd
    hooks: list[tuple[Any, Any]] = []
    while (top := autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.insert(0, top)
        autograd._pop_saved_tensors_default_hooks()
    return hooks


def _push_saved_tensors_hooks(hooks: Iterable[tuple[Any, Any]]) -> None:
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def is_recomputed() -> bool:
    """Returns whether a checkpoint that is not reentrant runs its function for the second time, in backward."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and _is_of_checkpoint(hooks)


def run_pre_hooks(
    module: nn.Module, own: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs the forward pre-hooks that follow the hook with the id `own`, and returns the arguments."""
    keys = list(module._forward_pre_hooks)
    for key in keys[keys.index(own) + 1 :]:
        hook: Any = module._forward_pre_hooks[key]
        if is_own(hook):
            continue
        if key in module._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        else:
            changed = hook(module, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
    return args, kwargs


def run_hooks(module: nn.Module, own: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Runs the forward hooks that precede the hook with the id `own`, and returns the output."""
    keys = list(module._forward_hooks)
    for key in keys[: keys.index(own)]:
        hook: Any = module._forward_hooks[key]
        if is_own(hook):
            continue
        with_kwargs = key in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if changed is None else changed
    return output
