# SPDX-License-Identifier: Apache-2.0
"""What launchers say in the environment."""

import msgspec
import pytest
from msgspec.structs import replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.launch import Launch

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "a", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "rank", "world_size", "local_rank"),
    [
        (TORCHRUN, 3, 8, 1),
        (SLURM, 5, 8, 1),
        (MPI, 2, 4, 0),
        (SLURM | TORCHRUN, 3, 8, 1),  # torchrun in an srun of one task a machine
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 2, 1),
    ],
)
def test_who_it_is(environment: dict[str, str], rank: int, world_size: int, local_rank: int) -> None:
    launch = Launch.from_environment(environment)
    assert launch is not None
    assert (launch.rank, launch.world_size, launch.local_rank) == (rank, world_size, local_rank)
    assert msgspec.convert(msgspec.to_builtins(launch), Launch) == launch


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # in a batch script, outside srun
    ],
)
def test_a_process_alone(environment: dict[str, str]) -> None:
    assert Launch.from_environment(environment) is None


@pytest.mark.parametrize(
    "wrong", [{"RANK": "eight"}, {"RANK": "-1"}, {"RANK": "8"}, {"WORLD_SIZE": ""}, {"LOCAL_RANK": "?"}]
)
def test_nonsense_is_refused_in_a_sentence(wrong: dict[str, str]) -> None:
    with pytest.raises(MemprofError, match="unset"):
        Launch.from_environment(TORCHRUN | wrong)


def test_of_one_job() -> None:
    one = Launch(0, 2, 0, "a", "job", 100, "0")
    assert one.same_job(Launch(1, 2, 1, "a", "job", 100, "0"))
    assert one.same_job(Launch(1, 2, 0, "b", "job", 7, "0"))  # each machine has its own launcher
    for other in (
        None,
        replace(one, launcher=101),  # the same command, given again
        replace(one, restart="1"),
        replace(one, job="other"),
        replace(one, world_size=4),
    ):
        assert not one.same_job(other)


def test_ghost_tp_is_refused_with_the_reason() -> None:
    from opacus_memprof import PrivacyEngine

    with pytest.raises(MemprofError, match="no optimizer for it"):
        PrivacyEngine().make_private(grad_sample_mode="ghost_tp")
