# SPDX-License-Identifier: Apache-2.0
"""A GPU that computes nothing and keeps books of everything: CUDA trainings run, and are profiled, without a GPU.

The libraries of csrc/virtual_gpu take the place of CUDA's in this process, and in this process alone: they are loaded
before torch is, for everybody, so that torch's libraries find their symbols there first. No environment variable is
involved, so that no other program can get a virtual GPU by accident.
"""

from opacus_memprof.virtual_gpu.mark import begin_run, describe_gpus, describe_limits, describe_run
from opacus_memprof.virtual_gpu.no_weights import load_no_weights
from opacus_memprof.virtual_gpu.process import active, default_answers, start
from opacus_memprof.virtual_gpu.ranks import check_ranks, local_world_size, play_rank, played

__all__ = [
    "active",
    "begin_run",
    "check_ranks",
    "default_answers",
    "describe_gpus",
    "describe_limits",
    "describe_run",
    "load_no_weights",
    "local_world_size",
    "play_rank",
    "played",
    "start",
]
