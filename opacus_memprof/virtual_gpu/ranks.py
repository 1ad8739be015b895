# SPDX-License-Identifier: Apache-2.0
"""Plays one rank of a job of many in a single process: the others are not there, and nothing waits for them.

The program finds the variables that torchrun would give it. torch.distributed finds a store that answers for the
other ranks; NCCL is the virtual one. gloo, which would connect to the others, is torch's fake backend.
"""

import functools
import importlib
import inspect
import os
import uuid
from dataclasses import dataclass
from typing import Any

from opacus_memprof import launch
from opacus_memprof.errors import MemprofError
from opacus_memprof.imports import AfterImport

MOST_LOCAL_RANKS = 8  # of a machine, where nobody says how many GPUs one has


@dataclass(frozen=True)
class PlayedRank:
    """One rank of a job, on a machine of `local_world_size`."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    def environment(self) -> dict[str, str]:
        """torchrun's variables. No TORCHELASTIC_USE_AGENT_STORE: there is no agent."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.rank // self.local_world_size),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }


_played: PlayedRank | None = None


def played() -> PlayedRank | None:
    """The rank that this process plays without the others, or None."""
    return _played


def check_ranks(ranks: list[int], world_size: int) -> list[int]:
    """The ranks to play, in order and each once; rank 0 where none is named.

    Raises:
        MemprofError: there is no such rank, or this process is a rank of a real job.
    """
    if world_size < 1:
        raise MemprofError(f"a job cannot have {world_size} ranks: give --virtual-ranks a number from 1 on")
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise MemprofError(
                f"a job of {world_size} ranks has no rank {rank}: give --rank a number from 0 to {world_size - 1}"
            )
    real = launch.Launch.from_environment()
    if real is not None:
        raise MemprofError(
            f"this process is rank {real.rank} of the {real.world_size} that its launcher has started, and cannot play "
            "a rank of another job: leave --virtual-ranks out, or start it without the launcher"
        )
    return sorted(set(ranks)) or [0]


def local_world_size(world_size: int, gpus: int | None = None) -> int:
    """Ranks on one machine, which is also how many GPUs it has.

    Raises:
        MemprofError: the machines could not be alike.
    """
    local = min(world_size, gpus or MOST_LOCAL_RANKS)
    if gpus is None:
        while world_size % local:
            local -= 1
    elif world_size % local:
        raise MemprofError(
            f"{world_size} ranks cannot be on machines of {gpus} GPUs each: make the one a multiple of the other"
        )
    return local


def play_rank(
    rank: int, world_size: int, *, gpus: int | None = None, job: str = "", ranks: list[int] | None = None
) -> None:
    """Makes this process `rank` of `world_size`; after `virtual_gpu.start`, and before torch.distributed is imported.

    Args:
        gpus: of one machine.
        job: what the other ranks of the job are told that are played, by other processes.
        ranks: all ranks of the job that are played; this one where it is left out.

    Raises:
        MemprofError: as `check_ranks` and `local_world_size`; or this process plays a rank already.
    """
    global _played
    if _played is not None:
        raise MemprofError(
            f"this process plays rank {_played.rank} of {_played.world_size} already, and cannot be another"
        )
    every = check_ranks([*(ranks or []), rank], world_size)
    _played = PlayedRank(rank, world_size, local_world_size(world_size, gpus))
    # NCCL's monitor would look for the other ranks' failures, in the store and from a thread of its own.
    os.environ |= _played.environment() | {
        "TORCHELASTIC_RUN_ID": job or uuid.uuid4().hex,
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    launch.set_played_ranks(every)
    AfterImport("torch.distributed.rendezvous", _replace_rendezvous)
    AfterImport("torch.distributed.distributed_c10d", _replace_groups)
    AfterImport("torch.distributed", _replace_stores)


_store: Any = None


def _lonely_store() -> Any:
    """The one store of this process: groups hold it in C++, which does not keep a Python object alive."""
    global _store
    from opacus_memprof.virtual_gpu.store import LonelyStore

    assert _played is not None
    _store = _store or LonelyStore(_played.world_size)
    return _store


def _replace_rendezvous() -> None:
    """Whatever address the program names: nobody is there."""
    assert _played is not None
    default = _played
    # torch.distributed has a function of this name too.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

    def meet(url: str, **_: Any) -> Any:
        query = rendezvous._query_to_dict(rendezvous.urlparse(url).query)
        rank = int(query.get("rank", default.rank))
        world_size = int(query.get("world_size", default.world_size))
        yield _lonely_store(), rank, world_size

    for scheme in ("env", "tcp", "file"):
        rendezvous._rendezvous_handlers[scheme] = meet


def _replace_stores() -> None:
    from torch import distributed

    from opacus_memprof.virtual_gpu.store import LonelyTCPStore

    if distributed.is_available():
        vars(distributed)["TCPStore"] = LonelyTCPStore


def _replace_groups() -> None:
    from torch.distributed import distributed_c10d as c10d

    initialize = c10d.init_process_group
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("store") is not None:
            bound.arguments["store"] = _lonely_store()
        initialize(*bound.args, **bound.kwargs)

    def monitored_barrier(*_: Any, **__: Any) -> None:
        """Waits for ranks that are not there: does nothing."""

    vars(c10d).update(
        init_process_group=init_process_group,
        monitored_barrier=functools.wraps(c10d.monitored_barrier)(monitored_barrier),
        ProcessGroupGloo=GlooWithoutPeers,
    )


class _WhatTakesThePlaceOfGloo(type):
    """torch checks what it has made."""

    def __instancecheck__(cls, instance: Any) -> bool:
        from torch._C._distributed_c10d import FakeProcessGroup

        return isinstance(instance, FakeProcessGroup)


class GlooWithoutPeers(metaclass=_WhatTakesThePlaceOfGloo):
    """In the place of ProcessGroupGloo: collectives of CPU tensors as if every rank had this rank's data, as far as
    torch's fake backend has them."""

    def __new__(cls, _store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        options = FakeProcessGroup.Options()
        if hasattr(options, "simulate_uniform_ranks"):
            options.simulate_uniform_ranks = True
        fake: Any = FakeProcessGroup
        fake._set_sequence_number_for_group = lambda _: None  # torch 2.11 asks gloo for them
        return fake._create_internal(rank, size, options)
