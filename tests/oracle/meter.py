# SPDX-License-Identifier: Apache-2.0
"""Measures bytes without the profiler under test: torch.profiler's memory records, and the sizes of storages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch._C._profiler import _EventType, _ProfilerEvent
from torch.profiler import ProfilerActivity, profile

WINDOW = "window:"  # `record_function(WINDOW + name)` marks a stretch of the run as a window


def window_peaks(run: Callable[[], Any]) -> dict[str, int]:
    """Runs, and returns for each name of a window the highest bytes of CPU memory above entry in any one of them."""
    with no_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        run()
    events = sorted(_events(recorded.profiler.kineto_results.experimental_event_tree()), key=lambda e: e.start_time_ns)
    memory = [(e.start_time_ns, e.typed[1]) for e in events if e.typed[0] == _EventType.Allocation]
    # A block from before is freed with the size of what an earlier run had at its address, or unseen.
    born: dict[int, int] = {}
    for time, block in memory:
        if block.alloc_size > 0:
            born.setdefault(block.ptr, time)
    blocks = [(time, block.alloc_size) for time, block in memory if born.get(block.ptr, time + 1) <= time]
    peaks: dict[str, int] = {}
    for window in (e for e in events if e.name.startswith(WINDOW)):
        name = window.name.removeprefix(WINDOW)
        inside = (size for time, size in blocks if window.start_time_ns <= time <= window.end_time_ns)
        peaks[name] = max(peaks.get(name, 0), *accumulate(inside, initial=0))
    return peaks


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector from freeing an earlier run's tensors in the middle of a measurement."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _events(roots: Iterable[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages under the tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
