# SPDX-License-Identifier: Apache-2.0
"""Waits for torch's threads when a process with a virtual GPU exits.

A thread of autograd drops Python objects just after the backward pass that it worked for has returned. If Python
finalizes at that moment, the thread aborts the process. On a GPU the program still waits for its last kernels then; on
a virtual one it would not.
"""

import atexit
import os
import threading
import time
from pathlib import Path

_TIMEOUT_S = 1.0
_PAUSE_S = 0.005
_THREADS = Path("/proc/self/task")


def wait_for_threads_at_exit() -> None:
    """Makes the process wait at exit, for at most a second, until none of its other threads runs.

    Call it before torch is imported: exit handlers run in reverse order, and torch's must run first.
    """
    atexit.register(_wait, os.getpid())


def _wait(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, which has none of these threads
    end = time.monotonic() + _TIMEOUT_S
    idle_checks = 0
    while idle_checks < 2 and time.monotonic() < end:
        time.sleep(_PAUSE_S)  # releases the GIL, which such a thread waits for
        idle_checks = 0 if _other_threads_run() else idle_checks + 1


def _other_threads_run() -> bool:
    current = str(threading.get_native_id())
    return any(_state(thread) == "R" for thread in _THREADS.iterdir() if thread.name != current)


def _state(thread: Path) -> str:
    """The state of a thread as in proc(5): R if it runs or is runnable. Empty if the thread has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
