# SPDX-License-Identifier: Apache-2.0
"""A callback for Lightning."""

import os
from collections.abc import Iterable
from typing import Any

from pytorch_lightning import Callback

from opacus_memprof.integrations.loggers import Logger, StepLog
from opacus_memprof.profiles.directory import DEFAULT_DIRECTORY


class MemprofCallback(Callback):
    """Attaches the model and its optimizers to the session, and logs memory by category.

    Takes a snapshot at the end of each epoch. Results of `make_private` are attached already.

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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches model and optimizers."""
        self._log.begin().attach(pl_module, *trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs memory after the optimizer's step."""
        self._log.step_ended(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes a snapshot."""
        self._log.snapshot(f"epoch {trainer.current_epoch}")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the session that this callback has opened."""
        self._log.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Closes the session that this callback has opened, with the reason why the training has failed."""
        self._log.end(exception)
