# SPDX-License-Identifier: Apache-2.0
"""A signal that comes while the main thread is inside a library call, such as a collective whose other ranks are gone.

Python runs handlers in the main thread when it is back in Python, and there it never comes back. The interpreter does
write the signal's number to a file descriptor at once: a thread reads it, gives the main thread some time, and acts in
its place.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable

GRACE_SECONDS = 5.0  # torchrun kills 30 s after it has asked


class ActInPlace:
    """Calls `act` in another thread when `signum` has come and `handled` is not set within GRACE_SECONDS.

    Made by the main thread. Does nothing where the program has such a descriptor of its own, or takes it later.
    """

    def __init__(self, signum: int, handled: threading.Event, act: Callable[[], object]) -> None:
        self._signum, self._handled, self._act = signum, handled, act
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return
        # A forked child's signals are its own.
        os.register_at_fork(after_in_child=lambda: _forget(write))
        threading.Thread(target=self._watch, name="opacus-memprof signals", daemon=True).start()

    def _watch(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] == self._signum and not self._handled.wait(GRACE_SECONDS):
                self._act()


def _forget(descriptor: int) -> None:
    with contextlib.suppress(ValueError):  # not in the main thread
        if (now := signal.set_wakeup_fd(-1)) != descriptor:
            signal.set_wakeup_fd(now)


def die_of(signum: int) -> None:
    """Ends this process by the signal, from any thread: Python lets the main one alone restore a handler."""
    ctypes.CDLL(None).signal(signum, 0)  # SIG_DFL
    os.kill(os.getpid(), signum)
