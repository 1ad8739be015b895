# SPDX-License-Identifier: Apache-2.0
"""Memory watched while something runs: around a function, or at an interval in the background."""

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from opacus_memprof.errors import MemprofError
from opacus_memprof.toolkit.anomalies import MONITOR
from opacus_memprof.toolkit.output import say
from opacus_memprof.toolkit.snapshots import change_between, memory_snapshot, take

P = ParamSpec("P")
R = TypeVar("R")


def monitor_function(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, dict[str, Any]]:
    """Calls the function; returns its result, and what its call changed.

    The change is as `change_between` has it, with "duration_s". The function's exceptions pass as they are.

    Raises:
        MemprofError: it cannot be called.
    """
    if not callable(function):
        raise MemprofError(f"cannot monitor a {type(function).__name__}: pass a function and then its arguments")
    name = getattr(function, "__name__", type(function).__name__)
    before = memory_snapshot(f"before {name}")
    start = time.perf_counter()
    result = function(*args, **kwargs)
    duration = time.perf_counter() - start
    return result, {**change_between(before, memory_snapshot(f"after {name}")), "duration_s": duration}


class Monitor:
    """Calls `note` with a snapshot every `interval` seconds, on a thread of its own, until `stop`.

    The snapshots are cheap ones, without categories. The program's end does not wait for the thread.

    Raises:
        MemprofError: the interval is not a positive number.
    """

    def __init__(self, interval: float, note: Callable[[dict[str, Any]], None]) -> None:
        if not isinstance(interval, (int, float)) or not 0 < interval < math.inf:
            raise MemprofError(f"an interval of {interval!r} s cannot be kept: give a positive number of seconds")
        self._interval = interval
        self._note = note
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="opacus-memprof monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it and waits until it has ended; again is harmless."""
        self._ending.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._ending.wait(self._interval):
                self._note({**take(), "name": MONITOR})
        except (MemprofError, RuntimeError) as error:  # a full disk, a broken device: not the program's to die of
            say(f"monitoring ends: {error}", logging.WARNING)
