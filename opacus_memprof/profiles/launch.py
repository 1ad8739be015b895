# SPDX-License-Identifier: Apache-2.0
"""The launch of a process of a distributed job, read from its launcher's environment variables.

Supports torchrun, accelerate (and other launchers that set RANK and WORLD_SIZE), Open MPI, and SLURM's srun. Needs no
torch.
"""

import os
import socket
from collections.abc import Mapping

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.json_object import JsonObject

# The variables of each launcher: rank, world size, local rank. A batch script outside srun has SLURM_PROCID as well,
# but no SLURM_STEP_NUM_TASKS. The first launcher found is used: torchrun runs under srun, not the other way round.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
# Variables that are equal in all processes of one job, and differ between jobs.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

_simulated: list[int] | None = None


def set_simulated_ranks(ranks: list[int]) -> None:
    """Sets which ranks of a simulated job run."""
    global _simulated
    _simulated = ranks


class Launch(JsonObject):
    """One process of a job of several processes, as in meta.json and profile.json.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: processes in the job, at least 2.
        local_rank: its number on its machine; `rank` if the launcher does not set it.
        host: the machine.
        job: the launcher's name for the job.
        launcher: the id of the parent process, which all processes of one machine share.
        restart: how often the launcher restarted the job's processes.
        played: the ranks that run, if a job is simulated by some of its ranks on virtual GPUs; otherwise None.
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
        """The ranks that write a profile."""
        return list(range(self.world_size)) if self.played is None else self.played

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Launch | None":
        """Returns the launch of this process; None if it is the only process.

        Raises:
            MemprofError: the variables are not numbers, or contradict each other.
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
        return cls(rank, world_size, local_rank, socket.gethostname(), job, os.getppid(), restart, _simulated)

    def same_job(self, other: "Launch | None") -> bool:
        """Returns whether both belong to the same attempt of the same job."""
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
