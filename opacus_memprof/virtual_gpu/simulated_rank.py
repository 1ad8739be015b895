# SPDX-License-Identifier: Apache-2.0
"""Simulates one rank of a job in this process, without the other ranks and without waiting for them.

The environment variables are those of torchrun. torch.distributed gets a store that answers for the other ranks, and
the virtual NCCL. gloo, which would connect to the others, is replaced by torch's fake backend.
"""

import functools
import importlib
import inspect
import os
import sys
import uuid
from dataclasses import dataclass
from typing import Any

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles import launch
from opacus_memprof.recording.startup import AfterImport

MAX_LOCAL_RANKS = 8  # GPUs of a machine, if their number is not given


@dataclass(frozen=True)
class SimulatedRank:
    """A rank of a job whose machines have `local_world_size` ranks each."""

    rank: int
    world_size: int
    local_world_size: int

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_world_size

    def environment(self) -> dict[str, str]:
        """The environment variables that torchrun sets, except TORCHELASTIC_USE_AGENT_STORE: there is no agent."""
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


_simulated: SimulatedRank | None = None


def simulated_rank() -> SimulatedRank | None:
    """Returns the rank that this process simulates, or None."""
    return _simulated


def check_ranks(ranks: list[int], world_size: int) -> list[int]:
    """Returns the ranks to simulate, sorted and without duplicates; rank 0 if `ranks` is empty.

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
            f"this process is rank {real.rank} of the {real.world_size} that its launcher has started, and cannot "
            "simulate a rank of another job: leave --virtual-ranks out, or start it without the launcher"
        )
    return sorted(set(ranks)) or [0]


def local_world_size(world_size: int, gpus: int | None = None) -> int:
    """Returns the number of ranks on each machine, which is also its number of GPUs.

    Raises:
        MemprofError: `world_size` is not a multiple of `gpus`.
    """
    local = min(world_size, gpus or MAX_LOCAL_RANKS)
    if gpus is None:
        while world_size % local:
            local -= 1
    elif world_size % local:
        raise MemprofError(
            f"{world_size} ranks cannot be on machines of {gpus} GPUs each: make the number of ranks a "
            "multiple of the number of GPUs"
        )
    return local


def simulate_rank(
    rank: int, world_size: int, *, gpus: int | None = None, job: str = "", ranks: list[int] | None = None
) -> None:
    """Makes this process simulate a rank of a job.

    Call it after `virtual_gpu.start`, and before torch.distributed is imported.

    Args:
        rank: the rank.
        world_size: the number of ranks of the job.
        gpus: the number of GPUs of one machine.
        job: an id that all simulated ranks of the job share. Default: a new one.
        ranks: all ranks of the job that are simulated. Default: this one.

    Raises:
        MemprofError: see `check_ranks` and `local_world_size`; or this process simulates a rank already.
    """
    global _simulated
    if _simulated is not None:
        raise MemprofError(
            f"this process simulates rank {_simulated.rank} of {_simulated.world_size} already, and cannot simulate "
            "another"
        )
    simulated_ranks = check_ranks([*(ranks or []), rank], world_size)
    _simulated = SimulatedRank(rank, world_size, local_world_size(world_size, gpus))
    # NCCL's monitor thread would look for failures of the other ranks in the store.
    os.environ |= _simulated.environment() | {
        "TORCHELASTIC_RUN_ID": job or uuid.uuid4().hex,
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    launch.set_simulated_ranks(simulated_ranks)
    AfterImport("torch.distributed.rendezvous", _replace_rendezvous)
    AfterImport("torch.distributed.distributed_c10d", _replace_groups)
    AfterImport("torch.distributed", _replace_stores)


_store: Any = None


def _single_store() -> Any:
    """Returns the store of this process. Groups refer to it from C++, which does not keep the Python object alive."""
    global _store
    from opacus_memprof.virtual_gpu.store import SingleRankStore

    assert _simulated is not None
    _store = _store or SingleRankStore(_simulated.world_size)
    return _store


def _replace_rendezvous() -> None:
    """Makes every rendezvous return the single-rank store, for any address that the program gives."""
    assert _simulated is not None
    default = _simulated
    # torch.distributed has a function of this name too.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")

    def handler(url: str, **_: Any) -> Any:
        query = rendezvous._query_to_dict(rendezvous.urlparse(url).query)
        rank = int(query.get("rank", default.rank))
        world_size = int(query.get("world_size", default.world_size))
        yield _single_store(), rank, world_size

    for scheme in ("env", "tcp", "file"):
        rendezvous._rendezvous_handlers[scheme] = handler


def _replace_stores() -> None:
    from torch import distributed

    from opacus_memprof.virtual_gpu.store import SingleRankTCPStore

    if distributed.is_available():
        vars(distributed)["TCPStore"] = SingleRankTCPStore


def replace(c10d: Any, name: str, replacement: Any) -> None:
    """Replaces an attribute of torch's module, also where other modules of torch.distributed have imported it.

    They have in a process that was forked after the import.
    """
    original = getattr(c10d, name)
    others = [each for other, each in sys.modules.items() if other.startswith("torch.distributed")]
    for module in [c10d, *others]:
        if vars(module).get(name) is original:
            vars(module)[name] = replacement


def _replace_groups() -> None:
    from torch.distributed import distributed_c10d as c10d

    initialize = c10d.init_process_group
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("store") is not None:
            bound.arguments["store"] = _single_store()
        initialize(*bound.args, **bound.kwargs)

    def monitored_barrier(*_: Any, **__: Any) -> None:
        """Does nothing: there are no other ranks to wait for."""

    replace(c10d, "init_process_group", init_process_group)
    replace(c10d, "monitored_barrier", functools.wraps(c10d.monitored_barrier)(monitored_barrier))
    replace(c10d, "ProcessGroupGloo", GlooWithoutPeers)


class _GlooInstanceCheck(type):
    """Makes isinstance(FakeProcessGroup(), GlooWithoutPeers) true, because torch checks the type of a created group."""

    def __instancecheck__(cls, instance: Any) -> bool:
        from torch._C._distributed_c10d import FakeProcessGroup

        return isinstance(instance, FakeProcessGroup)


class GlooWithoutPeers(metaclass=_GlooInstanceCheck):
    """Replaces ProcessGroupGloo by torch's fake backend.

    Its collectives behave as if every rank had this rank's data, as far as the torch version supports that.
    """

    def __new__(cls, _store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
        from torch._C._distributed_c10d import FakeProcessGroup

        options = FakeProcessGroup.Options()
        if hasattr(options, "simulate_uniform_ranks"):
            options.simulate_uniform_ranks = True
        fake: Any = FakeProcessGroup
        fake._set_sequence_number_for_group = lambda _: None  # torch 2.11 calls it for gloo
        return fake._create_internal(rank, size, options)
