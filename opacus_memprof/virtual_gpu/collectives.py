# SPDX-License-Identifier: Apache-2.0
"""Replaces collectives of Python objects, and the splitting of groups, in torch.distributed.

This is needed because the virtual NCCL sends nothing between ranks. If the ranks are processes, as under torchrun,
their objects go through the job's store. A rank that is simulated without the others gets copies of its own objects,
which counts as a read of values that it does not know.
"""

import ctypes
import functools
import pickle
from collections.abc import Callable
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.recording.startup import AfterImport
from opacus_memprof.virtual_gpu.simulated_rank import replace, simulated_rank

_NAME = "torch.distributed.distributed_c10d"
OBJECTS = "a collective of objects"  # the operation that reads objects of other ranks


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
        if store.check([key]) or not _simulates_one_rank():
            return pickle.loads(store.get(key))
        _count_rank_read()
        return value

    def gather(group: Any, value: Any, root: int | None = None) -> list[Any]:
        """Returns the values of all ranks; on a simulated rank copies of `value`. Only `root` waits, if it is given."""
        ranks, rank = c10d.get_world_size(group), c10d.get_rank(group)
        if _simulates_one_rank():
            if ranks > 1:
                _count_rank_read()
            return [_copy(value) for _ in range(ranks)]
        name = c10d._get_process_group_name(group)
        exchanges[name] = exchanges.get(name, 0) + 1
        key = f"virtual_gpu/objects/{name}/{exchanges[name]}"
        store = c10d._get_default_store()
        store.set(f"{key}/{rank}", pickle.dumps(value))
        return [pickle.loads(store.get(f"{key}/{each}")) for each in range(ranks) if root in (None, rank)]

    def root(group: Any, rank: int | None, group_rank: int | None) -> int:
        rank = 0 if rank is None and group_rank is None else rank
        return int(c10d._canonicalize_group_rank(group, rank, group_rank, return_global=False))

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
        if not c10d._rank_not_in_group(group):
            object_list[:] = gather(c10d._group_or_default_group(group), obj)

    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
        **_: Any,
    ) -> None:
        group = c10d._group_or_default_group(group)
        if c10d._rank_not_in_group(group):
            return
        destination = root(group, dst, group_dst)
        here = c10d.get_rank(group) == destination
        if here and object_gather_list is None:
            raise ValueError("Argument object_gather_list must be specified on destination rank.")
        objects = gather(group, obj, destination)
        if here and object_gather_list is not None:
            object_gather_list[:] = objects

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

    def message(group: Any, sender: int, receiver: int) -> str:
        name = f"{c10d._get_process_group_name(group)}/{sender}-{receiver}"
        exchanges[name] = exchanges.get(name, 0) + 1
        return f"virtual_gpu/messages/{name}/{exchanges[name]}"

    def send_object_list(
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        *_: Any,
        group_dst: int | None = None,
        **__: Any,
    ) -> None:
        group = c10d._group_or_default_group(group)
        key = message(group, c10d.get_rank(group), root(group, dst, group_dst))
        c10d._get_default_store().set(key, pickle.dumps(list(object_list)))

    def recv_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        *_: Any,
        group_src: int | None = None,
        **__: Any,
    ) -> int:
        if _simulates_one_rank():
            raise MemprofError(
                "a rank that is simulated alone cannot receive objects of another one (recv_object_list, by which "
                "stages of a pipeline learn shapes): start all ranks with torchrun, each on a virtual GPU"
            )
        group = c10d._group_or_default_group(group)
        sender = root(group, src, group_src)
        object_list[:] = pickle.loads(c10d._get_default_store().get(message(group, sender, c10d.get_rank(group))))
        return int(c10d.get_global_rank(group, sender))

    replacements = (all_gather_object, gather_object, broadcast_object_list, scatter_object_list)
    for replacement in (*replacements, send_object_list, recv_object_list):
        name = replacement.__name__
        replace(c10d, name, functools.wraps(getattr(c10d, name))(replacement))


def _count_rank_read() -> None:
    from opacus_memprof.virtual_gpu import values  # loads torch

    values.count_rank_read(OBJECTS)


def _simulates_one_rank() -> bool:
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
