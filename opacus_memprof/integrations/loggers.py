# SPDX-License-Identifier: Apache-2.0
"""Memory as scalars, for TensorBoard, Weights & Biases or whatever else takes a name, a number and a step."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from opacus_memprof import _native
from opacus_memprof.errors import MemprofError
from opacus_memprof.profiles.categories import add_parts
from opacus_memprof.session import Session, current


class Logger(Protocol):
    """Where scalars go."""

    def log(self, scalars: Mapping[str, int], step: int) -> None:
        """Keeps these values of one step."""


class TensorBoardLogger:
    """Writes to a `torch.utils.tensorboard.SummaryWriter`, which stays its owner's to close."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, scalars: Mapping[str, int], step: int) -> None:
        """A chart for each scalar."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WandbLogger:
    """Writes to a run that `wandb.init` has returned, online or offline, which stays its owner's to finish. Charts are
    drawn against `memory/step`: the run's own steps may be others'."""

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("memory/*", step_metric="memory/step")

    def log(self, scalars: Mapping[str, int], step: int) -> None:
        """A chart for each scalar."""
        self._run.log({**scalars, "memory/step": step})


def scalars() -> dict[str, int]:
    """What is live now and what was at the peak so far, in bytes: `memory/cuda:0/live/gradients`,
    `memory/cuda:0/peak/gradients`, `…/live/total` and `…/peak/total`. It costs microseconds and leaves no event."""
    result = {}
    for kind, devices in (("live", _native.counters()["devices"]), ("peak", _native.peaks())):
        for device, found in devices.items():
            for category, size in add_parts(found["categories"]).items():
                result[f"memory/{device}/{kind}/{category}"] = size
            result[f"memory/{device}/{kind}/total"] = found["requested_bytes"]
    return result


def log_steps(profile: Mapping[str, Any], loggers: Iterable[Logger]) -> None:
    """Each step's highest instant by category, from a profile (`Session.close`, `load_profile`), after training:
    `memory/cuda:0/step_peak/gradients`, in bytes."""
    for device, found in profile["devices"].items():
        for step in found["steps"]:
            values = {f"memory/{device}/step_peak/{name}": size for name, size in step["categories"].items()}
            values[f"memory/{device}/step_peak/total"] = step["peak_bytes"]
            for logger in loggers:
                logger.log(values, step["step"])


class StepLog:
    """What the frameworks' callbacks have in common: the session that is running, and scalars for its loggers.

    Args:
        loggers: they get `scalars()` at every `every`th step.
    """

    def __init__(self, loggers: Iterable[Logger], every: int) -> None:
        if every < 1:
            raise MemprofError(f"every={every} is no number of steps: give 1 or more")
        self._loggers = list(loggers)
        self._every = every

    def session(self) -> Session:
        """Raises MemprofError where none is running."""
        running = current()
        if running is None:
            raise MemprofError(
                "no profile is being recorded: train inside `with opacus_memprof.profile(...):`, or run the script "
                "under `opacus-memprof run`"
            )
        return running

    def step_ended(self, step: int) -> None:
        """`step` is the number of steps that have ended."""
        if self._loggers and step % self._every == 0:
            values = scalars()
            for logger in self._loggers:
                logger.log(values, step)
