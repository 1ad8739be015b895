# SPDX-License-Identifier: Apache-2.0
"""A callback for Hugging Face's Trainer."""

import os
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback

from opacus_memprof.integrations.loggers import Logger, StepLog
from opacus_memprof.profiles.directory import DEFAULT_DIRECTORY


class MemprofCallback(TrainerCallback):
    """Attaches the Trainer's model and optimizer to the session, and logs memory by category.

    Takes a snapshot at the end of each epoch. It does not change the training. The Trainer does not clear a private
    optimizer, as Opacus requires between steps: the program does that, as examples/huggingface_trainer.py shows.

    Args:
        loggers: names of trackers, such as "mlflow", or objects; see `opacus_memprof.integrations.loggers`.
        every: steps between two logs.
        directory: the profile of the session that this callback opens for the training, if none is running.
    """

    def __init__(
        self,
        loggers: Iterable[Logger | str] = (),
        *,
        every: int = 1,
        directory: str | os.PathLike[str] = DEFAULT_DIRECTORY,
    ) -> None:
        self._log = StepLog(loggers, every, directory)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attaches model and optimizer."""
        self._log.begin().attach(kwargs["model"], _unwrapped(kwargs["optimizer"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Logs memory, after the Trainer has cleared the model's gradients."""
        self._log.step_ended(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes a snapshot."""
        self._log.snapshot(f"epoch {state.epoch:g}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the session that this callback has opened."""
        self._log.end()


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
