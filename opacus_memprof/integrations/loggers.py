# SPDX-License-Identifier: Apache-2.0
"""Logs memory as scalars to TensorBoard, Weights & Biases, or any other object with a `log` method."""

import atexit
import os
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.directory import DEFAULT_DIRECTORY
from opacus_memprof.profiles.live_memory import LiveDevice, LivePeak
from opacus_memprof.profiles.profile import Profile
from opacus_memprof.recording import live
from opacus_memprof.session import Session, current
from opacus_memprof.session import profile as record


class Logger(Protocol):
    """A destination of scalars."""

    def log(self, scalars: Mapping[str, int], step: int) -> None:
        """Logs the values of one step.

        Args:
            scalars: bytes by name.
            step: the number of steps that have ended.
        """


class TensorBoardLogger:
    """Logs to a `torch.utils.tensorboard.SummaryWriter`, which the caller closes."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, scalars: Mapping[str, int], step: int) -> None:
        """Logs each scalar as a separate chart."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WandbLogger:
    """Logs to a run that `wandb.init` has returned, online or offline, which the caller finishes.

    The x-axis of charts is `memory/step`, because the run's steps may count something else.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("memory/*", step_metric="memory/step")

    def log(self, scalars: Mapping[str, int], step: int) -> None:
        """Logs each scalar as a separate chart."""
        self._run.log({**scalars, "memory/step": step})


def scalars() -> dict[str, int]:
    """Returns the live bytes now and at the peak so far, by device and category.

    Returns:
        Bytes by name: `memory/cuda:0/live/gradients`, `memory/cuda:0/peak/gradients`, `…/live/total`, `…/peak/total`.
        Empty if nothing is recorded. Reading takes microseconds and writes no event.
    """
    return {
        **_scalars("live", live.read_live().devices),
        **_scalars("peak", live.read_peaks()),
    }


def _scalars(kind: str, devices: Mapping[str, LiveDevice] | Mapping[str, LivePeak]) -> dict[str, int]:
    result: dict[str, int] = {}
    for name, device in devices.items():
        result |= {f"memory/{name}/{kind}/{category}": size for category, size in device.categories.items()}
        result[f"memory/{name}/{kind}/total"] = device.requested_bytes
    return result


def log_steps(profile: Profile, loggers: Iterable[Logger]) -> None:
    """Logs the peak of each step by category, after training: `memory/cuda:0/step_peak/gradients`, in bytes.

    Args:
        profile: the result of `Session.close` or `load_profile`.
        loggers: receive the values of each step.
    """
    for name, device in profile.devices.items():
        for step in device.steps:
            values = {f"memory/{name}/step_peak/{category}": size for category, size in step.categories.items()}
            values[f"memory/{name}/step_peak/total"] = step.peak_bytes
            for logger in loggers:
                logger.log(values, step.step)


class StepLog:
    """The common part of the callbacks: the session, and logging every few steps.

    Args:
        loggers: receive `scalars()`.
        every: steps between two logs.
        directory: the profile of a session that the callback opens, because none is running when training begins.

    Raises:
        MemprofError: `every` is less than 1.
    """

    def __init__(
        self, loggers: Iterable[Logger], every: int, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY
    ) -> None:
        if every < 1:
            raise MemprofError(f"every={every} is not a number of steps: give 1 or more")
        self._loggers = list(loggers)
        self._every = every
        self._directory = directory
        self._own: Session | None = None

    def begin(self) -> Session:
        """Returns the running session; without one, starts a session that `end` closes."""
        running = current()
        if running is None:
            running = self._own = record(self._directory)
            running.start()
            atexit.register(self.end, SystemExit(1))  # of a training that has raised an exception
        return running

    def end(self, error: BaseException | None = None) -> None:
        """Closes the session, if this callback has started it. `error` is the exception that has ended the training."""
        if self._own is not None and current() is self._own:
            self._own.__exit__(None if error is None else type(error), error, None)
        self._own = None

    def snapshot(self, name: str) -> None:
        """Takes a snapshot of the session that is running."""
        if (running := current()) is not None:
            running.snapshot(name)

    def step_ended(self, step: int) -> None:
        """Logs if `step`, the number of completed steps, is a multiple of `every`."""
        if self._loggers and step % self._every == 0:
            values = scalars()
            for logger in self._loggers:
                logger.log(values, step)
