# SPDX-License-Identifier: Apache-2.0
"""The process group of a run in several processes. Needs nothing that has to be compiled."""

import os
import time

import torch
import torch.distributed as dist

from opacus_memprof.errors import MemprofError

_GLOO_LETS_GO = 0.2  # seconds


def join_group(device: str) -> torch.device:
    """Joins the process group, and returns the device of this process. Raises the errors of torch.distributed."""
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
        # Its threads, which DTensor's caches keep running, let go of a collective's tensors after its result is there.
        # Those that still wait for Python's lock when Python ends abort the process.
        time.sleep(_GLOO_LETS_GO)
