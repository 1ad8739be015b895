# SPDX-License-Identifier: Apache-2.0
"""The end of a process with a virtual GPU, for which torch's threads must be at rest.

A thread of autograd drops Python objects just after the backward pass that it worked for has returned. If Python ends
in that moment the thread aborts the process. On a GPU the program still waits for its last kernels then; here it would
not.
"""

import atexit
import os
import threading
import time
from pathlib import Path

_LONGEST_S = 1.0
_PAUSE_S = 0.005
_TASKS = Path("/proc/self/task")


def wait_for_threads_at_exit() -> None:
    """Makes the process wait at its end, at most a second, until no other thread of it runs. To be called before torch
    is imported: exit handlers run in the opposite order."""
    atexit.register(_wait, os.getpid())


def _wait(pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child, which has none of these threads
    end = time.monotonic() + _LONGEST_S
    at_rest = 0
    while at_rest < 2 and time.monotonic() < end:
        time.sleep(_PAUSE_S)  # lets go of the GIL, which such a thread waits for
        at_rest = 0 if _others_run() else at_rest + 1


def _others_run() -> bool:
    own = threading.get_native_id()
    return any(_state(task) == "R" for task in _TASKS.iterdir() if task.name != str(own))


def _state(task: Path) -> str:
    """As in proc(5): R where it runs or waits for a processor."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):  # it has ended
        return ""
