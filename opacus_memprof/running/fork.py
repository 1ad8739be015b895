# SPDX-License-Identifier: Apache-2.0
"""Forks a process for each rank of a job, one after the other."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def fork_for_each(ranks: Sequence[int]) -> int:
    """Forks a child process for each rank, waiting for each to end before the next, and returns the rank in the child.

    The parent does not return: it exits with the exit code of the first child that failed. A single rank needs no fork.
    Call it before torch is imported, because threads do not survive a fork.
    """
    if len(ranks) == 1:
        return ranks[0]
    sys.stdout.flush()
    exit_code = 0
    for rank in ranks:
        child = os.fork()
        if child == 0:
            return rank
        child_exit_code = _wait(child)
        exit_code = exit_code or child_exit_code
    sys.exit(exit_code)


def _wait(child: int) -> int:
    """Waits for the child and returns its exit code. SIGTERM and SIGINT are forwarded, so that it writes its profile
    before this process ends of them."""

    def forward(signum: int, _: FrameType | None) -> NoReturn:
        os.kill(child, signum)
        os.waitpid(child, 0)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        raise SystemExit(128 + signum)

    original = {signum: signal.signal(signum, forward) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for signum, handler in original.items():
            signal.signal(signum, handler)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code
