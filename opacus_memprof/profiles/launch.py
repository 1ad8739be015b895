# SPDX-License-Identifier: Apache-2.0
"""Which process of a distributed job this is, as its launcher says in the environment.

torchrun and accelerate (and whatever else sets RANK and WORLD_SIZE), Open MPI, and SLURM's srun. Needs no torch.
"""

import os
import socket
from collections.abc import Mapping

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.json_object import JsonObject

# What each launcher calls the process' number, the number of processes, and the process' number on its machine. A batch
# script outside srun has SLURM_PROCID as well, but no SLURM_STEP_NUM_TASKS. The first launcher that is there counts:
# torchrun runs under srun, not the other way round.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
# What is the same in all processes of one job, and another in the next job.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

_played: list[int] | None = None


def set_played_ranks(ranks: list[int]) -> None:
    """Says which ranks of this process' job run at all, where the job is only played."""
    global _played
    _played = ranks


class Launch(JsonObject):
    """One process of a job of several, in meta.json and profile.json too.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: processes in the job, at least 2.
        local_rank: its number on its machine; `rank` where the launcher does not say.
        host: the machine.
        job: what the launcher calls the job.
        launcher: the id of the parent process, which the processes of one machine share.
        restart: how often the launcher has started the job's processes anew.
        played: of a job of which only some ranks run, on virtual GPUs and without the others, which; else None.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    job: str
    launcher: int
    restart: str
    played: list[int] | None = None

    @property
    def ranks(self) -> list[int]:
        """Those that leave a profile."""
        return list(range(self.world_size)) if self.played is None else self.played

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch | None":
        """This process', or None where it is the only one.

        Raises:
            MemprofError: the variables are there and make no sense.
        """
        for names in _VARIABLES:
            if names[0] in environment and names[1] in environment:
                rank, world_size = (_number(environment, name) for name in names[:2])
                local_rank = _number(environment, names[2]) if names[2] in environment else rank
                break
        else:
            return None
        if rank >= world_size:
            raise MemprofError(
                f"{names[0]} is {rank} and {names[1]} is {world_size}: correct them, or unset both for a run of one "
                "process"
            )
        if world_size == 1:
            return None
        job = "/".join(environment.get(name, "") for name in _JOB)
        restart = "/".join(environment.get(name, "0") for name in _RESTARTS)
        return cls(rank, world_size, local_rank, socket.gethostname(), job, os.getppid(), restart, _played)

    def same_job(self, other: "Launch | None") -> bool:
        """Whether the two are of one job, and not of an earlier one of the same name or an earlier attempt."""
        if other is None or (self.host == other.host and self.launcher != other.launcher):
            return False
        return (self.job, self.world_size, self.restart) == (other.job, other.world_size, other.restart)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        number = int(environment[name])
    except ValueError:
        number = -1
    if number < 0:
        raise MemprofError(
            f"{name} is {environment[name]!r} and should be a number: correct it, or unset it for a run of one process"
        )
    return number
