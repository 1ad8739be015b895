# SPDX-License-Identifier: Apache-2.0
"""A program whose autograd thread gets the processor only when nobody else wants it: `slow_autograd.py DIRECTORY`.

What it frees late, it frees later than on any busy host. In a process of its own: a thread may not be able to leave
SCHED_IDLE.
"""

import os
import sys
from pathlib import Path

import torch
from opacus import PrivacyEngine

import opacus_memprof
from tests import models


def put_last(name: str) -> None:
    """The thread of that name, and the calling one, share a processor, which the former gets last."""
    processor = {min(os.sched_getaffinity(0))}
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            os.sched_setaffinity(int(task.name), processor)
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, processor)


def main() -> None:
    torch.ones(2, device="cuda", requires_grad=True).sum().backward()  # begins the thread
    put_last("pt_autograd_0")
    model = next(model for model in models.MODELS if model.name == "llama-lora")
    with opacus_memprof.profile(sys.argv[1], device="cuda") as session:
        engine = PrivacyEngine()
        session.attach(engine)
        training = models.prepare(model, "no_op", "cuda", engine)
        for _ in range(5):
            training.step(32, filling=opacus_memprof.tag("per_sample_gradients"))


if __name__ == "__main__":
    main()
