# SPDX-License-Identifier: Apache-2.0
"""One process after the other for the ranks of a job, each of which goes on where this one is."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


def one_process_for_each(ranks: Sequence[int]) -> int:
    """Returns in a child process for each rank, with the rank; one rank alone has this process.

    Here it ends, when all children have ended, with the exit code of the first that failed. Call it before torch is
    imported: threads do not survive a fork.
    """
    if len(ranks) == 1:
        return ranks[0]
    sys.stdout.flush()
    failed = 0
    for rank in ranks:
        child = os.fork()
        if child == 0:
            return rank
        code = _wait(child)
        failed = failed or code
    sys.exit(failed)


def _wait(child: int) -> int:
    """The child's exit code. Whoever ends this process ends the child, which writes its profile first."""

    def pass_on(signum: int, _: FrameType | None) -> NoReturn:
        os.kill(child, signum)
        os.waitpid(child, 0)
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        raise SystemExit(128 + signum)

    before = {signum: signal.signal(signum, pass_on) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code
