# SPDX-License-Identifier: Apache-2.0
"""Replaces collectives of Python objects, and the splitting of groups, in torch.distributed.

This is needed because the virtual NCCL sends nothing between ranks. Gathered objects are copies of this rank's, as
gathered tensors are. Objects that one rank gives to others (broadcast_object_list, scatter_object_list) go through the
job's store if the ranks are processes, as under torchrun, because programs rely on getting that rank's object.
"""

import ctypes
import functools
import pickle
from collections.abc import Callable
from typing import Any

from opacus_memprof.recording.startup import AfterImport

_NAME = "torch.distributed.distributed_c10d"


def install(library: ctypes.CDLL) -> None:
    """Patches torch.distributed as soon as it is imported. `library` contains the virtual NCCL."""

    def patch() -> None:
        from torch.distributed import distributed_c10d

        _replace_object_collectives(distributed_c10d)
        _pass_split_sizes(distributed_c10d, library)

    AfterImport(_NAME, patch)


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _replace_object_collectives(c10d: Any) -> None:
    exchanges: dict[str, int] = {}  # number of exchanges so far, by the group's name

    def exchange(group: Any, source: int, value: Any) -> Any:
        """Returns the value of rank `source`; on a rank that is simulated without the others, `value`."""
        name = c10d._get_process_group_name(group)
        exchanges[name] = exchanges.get(name, 0) + 1
        key = f"virtual_gpu/objects/{name}/{exchanges[name]}"
        store = c10d._get_default_store()
        if c10d.get_rank(group) == source:
            store.set(key, pickle.dumps(value))
            return value
        return pickle.loads(store.get(key)) if store.check([key]) or not _simulates_one_rank() else value

    def root(group: Any, rank: int | None, group_rank: int | None) -> int:
        rank = 0 if rank is None and group_rank is None else rank
        return int(c10d._canonicalize_group_rank(group, rank, group_rank, return_global=False))

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
        if not c10d._rank_not_in_group(group):
            object_list[:] = [_copy(obj) for _ in range(c10d.get_world_size(group))]

    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
        **_: Any,
    ) -> None:
        group = c10d._group_or_default_group(group)
        if c10d._rank_not_in_group(group) or c10d.get_rank(group) != root(group, dst, group_dst):
            return
        if object_gather_list is None:
            raise ValueError("Argument object_gather_list must be specified on destination rank.")
        object_gather_list[:] = [_copy(obj) for _ in range(c10d.get_world_size(group))]

    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> None:
        group = c10d._group_or_default_group(group)
        if not c10d._rank_not_in_group(group):
            object_list[:] = exchange(group, root(group, src, group_src), list(object_list))

    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
        **_: Any,
    ) -> None:
        group = c10d._group_or_default_group(group)
        if c10d._rank_not_in_group(group):
            return
        objects = exchange(group, root(group, src, group_src), scatter_object_input_list)
        if objects is not None:
            scatter_object_output_list[0] = objects[c10d.get_rank(group)]

    for replacement in (all_gather_object, gather_object, broadcast_object_list, scatter_object_list):
        name = replacement.__name__
        setattr(c10d, name, functools.wraps(getattr(c10d, name))(replacement))


def _simulates_one_rank() -> bool:
    from opacus_memprof.virtual_gpu.simulated_rank import simulated_rank

    return simulated_rank() is not None


def _pass_split_sizes(c10d: Any, library: ctypes.CDLL) -> None:
    """Tells the virtual NCCL the size of each new group. The real one communicates with all ranks to find it."""
    color_of = c10d._process_group_color

    def color_with_size(ranks: list[int]) -> int:
        color = int(color_of(ranks))
        library.memprof_virtual_gpu_split_size(color, len(ranks))
        return color

    c10d._process_group_color = color_with_size

    def pass_size(method: Callable[..., Any], position: int) -> Callable[..., Any]:
        """Wraps a method that splits a group; `position` is that of its argument `ranks`."""

        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = kwargs["ranks"] if "ranks" in kwargs else args[position]
            library.memprof_virtual_gpu_next_split(len(ranks))
            try:
                return method(self, *args, **kwargs)
            finally:
                library.memprof_virtual_gpu_next_split(0)

        return wrapper

    c10d.ProcessGroup.split_group = pass_size(c10d.ProcessGroup.split_group, 0)
    from torch._C._distributed_c10d import Backend

    if hasattr(Backend, "split"):  # since torch 2.12
        Backend.split = pass_size(Backend.split, 1)
