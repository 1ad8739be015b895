# SPDX-License-Identifier: Apache-2.0
"""Handles SIGTERM itself, as trainers that write a checkpoint do, and passes it on to whoever handled it before."""

import signal
import sys
import time
from types import FrameType

import torch

torch.ones(1000)
asked = False
before = signal.getsignal(signal.SIGTERM)


def note(signum: int, frame: FrameType | None) -> None:
    global asked
    asked = True
    if callable(before):
        before(signum, frame)


signal.signal(signal.SIGTERM, note)
print("step 0 0.0", flush=True)
while not asked:
    time.sleep(0.01)
print("checkpoint written", flush=True)
sys.exit(4)
