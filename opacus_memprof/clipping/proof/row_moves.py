# SPDX-License-Identifier: Apache-2.0
"""Finds modules that select, move or drop rows of the batch depending on data.

Examples are masks, sorting by length, packed sequences, and routing to experts. In such a module a row may belong to
another sample than its position says, if not in this batch then in a later one. Therefore the module is repeated as a
whole, one sample at a time if nothing else works.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from opacus_memprof.clipping.proof.probe import CannotRunError, Probe
from opacus_memprof.clipping.proof.summary import coarser
from opacus_memprof.errors import MemprofError

_SAMPLES = 7
"""A number of samples that is unlikely to equal the size of another dimension."""
_aten = torch.ops.aten
_CONSTANTS = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_")


def modules_that_move_rows(probe: Probe) -> list[tuple[nn.Module, set[nn.Module]]]:
    """Returns the smallest modules that move rows and bring them back, innermost first.

    Each comes with the modules in it that may get moved rows. Sets `probe.computed_in` as well.

    Args:
        probe: the probe of the model, with the samples that are tried.

    Raises:
        MemprofError: a layer cannot be followed.
        CannotRunError: the model cannot run on these samples.
    """
    modules = _Modules(probe.model)
    watch = _Watch(modules)
    try:
        with modules.watching(), watch:
            probe.run_samples(range(_SAMPLES), watch.add_inputs)
    except MemprofError:
        raise
    except Exception as error:  # such as lengths that must be sorted
        raise CannotRunError from error
    probe.computed_in = watch.computed_in
    return modules.closed()


class _Modules:
    """The modules that run, in order, and how often each has moved rows.

    Args:
        model: the module that is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.running: list[nn.Module] = [model]
        self.moves: dict[nn.Module, tuple[int, int]] = {}  # number of moves, and the time of the first
        self._entered: dict[nn.Module, int] = {}
        self._time = 0
        self.parents: dict[nn.Module, nn.Module] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records which modules run inside the context."""
        inside = set(self.model.modules())

        def enter(module: nn.Module, args: Any) -> None:
            if module in inside and module is not self.model:
                self.parents.setdefault(module, self.running[-1])
                self.running.append(module)
                self._time += 1
                self._entered[module] = self._time

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if self.running[-1] is module and module is not self.model:
                self.running.pop()

        handles = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def count(self) -> None:
        """Counts a move in the running module."""
        self._add(self.moves, self.running[-1], 1, self._time)

    def _add(self, moves: dict[nn.Module, tuple[int, int]], module: nn.Module, count: int, first: int) -> None:
        before, earliest = moves.get(module, (0, first))
        moves[module] = before + count, min(first, earliest)

    def closed(self) -> list[tuple[nn.Module, set[nn.Module]]]:
        """Returns the modules in which rows are moved at least twice: there, and back.

        A single move counts for the parent module.
        """
        found = []
        moves = dict(self.moves)
        while moves:
            module = max(moves, key=self._depth)
            count, first = moves.pop(module)
            if count > 1 or module is self.model:
                later = {each for each in module.modules() if self._entered.get(each, 0) > first}
                found.append((module, later))
            else:
                self._add(moves, self.parents[module], count, first)
        return found

    def _depth(self, module: nn.Module) -> int:
        depth = 0
        while module in self.parents and module is not self.model:
            module, depth = self.parents[module], depth + 1
        return depth


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks which tensors depend on the inputs, and counts operations that move their rows by an index.

    Only indices that depend on the inputs count. The operations inside of a higher-order operator, such as torch.cond,
    are not seen.
    """

    supports_higher_order_operators = True

    def __init__(self, modules: _Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self._data: dict[int, StorageWeakRef] = {}
        self.computed_in: torch.dtype | None = None  # the coarsest dtype of a result that depends on the inputs

    def add_inputs(self, leaves: list[Any]) -> None:
        """Marks the model's inputs."""
        self._mark(leaves)

    def _mark(self, values: Any) -> None:
        for leaf in tree_flatten(values)[0]:
            if isinstance(leaf, torch.Tensor) and (ref := _storage(leaf)) is not None:
                self._data[ref.cdata] = ref

    def _is_data(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        ref = _storage(value)
        return ref is not None and ref.cdata in self._data

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_operator = isinstance(func, torch._ops.OpOverload)
        if is_operator and self._moves_rows(func, args, kwargs):
            self.modules.count()
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__ if is_operator else ""
        if name.startswith(_CONSTANTS):
            return result
        # Python may have computed it from the inputs: a length that was read, a list that was sorted.
        depends = any(map(self._is_data, tree_flatten((args, kwargs))[0]))
        if depends or name == "lift_fresh":
            self._mark(result)
        for x in tree_flatten(result)[0] if depends else ():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.computed_in = coarser(x.dtype, self.computed_in)
        return result

    def _moves_rows(self, func: Any, args: Any, kwargs: Any) -> bool:
        packet = func.overloadpacket
        if packet in (_aten._pack_padded_sequence, _aten._pad_packed_sequence):
            return True
        x = args[0] if args else None
        if packet in (_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index, _aten._unsafe_index_put):
            indices = args[1]
            moved = args[2] if len(args) > 2 else x
            return bool(indices) and self._has_rows(x) and self._is_data(indices[0]) and self._is_data(moved)
        if packet in (_aten.masked_select, _aten.masked_scatter, _aten.masked_scatter_):
            return self._has_rows(x) and self._is_data(args[1])
        if packet in (_aten.index_select, _aten.gather, _aten.index_add, _aten.index_add_, _aten.index_copy):
            return self._has_rows(x, args[1]) and self._is_data(args[2])
        if packet in (_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.scatter_reduce):
            return self._has_rows(x, args[1]) and self._is_data(args[2])
        if packet is _aten.repeat_interleave:
            return isinstance(x, torch.Tensor) and self._is_data(x) and x.dim() > 0
        return False

    def _has_rows(self, x: Any, dim: int = 0) -> bool:
        """Returns whether dimension `dim` of a tensor is its first dimension, and has the samples' rows."""
        if not isinstance(x, torch.Tensor) or not x.dim() or dim % x.dim() != 0:
            return False
        return x.dim() > 1 and x.shape[0] % _SAMPLES == 0


def _storage(x: torch.Tensor) -> StorageWeakRef | None:
    try:
        return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):  # a tensor without a storage
        return None
