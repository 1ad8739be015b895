# SPDX-License-Identifier: Apache-2.0
"""What launchers say in the environment."""

import os
import signal
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.launch import Launch
from opacus_memprof.running.program import fork_for_each, variables

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


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({}, {}),
        ({"rank": -1, "world_size": None, "init_method": "env://"}, {}),
        ({"rank": 0, "world_size": 4}, {"RANK": "0", "WORLD_SIZE": "4"}),
        ({"init_method": "tcp://host:1?rank=1&world_size=3"}, {"RANK": "1", "WORLD_SIZE": "3"}),
        ({"init_method": "file:///f?rank=1&world_size=3", "rank": 2}, {"RANK": "2", "WORLD_SIZE": "3"}),
    ],
)
def test_what_init_process_group_is_given(given: dict[str, Any], known: dict[str, str]) -> None:
    assert variables(given) == known


def end_as_planned(ends: dict[int, int]) -> None:
    """Forks a process for each rank, which a signal ends if its number is negative."""
    parent = os.getpid()
    rank = fork_for_each([*ends])
    assert os.getpid() != parent
    if ends[rank] < 0:
        os.kill(os.getpid(), -ends[rank])
    os._exit(ends[rank])


@pytest.mark.parametrize(
    ("ends", "code"),
    [({0: 0, 3: 0}, 0), ({0: 0, 3: 5, 4: 7}, 5), ({0: -signal.SIGKILL, 1: 0}, 137)],
)
def test_the_first_rank_that_fails_decides_the_exit_code(ends: dict[int, int], code: int) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as ended:
        end_as_planned(ends)
    assert ended.value.code == code
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert fork_for_each([7]) == 7  # which needs no process of its own
