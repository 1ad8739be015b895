# SPDX-License-Identifier: Apache-2.0
"""Logs memory as scalars to a tracker, by its name, or to any other object with a `log` method."""

import atexit
import functools
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
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


def _mlflow(mlflow: Any) -> Callable[..., object]:
    return lambda values, step: mlflow.log_metrics(values, step=step)


def _prometheus(client: Any) -> Callable[..., object]:
    gauge = client.Gauge("opacus_memprof_logged_bytes", "Memory that a training has logged.", ["name"])
    return lambda values, step: [gauge.labels(name).set(size) for name, size in values.items()]


def _tensorboard(tensorboard: Any) -> Callable[..., object]:
    writer = tensorboard.SummaryWriter()
    atexit.register(writer.close)
    return TensorBoardLogger(writer).log


def _trackio(trackio: Any) -> Callable[..., object]:
    return lambda values, step: trackio.log(values, step=step)


def _wandb(wandb: Any) -> Callable[..., object]:
    if wandb.run is None:
        raise MemprofError("wandb has no run to log memory to: call wandb.init before the training")
    return WandbLogger(wandb.run).log


# Name → the module that it needs, the package that has it, and the function that returns what logs to it.
_TRACKERS: dict[str, tuple[str, str, Callable[[Any], Callable[..., object]]]] = {
    "mlflow": ("mlflow", "mlflow", _mlflow),
    "prometheus": ("prometheus_client", "prometheus-client", _prometheus),
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", _tensorboard),
    "trackio": ("trackio", "trackio", _trackio),
    "wandb": ("wandb", "wandb", _wandb),
}


@functools.cache  # a process has one run, and one gauge of a name
def tracker(name: str) -> Logger:
    """Returns the logger of a tracker, which logs to the run that the program has started there.

    Args:
        name: "mlflow", "prometheus", "tensorboard", "trackio" or "wandb". Prometheus gets gauges in the registry that
            the program exposes, and TensorBoard a run below `runs`.

    Raises:
        MemprofError: there is no such tracker, or its package is not installed.
    """
    if name not in _TRACKERS:
        raise MemprofError(f"there is no tracker {name!r}: use {', '.join(_TRACKERS)}, or an object with a log method")
    module, package, _ = _TRACKERS[name]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MemprofError(f"logging to {name} needs {package} ({error}): pip install {package}") from None
    return _Tracker(name)


class _Tracker:
    """Asks the tracker for its run at the first log, because trainers start runs when training begins."""

    def __init__(self, name: str) -> None:
        self._name = name

    def log(self, scalars: Mapping[str, int], step: int) -> None:
        self._log(dict(scalars), step)

    @functools.cached_property
    def _log(self) -> Callable[..., object]:
        module, _, open_run = _TRACKERS[self._name]
        return open_run(importlib.import_module(module))


def _loggers(given: Iterable[Logger | str]) -> list[Logger]:
    return [tracker(each) if isinstance(each, str) else each for each in given]


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


def log_steps(profile: Profile, loggers: Iterable[Logger | str]) -> None:
    """Logs the peak of each step by category, after training: `memory/cuda:0/step_peak/gradients`, in bytes.

    Args:
        profile: the result of `Session.close` or `load_profile`.
        loggers: receive the values of each step; names of trackers, as `tracker` takes them, or objects.

    Raises:
        MemprofError: see `tracker`.
    """
    receivers = _loggers(loggers)
    for name, device in profile.devices.items():
        for step in device.steps:
            values = {f"memory/{name}/step_peak/{category}": size for category, size in step.categories.items()}
            values[f"memory/{name}/step_peak/total"] = step.peak_bytes
            for logger in receivers:
                logger.log(values, step.step)


class StepLog:
    """The common part of the callbacks: the session, and logging every few steps.

    Args:
        loggers: receive `scalars()`; names of trackers, as `tracker` takes them, or objects.
        every: steps between two logs.
        directory: the profile of a session that the callback opens, because none is running when training begins.

    Raises:
        MemprofError: `every` is less than 1, or see `tracker`.
    """

    def __init__(
        self, loggers: Iterable[Logger | str], every: int, directory: str | os.PathLike[str] = DEFAULT_DIRECTORY
    ) -> None:
        if every < 1:
            raise MemprofError(f"every={every} is not a number of steps: give 1 or more")
        self._loggers = _loggers(loggers)
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
