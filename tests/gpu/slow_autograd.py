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


def thread_named(name: str) -> int:
    tasks = Path("/proc/self/task").iterdir()
    return next(int(task.name) for task in tasks if (task / "comm").read_text().strip() == name)


def backward() -> None:
    torch.ones(2, device="cuda", requires_grad=True).sum().backward()


def main() -> None:
    backward()  # begins the thread
    autograd, mine, processors = thread_named("pt_autograd_0"), 0, os.sched_getaffinity(0)
    for thread in (autograd, mine):
        os.sched_setaffinity(thread, {min(processors)})
    os.sched_setscheduler(autograd, os.SCHED_IDLE, os.sched_param(0))

    model = next(model for model in models.MODELS if model.name == "llama-lora")
    with opacus_memprof.profile(sys.argv[1], device="cuda") as session:
        engine = PrivacyEngine()
        session.attach(engine)
        training = models.prepare(model, "no_op", "cuda", engine)
        for _ in range(5):
            training.step(32, filling=opacus_memprof.tag("per_sample_gradients"))

    # Python must not end while the thread waits for it: with the next backward it is done with what came before.
    for thread in (autograd, mine):
        os.sched_setaffinity(thread, processors)
    backward()


if __name__ == "__main__":
    main()
