# SPDX-License-Identifier: Apache-2.0
"""Handles a signal in another thread while the main thread is inside a library call.

An example is a collective whose other ranks are gone. Python runs signal handlers in the main thread once it is back in
the interpreter, which never happens in such a call. But the C-level handler writes the signal's number to a file
descriptor immediately (`signal.set_wakeup_fd`). A thread reads it, gives the main thread some time, and then acts
itself. That thread needs the interpreter's lock: if a call does not release it, such as a loop in an extension, the
signal waits for the end of the call.
"""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable

GRACE_SECONDS = 5.0  # torchrun sends SIGKILL 30 s after SIGTERM


class BackgroundSignalHandler:
    """Calls `callback` in another thread if `signum` arrives and `handled` is not set within GRACE_SECONDS.

    Must be constructed in the main thread. Does nothing if the program sets a wakeup descriptor of its own.
    """

    def __init__(self, signum: int, handled: threading.Event, callback: Callable[[], object]) -> None:
        self._signum, self._handled, self._callback = signum, handled, callback
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        existing = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        if existing != -1:
            signal.set_wakeup_fd(existing)
            return
        # Signals that a forked child receives must not be handled in this process.
        os.register_at_fork(after_in_child=lambda: _unset_wakeup_fd(write))
        threading.Thread(target=self._wait_for_signals, name="opacus-memprof signals", daemon=True).start()

    def _wait_for_signals(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] == self._signum and not self._handled.wait(GRACE_SECONDS):
                self._callback()


def _unset_wakeup_fd(descriptor: int) -> None:
    with contextlib.suppress(ValueError):  # not in the main thread
        if (current := signal.set_wakeup_fd(-1)) != descriptor:
            signal.set_wakeup_fd(current)


def die_of(signum: int) -> None:
    """Ends this process by the signal, from any thread.

    Uses C's `signal` to reset the handler, because Python's function works in the main thread only.
    """
    ctypes.CDLL(None).signal(signum, 0)  # SIG_DFL
    os.kill(os.getpid(), signum)
