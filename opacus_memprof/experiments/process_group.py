# SPDX-License-Identifier: Apache-2.0
"""The process group of a run in several processes. Needs no compiled extension."""

import os
import time

import torch
import torch.distributed as dist

from opacus_memprof.errors import MemprofError

_GLOO_EXIT_SECONDS = 0.2


def join_group(device: str) -> torch.device:
    """Joins the process group, and returns the device of this process. Raises the errors of torch.distributed.

    Raises:
        MemprofError: there are fewer GPUs than processes.
    """
    if device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if own.index >= torch.cuda.device_count():
        raise MemprofError(f"there are {torch.cuda.device_count()} GPUs: use at most as many processes")
    torch.cuda.set_device(own)
    dist.init_process_group("nccl", device_id=own)
    return own


def leave_group() -> None:
    """Leaves the process group. The process may end then."""
    if not dist.is_initialized():
        return
    backend = dist.get_backend()
    dist.destroy_process_group()
    if backend == "gloo":
        # gloo's threads, which DTensor's caches keep running, free a collective's tensors some time after its result is
        # ready. If Python ends while such a thread waits for the GIL, the process aborts.
        time.sleep(_GLOO_EXIT_SECONDS)
