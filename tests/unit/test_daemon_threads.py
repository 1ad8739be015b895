# SPDX-License-Identifier: Apache-2.0
"""A daemon thread that is inside of a wrapped call when the process exits: Python ends it by unwinding its stack."""

import subprocess
import sys

PROGRAM = """
import threading, time
import torch
from torch import nn
from opacus_memprof import hooks

started = threading.Event()


class Waiting(nn.Module):
    def forward(self, x):
        started.set()
        time.sleep(0.05)  # takes Python's lock again when the interpreter is being torn down
        return x


class SlowTeardown:
    def __del__(self, sleep=time.sleep):
        sleep(1)


model = nn.Sequential(Waiting())
hooks.attach_model(model)
slow = SlowTeardown()


def run():
    while True:
        model(torch.ones(2, 2))


threading.Thread(target=run, daemon=True).start()
started.wait()
print("end", flush=True)
"""


def test_the_process_ends_as_it_would_without_the_profiler() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "end\n"), ended.stderr
