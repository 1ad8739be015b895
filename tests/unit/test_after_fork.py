# SPDX-License-Identifier: Apache-2.0
"""What a forked child may do, a DataLoader's worker above all: whatever another thread did at the fork."""

import subprocess
import sys

FORKS = """
import os, signal, threading

import torch

from opacus_memprof.recording import native

{prepare}

for _ in range({forks}):
    if os.fork() == 0:
        signal.alarm(10)  # ends a child that waits for ever
        {child}
        os._exit(0)
    _, status = os.wait()
    if status != 0:
        print(status)
        os._exit(1)
os._exit(0)
"""


def end_of_children(prepare: str, child: str, forks: int) -> str:
    """Empty if each of the children, forked while threads of the parent run, came to its end."""
    program = FORKS.format(prepare=prepare, child=child, forks=forks)
    return subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120).stdout


def test_a_child_allocates_on_the_cpu() -> None:
    prepare = """
kept = torch.empty(1000)
native.cpu_install()
born_under_us = torch.empty(1000)

def allocate():
    while True:
        torch.empty(10)

for _ in range(3):
    threading.Thread(target=allocate, daemon=True).start()
"""
    assert end_of_children(prepare, "kept = born_under_us = torch.empty(10)", forks=100) == ""
