# SPDX-License-Identifier: Apache-2.0
"""What a step runs under in overhead.py: nothing, parts of the profiler, all of it, the tools of others."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from opacus_memprof import hooks
from opacus_memprof.recording import native

Variant = Callable[[], contextlib.AbstractContextManager[None]]

MAX_EVENTS = 1 << 24


@contextlib.contextmanager
def without() -> Iterator[None]:
    yield


def counters_on(device: str) -> Variant:
    """The allocator and its counters."""

    @contextlib.contextmanager
    def counters() -> Iterator[None]:
        install, uninstall = (
            (native.cuda_install, native.cuda_uninstall)
            if device == "cuda"
            else (native.cpu_install, native.cpu_uninstall)
        )
        install()
        try:
            yield
        finally:
            uninstall()

    return counters


def events_on(device: str) -> Variant:
    """Counters and the event file."""

    @contextlib.contextmanager
    def events() -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="memprof_overhead_") as directory, counters_on(device)():
            native.start_events(directory, MAX_EVENTS, "{}")
            try:
                yield
            finally:
                native.stop_events()

    return events


def full_on(device: str, model: torch.nn.Module, optimizer: Any) -> Variant:
    """Counters, event file, hook wrappers, module names."""

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        with events_on(device)():
            attachments = [hooks.attach_model(model), hooks.attach_optimizer(optimizer)]
            try:
                yield
            finally:
                for attachment in reversed(attachments):
                    attachment.detach()

    return full


@contextlib.contextmanager
def history() -> Iterator[None]:
    """torch.cuda.memory._record_memory_history, as its documentation starts it."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def profiler() -> Iterator[None]:
    with torch.profiler.profile(profile_memory=True):
        yield
