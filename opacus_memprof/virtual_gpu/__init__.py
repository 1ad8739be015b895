# SPDX-License-Identifier: Apache-2.0
"""The virtual GPU: runs and profiles CUDA trainings without a GPU. It computes nothing, but accounts for all memory.

The libraries of csrc/virtual_gpu replace CUDA's in this process only. They are loaded before torch with RTLD_GLOBAL, so
that torch's libraries resolve their symbols there first. No environment variable is used, so no other program gets a
virtual GPU by accident.
"""

from opacus_memprof.virtual_gpu.describe import begin_run, describe_gpus, describe_limits, describe_run
from opacus_memprof.virtual_gpu.process import (
    active,
    choose_gpu,
    default_answers,
    load_no_weights,
    smallest_memory,
    start,
)
from opacus_memprof.virtual_gpu.simulated_rank import check_ranks, local_world_size, simulate_rank

__all__ = [
    "active",
    "begin_run",
    "check_ranks",
    "choose_gpu",
    "default_answers",
    "describe_gpus",
    "describe_limits",
    "describe_run",
    "load_no_weights",
    "local_world_size",
    "simulate_rank",
    "smallest_memory",
    "start",
]
